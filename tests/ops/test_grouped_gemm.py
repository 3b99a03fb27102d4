"""The public product on the CPU: every element against float64, every row that is not ours untouched."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import padless
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.layouts import to_mn_major
from support.ragged import RAGGED_CASES, GuardedOutput, RaggedCase

# Half a unit in the last place of 1, and half the smallest subnormal.
OUT_DTYPES = {
    torch.bfloat16: (2.0**-8, 2.0**-134),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.float32: (2.0**-24, 2.0**-150),
}
FP32 = 2.0**-24
NAN_CODE = 0x7F


def random_codes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Finite e4m3 codes of every size, zeros and subnormals included."""
    magnitude = torch.randint(0, 127, shape, generator=generator)
    sign = torch.randint(0, 2, shape, generator=generator) * 128
    return (magnitude + sign).to(torch.uint8).view(torch.float8_e4m3fn)


def random_operands(
    m: int, n: int, k: int, num_groups: int, scale_major: str, seed: int
) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """Any codes with any scales, not what a quantiser makes of numbers: each block has a scale of its own."""
    generator = torch.Generator().manual_seed(seed)
    k_blocks = -(-k // 128)
    sfa = 2.0 ** (torch.rand((m, k_blocks), generator=generator) * 4 - 12)
    sfb = 2.0 ** (torch.rand((num_groups, -(-n // 128), k_blocks), generator=generator) * 4 - 12)
    a = BlockScaledTensor(random_codes((m, k), generator), to_mn_major(sfa) if scale_major == "mn" else sfa, FP8_BLOCK)
    assert a.scale_major == scale_major or m == 0
    return a, BlockScaledTensor(random_codes((num_groups, n, k), generator), sfb, FP8_BLOCK)


def expected(a: BlockScaledTensor, b: BlockScaledTensor, sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(product, size of its terms) of the rows of all groups, in float64, from values and not from codes.

    The size of an element is the sum over K blocks of |the block's part of it|: what float32 promotion can lose is
    a small part of that.
    """
    k = a.data.shape[1]
    per_column = torch.arange(k) // 128
    values_a = a.data.to(torch.float64) * a.scale.to(torch.float64)[:, per_column]
    products, terms = [], []
    rows = itertools.accumulate(sizes, initial=0)
    for group, (start, size) in enumerate(zip(rows, sizes, strict=False)):
        per_row = torch.arange(b.data.shape[1]) // 128
        values_b = b.data[group].to(torch.float64) * b.scale[group].to(torch.float64)[per_row][:, per_column]
        of_group = values_a[start : start + size]
        products.append(of_group @ values_b.T)
        blocks = range(0, k, 128)
        terms.append(sum((of_group[:, at : at + 128] @ values_b[:, at : at + 128].T).abs() for at in blocks))
    return torch.cat(products), torch.cat(terms)


def assert_every_element(out: torch.Tensor, product: torch.Tensor, terms: torch.Tensor, k_blocks: int) -> None:
    """Each element within what rounding explains.

    Per K block the partial sum, the product of scales and the fused multiply-add round once each, to 2^-24 of what
    they round; the running sum is at most the sum of the terms. Then comes one rounding to the output's type.
    """
    relative, smallest = OUT_DTYPES[out.dtype]
    promotion = terms * ((k_blocks + 2) * FP32 * (1 + 1e-6))
    bound = promotion + (product.abs() + promotion) * relative + smallest
    error = (out.to(torch.float64) - product).abs()
    bad = torch.nonzero(~(error <= bound).all(dim=1)).flatten()
    assert bad.numel() == 0, f"rows {bad.tolist()[:8]} of {len(out)} are off by up to {error[bad].max():.3g}"


def check(
    sizes: tuple[int, ...], past: int, n: int, k: int, dtype: torch.dtype, scale_major: str, seed: int = 0
) -> torch.Tensor:
    m, valid = sum(sizes) + past, sum(sizes)
    a, b = random_operands(m, n, k, len(sizes), scale_major, seed)
    guarded = GuardedOutput(m, n, dtype)
    out = padless.grouped_gemm(a, b, padless.group_offsets(list(sizes)), out=guarded.out, check_offs=True)
    assert out is guarded.out
    guarded.check(valid)
    if valid:
        assert_every_element(out[:valid], *expected(a, b, sizes), k_blocks=-(-k // 128))
    return out


# --- results ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_major", ["mn", "k"])
@pytest.mark.parametrize("dtype", OUT_DTYPES, ids=str)
def test_ragged_groups(ragged_case: RaggedCase, dtype: torch.dtype, scale_major: str) -> None:
    check(ragged_case.sizes, ragged_case.M - ragged_case.valid_rows, ragged_case.N, ragged_case.K, dtype, scale_major)


@given(
    sizes=st.lists(st.sampled_from((0, 0, 1, 1, 2, 17, 64, 65, 130)), min_size=1, max_size=6).map(tuple),
    past=st.sampled_from((0, 0, 1, 40)),
    n=st.integers(1, 34).map(lambda x: 8 * x),
    k=st.integers(1, 26).map(lambda x: 16 * x),
    dtype=st.sampled_from(list(OUT_DTYPES)),
    scale_major=st.sampled_from(("mn", "k")),
    seed=st.integers(0, 2**31),
)
def test_any_shape(
    sizes: tuple[int, ...], past: int, n: int, k: int, dtype: torch.dtype, scale_major: str, seed: int
) -> None:
    check(sizes, past, n, k, dtype, scale_major, seed)


@pytest.mark.parametrize("n", [4, 12, 132])
def test_float32_output_needs_a_multiple_of_four_only(n: int) -> None:
    check((3, 0, 5), 1, n, 144, torch.float32, "mn")


def test_a_single_row_has_scales_of_either_layout() -> None:
    results = [check((1,), 0, 136, 400, torch.float32, major) for major in ("mn", "k")]
    assert torch.equal(*results)


@pytest.mark.parametrize("case", RAGGED_CASES, ids=lambda case: case.name)
def test_the_two_scale_layouts_give_the_same_bits(case: RaggedCase) -> None:
    offs = case.offs()
    results = []
    for major in ("mn", "k"):
        a, b = random_operands(case.M, case.N, case.K, case.num_groups, major, seed=7)
        results.append(padless.grouped_gemm(a, b, offs, out_dtype=torch.float32)[: case.valid_rows])
    assert torch.equal(*results)


def test_a_new_tensor_is_bfloat16_unless_asked_otherwise() -> None:
    a, b = random_operands(5, 24, 256, 2, "mn", 0)
    offs = padless.group_offsets([2, 3])
    for asked, given_dtype in (({}, torch.bfloat16), *(({"out_dtype": d}, d) for d in OUT_DTYPES)):
        out = padless.grouped_gemm(a, b, offs, **asked)
        assert (out.dtype, out.shape) == (given_dtype, (5, 24))
        assert_every_element(out, *expected(a, b, (2, 3)), k_blocks=2)


def test_rows_apart_keep_what_is_between_them() -> None:
    """out, a and b may be parts of larger tensors, with rows further apart than they are long."""
    sizes, n, k = (3, 0, 66), 40, 208
    a, b = random_operands(sum(sizes) + 2, n, k, 3, "mn", 3)
    wide_a = torch.full((a.data.shape[0], k + 48), NAN_CODE, dtype=torch.uint8).view(torch.float8_e4m3fn)
    wide_b = torch.full((3, n + 3, k + 16), NAN_CODE, dtype=torch.uint8).view(torch.float8_e4m3fn)
    wide_a[:, :k] = a.data
    wide_b[:, :n, :k] = b.data
    wide_out = torch.full((a.data.shape[0], n + 24), -7.5, dtype=torch.bfloat16)
    out = padless.grouped_gemm(
        BlockScaledTensor(wide_a[:, :k], a.scale, FP8_BLOCK),
        BlockScaledTensor(wide_b[:, :n, :k], b.scale, FP8_BLOCK),
        padless.group_offsets(list(sizes)),
        out=wide_out[:, :n],
    )
    valid = sum(sizes)
    assert torch.equal(out[:valid], padless.grouped_gemm(a, b, padless.group_offsets(list(sizes)))[:valid])
    assert (wide_out[:, n:] == -7.5).all()
    assert (wide_out[valid:] == -7.5).all()


def test_a_group_sees_its_own_rows_and_weights_only() -> None:
    """NaN in one row, in another group's weights and past the end: nobody else may notice."""
    sizes = (2, 3, 0, 4)
    a, b = random_operands(12, 24, 272, 4, "mn", 5)
    offs = padless.group_offsets(list(sizes))
    clean = padless.grouped_gemm(a, b, offs)
    a.data.view(torch.uint8)[3] = NAN_CODE  # a row of group 1
    a.data.view(torch.uint8)[9:] = NAN_CODE  # rows of nobody
    b.data.view(torch.uint8)[2] = NAN_CODE  # weights of the empty group
    b.data.view(torch.uint8)[0, 5] = NAN_CODE  # one column of group 0
    out = padless.grouped_gemm(a, b, offs)
    poisoned = torch.zeros((9, 24), dtype=torch.bool)
    poisoned[3] = True
    poisoned[:2, 5] = True
    assert torch.equal(out[:9].isnan(), poisoned)
    assert torch.equal(out[:9][~poisoned], clean[:9][~poisoned])


@pytest.mark.parametrize("dtype", OUT_DTYPES, ids=str)
def test_a_group_is_what_it_would_be_alone(dtype: torch.dtype) -> None:
    sizes = (7, 0, 65, 1)
    a, b = random_operands(sum(sizes), 136, 304, 4, "k", 6)
    out = padless.grouped_gemm(a, b, padless.group_offsets(list(sizes)), out_dtype=dtype)
    starts = itertools.accumulate(sizes, initial=0)
    for group, (start, size) in enumerate(zip(starts, sizes, strict=False)):
        rows = slice(start, start + size)
        alone = padless.gemm(
            BlockScaledTensor(a.data[rows], a.scale[rows].clone(), FP8_BLOCK),
            BlockScaledTensor(b.data[group], b.scale[group].clone(), FP8_BLOCK),
            out_dtype=dtype,
        )
        assert torch.equal(out[rows], alone), group


@given(
    m=st.sampled_from((0, 1, 63, 130)),
    n=st.integers(1, 34).map(lambda x: 8 * x),
    k=st.integers(1, 26).map(lambda x: 16 * x),
    dtype=st.sampled_from(list(OUT_DTYPES)),
    scale_major=st.sampled_from(("mn", "k")),
)
def test_the_dense_product_is_one_group(m: int, n: int, k: int, dtype: torch.dtype, scale_major: str) -> None:
    a, b = random_operands(m, n, k, 1, scale_major, 11)
    grouped = padless.grouped_gemm(a, b, padless.group_offsets([m]), out_dtype=dtype)
    guarded = GuardedOutput(m, n, dtype)
    dense = padless.gemm(a, BlockScaledTensor(b.data[0], b.scale[0], FP8_BLOCK), out=guarded.out)
    guarded.check(m)
    assert torch.equal(dense, grouped)


def test_quantized_numbers_multiply_as_the_numbers_do() -> None:
    """From end to end: the error of the product of quantised numbers is that of 4-bit significands."""
    generator = torch.Generator().manual_seed(13)
    x = torch.randn((96, 512), generator=generator)
    w = torch.randn((3, 136, 512), generator=generator)
    a = padless.quantize(x, padless.FP8_BLOCK)
    b = padless.quantize(w, padless.FP8_BLOCK, kind="weight")
    out = padless.grouped_gemm(a, b, padless.group_offsets([31, 1, 64]), out_dtype=torch.float32)
    exact = torch.cat([x[:31] @ w[0].T, x[31:32] @ w[1].T, x[32:] @ w[2].T])
    relative = (out - exact).norm(dim=1) / exact.norm(dim=1)
    assert (relative > 0.005).all()  # else nothing was quantised
    assert (relative < 0.06).all()  # 2^-4 is the most that rounding to 3 mantissa bits loses


# --- nobody's rows ---------------------------------------------------------------------------------------


@given(
    offs=st.lists(st.one_of(st.integers(-20, 60), st.integers(-(2**31), 2**31 - 1)), min_size=1, max_size=6),
    m=st.sampled_from((0, 1, 33, 50)),
)
def test_wrong_offs_never_write_outside(offs: list[int], m: int) -> None:
    """Where they are no partition the reference refuses them, and writes nothing."""
    a, b = random_operands(m, 24, 144, len(offs), "mn", 17)
    guarded = GuardedOutput(m, 24, torch.bfloat16)
    ends = [0, *offs, m]
    if ends == sorted(ends):
        padless.grouped_gemm(a, b, torch.tensor(offs, dtype=torch.int32), out=guarded.out)
        guarded.check(offs[-1])
        return
    with pytest.raises(ValueError, match=r"^offs\[\d\] is -?\d+; offs must not be negative nor decrease"):
        padless.grouped_gemm(a, b, torch.tensor(offs, dtype=torch.int32), out=guarded.out)
    guarded.check(0)


@pytest.mark.parametrize(
    ("offs", "message"),
    [
        ([3, 2, 9], r"offs\[1\] is 2; offs must not be negative nor decrease \(the entry before is 3\)"),
        ([-1, 2, 9], r"offs\[0\] is -1"),
        ([3, 5, 11], r"offs\[2\] is 11; .* nor pass M = 10"),
        ([2**31 - 1, 2**31 - 1, 2**31 - 1], r"offs\[0\] is 2147483647"),
    ],
)
def test_check_offs_looks_at_the_values(offs: list[int], message: str) -> None:
    a, b = random_operands(10, 24, 144, 3, "mn", 19)
    guarded = GuardedOutput(10, 24, torch.bfloat16)
    values = torch.tensor(offs, dtype=torch.int32)
    for check_offs, kind in ((True, torch.int32), (False, torch.int32), (False, torch.int64)):
        with pytest.raises(ValueError, match=message):
            padless.grouped_gemm(a, b, values.to(kind), out=guarded.out, check_offs=check_offs)
    guarded.check(0)


def test_check_offs_lets_right_values_pass() -> None:
    a, b = random_operands(10, 24, 144, 4, "mn", 19)
    for offs in ([0, 0, 0, 0], [10, 10, 10, 10], [0, 3, 3, 9]):
        padless.grouped_gemm(a, b, torch.tensor(offs, dtype=torch.int32), check_offs=True)


def test_without_groups_nothing_is_written() -> None:
    a, b = random_operands(10, 24, 144, 0, "mn", 19)
    guarded = GuardedOutput(10, 24, torch.bfloat16)
    padless.grouped_gemm(a, b, torch.zeros(0, dtype=torch.int32), out=guarded.out, check_offs=True)
    guarded.check(0)


# --- group_offsets ---------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 10**6), min_size=1, max_size=50))
def test_group_offsets_are_cumulative_ends(sizes: list[int]) -> None:
    wanted = torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32)
    for given_as in (sizes, torch.tensor(sizes), torch.tensor(sizes, dtype=torch.int32)):
        offs = padless.group_offsets(given_as)
        assert offs.dtype == torch.int32
        assert torch.equal(offs, wanted)


def test_group_offsets_of_something_else() -> None:
    for sizes in ([[1, 2]], torch.ones(3), 5):
        with pytest.raises(ValueError, match="sizes must be a 1-D list or tensor of integers, got"):
            padless.group_offsets(sizes)


def test_group_offsets_of_no_groups() -> None:
    offs = padless.group_offsets([])
    assert (offs.dtype, offs.shape) == (torch.int32, (0,))


def test_group_offsets_that_do_not_fit() -> None:
    for sizes in ([2**30, 2**30, 2**30], [2**62] * 4, [2**63 - 1, 2], [2**31], [5, 2**63], [2**80], [3, -1, 2]):
        with pytest.raises(ValueError, match=r"sizes must not be negative and sum to less than 2\^31, got"):
            padless.group_offsets(sizes)
    assert padless.group_offsets([2**31 - 2, 1]).tolist() == [2**31 - 2, 2**31 - 1]
    wide = torch.full((4,), 2**62)
    with pytest.raises(ValueError, match="sizes"):
        padless.group_offsets(wide)
    small = torch.full((9,), 100, dtype=torch.int8)
    assert padless.group_offsets(small).tolist() == list(range(100, 1000, 100))


# --- the checks above can fail ---------------------------------------------------------------------------


def test_a_row_of_zeros_is_seen_where_a_global_ratio_passes() -> None:
    """1 - 2 <x, y> / (|x|^2 + |y|^2) is about 1 / (2 M) for one lost row: tiny for a usual M."""
    m, k = 4096, 128
    a, b = random_operands(m, 8, k, 1, "mn", 23)
    product, terms = expected(a, b, (m,))
    out = padless.grouped_gemm(a, b, padless.group_offsets([m]), out_dtype=torch.float32)
    assert_every_element(out, product, terms, 1)
    out[1234] = 0
    x, y = out.to(torch.float64), product
    ratio = 1 - 2 * (x * y).sum() / (x * x + y * y).sum()
    assert ratio < 0.001
    with pytest.raises(AssertionError, match=r"rows \[1234\] of 4096"):
        assert_every_element(out, product, terms, 1)


@pytest.mark.parametrize("dtype", OUT_DTYPES, ids=str)
def test_one_element_a_little_off_is_seen(dtype: torch.dtype) -> None:
    a, b = random_operands(40, 72, 400, 2, "mn", 29)
    product, terms = expected(a, b, (15, 25))
    out = padless.grouped_gemm(a, b, padless.group_offsets([15, 25]), out_dtype=dtype)
    assert_every_element(out, product, terms, 4)
    largest = divmod(int(product.abs().argmax()), product.shape[1])
    for _ in range(8 if dtype == torch.float32 else 2):  # two units in the last place; eight after promotion
        out[largest] = torch.nextafter(out[largest], torch.tensor(math.inf, dtype=dtype))
    with pytest.raises(AssertionError, match=rf"rows \[{largest[0]}\]"):
        assert_every_element(out, product, terms, 4)


@pytest.mark.parametrize("wrong", ["neighbour", "swapped_scales", "last_block_lost"])
def test_a_wrong_product_is_seen(wrong: str) -> None:
    sizes = (30, 34)
    a, b = random_operands(64, 136, 272, 2, "mn", 31)
    product, terms = expected(a, b, sizes)
    if wrong == "neighbour":  # the boundary between two groups is one row off
        out = padless.grouped_gemm(a, b, padless.group_offsets([31, 33]))
    elif wrong == "swapped_scales":
        scale = b.scale.flip(0).contiguous()
        out = padless.grouped_gemm(a, BlockScaledTensor(b.data, scale, FP8_BLOCK), padless.group_offsets(sizes))
    else:
        cut_a = BlockScaledTensor(a.data[:, :256], to_mn_major(a.scale[:, :2]), FP8_BLOCK)
        cut_b = BlockScaledTensor(b.data[..., :256], b.scale[..., :2].contiguous(), FP8_BLOCK)
        out = padless.grouped_gemm(cut_a, cut_b, padless.group_offsets(sizes))
    with pytest.raises(AssertionError, match="rows"):
        assert_every_element(out, product, terms, 3)
