"""The drop-in: called with torch's enums and in torch's layouts, it is grouped_gemm."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import ScalingType, SwizzleType

import padless
from padless.compat.torch import scaled_grouped_mm
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.layouts import to_mn_major
from support.ragged import RAGGED_CASES, RaggedCase

ROWS, SQUARES = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128


def random_operands(m: int, n: int, k: int, groups: int, seed: int = 0) -> tuple[Any, Any]:
    """Codes of any size; the scales of all blocks differ, so that none can stand for another."""
    generator = torch.Generator().manual_seed(seed)

    def codes(*shape: int) -> torch.Tensor:
        values = torch.randint(0, 127, shape, generator=generator)
        return values.to(torch.uint8).view(torch.float8_e4m3fn)

    k_blocks = -(-k // 128)
    sfa = torch.rand((m, k_blocks), generator=generator) + 0.5
    sfb = torch.rand((groups, -(-n // 128), k_blocks), generator=generator) + 0.5
    return (
        BlockScaledTensor(codes(m, k), sfa / 64, FP8_BLOCK),
        BlockScaledTensor(codes(groups, n, k), sfb / 64, FP8_BLOCK),
    )


def call(a: BlockScaledTensor, b: BlockScaledTensor, ends: torch.Tensor, **changes: Any) -> torch.Tensor:
    """The call as torch's users write it: everything of b is the transpose of what lies in memory."""
    arguments = {
        "mat_a": a.data,
        "mat_b": b.data.transpose(-2, -1),
        "scale_a": a.scale,
        "scale_recipe_a": ROWS,
        "scale_b": b.scale.transpose(-2, -1),
        "scale_recipe_b": SQUARES,
        "offs": ends,
        **changes,
    }
    return scaled_grouped_mm(**arguments)


def test_the_signature_is_torchs() -> None:
    ours = inspect.signature(scaled_grouped_mm).parameters
    theirs = inspect.signature(torch.nn.functional.scaled_grouped_mm).parameters
    assert list(ours) == list(theirs)
    for name in ours:
        assert ours[name].default == theirs[name].default, name
        assert ours[name].kind == theirs[name].kind, name


@pytest.mark.parametrize("case", [c for c in RAGGED_CASES if c.M], ids=lambda case: case.name)
@pytest.mark.parametrize("major", ["mn", "k"])
def test_it_is_grouped_gemm(case: RaggedCase, major: str) -> None:
    a, b = random_operands(case.M, case.N, case.K, case.num_groups)
    if major == "mn":
        a = BlockScaledTensor(a.data, to_mn_major(a.scale), FP8_BLOCK)
    expected = padless.grouped_gemm(a, b, case.offs())
    out = call(a, b, case.offs())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out[: case.valid_rows], expected[: case.valid_rows])


@given(n=st.integers(1, 50).map(lambda x: 8 * x), k=st.integers(1, 40).map(lambda x: 16 * x), groups=st.integers(1, 3))
def test_the_scales_of_b_are_never_taken_for_their_transpose(n: int, k: int, groups: int) -> None:
    """As the transpose that torch has; and as they lie in memory, where the shape tells the two apart."""
    a, b = random_operands(4 * groups, n, k, groups)
    offs = padless.group_offsets([4] * groups)
    expected = padless.grouped_gemm(a, b, offs)
    assert torch.equal(call(a, b, offs), expected)
    if b.scale.shape[1] != b.scale.shape[2]:
        assert torch.equal(call(a, b, offs, scale_b=b.scale), expected)


