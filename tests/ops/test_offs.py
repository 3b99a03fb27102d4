"""Offsets as callers have them: int64, on a CPU looked at, from other layouts; and what a CPU refuses as a GPU does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import padless
from padless import layouts
from padless.formats import FORMATS, FP8_BLOCK, MXFP4, MXFP8, NVFP4, BlockScaledTensor
from padless.kernels.sm90_bf16.config import Sm90Bf16Config
from padless.kernels.sm90_fp8.config import Sm90Fp8Config

SIZES, N, K = [3, 0, 1, 7], 64, 128
M = sum(SIZES) + 2
OFFS = padless.group_offsets(SIZES)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def operands(fmt: Any, **options: Any) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    return padless.quantize(normal(M, K), fmt, **options), padless.quantize(normal(4, N, K), fmt, kind="weight")


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x[: OFFS[-1]].view(torch.uint8), y[: OFFS[-1]].view(torch.uint8))


# --- int64 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_int64_is_int32(fmt: Any) -> None:
    """torch's cumsum of sizes, int64, in every call that takes offs."""
    offs = torch.tensor(SIZES).cumsum(0)
    assert offs.dtype == torch.int64
    a, b = operands(fmt)
    assert same(padless.grouped_gemm(a, b, offs), padless.grouped_gemm(a, b, OFFS))
    epilogue = padless.Epilogue(d_dtype=torch.float32)
    both = [padless.grouped_gemm_epilogue(a, b, ends, epilogue).d for ends in (offs, OFFS)]
    assert same(*both)
    quant = {"a_tensor": a, "b_tensor": b}
    both = [padless.grouped_gemm_quant(**quant, padded_offsets=ends)["d_tensor"] for ends in (offs, OFFS)]
    assert same(*both)


def test_int64_in_the_quantizers() -> None:
    offs, x = OFFS.long(), normal(M, K)
    for fmt, layout in ((NVFP4, "plain"), (MXFP8, "blocked_groups"), (NVFP4, "blocked_groups")):
        a, again = (padless.quantize(x, fmt, offs=ends, scale_layout=layout) for ends in (offs, OFFS))
        assert torch.equal(a.data.view(torch.uint8), again.data.view(torch.uint8))
        assert torch.equal(
            padless.dequantize(a, offs=offs)[: OFFS[-1]], padless.dequantize(again, offs=OFFS)[: OFFS[-1]]
        )
        b = padless.quantize(normal(4, N, K), fmt, kind="weight")
        products = [padless.grouped_gemm(t, b, ends) for t, ends in itertools.product((a, again), (offs, OFFS))]
        assert all(same(products[0], product) for product in products)
    for made in (padless.quantize_rows_columns(x, offs), padless.quantize_rows_columns(x, OFFS)):
        assert made[1].offs.dtype == torch.int32
        assert made[1].starts.tolist() == [0, 32, 32, 64]
    dh, z = normal(M, 64), normal(M, 128)
    got, want = (padless.swiglu_backward_quantize(dh, z, ends, gate_up="concatenated") for ends in (offs, OFFS))
    assert torch.equal(got.dz_columns.data.view(torch.uint8), want.dz_columns.data.view(torch.uint8))


def test_int64_for_other_groups_is_refused() -> None:
    a, b = operands(MXFP8, offs=OFFS.long(), scale_layout="blocked_groups")
    other = padless.group_offsets([2, 1, 1, 7]).long()
    with pytest.raises(ValueError, match=r"^offs\[0\] is 2 and a has scales for groups of which that one ends at 3"):
        padless.grouped_gemm(a, b, other)


def test_an_int64_that_does_not_fit_does_not_wrap_around() -> None:
    """2^32 + 3 is 3 in 32 bits."""
    a, b = operands(FP8_BLOCK)
    offs = torch.tensor([2**32 + 3] * 4)
    with pytest.raises(ValueError, match=r"^offs\[0\] is 2147483647; offs must not be negative"):
        padless.grouped_gemm(a, b, offs)
    x = normal(M, K)
    _, columns = padless.quantize_rows_columns(x, offs)
    assert columns.offs.tolist() == [2**31 - 1] * 4


