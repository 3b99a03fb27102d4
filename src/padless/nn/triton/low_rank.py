"""The two products of low-rank adapters as Triton kernels: bound by the rows that they read or write. The second one may
activate and quantize what it adds to.

Rows are in groups of (expert, adapter). A program takes a few consecutive rows and goes through the groups that these
are in; every row is multiplied by tensor-core instructions of the same shape whatever rows are around it, so that its
bits depend on the row and the factors alone.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from padless.formats import ceil_div
from padless.layouts import empty_mn_major
from padless.moe.activation import Activation
from padless.moe.triton import arithmetic
from padless.moe.triton.arithmetic import rounded
from padless.nn.triton.activation import ARRANGEMENTS
from padless.quantization.triton import casts, fp8_block
from padless.quantization.triton.launches import begin, launch, programmatic

FACTORS = 8  # of a launch, which are parameters of the kernel
_ROWS = 32  # of a program at most: fewer where that makes too few programs, or many groups one after the other
_PROGRAMS = 512
_FEW_ROWS = 1024
_COLUMNS = 128
_LARGE = tl.constexpr(2**31 - 1)
# Adapters of tokens and the token of each row, as `padless.nn.lora.low_rank.LowRank` has them.
Chosen = tuple[torch.Tensor | None, torch.Tensor | None]


def low_rank_down(
    rows: torch.Tensor, factors: Sequence[torch.Tensor], offs: torch.Tensor, per_expert: int, scaling: float, width: int,
    tokens: torch.Tensor | None = None, chosen: Chosen = (None, None),
) -> torch.Tensor:  # fmt: skip
    """`padless.nn.lora.low_rank.down`, of rows whose last stride is 1; neither M nor K is 0."""
    _, rank, columns = factors[0].shape
    m = rows.shape[0] if tokens is None else tokens.shape[0]
    t = torch.empty((m, width), dtype=torch.bfloat16, device=rows.device)
    block_r = max(16, triton.next_power_of_2(width))
    tile = _down_tile(m, offs.shape[0], block_r, chosen)
    begins = _programmatic(m, offs.device, is_behind_product=tokens is None)
    for given, counts, options in _launches(factors, offs, per_expert, scaling, tile.rows):
        launch(_down, ceil_div(m, tile.rows))(
            rows, tokens, t, offs, *chosen, *given, m, rows.stride(0), *counts, K=columns, RANK=rank, WIDTH=width,
            BLOCK_R=block_r, BLOCK_K=tile.columns, STAGES=tile.stages, num_warps=tile.num_warps, **options, **begins,
        )  # fmt: skip
    return t


def low_rank_up(
    t: torch.Tensor, factors: Sequence[torch.Tensor], offs: torch.Tensor, per_expert: int, scaling: float,
    added: torch.Tensor | None, chosen: Chosen = (None, None),
) -> torch.Tensor:  # fmt: skip
    """`padless.nn.lora.low_rank.up`, of contiguous t and added; neither M nor N is 0."""
    _, columns, rank = factors[0].shape
    out = torch.empty((t.shape[0], columns), dtype=torch.bfloat16, device=t.device)
    block_r = max(16, triton.next_power_of_2(rank))
    block_n = min(_COLUMNS, 8192 // block_r)
    blocks = ceil_div(columns, block_n)
    tile = _up_tile(t.shape[0], blocks, offs.shape[0], chosen)
    begins = _programmatic(t.shape[0], offs.device, is_behind_product=True)
    for given, counts, options in _launches(factors, offs, per_expert, scaling, tile.rows):
        launch(_up, ceil_div(t.shape[0], tile.rows) * blocks)(
            t, out, offs, *chosen, *given, added, t.shape[0], columns, blocks, *counts, RANK=rank, WIDTH=t.shape[1],
            BLOCK_R=block_r, BLOCK_N=block_n, num_warps=tile.num_warps, **options, **begins,
        )  # fmt: skip
        added = out
    return out


def low_rank_up_activated(
    t: torch.Tensor, factors: Sequence[torch.Tensor], offs: torch.Tensor, per_expert: int, scaling: float,
    added: torch.Tensor, activation: Activation, is_quantized: bool, chosen: Chosen = (None, None),
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """`padless.nn.lora.low_rank.up_activated` of contiguous t and added, neither M nor N 0, and of factors that
    `activates_up`: values, and codes as bytes and scales in FP8_BLOCK or None.
    """
    rows, columns = added.shape[0], added.shape[1] // 2
    values = torch.empty((rows, columns), dtype=torch.bfloat16, device=t.device)
    codes = scale = None
    if is_quantized:
        codes = torch.empty((rows, columns), dtype=torch.uint8, device=t.device)
        scale = empty_mn_major(rows, ceil_div(columns, _COLUMNS), t.device)
    rank = factors[0].shape[2]
    blocks = ceil_div(columns, _COLUMNS)
    tile = _up_tile(rows, blocks, offs.shape[0], chosen)
    ((given, counts, options),) = _launches(factors, offs, per_expert, scaling, tile.rows)
    launch(_up_activated, ceil_div(rows, tile.rows) * blocks)(
        t, added, values, codes, scale, offs, *chosen, *given, rows, columns, blocks, *counts,
        0 if scale is None else scale.stride(1), activation.alpha, activation.up_offset, activation.limit or 0.0,
        KIND=activation.kind, ARRANGEMENT=ARRANGEMENTS[activation.gate_up], HAS_LIMIT=activation.limit is not None,
        RANK=rank, WIDTH=t.shape[1], BLOCK_R=max(16, triton.next_power_of_2(rank)), BLOCK_N=_COLUMNS,
        num_warps=tile.num_warps, **options, **_programmatic(rows, offs.device, is_behind_product=True),
    )  # fmt: skip
    return values, codes, scale


def adapter_pairs(ids: torch.Tensor, adapter_ids: torch.Tensor, num_experts: int, num_adapters: int) -> torch.Tensor:
    """`padless.nn.lora.low_rank.adapter_pairs`, of contiguous tensors; ids is not empty."""
    out = torch.empty_like(ids)
    launch(_pairs, ceil_div(ids.numel(), 256))(
        ids, adapter_ids, out, ids.numel(), ids.shape[1], num_experts, num_adapters, SLOTS=256, num_warps=4,
        **_programmatic(ids.numel(), ids.device, is_behind_product=False),
    )  # fmt: skip
    return out


Launches = list[tuple[tuple[torch.Tensor, ...], tuple[Any, ...], dict[str, Any]]]


def _launches(
    factors: Sequence[torch.Tensor], offs: torch.Tensor, per_expert: int, scaling: float, live: int
) -> Launches:
    """(factors, filled up with their first; strides and numbers; options) of each launch."""
    if len({(t.stride(), t.dtype) for t in factors}) > 1:
        factors = [t.contiguous() for t in factors]
    hardware, groups = casts.casts_in_hardware(offs.device), triton.next_power_of_2(offs.shape[0])
    found: Launches = []
    for first in range(0, len(factors), FACTORS):
        some = tuple(factors[first : first + FACTORS])
        aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in some)
        counts = (*some[0].stride(), offs.shape[0], per_expert, first, len(some), scaling)
        options = {
            "LIVE": live,
            "ROWS": max(live, 16),
            "GROUPS": groups,
            "ALIGNED": aligned,
            "HARDWARE": hardware,
            "enable_fp_fusion": False,
        }
        found.append((some + some[:1] * (FACTORS - len(some)), counts, options))
    return found


class _Tile(NamedTuple):
    """Part of a program: rows, a power of two, by columns at a time; warps, and columns on their way."""

    rows: int
    columns: int
    num_warps: int
    stages: int = 4


def _down_tile(rows: int, groups: int, block_r: int, chosen: Chosen) -> _Tile:
    live = _live_rows(rows, 1, groups, chosen)
    return _Tile(live, min(_COLUMNS, 8192 // block_r), 2 if block_r == 16 else 4)


def _up_tile(rows: int, blocks: int, groups: int, chosen: Chosen) -> _Tile:
    live = _live_rows(rows, blocks, groups, chosen)
    return _Tile(live, _COLUMNS, 8 if live == _ROWS else 4)


def _programmatic(rows: int, device: torch.device, *, is_behind_product: bool) -> dict[str, int]:
    """Options of a launch, which begins before the kernel ahead has ended where it is one of many short ones."""
    return programmatic(device) if rows <= _FEW_ROWS else {"PROGRAMMATIC": 0}


def _live_rows(rows: int, blocks: int, groups: int, chosen: Chosen) -> int:
    """Rows of a program, a power of two: the more, the less is read of factors. One, where each looks its adapter up."""
    if chosen[0] is not None:
        return 1
    wanted = min(_ROWS, rows * blocks // _PROGRAMS, rows // (2 * groups))
    return 1 << max(wanted.bit_length() - 1, 0)


@triton.jit(do_not_specialize=["slots", "num_adapters"])
def _pairs(
    ids_ptr, adapter_ids_ptr, out_ptr, slots, top_k, num_experts, num_adapters,
    SLOTS: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    begin(PROGRAMMATIC)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    expert = tl.load(ids_ptr + slot, mask=slot < slots, other=0)
    adapter = tl.load(adapter_ids_ptr + slot // top_k, mask=slot < slots, other=0).to(expert.dtype)
    adapter = tl.where((adapter >= 0) & (adapter < num_adapters), adapter, num_adapters)
    pair = tl.where((expert >= 0) & (expert < num_experts), expert * (num_adapters + 1) + adapter, -1)
    tl.store(out_ptr + slot, pair, mask=slot < slots)


@triton.jit
def _group_of(ends, row):
    """The group of a row and its end; behind the last one the number of groups and a large number."""
    return tl.sum((ends <= row).to(tl.int32)), tl.min(tl.where(ends > row, ends, _LARGE))


@triton.jit
def _adapter_of(chosen_ptr, row_tokens_ptr, row, group, per_expert):
    if chosen_ptr is None:
        adapter = group % per_expert
    else:
        adapter = tl.load(chosen_ptr + tl.load(row_tokens_ptr + row))
    return adapter


@triton.jit
def _factor(f0, f1, f2, f3, f4, f5, f6, f7, adapter, of_expert, ALIGNED: tl.constexpr):
    """The pointer of an adapter's factor of an expert."""
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
    found += of_expert
    return tl.multiple_of(found, 16) if ALIGNED else found


