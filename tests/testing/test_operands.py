"""Operands for tests, verification and benchmarks: parts, layouts and moves keep every value."""

from __future__ import annotations

import pytest
import torch

from padless import MXFP8, NVFP4, dequantize
from padless.formats import FORMAT_BY_NAME
from padless.testing.operands import BF16, any_codes, groups_of, in_layout, make_operands, moved, quantized, rows_of

PAIRS = [("FP8_BLOCK", "FP8_BLOCK"), ("MXFP8", "MXFP8"), ("NVFP4", "NVFP4"), (BF16, "MXFP4")]
SIZES = [5, 0, 9]
N, K = 160, 288


def values(t) -> torch.Tensor:  # type: ignore[no-untyped-def]
    return t.float() if isinstance(t, torch.Tensor) else dequantize(t, torch.float32)


@pytest.fixture(params=PAIRS, ids=" x ".join)
def operands(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    return make_operands(*request.param, SIZES, N, K, seed=3, device="cpu")


def test_rows_and_groups_keep_their_values(operands) -> None:  # type: ignore[no-untyped-def]
    index = torch.tensor([13, 0, 5, 5])
    assert torch.equal(values(rows_of(operands.a, index)), values(operands.a)[index])
    whole = torch.cat([values(operands.b[g : g + 1]) for g in range(3)])
    assert torch.equal(values(groups_of(operands.b, [2, 0])), whole[[2, 0]])
    if operands.b.global_scale is None:
        assert torch.equal(whole, values(operands.b))


def test_moved_operands_are_the_same_and_mn_major_scales_stay_so(operands) -> None:  # type: ignore[no-untyped-def]
    for t in (operands.a, operands.b):
        there = moved(t, "cpu")
        if isinstance(t, torch.Tensor):
            assert torch.equal(there, t)
        else:
            assert torch.equal(there.data.view(torch.uint8), t.data.view(torch.uint8))
            assert torch.equal(there.scale.float(), t.scale.float())
            assert (there.format, there.scale_layout) == (t.format, t.scale_layout)
            assert (there.global_scale is None) == (t.global_scale is None)
    if not isinstance(operands.a, torch.Tensor) and operands.a.scale_major == "mn":
        there = moved(operands.a, "cpu")
        assert there.scale_major == "mn"
        assert there.scale.data_ptr() != operands.a.scale.data_ptr()
        rows, columns = there.scale.shape
        storage = there.scale.as_strided((columns, there.scale.stride(1)), (there.scale.stride(1), 1))
        assert storage[:, rows:].isnan().all(), "what a kernel must not read is no number"
    assert moved(None, "cpu") is None
    assert moved("x", "cpu") == "x"


def test_another_layout_has_the_same_values() -> None:
    operands = make_operands("MXFP8", "MXFP8", SIZES, N, K, seed=3, device="cpu")
    assert in_layout(operands.a, "plain") is operands.a
    for layout in ("blocked", "blocked_groups"):
        tiled = in_layout(operands.a, layout, operands.offs)
        assert tiled.scale_layout == layout
        assert torch.equal(dequantize(tiled, offs=operands.offs), dequantize(operands.a))
    copy = operands.b.clone()
    assert torch.equal(copy.data.view(torch.uint8), operands.b.data.view(torch.uint8))
    assert copy.data.data_ptr() != operands.b.data.data_ptr()
    assert copy.scale.data_ptr() != operands.b.scale.data_ptr()


@pytest.mark.parametrize("name", FORMAT_BY_NAME)
def test_any_codes_are_finite_and_many(name: str) -> None:
    fmt = FORMAT_BY_NAME[name]
    generator = torch.Generator().manual_seed(1)
    t = any_codes(fmt, (40, 256), "activation", 3, generator)
    assert t.logical_shape == (40, 256)
    assert t.data.view(torch.uint8).unique().numel() > 120
    codes = any_codes(fmt, (2, 64, 256), "weight", 2, generator)
    assert values(codes).isfinite().all()
    assert codes.scale.float().unique().numel() > 1


def test_quantized_by_name() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    assert quantized(x, BF16, "activation").dtype == torch.bfloat16
    assert quantized(x, "MXFP8", "activation").format == MXFP8
    assert quantized(x[None], "NVFP4", "weight").format == NVFP4