@pytest.mark.slow
def test_int64_in_the_emulator() -> None:
    a, b = operands(FP8_BLOCK)
    both = [padless.grouped_gemm(a, b, ends, backend="emulator") for ends in (OFFS.long(), OFFS)]
    assert same(*both)


# --- values, on a CPU ------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[BlockScaledTensor, BlockScaledTensor, torch.Tensor], Any]] = {
    "grouped_gemm": padless.grouped_gemm,
    "grouped_gemm_epilogue": lambda a, b, offs: padless.grouped_gemm_epilogue(
        a, b, offs, padless.Epilogue(d_dtype=torch.bfloat16)
    ),
    "grouped_gemm_quant": lambda a, b, offs: padless.grouped_gemm_quant(a_tensor=a, b_tensor=b, padded_offsets=offs),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("offs", "message"),
    [
        ([3, 2, 4, 11], r"offs\[1\] is 2; .* decrease \(the entry before is 3\)"),
        ([-1, 2, 4, 11], r"offs\[0\] is -1; offs must not be negative"),
        ([3, 3, 4, M + 1], rf"offs\[3\] is {M + 1}; .* nor pass M = {M}"),
    ],
)
def test_values_are_looked_at_on_a_cpu(call: str, offs: list[int], message: str) -> None:
    for fmt in (FP8_BLOCK, MXFP4):
        a, b = operands(fmt)
        with pytest.raises(ValueError, match=message):
            CALLS[call](a, b, torch.tensor(offs, dtype=torch.int32))


# --- config= on a CPU ------------------------------------------------------------------------------------


def test_another_kernels_config_is_refused_on_a_cpu() -> None:
    a, b = operands(FP8_BLOCK)
    right: tuple[Any, ...] = (None, Sm90Fp8Config, Sm90Fp8Config(block_m=64))
    for config in right:
        assert same(padless.grouped_gemm(a, b, OFFS, config=config), padless.grouped_gemm(a, b, OFFS))
    for config in (Sm90Bf16Config, 3, "fast"):
        with pytest.raises(
            ValueError, match=r"^config is a \w+; grouped_gemm of FP8_BLOCK x FP8_BLOCK takes a Sm90Fp8Config or Sm100"
        ):
            padless.grouped_gemm(a, b, OFFS, config=config)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^config is a \w+; grouped_gemm_quant of FP8_BLOCK x FP8_BLOCK takes"):
            padless.grouped_gemm_quant(a_tensor=a, b_tensor=b, padded_offsets=OFFS, config=config)  # type: ignore[arg-type]
    a, b = operands(MXFP8)
    assert same(padless.grouped_gemm(a, b, OFFS, config=Sm90Bf16Config), padless.grouped_gemm(a, b, OFFS))
    dense = b[0]
    with pytest.raises(ValueError, match=r"^config is a Sm90Fp8Config; gemm of MXFP8 x MXFP8 takes a "):
        padless.gemm(a, dense, config=Sm90Fp8Config)
    with pytest.raises(ValueError, match=r"^config is a Sm90Fp8Config; grouped_gemm_list takes a Sm100GroupedConfig"):
        padless.grouped_gemm_list([a], [dense], config=Sm90Fp8Config())  # type: ignore[arg-type]
    _, columns = padless.quantize_rows_columns(normal(M, 64), OFFS)
    with pytest.raises(ValueError, match=r"^config is a Sm90Fp8Config; copies of grouped columns take a WgradConfig"):
        padless.grouped_gemm_wgrad(columns, columns, config=Sm90Fp8Config())  # type: ignore[arg-type]


# --- from other layouts ----------------------------------------------------------------------------------


