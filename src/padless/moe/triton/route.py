"""Routing as Triton kernels: a stable counting sort of expert ids, in one launch for few slots and three for many.

No atomic decides an order. Few slots: every expert's program reads all ids and counts. Many: each program counts the
ids of a tile of slots and ranks every slot among those of its tile and expert (`_rank`); the tiles' counts of each
expert are added up (`_scan`); and each slot's row is its rank, behind the tiles before and the experts before
(`_place`).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from padless.formats import ceil_div
from padless.moe.checks import SORT_TILE as TILE
from padless.moe.checks import sort_bins
from padless.quantization.triton.launches import begin, launch, programmatic

FEW_SLOTS = 4096  # up to here one launch
SCANNED = 1024  # tiles whose counts are added up at once
_SCANNED_BINS, _SCAN_WARPS = 4, 8  # of a program
_PLACED_SLOTS = 512


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
    how = programmatic(device)
    offs, tokens, inverse = empty(ids, num_experts)
    if slots <= FEW_SLOTS:
        block = max(triton.next_power_of_2(slots), 128)
        launch(_route_few, num_experts + 1)(
            ids,
            offs,
            tokens,
            inverse,
            slots,
            num_experts,
            top_k,
            BLOCK=block,
            **how,
            num_warps=4 if block <= 1024 else 8,
        )
        return Sorted(offs, tokens, inverse)
    bins = sort_bins(num_experts)
    tiles = ceil_div(slots, TILE)
    counts = torch.empty((tiles + 1, bins), dtype=torch.int32, device=device)  # the last row: of all tiles
    launch(_rank, tiles)(ids, counts, inverse, slots, num_experts, BINS=bins, TILE=TILE, **how, num_warps=4)
    launch(_scan, bins // _SCANNED_BINS)(
        counts,
        tiles,
        BINS=bins,
        COLUMNS=_SCANNED_BINS,
        TILES=min(triton.next_power_of_2(tiles), SCANNED),
        **how,
        num_warps=_SCAN_WARPS,
    )
    launch(_place, ceil_div(slots, _PLACED_SLOTS))(
        ids, counts, offs, tokens, inverse, slots, num_experts, top_k, tiles,
        BINS=bins, TILE=TILE, SLOTS=_PLACED_SLOTS, **how, num_warps=4,
    )  # fmt: skip
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
    PROGRAMMATIC: tl.constexpr,
):
    begin(PROGRAMMATIC)
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
    EXPERTS: tl.constexpr = 1 if SLOTS >= 2048 else 2048 // SLOTS  # most calls need no second turn
    for first in range(tl.program_id(0) * EXPERTS, num_experts, tl.num_programs(0) * EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        ends = tl.sum((ids[None, :] <= expert[:, None]).to(tl.int32), axis=1)
        tl.store(offs_ptr + expert, ends, mask=expert < num_experts)
    return rows, lane


@triton.jit(do_not_specialize=["slots"])
def _rank(
    ids_ptr,
    counts_ptr,  # (tiles + 1, BINS) int32
    ranks_ptr,  # (slots,) int32
    slots,
    num_experts,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    begin(PROGRAMMATIC)
    tile = tl.program_id(0)
    lane = tl.arange(0, TILE)
    slot = tile * TILE + lane
    ids = _load_ids(ids_ptr, slot, slots, num_experts)
    # Summed along the axis that a thread has for itself: along the last it would be one reduction of a warp a slot.
    earlier = (ids[:, None] == ids[None, :]) & (lane[:, None] < lane[None, :])
    tl.store(ranks_ptr + slot, tl.sum(earlier.to(tl.int32), axis=0), mask=slot < slots)
    tl.store(counts_ptr + tile * BINS + tl.arange(0, BINS), tl.histogram(ids, BINS))


@triton.jit(do_not_specialize=["tiles"])
def _scan(
    counts_ptr, tiles, BINS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, PROGRAMMATIC: tl.constexpr
):
    """Counts become those of all tiles before; the row behind the last tile, those of all."""
    begin(PROGRAMMATIC)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros((COLUMNS,), tl.int32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        at = counts_ptr + tile[:, None] * BINS + column[None, :]
        counts = tl.load(at, mask=tile[:, None] < tiles, other=0)
        tl.store(at, before[None, :] + tl.cumsum(counts, axis=0) - counts, mask=tile[:, None] < tiles)
        before += tl.sum(counts, axis=0)
    tl.store(counts_ptr + tiles * BINS + column, before)


@triton.jit(do_not_specialize=["slots", "tiles"])
def _place(
    ids_ptr,
    counts_ptr,
    offs_ptr,
    tokens_ptr,
    inverse_ptr,  # holds the ranks
    slots,
    num_experts,
    top_k,
    tiles,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    begin(PROGRAMMATIC)
    bins = tl.arange(0, BINS)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    ids = _load_ids(ids_ptr, slot, slots, num_experts)
    rank = tl.load(inverse_ptr + slot, mask=slot < slots, other=0)
    before = tl.load(counts_ptr + slot // TILE * BINS + ids, mask=slot < slots, other=0)
    total = tl.load(counts_ptr + tiles * BINS + bins)
    ends = tl.cumsum(total, axis=0)
    if tl.program_id(0) == 0:
        tl.store(offs_ptr + bins, ends, mask=bins < num_experts)
    row = tl.gather(ends - total, ids, axis=0) + before + rank
    _store_slots(tokens_ptr, inverse_ptr, row, slot, ids == num_experts, top_k, slot < slots)
