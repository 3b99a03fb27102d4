"""The formats' descriptions against the bit definitions, and every way a BlockScaledTensor can be put
together wrongly."""

from __future__ import annotations

import re

import pytest
import slow_formats
import torch

from padless.formats import FP8_BLOCK, BlockScaledTensor, ceil_div, is_mn_major, round_up


def fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)


def scales(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float32)


def mn_major(rows: int, columns: int, ld: int) -> torch.Tensor:
    return torch.ones((columns, ld)).t()[:rows]


def test_slow_e4m3_is_the_hardware_format() -> None:
    """The judge's own table: every finite code decodes as torch's e4m3 and encodes back to itself."""
    codes = [c for c in range(256) if c & 0x7F != 0x7F]
    decoded = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)
    for code, value in zip(codes, decoded.tolist(), strict=True):
        assert slow_formats.E4M3.decode(code) == value
        assert slow_formats.E4M3.encode(slow_formats.E4M3.decode(code), negative=code > 127) == code


def test_integer_helpers() -> None:
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [round_up(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]


@pytest.mark.parametrize(
    ("shape", "kind", "expected"),
    [
        ((5, 128), "activation", (5, 1)),
        ((5, 129), "activation", (5, 2)),
        ((0, 16), "activation", (0, 1)),
        ((127, 300), "weight", (1, 3)),
        ((3, 129, 256), "weight", (3, 2, 2)),
    ],
)
def test_scale_shape(shape: tuple[int, ...], kind: str, expected: tuple[int, ...]) -> None:
    assert FP8_BLOCK.scale_shape(shape, kind) == expected


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 130])
@pytest.mark.parametrize("columns", [1, 2, 4])
def test_mn_major_and_row_major_scales_are_told_apart(rows: int, columns: int) -> None:
    data = fp8(rows, 128 * columns)
    ld = max(4, round_up(rows, 4))
    in_mn = BlockScaledTensor(data, mn_major(rows, columns, ld), FP8_BLOCK)
    in_k = BlockScaledTensor(data, scales(rows, columns), FP8_BLOCK)
    assert in_mn.scale_major == "mn"
    assert in_k.scale_major == "k"
    assert in_mn.is_activation
    assert in_k.is_activation


def test_attributes_are_those_of_data() -> None:
    t = BlockScaledTensor(fp8(2, 256, 384), scales(2, 2, 3), FP8_BLOCK)
    assert t.shape == (2, 256, 384) == t.logical_shape
    assert t.dtype == torch.float8_e4m3fn
    assert t.device == torch.device("cpu")
    assert t.is_weight
    assert not t.is_activation


def test_one_row_serves_as_activation_and_as_weight() -> None:
    t = BlockScaledTensor(fp8(1, 256), scales(1, 2), FP8_BLOCK)
    assert t.is_activation
    assert t.is_weight
    # MN-major scales of one row have a stride that weights do not allow.
    t = BlockScaledTensor(fp8(1, 256), mn_major(1, 2, 4), FP8_BLOCK)
    assert t.is_activation
    assert not t.is_weight


def test_mn_major_needs_the_rounded_leading_dimension() -> None:
    assert is_mn_major(mn_major(6, 2, 8))
    assert not is_mn_major(mn_major(6, 2, 6))
    assert not is_mn_major(mn_major(6, 2, 12))


BAD_PARTS = {
    "format": (lambda: (fp8(4, 128), scales(4, 1), "FP8"), "format must be a BlockScaledFormat, got str"),
    "data is a list": (lambda: ([1.0], scales(4, 1), FP8_BLOCK), "data must be a torch.Tensor, got list"),
    "scale is a number": (lambda: (fp8(4, 128), 1.0, FP8_BLOCK), "scale must be a torch.Tensor, got float"),
    "data dtype": (
        lambda: (scales(4, 128), scales(4, 1), FP8_BLOCK),
        "data must be torch.float8_e4m3fn for FP8_BLOCK, got torch.float32",
    ),
    "scale dtype": (
        lambda: (fp8(4, 128), scales(4, 1).half(), FP8_BLOCK),
        "scale must be torch.float32 for FP8_BLOCK, got torch.float16",
    ),
    "data rank": (
        lambda: (fp8(128), scales(1), FP8_BLOCK),
        "data must be (rows, K) or (num_groups, rows, K)",
    ),
    "scale device": (
        lambda: (fp8(4, 128), scales(4, 1).to("meta"), FP8_BLOCK),
        "scale must be on data's device cpu, got meta",
    ),
    "scale shape": (
        lambda: (fp8(200, 256), scales(200, 1), FP8_BLOCK),
        "scale must have shape (200, 2) (activation) or (2, 2) (weight) for FP8_BLOCK data of "
        "shape (200, 256), got (200, 1)",
    ),
    "scale shape in 3-D": (
        lambda: (fp8(2, 200, 256), scales(2, 200, 2), FP8_BLOCK),
        "scale must have shape (2, 2, 2) (weight)",
    ),
    "scale rank": (lambda: (fp8(4, 128), scales(4), FP8_BLOCK), "scale must have shape"),
    "activation scale strides": (
        lambda: (fp8(6, 256), mn_major(6, 2, 6), FP8_BLOCK),
        "scale of an activation must be contiguous or MN-major",
    ),
    "weight scale strides": (
        lambda: (fp8(384, 256), scales(2, 3).t(), FP8_BLOCK),
        "scale of a weight must be contiguous, got strides (1, 3)",
    ),
}


@pytest.mark.parametrize("case", BAD_PARTS)
def test_bad_parts_are_named(case: str) -> None:
    make, message = BAD_PARTS[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        BlockScaledTensor(*make())


def test_global_scale_is_refused_where_the_format_has_none() -> None:
    with pytest.raises(ValueError, match="global_scale must be None for FP8_BLOCK"):
        BlockScaledTensor(fp8(4, 128), scales(4, 1), FP8_BLOCK, torch.ones(()))


def test_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match="kind must be one of"):
        FP8_BLOCK.scale_shape((4, 128), "weights")