def test_from_indptr() -> None:
    for dtype in (torch.int32, torch.int64):
        offs = layouts.offs_from_indptr(torch.tensor([0, 3, 3, 4, 11], dtype=dtype))
        assert offs.dtype == torch.int32
        assert torch.equal(offs, OFFS)
    assert layouts.offs_from_indptr(torch.tensor([0])).shape == (0,)
    for bad in (torch.tensor([1, 3]), torch.zeros(0, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"^m_indptr must start with 0"):
            layouts.offs_from_indptr(bad)
    with pytest.raises(ValueError, match=r"^m_indptr must be a 1-D int32 or int64 tensor, got \(2,\) torch.float32"):
        layouts.offs_from_indptr(torch.zeros(2))


def naive_ends(indices: list[int], groups: int) -> list[int]:
    """Row by row."""
    ends, last = [], 0
    for group in range(groups):
        rows = [row for row, g in enumerate(indices) if g == group]
        later = [row for row, g in enumerate(indices) if g > group]
        if rows:
            last = later[0] if later else rows[-1] + 1
        elif not last and later:
            last = 0
        ends.append(last)
    return ends


@pytest.mark.parametrize(
    ("indices", "groups"),
    [
        ([0, 0, -1, 2, -1], 3),
        ([], 3),
        ([-1, -1], 2),
        ([1, 1, 1], 3),
        ([0, -1, -1, 1, 1, -1, 3, 3, -1, -1], 5),
        ([2], 3),
    ],
)
def test_from_indices(indices: list[int], groups: int) -> None:
    got = layouts.offs_from_indices(torch.tensor(indices, dtype=torch.int32), groups)
    assert got.dtype == torch.int32
    assert got.tolist() == naive_ends(indices, groups)


def test_from_indices_gives_every_row_its_group() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(40):
        groups = int(torch.randint(1, 9, (), generator=generator))
        indices = torch.randint(0, groups, (30,), generator=generator).sort().values
        indices[torch.rand(30, generator=generator) < 0.3] = -1
        offs = layouts.offs_from_indices(indices, groups)
        of_rows = layouts.group_of_rows(offs, 30)
        kept = indices >= 0
        assert torch.equal(of_rows[kept], indices[kept])
        assert offs.tolist() == sorted(offs.tolist())


def test_indices_that_descend_are_refused() -> None:
    for bad, groups in (([1, 0], 2), ([0, 2], 2), ([1, -1, 0], 2)):
        with pytest.raises(ValueError, match=rf"^m_indices must ascend and be below num_groups = {groups}, got \["):
            layouts.offs_from_indices(torch.tensor(bad), groups)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_from_masked(fmt: Any) -> None:
    """The product of a masked layout's rows, through quantize(rows=) and back."""
    sizes, max_m = torch.tensor([2, 0, 5, 9, -3]), 5
    x = normal(5, max_m, K)
    for group, size in enumerate(sizes.clamp(0, max_m).tolist()):
        x[group, size:] = float("nan")
    masked = layouts.from_masked(sizes, max_m)
    assert masked.offs.tolist() == [2, 2, 7, 12, 12]
    shared = torch.tensor(0.01) if fmt == NVFP4 else None
    a = padless.quantize(x.view(-1, K), fmt, rows=masked.rows, global_scale=shared)
    b = padless.quantize(normal(5, N, K), fmt, kind="weight")
    out = padless.grouped_gemm(a, b, masked.offs, out_dtype=torch.float32)[masked.inverse.clamp(min=0)]
    assert out.shape == (5, max_m, N)
    for group, size in enumerate(sizes.clamp(0, max_m).tolist()):
        if size:
            rows = padless.quantize(x[group, :size], fmt, global_scale=shared)
            assert torch.equal(out[group, :size], padless.gemm(rows, b[group], out_dtype=torch.float32))
        assert (masked.inverse[group, size:] == -1).all()
    with pytest.raises(ValueError, match=r"^max_m is -1"):
        layouts.from_masked(sizes, -1)