@triton.jit
def _bfloat16(x, HARDWARE: tl.constexpr):
    return x.to(tl.bfloat16) if HARDWARE else rounded(x, tl.bfloat16)


@triton.jit
def _product(x, factor, total, HARDWARE: tl.constexpr):
    """total + x @ factor, of bfloat16 x and factor rounded to it. The interpreter's product of bfloat16 is wrong."""
    if HARDWARE:
        return tl.dot(x, factor.to(tl.bfloat16), total)
    return tl.dot(casts.to_float32(x), casts.to_float32(rounded(casts.to_float32(factor), tl.bfloat16)), total)


@triton.jit(do_not_specialize=["M", "num_groups", "per_expert", "first_factor", "num_factors"])
def _down(
    rows_ptr,  # (M, K) bfloat16, strides (row_stride, 1), or as many rows as tokens name
    tokens_ptr,  # (M,) int32, the row of each row of t; None for its own
    t_ptr,  # (M, WIDTH) bfloat16
    offs_ptr,  # (num_groups,) int32, ends of the groups
    chosen_ptr,  # (T,) int32 or int64, the adapter of each token; None: groups say it. With it LIVE is 1
    row_tokens_ptr,  # (M,) int32, the token of each row, with chosen
    f0, f1, f2, f3, f4, f5, f6, f7,  # (E, RANK, K), strides (expert_stride, rank_stride, k_stride)
    M,
    row_stride,
    expert_stride,
    rank_stride,
    k_stride,
    num_groups,
    per_expert,
    first_factor,
    num_factors,
    scaling,
    K: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LIVE: tl.constexpr,
    ROWS: tl.constexpr,  # LIVE, or the 16 that tensor cores take
    GROUPS: tl.constexpr,  # a power of two
    ALIGNED: tl.constexpr,  # whether every expert's factor begins at a multiple of 16 bytes
    HARDWARE: tl.constexpr,
    STAGES: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    begin(PROGRAMMATIC)
    covered = tl.program_id(0) * LIVE
    t_ptr += covered.to(tl.int64) * WIDTH
    live = tl.arange(0, ROWS)
    row = covered + live
    end_of_rows = tl.minimum(covered + LIVE, M)
    if tokens_ptr is None:
        rows_ptr += covered.to(tl.int64) * row_stride
        of_row = live * row_stride
    else:
        of_row = tl.load(tokens_ptr + row, mask=row < end_of_rows, other=0).to(tl.int64) * row_stride
    j = tl.arange(0, BLOCK_R)
    place_of_end = tl.arange(0, GROUPS)
    ends = tl.load(offs_ptr + place_of_end, mask=place_of_end < num_groups, other=_LARGE)
    while covered < end_of_rows:
        group, end = _group_of(ends, covered)
        end = tl.minimum(end, end_of_rows)
        adapter = _adapter_of(chosen_ptr, row_tokens_ptr, covered, group, per_expert) - first_factor
        if (group < num_groups) & (adapter >= 0) & (adapter < num_factors):
            of_expert = (group // per_expert).to(tl.int64) * expert_stride
            factor = _factor(f0, f1, f2, f3, f4, f5, f6, f7, adapter, of_expert, ALIGNED)
            mine = ((row >= covered) & (row < end))[:, None]
            total = tl.zeros((ROWS, BLOCK_R), tl.float32)
            for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                k = start + tl.arange(0, BLOCK_K)
                inside = (k < K)[None, :]
                x = tl.load(rows_ptr + of_row[:, None] + k[None, :], mask=mine & inside, other=0.0)
                a = tl.load(
                    factor + j[:, None] * rank_stride + k[None, :] * k_stride,
                    mask=(j < RANK)[:, None] & inside, other=0.0,
                )  # fmt: skip
                total = _product(x, tl.trans(a), total, HARDWARE)
            tl.store(
                t_ptr + live[:, None] * WIDTH + j[None, :], _bfloat16(total * scaling, HARDWARE),
                mask=mine & (j < WIDTH)[None, :],
            )  # fmt: skip
        covered = end


@triton.jit(do_not_specialize=["M", "blocks", "num_groups", "per_expert", "first_factor", "num_factors"])
def _up(
    t_ptr,  # (M, WIDTH) bfloat16
    out_ptr,  # (M, N) bfloat16
    offs_ptr,  # (num_groups,) int32, ends of the groups
    chosen_ptr,  # (T,) int32 or int64, the adapter of each token; None: groups say it. With it LIVE is 1
    row_tokens_ptr,  # (M,) int32, the token of each row, with chosen
    f0, f1, f2, f3, f4, f5, f6, f7,  # (E, N, RANK), strides (expert_stride, n_stride, rank_stride)
    added_ptr,  # (M, N) bfloat16, which may be out; None for zeros
    M,
    N,
    blocks,  # programs for the columns of a row
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
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LIVE: tl.constexpr,
    ROWS: tl.constexpr,  # LIVE, or the 16 that tensor cores take
    GROUPS: tl.constexpr,  # a power of two
    ALIGNED: tl.constexpr,  # whether every expert's factor begins at a multiple of 16 bytes
    HARDWARE: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """Rows of no group and of groups without a factor are `added`."""
    begin(PROGRAMMATIC)
    covered = tl.program_id(0) // blocks * LIVE
    live = tl.arange(0, ROWS)
    row = covered + live
    end_of_rows = tl.minimum(covered + LIVE, M)
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_R)
    place = live[:, None] * N + n[None, :]
    t_ptr += covered.to(tl.int64) * WIDTH
    out_ptr += covered.to(tl.int64) * N
    if added_ptr is not None:
        added_ptr += covered.to(tl.int64) * N
    place_of_end = tl.arange(0, GROUPS)
    ends = tl.load(offs_ptr + place_of_end, mask=place_of_end < num_groups, other=_LARGE)
    while covered < end_of_rows:
        group, end = _group_of(ends, covered)
        end = tl.minimum(end, end_of_rows)
        mine = ((row >= covered) & (row < end))[:, None]
        inside = mine & (n < N)[None, :]
        if added_ptr is not None:
            added = tl.load(added_ptr + place, mask=inside, other=0.0)
        adapter = _adapter_of(chosen_ptr, row_tokens_ptr, covered, group, per_expert) - first_factor
        has_factor = (group < num_groups) & (adapter >= 0) & (adapter < num_factors)
        of_expert = tl.where(has_factor, group // per_expert, 0).to(tl.int64) * expert_stride
        factor = _factor(f0, f1, f2, f3, f4, f5, f6, f7, adapter, of_expert, ALIGNED)
        in_rank = (j < RANK) & has_factor
        t = tl.load(t_ptr + live[:, None] * WIDTH + j[None, :], mask=mine & in_rank[None, :], other=0.0)
        b = tl.load(
            factor + n[None, :] * n_stride + j[:, None] * rank_stride,
            mask=in_rank[:, None] & (n < N)[None, :], other=0.0,
        )  # fmt: skip
        result = _product(t, b, tl.zeros((ROWS, BLOCK_N), tl.float32), HARDWARE) * scaling
        if added_ptr is not None:
            # A row without an adapter keeps its bits, the sign of zero too.
            result = tl.where(has_factor, result, -0.0) + casts.to_float32(added)
        tl.store(out_ptr + place, _bfloat16(result, HARDWARE), mask=inside)
        covered = end


@triton.jit
def _sums(
    t, added_ptr, factor, n, n_stride, mine, inside, in_rank, has_factor, scaling,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Columns n of what `_up` stores, in float32. factor: pointers to the ranks of a row of it."""
    added = tl.load(added_ptr + n[None, :], mask=mine & inside[None, :], other=0.0)
    b = tl.load(factor + n[None, :] * n_stride, mask=in_rank[:, None] & inside[None, :], other=0.0)
    result = _product(t, b, tl.zeros((ROWS, COLUMNS), tl.float32), HARDWARE) * scaling
    result = tl.where(has_factor, result, -0.0) + casts.to_float32(added)
    return casts.to_float32(_bfloat16(result, HARDWARE))


@triton.jit(do_not_specialize=["M", "blocks", "num_groups", "per_expert", "first_factor", "num_factors", "scale_ld"])
def _up_activated(
    t_ptr,  # (M, WIDTH) bfloat16
    added_ptr,  # (M, 2 I) bfloat16
    values_ptr,  # (M, I) bfloat16
    codes_ptr,  # (M, I) uint8, None for values alone
    scale_ptr,  # (M, blocks) float32, strides (1, scale_ld)
    offs_ptr,  # (num_groups,) int32, ends of the groups
    chosen_ptr,  # (T,) int32 or int64, the adapter of each token; None: groups say it. With it LIVE is 1
    row_tokens_ptr,  # (M,) int32, the token of each row, with chosen
    f0, f1, f2, f3, f4, f5, f6, f7,  # (E, 2 I, RANK), strides (expert_stride, n_stride, rank_stride)
    M,
    I,  # noqa: E741
    blocks,
    expert_stride,
    n_stride,
    rank_stride,
    num_groups,
    per_expert,
    first_factor,
    num_factors,
    scaling,
    scale_ld,
    alpha,
    up_offset,
    limit,
    KIND: tl.constexpr,
    ARRANGEMENT: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,  # columns of values, and of a block of scales
    LIVE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """The activation of what `_up` stores, bit for bit."""
    begin(PROGRAMMATIC)
    block = tl.program_id(0) % blocks
    covered = tl.program_id(0) // blocks * LIVE
    live = tl.arange(0, ROWS)
    row = covered + live
    end_of_rows = tl.minimum(covered + LIVE, M)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    wide = block * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)
    j = tl.arange(0, BLOCK_R)
    t_ptr += covered.to(tl.int64) * WIDTH
    added_ptrs = added_ptr + covered.to(tl.int64) * (2 * I) + live[:, None] * (2 * I)
    first_value = covered.to(tl.int64) * I
    place = live[:, None] * I + column[None, :]
    place_of_end = tl.arange(0, GROUPS)
    ends = tl.load(offs_ptr + place_of_end, mask=place_of_end < num_groups, other=_LARGE)
    if scale_ptr is not None:  # the padding below the scales
        padded = M + tl.arange(0, 4)
        is_padding = (padded < scale_ld) & (tl.program_id(0) < blocks)
        tl.store(scale_ptr + block.to(tl.int64) * scale_ld + padded, tl.zeros((4,), tl.float32), mask=is_padding)
    while covered < end_of_rows:
        group, end = _group_of(ends, covered)
        end = tl.minimum(end, end_of_rows)
        is_mine = (row >= covered) & (row < end)
        mine = is_mine[:, None]
        adapter = _adapter_of(chosen_ptr, row_tokens_ptr, covered, group, per_expert) - first_factor
        has_factor = (group < num_groups) & (adapter >= 0) & (adapter < num_factors)
        of_expert = tl.where(has_factor, group // per_expert, 0).to(tl.int64) * expert_stride
        factor = _factor(f0, f1, f2, f3, f4, f5, f6, f7, adapter, of_expert, ALIGNED) + j[:, None] * rank_stride
        in_rank = (j < RANK) & has_factor
        t = tl.load(t_ptr + live[:, None] * WIDTH + j[None, :], mask=mine & in_rank[None, :], other=0.0)
        if ARRANGEMENT == 2:
            both = _sums(t, added_ptrs, factor, wide, n_stride, mine, wide < 2 * I, in_rank, has_factor, scaling,
                         ROWS, 2 * BLOCK_N, HARDWARE)  # fmt: skip
            gate, up = tl.split(tl.reshape(both, (ROWS, BLOCK_N, 2)))
        else:
            if ARRANGEMENT == 0:
                of_gate = column
                of_up = I + column
            else:
                of_gate = column // 32 * 64 + column % 32
                of_up = of_gate + 32
            gate = _sums(t, added_ptrs, factor, of_gate, n_stride, mine, column < I, in_rank, has_factor, scaling,
                         ROWS, BLOCK_N, HARDWARE)  # fmt: skip
            up = _sums(t, added_ptrs, factor, of_up, n_stride, mine, column < I, in_rank, has_factor, scaling,
                       ROWS, BLOCK_N, HARDWARE)  # fmt: skip
        inside = mine & (column < I)[None, :]
        x = arithmetic.activated(gate, up, KIND, alpha, up_offset, limit, HAS_LIMIT, HARDWARE)
        x = tl.where(inside, x, 0.0)
        tl.store(values_ptr + first_value + place, _bfloat16(x, HARDWARE), mask=inside)
        if codes_ptr is not None:
            scale, multiplier = fp8_block._fp8_block_scale(tl.max(casts.magnitude_bits(x), axis=1))
            tl.store(codes_ptr + first_value + place, casts.to_e4m3(x * multiplier[:, None], HARDWARE), mask=inside)
            tl.store(scale_ptr + block.to(tl.int64) * scale_ld + row, scale, mask=is_mine)
        covered = end
