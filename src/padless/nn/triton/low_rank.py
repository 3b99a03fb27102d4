"""The two products of low-rank adapters as Triton kernels: bound by the rows that they read or write.

Rows are in groups of (expert, adapter). A program takes a few consecutive rows and goes through the groups that these
are in; every row is multiplied by tensor-core instructions of the same shape whatever rows are around it, so that its
bits depend on the row and the factors alone.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from padless.formats import ceil_div
from padless.moe.triton.arithmetic import rounded
from padless.quantization.triton import casts
from padless.quantization.triton.launches import launch

FACTORS = 8  # of a launch, which are parameters of the kernel
_LIVE_ROWS, _PROGRAMS = 16, 1024  # fewer rows a program where that makes too few programs
_DOWN_COLUMNS, _UP_COLUMNS = 128, 256


def low_rank_down(
    rows: torch.Tensor, factors: Sequence[torch.Tensor], offs: torch.Tensor, per_expert: int, scaling: float, width: int
) -> torch.Tensor:
    """`padless.nn.lora.low_rank.down`, of rows whose last stride is 1; neither M nor K is 0."""
    rank = factors[0].shape[1]
    t = torch.empty((rows.shape[0], width), dtype=torch.bfloat16, device=rows.device)
    for first, given in _launches(factors):
        live = _live_rows(rows.shape[0])
        launch(_down, ceil_div(rows.shape[0], live))(
            rows, t, offs, *given, rows.shape[0], rows.shape[1], rows.stride(0), *given[0].stride(), offs.shape[0],
            per_expert, first, min(len(factors) - first, FACTORS), scaling,
            RANK=rank, WIDTH=width, LIVE=live, BLOCK_R=max(16, triton.next_power_of_2(width)),
            BLOCK_K=_DOWN_COLUMNS, **_facts(given), num_warps=4 if rank > 32 else 2, enable_fp_fusion=False,
        )  # fmt: skip
    return t


def low_rank_up(
    t: torch.Tensor, factors: Sequence[torch.Tensor], offs: torch.Tensor, per_expert: int, scaling: float,
    added: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """`padless.nn.lora.low_rank.up`, of contiguous t and added; neither M nor N is 0."""
    _, columns, rank = factors[0].shape
    out = torch.empty((t.shape[0], columns), dtype=torch.bfloat16, device=t.device)
    blocks = ceil_div(columns, _UP_COLUMNS)
    for first, given in _launches(factors):
        live = _live_rows(t.shape[0])
        launch(_up, ceil_div(t.shape[0], live) * blocks)(
            t, out, offs, *given, added if first == 0 else out, t.shape[0], columns, blocks, *given[0].stride(),
            offs.shape[0], per_expert, first, min(len(factors) - first, FACTORS), scaling,
            RANK=rank, WIDTH=t.shape[1], LIVE=live, BLOCK_R=max(16, triton.next_power_of_2(rank)),
            BLOCK_N=_UP_COLUMNS, **_facts(given), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _launches(factors: Sequence[torch.Tensor]) -> list[tuple[int, tuple[torch.Tensor, ...]]]:
    """Factors of each launch, filled up with its first, and the place of that one."""
    same = len({(t.stride(), t.dtype) for t in factors}) == 1
    of = factors if same else [t.contiguous() for t in factors]
    parts = [(first, tuple(of[first : first + FACTORS])) for first in range(0, len(of), FACTORS)]
    return [(first, some + some[:1] * (FACTORS - len(some))) for first, some in parts]


def _facts(factors: Sequence[torch.Tensor]) -> dict[str, bool]:
    aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in factors)
    return {"ALIGNED": aligned, "HARDWARE": casts.casts_in_hardware(factors[0].device)}


def _live_rows(rows: int) -> int:
    return min(_LIVE_ROWS, max(1, triton.next_power_of_2(ceil_div(rows, _PROGRAMS))))


@triton.jit
def _group_of(offs_ptr, row, num_groups):
    """The first group that ends behind the row, num_groups where none does."""
    low = row * 0
    high = low + num_groups
    while low < high:
        middle = (low + high) // 2
        if tl.load(offs_ptr + middle) > row:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _factor(f0, f1, f2, f3, f4, f5, f6, f7, adapter):
    """The pointer of an adapter's factor."""
    found = f0
    if adapter == 1:
        found = f1
    if adapter == 2:
        found = f2
    if adapter == 3:
        found = f3
    if adapter == 4:
        found = f4
    if adapter == 5:
        found = f5
    if adapter == 6:
        found = f6
    if adapter == 7:
        found = f7
    return found


@triton.jit
def _product(x, factor, total, HARDWARE: tl.constexpr):
    """total + x @ factor, of bfloat16 x and factor rounded to it. The interpreter's product of bfloat16 is wrong."""
    factor = rounded(casts.to_float32(factor), tl.bfloat16)
    if HARDWARE:
        return tl.dot(x, factor, total)
    return tl.dot(casts.to_float32(x), casts.to_float32(factor), total)


