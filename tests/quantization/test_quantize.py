"""FP8_BLOCK: the torch quantiser, bit for bit, against the definition in fractions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.moe import Activation, activate_quantize
from padless.quantization.quantize import dequantize, quantize
from padless.quantization.rows_columns import quantize_rows_columns
from support import slow_formats

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def random_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values whose blocks have very different sizes, with zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-12, 12, (*shape[:-1], 1), generator=generator)
    values = torch.randn(shape, generator=generator) * 2.0**spread
    values[torch.rand(shape, generator=generator) < 0.05] = -0.0
    return values.clamp(-60000, 60000).to(dtype)


def assert_is_the_definition(x: torch.Tensor, t: BlockScaledTensor, kind: str) -> None:
    """Every code and every scale of a 2-D x, recomputed block by block."""
    rows, columns = x.shape
    block_rows, block_k = FP8_BLOCK.block(kind)
    values = x.to(torch.float32).tolist()
    codes = t.data.view(torch.uint8).tolist()
    scale = t.scale.tolist()
    for r in range(0, rows, block_rows):
        for c in range(0, columns, block_k):
            cells = [(i, j) for i in range(r, min(r + block_rows, rows)) for j in range(c, min(c + block_k, columns))]
            want_scale, want_codes = slow_formats.fp8_block([values[i][j] for i, j in cells])
            assert scale[r // block_rows][c // block_k] == want_scale, f"scale of the block at row {r} column {c}"
            assert [codes[i][j] for i, j in cells] == want_codes, f"codes of the block at row {r} column {c}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["activation", "weight"])
def test_codes_and_scales_are_the_definition(kind: str, dtype: torch.dtype) -> None:
    x = random_values((131, 144), dtype, seed=1)[: 131 if kind == "weight" else 17]
    assert_is_the_definition(x, quantize(x, FP8_BLOCK, kind=kind), kind)


@given(rows=st.integers(0, 9), columns=st.integers(1, 270), seed=st.integers(0, 2**31), data=st.data())
def test_any_shape_is_the_definition(rows: int, columns: int, seed: int, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["activation", "weight"]))
    x = random_values((rows, columns), data.draw(st.sampled_from(DTYPES)), seed)
    t = quantize(x, FP8_BLOCK, kind=kind)
    assert t.shape == x.shape
    assert_is_the_definition(x, t, kind)


def test_ties_round_to_even_and_magnitudes_saturate() -> None:
    """A block with amax 448 has scale 1, so its codes are the e4m3 rounding of the values themselves."""
    values = [448.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10, -17.0, -(2.0**-10), 0.0, -0.0, 2.0**-9 + 2.0**-11]
    t = quantize(torch.tensor([values]), FP8_BLOCK)
    assert t.scale.item() == 1.0
    decoded = t.data.float().tolist()[0]
    assert decoded == [448.0, 16.0, 20.0, 0.0, 2.0**-8, -16.0, 0.0, 0.0, 0.0, 2.0**-9]
    assert [math.copysign(1, v) for v in decoded[6:9]] == [-1, 1, -1]


def test_the_scale_is_rounded_once() -> None:
    """amax 1: the scale is the float32 next to 1 / 448, and its reciprocal is not exactly 448."""
    t = quantize(torch.tensor([[1.0, -0.75]]), FP8_BLOCK)
    assert t.scale.item() == float(slow_formats.fl32(slow_formats.Fraction(1, 448)))


def test_a_zero_block_has_the_floor_scale() -> None:
    t = quantize(torch.zeros(2, 200), FP8_BLOCK)
    floor = float(slow_formats.fl32(slow_formats.fl32(slow_formats.Fraction("1e-4")) / 448))
    assert t.scale.tolist() == [[floor, floor]] * 2
    assert not t.data.view(torch.uint8).any()


@pytest.mark.parametrize("kind", ["activation", "weight"])
def test_nan_poisons_its_block_and_no_other(kind: str) -> None:
    x = random_values((3, 384), torch.float32, seed=2)
    clean = quantize(x, FP8_BLOCK, kind=kind)
    x[1, 130] = -float("nan")
    t = quantize(x, FP8_BLOCK, kind=kind)
    rows = slice(1, 2) if kind == "activation" else slice(None)
    assert (t.data.view(torch.uint8)[rows, 128:256] == 0x7F).all()
    assert (t.scale[rows, 1].contiguous().view(torch.int32) == 0x7FC00000).all()
    assert dequantize(t)[rows, 128:256].isnan().all()
    keep = torch.ones(3, 384, dtype=torch.bool)
    keep[rows, 128:256] = False
    assert torch.equal(t.data.view(torch.uint8)[keep], clean.data.view(torch.uint8)[keep])


def test_inf_decodes_to_nan_and_never_to_a_number() -> None:
    x = torch.ones(2, 128)
    x[0, 5] = -float("inf")
    t = quantize(x, FP8_BLOCK)
    assert t.scale[:, 0].tolist() == [float("inf"), float(slow_formats.fl32(slow_formats.Fraction(1, 448)))]
    assert t.data.view(torch.uint8)[0, 5] == 0x7F
    assert dequantize(t)[0].isnan().all()
    assert dequantize(t)[1].isfinite().all()


def test_float32_extremes() -> None:
    """The largest and the smallest float32: scales and reciprocals stay normal numbers."""
    biggest = torch.finfo(torch.float32).max
    x = torch.tensor([[biggest, -biggest, 1.0, 1e-45], [1e-45, -1e-39, 1e-5, 0.0]])
    assert_is_the_definition(x, quantize(x, FP8_BLOCK), "activation")


def test_scale_major_changes_the_layout_only() -> None:
    x = random_values((6, 300), torch.bfloat16, seed=3)
    mn, k = quantize(x, FP8_BLOCK), quantize(x, FP8_BLOCK, scale_major="k")
    assert mn.scale.stride() == (1, 8)
    assert k.scale.stride() == (3, 1)
    assert torch.equal(mn.scale, k.scale)
    assert torch.equal(mn.data.view(torch.uint8), k.data.view(torch.uint8))
    storage = torch.as_strided(mn.scale, (3, 8), (8, 1))
    assert not storage[:, 6:].any(), "padding of MN-major scales is zero"


def test_batched_weights_are_quantized_one_by_one() -> None:
    w = random_values((3, 130, 144), torch.bfloat16, seed=4)
    t = quantize(w, FP8_BLOCK, kind="weight")
    for g in range(3):
        one = quantize(w[g], FP8_BLOCK, kind="weight")
        assert torch.equal(t.scale[g], one.scale)
        assert torch.equal(t.data[g].view(torch.uint8), one.data.view(torch.uint8))


def test_input_strides_do_not_matter() -> None:
    x = random_values((144, 10), torch.bfloat16, seed=5)
    a, b = quantize(x.t(), FP8_BLOCK), quantize(x.t().contiguous(), FP8_BLOCK)
    assert a.data.is_contiguous()
    assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
    assert torch.equal(a.scale, b.scale)


@given(seed=st.integers(0, 2**31), kind=st.sampled_from(["activation", "weight"]))
def test_dequantize_is_code_times_scale(seed: int, kind: str) -> None:
    x = random_values((130, 150), torch.float32, seed)
    t = quantize(x, FP8_BLOCK, kind=kind)
    block_rows, block_k = FP8_BLOCK.block(kind)
    got = dequantize(t)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(40):
        r, c = (int(torch.randint(n, (), generator=generator)) for n in x.shape)
        code = t.data.view(torch.uint8)[r, c].item()
        exact = slow_formats.E4M3.decode(code) * slow_formats.Fraction(t.scale[r // block_rows, c // block_k].item())
        assert got[r, c].item() == float(slow_formats.fl32(exact))
    # Half a code at most: 2^-4 of the value, or half the smallest code where values are tiny.
    scale = t.scale.repeat_interleave(block_rows, 0).repeat_interleave(block_k, 1)[:130, :150]
    assert ((got - x).abs() <= x.abs() * 2**-4 * 1.0001 + scale * 2**-10 * 1.0001).all()


def test_dequantize_of_one_row_weight_and_other_dtypes() -> None:
    x = random_values((1, 256), torch.float32, seed=6)
    t = quantize(x, FP8_BLOCK, kind="weight")
    assert torch.equal(dequantize(t, torch.bfloat16), dequantize(t).to(torch.bfloat16))


BAD_CALLS = {
    "x must be a torch.Tensor": (([1.0], FP8_BLOCK), {}),
    "x must be bfloat16, float16 or float32, got torch.float64": ((torch.ones(2, 2).double(), FP8_BLOCK), {}),
    "x must be \\(M, K\\) for kind='activation', got shape \\(2, 2, 2\\)": ((torch.ones(2, 2, 2), FP8_BLOCK), {}),
    "x must be \\(N, K\\) or \\(num_groups, N, K\\)": ((torch.ones(2), FP8_BLOCK), {"kind": "weight"}),
    "x must have K > 0": ((torch.ones(2, 0), FP8_BLOCK), {}),
    "format must be a BlockScaledFormat": ((torch.ones(2, 2), "fp8"), {}),
    "kind must be one of": ((torch.ones(2, 2), FP8_BLOCK), {"kind": "weights"}),
    "scale_major must be one of": ((torch.ones(2, 2), FP8_BLOCK), {"scale_major": "m"}),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_bad_arguments_are_named(message: str) -> None:
    args, kwargs = BAD_CALLS[message]
    with pytest.raises(ValueError, match=message):
        quantize(*args, **kwargs)


@pytest.mark.parametrize(
    ("shape", "kind"), [((2**30, 2), "activation"), ((2, 2**30), "activation"), ((2**15, 2**15, 2), "weight")]
)
def test_more_rows_or_columns_than_kernels_count(shape: tuple[int, ...], kind: str) -> None:
    x = torch.zeros(1).expand(shape)
    with pytest.raises(ValueError, match=r"^x has shape \(.*must be fewer than 2\^30"):
        quantize(x, FP8_BLOCK, kind=kind)
    if kind == "activation":
        with pytest.raises(ValueError, match=r"^x has shape \(.*must be fewer than 2\^30"):
            quantize_rows_columns(x, torch.tensor([2]))
        with pytest.raises(ValueError, match=r"^x has shape \(.*must be fewer than 2\^30"):
            activate_quantize(x, Activation("silu"), None)


def test_dequantize_wants_a_block_scaled_tensor() -> None:
    with pytest.raises(ValueError, match="t must be a BlockScaledTensor, got Tensor"):
        dequantize(torch.ones(2, 2))
