"""The judge, judged: rounding, accumulation order and group bounds in exact arithmetic on small cases."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from padless.formats import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledFormat, BlockScaledTensor
from padless.quantization.quantize import quantize
from padless.reference.gemm import fma_float32, gemm_reference, group_rows, grouped_gemm_reference, round_to
from support import slow_formats
from support.ragged import GuardedOutput, RaggedCase

ROUNDING = {torch.bfloat16: (8, -126), torch.float16: (11, -14), torch.float32: (24, -126)}


def random_operand(shape: tuple[int, ...], kind: str, seed: int) -> BlockScaledTensor:
    """Any finite codes with any scales: nothing a quantiser would have to have made."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 127, shape, generator=generator) + 128 * torch.randint(0, 2, shape, generator=generator)
    scale = 2.0 ** (torch.rand(FP8_BLOCK.scale_shape(shape, kind), generator=generator) * 8 - 12)
    return BlockScaledTensor(codes.to(torch.uint8).view(torch.float8_e4m3fn), scale, FP8_BLOCK)


def exact_row(a: BlockScaledTensor, b: BlockScaledTensor, m: int, group: int | None, n: int) -> list:
    """Each K block's sum of code products and its two scales: the terms of one output element."""
    b_data, b_scale = (b.data, b.scale) if group is None else (b.data[group], b.scale[group])
    a_codes = [slow_formats.E4M3.decode(c) for c in a.data[m].view(torch.uint8).tolist()]
    b_codes = [slow_formats.E4M3.decode(c) for c in b_data[n].view(torch.uint8).tolist()]
    terms = []
    for kb in range(a.scale.shape[1]):
        ks = range(kb * 128, min(kb * 128 + 128, len(a_codes)))
        partial = sum((a_codes[k] * b_codes[k] for k in ks), Fraction(0))
        terms.append((partial, Fraction(a.scale[m, kb].item()), Fraction(b_scale[n // 128, kb].item())))
    return terms


def expected(terms: list, out_dtype: torch.dtype) -> float:
    acc = Fraction(0)
    for partial, sfa, sfb in terms:
        acc = slow_formats.fl32(slow_formats.fl32(partial) * slow_formats.fl32(sfa * sfb) + acc)
    return float(slow_formats.round_binary(acc, *ROUNDING[out_dtype]))


@pytest.mark.parametrize("out_dtype", list(ROUNDING))
def test_fp8_block_accumulation_is_the_promotion_in_order(out_dtype: torch.dtype) -> None:
    a, b = random_operand((5, 400), "activation", 1), random_operand((3, 136, 400), "weight", 2)
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    got = grouped_gemm_reference(a, b, offs, out_dtype=out_dtype)
    pick = random.Random(3)
    for m in range(5):
        for n in [127, 128, *pick.sample(range(136), 6)]:
            terms = exact_row(a, b, m, 0 if m < 2 else 2, n)
            assert got[m, n].item() == expected(terms, out_dtype), (m, n)


def test_float64_accumulation_is_the_sum() -> None:
    a, b = random_operand((3, 272), "activation", 4), random_operand((16, 272), "weight", 5)
    got = gemm_reference(a, b, out_dtype=torch.float64, accumulate="float64")
    for m in range(3):
        for n in range(16):
            terms = exact_row(a, b, m, None, n)
            total = sum(p * sa * sb for p, sa, sb in terms)
            size = sum(abs(p * sa * sb) for p, sa, sb in terms)
            assert abs(Fraction(got[m, n].item()) - total) <= size * Fraction(2) ** -50


def test_the_two_accumulations_differ() -> None:
    """Otherwise the tests above would not tell one from the other."""
    a, b = random_operand((5, 400), "activation", 1), random_operand((136, 400), "weight", 2)
    in_blocks = gemm_reference(a, b, out_dtype=torch.float64)
    assert not torch.equal(in_blocks, gemm_reference(a, b, out_dtype=torch.float64, accumulate="float64"))


def test_every_case_of_ragged_groups(ragged_case: RaggedCase) -> None:
    """Against a per-group dense reference, with guard rows and rows past the end untouched."""
    case = ragged_case
    a = random_operand((case.M, case.K), "activation", 6)
    b = random_operand((case.num_groups, case.N, case.K), "weight", 7)
    guarded = GuardedOutput(case.M, case.N, torch.float32)
    result = grouped_gemm_reference(a, b, case.offs(), out=guarded.out)
    assert result is guarded.out
    guarded.check(case.valid_rows)
    start = 0
    for g, size in enumerate(case.sizes):
        one = BlockScaledTensor(a.data[start : start + size], a.scale[start : start + size], FP8_BLOCK)
        dense = gemm_reference(one, BlockScaledTensor(b.data[g], b.scale[g], FP8_BLOCK), out_dtype=torch.float32)
        assert torch.equal(guarded.out[start : start + size], dense), f"group {g}"
        start += size


def test_rows_of_no_group_are_nan_in_a_fresh_result() -> None:
    a, b = random_operand((4, 128), "activation", 8), random_operand((1, 8, 128), "weight", 9)
    got = grouped_gemm_reference(a, b, torch.tensor([3], dtype=torch.int32))
    assert got[:3].isfinite().all()
    assert got[3].isnan().all()


@given(offs=st.lists(st.integers(-5, 15), min_size=1, max_size=8), rows=st.integers(0, 10))
def test_wrong_offs_stay_inside(offs: list[int], rows: int) -> None:
    """Groups tile [0, last end) in order whatever offs says, and honest offs are taken as they are."""
    got = group_rows(torch.tensor(offs, dtype=torch.int32), rows)
    position = 0
    for start, end in got:
        assert position == start <= end <= rows
        position = end
    if offs == sorted(offs) and offs[0] >= 0 and offs[-1] <= rows:
        assert [end for _, end in got] == offs


def test_group_rows_example() -> None:
    assert group_rows(torch.tensor([3, 2, 9], dtype=torch.int32), 7) == [(0, 3), (3, 3), (3, 7)]


def test_wrong_offs_write_nothing_outside() -> None:
    a, b = random_operand((6, 128), "activation", 10), random_operand((3, 8, 128), "weight", 11)
    guarded = GuardedOutput(6, 8, torch.float32)
    grouped_gemm_reference(a, b, torch.tensor([4, -7, 2_000_000_000], dtype=torch.int32), out=guarded.out)
    guarded.check(6)


FMA_WITNESSES = [
    # (1 + 2^-23)(1 - 2^-23) 2^-24 = 2^-24 - 2^-70, just below half a unit of z: rounding through float64
    # loses the 2^-70, sees a tie and goes up to the even neighbour.
    ((1 + 2.0**-23) * 2.0**-24, 1 - 2.0**-23, 1 + 2.0**-23),
    (-(1 + 2.0**-23) * 2.0**-24, 1 - 2.0**-23, -(1 + 2.0**-23)),
    # The same among subnormal results: 2^-150 (1 - 2^-46) beside 2^-127 + 2^-149.
    ((1 + 2.0**-23) * 2.0**-75, (1 - 2.0**-23) * 2.0**-75, 2.0**-127 + 2.0**-149),
]


@pytest.mark.parametrize("case", range(len(FMA_WITNESSES)))
def test_fma_rounds_once(case: int) -> None:
    x, y, z = FMA_WITNESSES[case]
    want = slow_formats.fl32(Fraction(x) * Fraction(y) + Fraction(z))
    got = fma_float32(*(torch.tensor([v], dtype=torch.float32) for v in (x, y, z)))
    assert got.item() == want
    assert torch.tensor(x * y + z, dtype=torch.float64).to(torch.float32).item() != want, "not a witness"


@given(st.data())
def test_fma_is_exact_arithmetic_rounded(data: st.DataObject) -> None:
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60)
    x, y, z = (data.draw(floats) for _ in range(3))
    got = fma_float32(*(torch.tensor([v], dtype=torch.float32) for v in (x, y, z)))
    assert got.item() == slow_formats.fl32(Fraction(x) * Fraction(y) + Fraction(z))


@pytest.mark.parametrize("special", [float("inf"), -float("inf"), float("nan")])
def test_fma_passes_non_finite_values_on(special: float) -> None:
    one, two, odd = (torch.tensor([v]) for v in (1.0, 2.0, special))
    for args in ((odd, one, two), (one, two, odd)):
        torch.testing.assert_close(fma_float32(*args), odd, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float64_to_16_bits_rounds_once(dtype: torch.dtype) -> None:
    """A value just above a 16-bit tie, by less than float32 can hold."""
    tie = 1 + 2.0 ** -ROUNDING[dtype][0]
    above, below = torch.tensor([tie + 2.0**-40, tie - 2.0**-40], dtype=torch.float64)
    up, down = 1 + 2.0 ** (1 - ROUNDING[dtype][0]), 1.0
    assert round_to(above, dtype).item() == up
    assert round_to(below, dtype).item() == down
    assert above.to(dtype).item() == down, "not a witness: torch rounds once after all"


def test_wrong_arguments_are_named() -> None:
    a, b = random_operand((4, 128), "activation", 12), random_operand((2, 8, 128), "weight", 13)
    offs = torch.tensor([1, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="offs must have one end per group"):
        grouped_gemm_reference(a, b, offs[:1])
    with pytest.raises(ValueError, match="accumulate must be one of"):
        grouped_gemm_reference(a, b, offs, accumulate="float32")
    with pytest.raises(ValueError, match="must share K"):
        grouped_gemm_reference(random_operand((4, 256), "activation", 1), b, offs)
    with pytest.raises(ValueError, match=r"out must have shape \(4, 8\), got \(4, 9\)"):
        grouped_gemm_reference(a, b, offs, out=torch.empty(4, 9))
    with pytest.raises(ValueError, match="out_dtype must be one of"):
        grouped_gemm_reference(a, b, offs, out_dtype=torch.int32)
    with pytest.raises(ValueError, match="b must be"):
        gemm_reference(a, b)


# --- formats other than FP8_BLOCK ------------------------------------------------------------------------

ELEMENTS = {
    "FP8_BLOCK": slow_formats.E4M3,
    "MXFP8": slow_formats.E4M3,
    "MXFP8_E5M2": slow_formats.E5M2,
    "MXFP4": slow_formats.E2M1,
    "NVFP4": slow_formats.E2M1,
}


def code(t: BlockScaledTensor, row: tuple[int, ...], k: int) -> Fraction:
    """One code of t, decoded."""
    data = t.data.view(torch.uint8)[row]
    if t.format.codes_per_byte == 2:
        return slow_formats.E2M1.decode((data[k // 2].item() >> (4 * (k % 2))) & 0xF)
    return ELEMENTS[t.format.name].decode(data[k].item())


def one_scale(t: BlockScaledTensor, row: tuple[int, ...], k: int) -> Fraction:
    rows = (*row[:-1], row[-1] // (128 if t.format is FP8_BLOCK and t.data.dim() == 3 else 1))
    return Fraction(t.scale[rows][k // t.format.block_k].item())


@pytest.mark.parametrize(
    ("a_format", "b_format", "step"),
    [(MXFP8, MXFP8, 32), (MXFP8_E5M2, MXFP4, 32), (NVFP4, NVFP4, 16), (FP8_BLOCK, NVFP4, 16), (MXFP8, FP8_BLOCK, 32)],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_any_two_formats(a_format: BlockScaledFormat, b_format: BlockScaledFormat, step: int) -> None:
    """Promotion block by block, and NVFP4's global scales per tensor and per weight at the end."""
    generator = torch.Generator().manual_seed(21)
    x, w = torch.randn(5, 144, generator=generator), torch.randn(2, 9, 144, generator=generator)
    a = quantize(x, a_format)
    b = quantize(w * torch.tensor([1.0, 30.0])[:, None, None], b_format, kind="weight", scale_layout="plain")
    offs = torch.tensor([2, 5], dtype=torch.int32)
    got = grouped_gemm_reference(a, b, offs, out_dtype=torch.float32)
    exact = grouped_gemm_reference(a, b, offs, out_dtype=torch.float64, accumulate="float64")
    for m in range(5):
        group = 0 if m < 2 else 1
        for n in (0, 4, 8):
            acc, total, size = Fraction(0), Fraction(0), Fraction(0)
            for k in range(0, 144, step):
                partial = sum(code(a, (m,), i) * code(b, (group, n), i) for i in range(k, min(k + step, 144)))
                scales = one_scale(a, (m,), k) * one_scale(b, (group, n), k)
                acc = slow_formats.fl32(slow_formats.fl32(partial) * slow_formats.fl32(scales) + acc)
                total += partial * scales
                size += abs(partial * scales)
            a_global = Fraction(a.global_scale.item()) if a.global_scale is not None else Fraction(1)
            b_global = Fraction(b.global_scale[group].item()) if b.global_scale is not None else Fraction(1)
            want = slow_formats.fl32(acc * slow_formats.fl32(a_global * b_global))
            assert got[m, n].item() == want, (m, n)
            error = abs(Fraction(exact[m, n].item()) - total * a_global * b_global)
            assert error <= size * a_global * b_global * Fraction(2) ** -50


def test_scale_layouts_and_global_scales_per_group_give_the_same_product() -> None:
    generator = torch.Generator().manual_seed(22)
    x, w = torch.randn(140, 96, generator=generator), torch.randn(2, 16, 96, generator=generator)
    offs = torch.tensor([5, 137], dtype=torch.int32)
    plain = [quantize(x, NVFP4, offs=offs), quantize(w, NVFP4, kind="weight", scale_layout="plain")]
    blocked = [
        quantize(x, NVFP4, offs=offs, scale_layout="blocked_groups"),
        quantize(w, NVFP4, kind="weight", scale_layout="blocked"),
    ]
    want = grouped_gemm_reference(*plain, offs, out_dtype=torch.float32)
    got = grouped_gemm_reference(*blocked, offs, out_dtype=torch.float32)
    assert want[:137].isfinite().all()
    assert torch.equal(got[:137], want[:137])
    one = quantize(x[:5], NVFP4)
    dense = gemm_reference(
        one,
        BlockScaledTensor(plain[1].data[0], plain[1].scale[0], NVFP4, plain[1].global_scale[0]),
        out_dtype=torch.float32,
    )
    assert torch.equal(dense, want[:5])
