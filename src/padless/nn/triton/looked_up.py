"""Low-rank adapters of slots that look them up, as Triton kernels: a program has a slot, or columns of a token's slots.

Where few rows are read of each adapter, most of the time is a chain of loads, so that factors are loaded while kernels
ahead still run: see `Slots`.
"""

# mypy: disable-error-code="no-untyped-def,assignment"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from padless.formats import ceil_div
from padless.moe.activation import Activation
from padless.moe.triton import arithmetic
from padless.moe.triton.combine import DTYPES
from padless.nn.triton.low_rank import (
    COLUMNS,
    LEAST_ROWS,
    Given,
    Slots,
    Tiles,
    launch_down,
    launch_up_activated,
    launches_of,
)
from padless.nn.triton.low_rank_kernels import factor_of, of_slot, product, stored
from padless.quantization.triton import casts
from padless.quantization.triton.launches import launch, programmatic, release, wait

_FACTOR_VALUES = 1 << 14  # of a program of four warps


def down(rows: torch.Tensor, factors: Sequence[torch.Tensor], slots: Slots, width: int) -> torch.Tensor:
    """`padless.nn.lora.looked_up.down`, of rows whose last stride is 1; neither M nor K is 0."""
    t = torch.empty((slots.ids.numel(), width), dtype=torch.bfloat16, device=rows.device)
    given, tiles, how = _given(factors, slots)
    launch_down(rows, None, t, slots, given, 1.0, tiles, how)
    return t


def up_activated(
    t: torch.Tensor, factors: Sequence[torch.Tensor], slots: Slots, scaling: float, added: torch.Tensor,
    activation: Activation, is_quantized: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """`padless.nn.lora.looked_up.up_activated`, of contiguous tensors; neither M nor N is 0."""
    given, tiles, how = _given(factors, slots)
    return launch_up_activated(t, slots, given, scaling, added, activation, is_quantized, tiles, how)


def combined(
    t: torch.Tensor, factors: Sequence[torch.Tensor], slots: Slots, scaling: float, y: torch.Tensor,
    weights: torch.Tensor, shared: torch.Tensor | None, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """`padless.nn.lora.looked_up.combined`, of contiguous tensors with at least one token and column."""
    (tokens, top_k), columns, rank = slots.ids.shape, y.shape[1], factors[0].shape[2]
    out = torch.empty((tokens, columns), dtype=dtype, device=t.device)
    block_r = max(16, triton.next_power_of_2(rank))
    width = _columns_combined(block_r, top_k)
    blocks = ceil_div(columns, width)
    given, tiles, how = _given(factors, slots)
    launch(_combine, tokens * blocks)(
        t, y, out, slots.ids, slots.adapter_ids, slots.inverse, *given.factors, weights, shared, columns, y.shape[0],
        blocks, *given.numbers, scaling, TOP_K=top_k, OUT=DTYPES[dtype], RANK=rank, WIDTH=t.shape[1], BLOCK_R=block_r,
        BLOCK_N=width, ROWS=tiles.rows, num_warps=4, **given.options, **how,
    )  # fmt: skip
    return out


def _columns_combined(block_r: int, top_k: int) -> int:
    """Columns of a program, which has the factors of all slots in registers."""
    return min(max(_FACTOR_VALUES // (block_r * triton.next_power_of_2(top_k)), 16), COLUMNS)


def _given(factors: Sequence[torch.Tensor], slots: Slots) -> tuple[Given, Tiles, dict[str, int]]:
    """Arguments and options of a launch of slots, of at most `FACTORS` factors."""
    (given,) = launches_of(factors, factors[0].shape[0], 1)
    return given, Tiles(LEAST_ROWS, slots.ids.numel(), 1), programmatic(slots.ids.device, early=given.is_known)


@triton.jit(do_not_specialize=["rows", "blocks", "num_experts", "per_expert", "first_factor", "num_factors"])
def _combine(
    t_ptr,  # (slots, WIDTH) bfloat16
    y_ptr,  # (rows, N) bfloat16
    out_ptr,  # (T, N)
    ids_ptr,
    chosen_ptr,
    inverse_ptr,
    f0, f1, f2, f3, f4, f5, f6, f7,  # (E, N, RANK), strides (expert_stride, n_stride, rank_stride)
    weights_ptr,  # (T, TOP_K)
    shared_ptr,  # (T, N), or None
    N,
    rows,
    blocks,
    expert_stride,
    n_stride,
    rank_stride,
    num_experts,
    per_expert,
    first_factor,
    num_factors,
    scaling,
    TOP_K: tl.constexpr,
    OUT: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """`padless.moe.combine` of what `_up` stores, bit for bit."""
    release(PROGRAMMATIC)
    token = tl.program_id(0) // blocks
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_R)
    inside = (n < N)[None, :]
    factors = ()  # all on their way before anything is waited for
    has = ()
    for i in tl.static_range(TOP_K):
        expert, adapter, has_factor = of_slot(ids_ptr, chosen_ptr, token * TOP_K + i, num_experts, num_factors, TOP_K)
        of_expert = tl.where(has_factor, expert, 0).to(tl.int64) * expert_stride
        factor = factor_of(f0, f1, f2, f3, f4, f5, f6, f7, adapter, of_expert, ALIGNED)
        in_factor = ((j < RANK) & has_factor)[:, None] & inside
        b = tl.load(factor + n[None, :] * n_stride + j[:, None] * rank_stride, mask=in_factor, other=0.0)
        factors = factors + (b,)  # noqa: RUF005 (Triton unpacks no tuple)
        has = has + (has_factor,)  # noqa: RUF005
    wait(PROGRAMMATIC)
    # Rows of tiles are slots: all of t is multiplied by the factor of each, whose row is taken.
    row = tl.arange(0, ROWS)
    slot = token * TOP_K + row
    places = tl.load(inverse_ptr + slot, mask=row < TOP_K, other=-1).to(tl.int64)
    kept = (places >= 0) & (places < rows)
    t_ptrs = t_ptr + slot.to(tl.int64)[:, None] * WIDTH + j[None, :]
    t = tl.load(t_ptrs, mask=kept[:, None] & (j < RANK)[None, :], other=0.0)
    y = tl.load(y_ptr + places[:, None] * N + n[None, :], mask=kept[:, None] & inside, other=0.0)
    weights = casts.to_float32(tl.load(weights_ptr + slot, mask=kept, other=0.0))
    found = tl.full((ROWS, BLOCK_N), -0.0, tl.float32)  # so that a row without an adapter keeps its bits
    for i in tl.static_range(TOP_K):
        result = product(t, factors[i], tl.zeros((ROWS, BLOCK_N), tl.float32), HARDWARE) * scaling
        found = tl.where(((row == i) & has[i])[:, None], result, found)
    values = stored(found + casts.to_float32(y), HARDWARE) * weights[:, None]
    # Of a slot without an expert they are 0, and the sum is never -0, so that adding them changes nothing.
    total = tl.zeros((1, BLOCK_N), tl.float32)
    for i in tl.static_range(TOP_K):
        total += tl.gather(values, tl.full((1, BLOCK_N), i, tl.int32), axis=0)
    place = token.to(tl.int64) * N + n[None, :]
    if shared_ptr is not None:
        total += casts.to_float32(tl.load(shared_ptr + place, mask=inside, other=0.0))
    tl.store(out_ptr + place, arithmetic.rounded(total, OUT), mask=inside)
