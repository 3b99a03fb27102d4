"""Routing as Triton kernels: a stable counting sort of expert ids, in one launch for few slots and two for many.

No atomic decides an order. Few slots: every expert's program reads all ids and counts. Many: each program counts the ids
of its run of slots and ranks every slot among those of its run and expert (`_rank`), then adds up what the runs before
it and the experts before each hold (`_place`). A run is a few tiles that are ranked side by side, so that a program
waits once for each thing it waits for, not once for each tile.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from padless.formats import ceil_div

FEW_SLOTS = 4096  # up to here one launch
TILE = 128  # slots that are ranked at once, by comparing all pairs
MAX_RUNS = 128  # programs of the two launches
MAX_TILES = 4  # of a run at once, four warps each
_BINS_AT_ONCE = 1024  # counts of all tiles of a run at once, as far as they are several
_COUNTS_AT_ONCE = 32768


class Sorted(NamedTuple):
    """Sorted slots, as `padless.moe.Routing`."""

    offs: torch.Tensor
    tokens: torch.Tensor
    inverse: torch.Tensor


def empty(ids: torch.Tensor, num_experts: int) -> Sorted:
    """Unset outputs of routing for ids (T, k)."""

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids.device)

    return Sorted(new(num_experts), new(ids.numel()), new(*ids.shape))


def route(ids: torch.Tensor, num_experts: int) -> Sorted:
    """The sorted slots of contiguous ids (T, k), at least one of them."""
    slots, top_k, device = ids.numel(), ids.shape[1], ids.device
    offs, tokens, inverse = empty(ids, num_experts)
    if slots <= FEW_SLOTS:
        block = max(triton.next_power_of_2(slots), 128)
        _route_few[(num_experts + 1,)](
            ids, offs, tokens, inverse, slots, num_experts, top_k, BLOCK=block, num_warps=4 if block <= 1024 else 8
        )
        return Sorted(offs, tokens, inverse)
    bins = max(triton.next_power_of_2(num_experts + 2), 128)  # experts, dropped ids, and lanes past the end
    tiles = ceil_div(slots, TILE)
    tiles_per_run = ceil_div(tiles, MAX_RUNS)
    tiles_at_once = max(min(triton.next_power_of_2(tiles_per_run), MAX_TILES, _BINS_AT_ONCE // bins), 1)
    steps = ceil_div(tiles_per_run, tiles_at_once)
    runs = ceil_div(tiles, steps * tiles_at_once)
    counts = torch.empty((runs, bins), dtype=torch.int32, device=device)
    _rank[(runs,)](
        ids,
        counts,
        inverse,
        slots,
        num_experts,
        steps,
        BINS=bins,
        TILES=tiles_at_once,
        TILE=TILE,
        num_warps=4 * tiles_at_once,
    )
    _place[(runs,)](
        ids,
        counts,
        offs,
        tokens,
        inverse,
        slots,
        num_experts,
        top_k,
        steps,
        runs,
        BINS=bins,
        SLOTS=tiles_at_once * TILE,
        RUNS_AT_ONCE=_COUNTS_AT_ONCE // bins,
        num_warps=16,
    )
    return Sorted(offs, tokens, inverse)


@triton.jit
def _load_ids(ids_ptr, slot, slots, num_experts):
    """Expert ids as int32: num_experts for ids that are none, num_experts + 1 past the last slot."""
    ids = tl.load(ids_ptr + slot, mask=slot < slots, other=0)
    ids = tl.where((ids >= 0) & (ids < num_experts), ids, num_experts).to(tl.int32)
    return tl.where(slot < slots, ids, num_experts + 1)


@triton.jit
def _store_slots(tokens_ptr, inverse_ptr, row, slot, dropped, top_k, mask):
    tl.store(tokens_ptr + row, slot // top_k, mask=mask)
    tl.store(inverse_ptr + slot, tl.where(dropped, -1 - row, row), mask=mask)


# What the number of tokens decides is not compiled in, but for BLOCK, a power of two.
@triton.jit(do_not_specialize=["slots"])
def _route_few(
    ids_ptr,  # (slots,) int32 or int64
    offs_ptr,
    tokens_ptr,
    inverse_ptr,
    slots,
    num_experts,
    top_k,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)  # num_experts: the dropped ids
    slot = tl.arange(0, BLOCK)
    ids = _load_ids(ids_ptr, slot, slots, num_experts)
    mine = ids == expert
    start = tl.sum((ids < expert).to(tl.int32), axis=0)
    rank = tl.cumsum(mine.to(tl.int32), axis=0)
    _store_slots(tokens_ptr, inverse_ptr, start + rank - 1, slot, expert == num_experts, top_k, mine)
    if expert < num_experts:
        tl.store(offs_ptr + expert, start + tl.sum(mine.to(tl.int32), axis=0))


@triton.jit
def sort_few(
    ids_ptr,
    offs_ptr,
    tokens_ptr,
    inverse_ptr,
    token,
    tokens,
    num_experts,
    writes,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """(rows of one token's slots, their numbers), a power of two of them; with `writes` they are stored.

    To be called by every program of a one-dimensional grid: each also stores its share of offs.
    """
    LANES: tl.constexpr = triton.next_power_of_2(TOP_K)
    slot = tl.arange(0, SLOTS)
    ids = _load_ids(ids_ptr, slot, tokens * TOP_K, num_experts)
    lane = tl.arange(0, LANES)
    my_slot = token * TOP_K + lane
    mine = _load_ids(ids_ptr, my_slot, tokens * TOP_K, num_experts)
    earlier = (ids[None, :] == mine[:, None]) & (slot[None, :] < my_slot[:, None])
    rows = tl.sum(((ids[None, :] < mine[:, None]) | earlier).to(tl.int32), axis=1)
    stored = (lane < TOP_K) & writes
    tl.store(tokens_ptr + rows, token, mask=stored)
    tl.store(inverse_ptr + my_slot, tl.where(mine == num_experts, -1 - rows, rows), mask=stored)
    EXPERTS: tl.constexpr = 1 if SLOTS >= 512 else 512 // SLOTS
    for first in range(tl.program_id(0) * EXPERTS, num_experts, tl.num_programs(0) * EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        ends = tl.sum((ids[None, :] <= expert[:, None]).to(tl.int32), axis=1)
        tl.store(offs_ptr + expert, ends, mask=expert < num_experts)
    return rows, lane


@triton.jit(do_not_specialize=["slots", "steps"])
def _rank(
    ids_ptr,
    counts_ptr,  # (runs, BINS) int32
    ranks_ptr,  # (slots,) int32
    slots,
    num_experts,
    steps,
    BINS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    run = tl.program_id(0)
    lane = tl.arange(0, TILE)
    counts = tl.zeros((BINS,), tl.int32)
    for step in range(run * steps, (run + 1) * steps):
        slot = step * (TILES * TILE) + tl.arange(0, TILES * TILE)
        ids = _load_ids(ids_ptr, slot, slots, num_experts)
        by_tile = tl.reshape(ids, (TILES, TILE))
        # Summed along the axis that a thread has for itself: along the last it would be one reduction of a warp a slot.
        earlier = (by_tile[:, :, None] == by_tile[:, None, :]) & (lane[None, :, None] < lane[None, None, :])
        rank = tl.reshape(tl.sum(earlier.to(tl.int32), axis=1), (TILES * TILE,))
        place = tl.arange(0, TILES * TILE) // TILE * BINS + ids
        of_tiles = tl.reshape(tl.histogram(place, TILES * BINS), (TILES, BINS))
        before = counts[None, :] + tl.cumsum(of_tiles, axis=0) - of_tiles
        rank += tl.gather(tl.reshape(before, (TILES * BINS,)), place, axis=0)
        tl.store(ranks_ptr + slot, rank, mask=slot < slots)
        counts += tl.sum(of_tiles, axis=0)
    tl.store(counts_ptr + run * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["slots", "steps", "runs"])
def _place(
    ids_ptr,
    counts_ptr,
    offs_ptr,
    tokens_ptr,
    inverse_ptr,  # holds the ranks
    slots,
    num_experts,
    top_k,
    steps,
    runs,
    BINS: tl.constexpr,
    SLOTS: tl.constexpr,
    RUNS_AT_ONCE: tl.constexpr,
):
    run = tl.program_id(0)
    bins = tl.arange(0, BINS)
    before = tl.zeros((BINS,), tl.int32)
    total = tl.zeros((BINS,), tl.int32)
    for first in range(0, runs, RUNS_AT_ONCE):
        other = first + tl.arange(0, RUNS_AT_ONCE)
        # Four bins are wanted or none of them, so that they are loaded together.
        wanted = (other[:, None] < runs) & ((bins // 4 * 4)[None, :] <= num_experts)
        counts = tl.load(counts_ptr + other[:, None] * BINS + bins[None, :], mask=wanted, other=0)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where(other[:, None] < run, counts, 0), axis=0)
    ends = tl.cumsum(total, axis=0)
    if run == 0:
        tl.store(offs_ptr + bins, ends, mask=bins < num_experts)
    first_row = ends - total + before
    for step in range(run * steps, (run + 1) * steps):
        slot = step * SLOTS + tl.arange(0, SLOTS)
        ids = _load_ids(ids_ptr, slot, slots, num_experts)
        rank = tl.load(inverse_ptr + slot, mask=slot < slots, other=0)
        row = tl.gather(first_row, ids, axis=0) + rank
        _store_slots(tokens_ptr, inverse_ptr, row, slot, ids == num_experts, top_k, slot < slots)