@triton.jit(do_not_specialize=["M", "num_groups", "per_expert", "first_factor", "num_factors"])
def _down(
    rows_ptr,  # (M, K) bfloat16, strides (row_stride, 1)
    t_ptr,  # (M, WIDTH) bfloat16
    offs_ptr,  # (num_groups,) int32, ends of the groups
    f0, f1, f2, f3, f4, f5, f6, f7,  # (E, RANK, K), strides (expert_stride, rank_stride, k_stride)
    M,
    K,
    row_stride,
    expert_stride,
    rank_stride,
    k_stride,
    num_groups,
    per_expert,
    first_factor,
    num_factors,
    scaling,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    LIVE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGNED: tl.constexpr,  # whether every expert's factor begins at a multiple of 16 bytes
    HARDWARE: tl.constexpr,
):  # fmt: skip
    covered = tl.program_id(0) * LIVE
    row = covered + tl.arange(0, 16)
    end_of_rows = tl.minimum(covered + LIVE, M)
    j = tl.arange(0, BLOCK_R)
    long_row = row.to(tl.int64)[:, None]
    group = _group_of(offs_ptr, covered, num_groups)
    while (group < num_groups) & (covered < end_of_rows):
        end = tl.minimum(tl.load(offs_ptr + group), end_of_rows)
        adapter = group % per_expert - first_factor
        if (adapter >= 0) & (adapter < num_factors):
            factor = _factor(f0, f1, f2, f3, f4, f5, f6, f7, adapter)
            factor += (group // per_expert).to(tl.int64) * expert_stride
            if ALIGNED:
                factor = tl.multiple_of(factor, 16)
            mine = (row >= covered) & (row < end)
            total = tl.zeros((16, BLOCK_R), tl.float32)
            start = covered * 0
            while start < K:
                k = start + tl.arange(0, BLOCK_K)
                inside = (k < K)[None, :]
                x = tl.load(rows_ptr + long_row * row_stride + k[None, :], mask=mine[:, None] & inside, other=0.0)
                a = tl.load(
                    factor + j[:, None] * rank_stride + k[None, :] * k_stride,
                    mask=(j < RANK)[:, None] & inside, other=0.0,
                )  # fmt: skip
                total = _product(x, tl.trans(a), total, HARDWARE)
                start += BLOCK_K
            tl.store(
                t_ptr + long_row * WIDTH + j[None, :], rounded(total * scaling, tl.bfloat16),
                mask=mine[:, None] & (j < WIDTH)[None, :],
            )  # fmt: skip
        covered = end
        group = _group_of(offs_ptr, covered, num_groups)


@triton.jit(do_not_specialize=["M", "num_groups", "per_expert", "first_factor", "num_factors"])
def _up(
    t_ptr,  # (M, WIDTH) bfloat16
    out_ptr,  # (M, N) bfloat16
    offs_ptr,  # (num_groups,) int32, ends of the groups
    f0, f1, f2, f3, f4, f5, f6, f7,  # (E, N, RANK), strides (expert_stride, n_stride, rank_stride)
    added_ptr,  # (M, N) bfloat16, which may be out; None for zeros
    M,
    N,
    blocks,
    expert_stride,
    n_stride,
    rank_stride,
    num_groups,
    per_expert,
    first_factor,
    num_factors,
    scaling,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    LIVE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,  # whether every expert's factor begins at a multiple of 16 bytes
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Rows of no group and of groups without a factor are `added`."""
    covered = tl.program_id(0) // blocks * LIVE
    row = covered + tl.arange(0, 16)
    end_of_rows = tl.minimum(covered + LIVE, M)
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_R)
    place = row.to(tl.int64)[:, None] * N + n[None, :]
    result = tl.zeros((16, BLOCK_N), tl.float32)
    group = _group_of(offs_ptr, covered, num_groups)
    while (group < num_groups) & (covered < end_of_rows):
        end = tl.minimum(tl.load(offs_ptr + group), end_of_rows)
        adapter = group % per_expert - first_factor
        if (adapter >= 0) & (adapter < num_factors):
            factor = _factor(f0, f1, f2, f3, f4, f5, f6, f7, adapter)
            factor += (group // per_expert).to(tl.int64) * expert_stride
            if ALIGNED:
                factor = tl.multiple_of(factor, 16)
            mine = ((row >= covered) & (row < end))[:, None]
            t = tl.load(
                t_ptr + row.to(tl.int64)[:, None] * WIDTH + j[None, :], mask=mine & (j < RANK)[None, :], other=0.0
            )
            b = tl.load(
                factor + n[None, :].to(tl.int64) * n_stride + j[:, None] * rank_stride,
                mask=(j < RANK)[:, None] & (n < N)[None, :], other=0.0,
            )  # fmt: skip
            total = _product(t, b, tl.zeros((16, BLOCK_N), tl.float32), HARDWARE)
            result = tl.where(mine, total * scaling, result)
        covered = end
        group = _group_of(offs_ptr, covered, num_groups)
    inside = (row < end_of_rows)[:, None] & (n < N)[None, :]
    if added_ptr is not None:
        result += casts.to_float32(tl.load(added_ptr + place, mask=inside, other=0.0))
    tl.store(out_ptr + place, rounded(result, tl.bfloat16), mask=inside)