def test_lists_of_one_are_the_one() -> None:
    a, b = random_operands(6, 136, 272, 2)
    offs = padless.group_offsets([2, 4])
    expected = call(a, b, offs)
    out = call(
        a,
        b,
        offs,
        scale_a=[a.scale],
        scale_recipe_a=[ROWS],
        scale_b=[b.scale.transpose(-2, -1)],
        scale_recipe_b=[SQUARES],
        swizzle_a=[SwizzleType.NO_SWIZZLE],
        swizzle_b=SwizzleType.NO_SWIZZLE,
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("asked", "given_dtype"),
    [
        (None, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
    ],
    ids=str,
)
def test_the_output_type(asked: torch.dtype | None, given_dtype: torch.dtype) -> None:
    a, b = random_operands(6, 136, 272, 2)
    offs = padless.group_offsets([2, 4])
    out = call(a, b, offs, output_dtype=asked)
    assert torch.equal(out, padless.grouped_gemm(a, b, offs, out_dtype=given_dtype))
    assert torch.equal(call(a, b, offs, output_dtype=asked, use_fast_accum=True), out)


def test_positional_arguments_are_in_torchs_order() -> None:
    a, b = random_operands(6, 136, 272, 2)
    offs = padless.group_offsets([2, 4])
    mat_b, scale_b = b.data.transpose(-2, -1), b.scale.transpose(-2, -1)
    out = scaled_grouped_mm(a.data, mat_b, a.scale, ROWS, scale_b, SQUARES, None, None, None, offs, torch.float32)
    assert torch.equal(out, padless.grouped_gemm(a, b, offs, out_dtype=torch.float32))


# --- refusals ----------------------------------------------------------------------------------------------

GOOD = random_operands(6, 136, 272, 2)
OFFS = padless.group_offsets([2, 4])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"scale_recipe_a": ScalingType.RowWise},
            "scale_recipe_a is .*RowWise.*; supported: ScalingType.BlockWise1x128",
        ),
        ({"scale_recipe_a": [ROWS, ROWS]}, "scale_recipe_a is"),
        ({"scale_recipe_b": ROWS}, "scale_recipe_b is .*1x128.*; supported: ScalingType.BlockWise128x128"),
        ({"scale_recipe_b": None}, "scale_recipe_b is None"),
        ({"swizzle_a": SwizzleType.SWIZZLE_32_4_4}, "swizzle_a is .*SWIZZLE_32_4_4.*leave it None"),
        ({"swizzle_b": [SwizzleType.SWIZZLE_32_4_4]}, "swizzle_b is .*SWIZZLE_32_4_4"),
        ({"bias": torch.zeros(136)}, "bias must be None"),
        ({"contraction_dim": (1, 1)}, r"contraction_dim is \(1, 1\)"),
        ({"offs": None}, "offs is None; pass the"),
        ({"offs": OFFS.float()}, "offs must be a 1-D int32 or int64 tensor"),
        ({"scale_a": [GOOD[0].scale, GOOD[0].scale]}, "scale_a must be one tensor, or a list of one"),
        ({"scale_b": []}, "scale_b must be one tensor, or a list of one"),
        ({"mat_b": GOOD[1].data}, r"mat_b must be \(G, K, N\) and column-major .*\(2, 136, 272\)"),
        ({"mat_b": GOOD[1].data[0].t()}, r"mat_a has 272 columns and mat_b 272 rows"),
        ({"mat_a": GOOD[0].data[None]}, r"mat_a must be \(M, K\), or \(M, T\) beside a 2-D mat_b"),
        ({"output_dtype": torch.float64}, "output_dtype is torch.float64"),
        ({"scale_b": GOOD[1].scale[:1]}, r"scale_b has shape \(1, 2, 3\); allowed: .*\(2, 2, 3\)"),
        ({"scale_a": GOOD[0].scale.double()}, "scale must be torch.float32"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_call_is_refused_in_words(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(*GOOD, OFFS, **changes)


def test_the_call_they_are_made_from_is_good() -> None:
    assert call(*GOOD, OFFS).shape == (6, 136)


# --- torch's own layouts ------------------------------------------------------------------------------------


def test_scales_of_a_as_torch_lays_them_out() -> None:
    """torch.nn.functional.scaled_mm asks for strides (1, M) exactly, for this recipe."""
    a, b = random_operands(6, 136, 272, 2)
    column_major = a.scale.t().contiguous().t()
    assert column_major.stride() == (1, 6)
    assert torch.equal(call(a, b, OFFS, scale_a=column_major), call(a, b, OFFS))


@pytest.mark.parametrize("n", [136, 272])
def test_scales_of_b_as_torch_lays_them_out(n: int) -> None:
    """torch.nn.functional.scaled_mm wants (ceil(K / 128) rounded up to 4, ceil(N / 128)), K blocks innermost."""
    a, b = random_operands(6, n, 272, 2)
    padded = torch.zeros((2, -(-n // 128), 4))
    padded[..., :3] = b.scale
    assert torch.equal(call(a, b, OFFS, scale_b=padded.transpose(-2, -1)), call(a, b, OFFS))


def test_square_scales_of_b_are_not_taken_for_their_transpose() -> None:
    """The shape cannot tell, so: refused, or read as torch's. An error message recommends .contiguous(), and after it
    the same scales give another result without a word."""
    a, b = random_operands(6, 384, 384, 2)
    try:
        out = call(a, b, OFFS, scale_b=b.scale.transpose(-2, -1).contiguous())
    except ValueError:
        return
    assert torch.equal(out, call(a, b, OFFS))


def test_a_scale_of_no_dimensions_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="scale"):
        call(*GOOD, OFFS, scale_b=torch.tensor(1.0))
