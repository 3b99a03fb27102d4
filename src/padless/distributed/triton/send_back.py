"""`fan_in`: the sum of a token's rows here to the rank it came from; `finish`: the sum of what all ranks sent.

BY_SLOT: a token's rows are sent as they are, each to the place of its slot, and `finish` weights and adds them up.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from padless.distributed.triton.cells import buffer_of, is_last, region, signal, wait
from padless.moe.triton import arithmetic
from padless.quantization.triton import casts, launches


@triton.jit
def _of_half(
    slots_region,
    part_region,
    half,
    max_tokens,
    R: tl.constexpr,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    PART_BYTES: tl.constexpr,
    BY_SLOT: tl.constexpr,
):
    """Offsets of a half's values by slot and of its rows."""
    ROWS: tl.constexpr = TOP_K if BY_SLOT else R
    first = half * max_tokens
    return slots_region + first * TOP_K * 4, part_region + first * ROWS * H * PART_BYTES


@triton.jit(do_not_specialize=["rank", "limit", "capacity"])
def fan_in(
    pointers_ptr,
    counters_ptr,
    status_ptr,
    inverse_ptr,  # (R * Tmax, k) int32
    rows_ptr,  # (C, H) bfloat16 or float32
    prob_ptr,  # (C,) float32, or None for ones
    dprob_ptr,  # (C,) float32 to be brought to its slots, or None
    rank,
    max_tokens,
    capacity,
    rows_stride,
    summed,
    finished,
    aborted,
    slots_region,
    part_region,
    limit,
    R: tl.constexpr,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    PART: tl.constexpr,  # dtype of partial sums
    PART_BYTES: tl.constexpr,
    BY_SLOT: tl.constexpr,
    HALVES: tl.constexpr,  # of what is sent back, by parity of the epoch; with one it is not stored before it was read
    CLOCK: tl.constexpr,
    POLLS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    launches.begin(PROGRAMMATIC)
    SLOTS: tl.constexpr = triton.next_power_of_2(TOP_K)
    CHUNKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    epoch = tl.load(counters_ptr + 1) + 1
    half = (epoch % HALVES).to(tl.int64)
    slots_region, part_region = _of_half(slots_region, part_region, half, max_tokens, R, TOP_K, H, PART_BYTES, BY_SLOT)
    there = 1
    if HALVES == 1:  # until all ranks have read what the combine before left in their buffers
        there = wait(
            counters_ptr, 1, pointers_ptr, rank, finished, aborted, epoch - 1, status_ptr, limit, R, CLOCK, POLLS
        )
    # A rank that gave up in the dispatch has no rows, and must not say that their sums are there.
    gave_up = tl.load(buffer_of(pointers_ptr, rank, aborted).to(tl.pointer_type(tl.int64)), volatile=True)
    lane = tl.arange(0, SLOTS)
    for item in range(tl.program_id(0), R * max_tokens * CHUNKS * there, tl.num_programs(0)):
        pair, chunk = item // CHUNKS, item % CHUNKS
        source = (rank + 1 + pair % R) % R
        token = tl.cast(pair // R, tl.int64)
        at = (source * max_tokens + token) * TOP_K
        rows = tl.load(inverse_ptr + at + lane, mask=lane < TOP_K, other=-1)
        if tl.max(rows, axis=0) >= 0:
            column = chunk * BLOCK + tl.arange(0, BLOCK)
            inside = column < H
            total = tl.zeros((BLOCK,), tl.float32)
            for j in tl.static_range(TOP_K):
                row = tl.load(inverse_ptr + at + j).to(tl.int64)
                kept = (row >= 0) & (row < capacity)
                values = tl.load(rows_ptr + row * rows_stride + column, mask=inside & kept, other=0.0)
                if BY_SLOT:
                    first = part_region + (token * TOP_K + j) * H * PART_BYTES
                    part = region(pointers_ptr, source, first, PART)
                    tl.store(part + column, values, mask=inside & (row >= 0))
                else:
                    values = casts.to_float32(values)
                    if prob_ptr is not None:
                        values = values * tl.load(prob_ptr + row, mask=kept, other=0.0)
                    total += values
            if not BY_SLOT:
                first = part_region + (rank * max_tokens + token) * H * PART_BYTES
                part = region(pointers_ptr, source, first, PART)
                tl.store(part + column, arithmetic.rounded(total, PART), mask=inside)
            if dprob_ptr is not None:  # noqa: SIM102 (decided when it is compiled)
                if chunk == 0:
                    there_is = (rows >= 0) & (rows < capacity)
                    slots = buffer_of(pointers_ptr, source, slots_region + token * TOP_K * 4)
                    by_slot = tl.load(dprob_ptr + rows, mask=there_is, other=0.0)
                    tl.store(slots.to(tl.pointer_type(tl.float32)) + lane, by_slot, mask=rows >= 0)
    if is_last(counters_ptr + 3):
        tl.store(counters_ptr + 1, epoch)
        if (there == 1) & (gave_up == 0):
            signal(pointers_ptr, rank, summed + half * R * 8, epoch, R)


@triton.jit(do_not_specialize=["rank", "limit", "T"])
def finish(
    pointers_ptr,
    counters_ptr,
    status_ptr,
    ids_ptr,  # (T, k) int32
    rank_of_ptr,  # (E,) int32
    weights_ptr,  # BY_SLOT: (T, k) bfloat16, float16 or float32, or None for ones
    shared_ptr,  # BY_SLOT: (T, H), strides (shared_stride, 1), or None
    out_ptr,  # (T, H)
    slots_ptr,  # (T, k) float32, or None
    rank,
    T,
    max_tokens,
    num_experts,
    shared_stride,
    summed,
    finished,
    aborted,
    slots_region,
    part_region,
    limit,
    R: tl.constexpr,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    PART: tl.constexpr,
    PART_BYTES: tl.constexpr,
    OUT: tl.constexpr,
    BY_SLOT: tl.constexpr,
    HALVES: tl.constexpr,  # of what is sent back, by parity of the epoch; with one it is not stored before it was read
    CLOCK: tl.constexpr,
    POLLS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    launches.wait(PROGRAMMATIC)
    SLOTS: tl.constexpr = triton.next_power_of_2(TOP_K)
    CHUNKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    epoch = tl.load(counters_ptr + 1)
    half = (epoch % HALVES).to(tl.int64)
    slots_region, part_region = _of_half(slots_region, part_region, half, max_tokens, R, TOP_K, H, PART_BYTES, BY_SLOT)
    cells = summed + half * R * 8
    there = wait(counters_ptr, 1, pointers_ptr, rank, cells, aborted, epoch, status_ptr, limit, R, CLOCK, POLLS)
    launches.release(PROGRAMMATIC)  # not before: what begins next holds its place on the GPU while this waits
    lane = tl.arange(0, SLOTS)
    for item in range(tl.program_id(0), T * CHUNKS, tl.num_programs(0)):
        token, chunk = tl.cast(item // CHUNKS, tl.int64), item % CHUNKS
        ids = tl.load(ids_ptr + token * TOP_K + lane, mask=lane < TOP_K, other=-1)
        is_expert = (ids >= 0) & (ids < num_experts)
        ranks = tl.load(rank_of_ptr + ids, mask=is_expert, other=-1)
        column = chunk * BLOCK + tl.arange(0, BLOCK)
        inside = column < H
        total = tl.zeros((BLOCK,), tl.float32)
        if BY_SLOT:
            for j in tl.static_range(TOP_K):
                expert = tl.load(ids_ptr + token * TOP_K + j)
                is_there = (expert >= 0) & (expert < num_experts)
                first = part_region + (token * TOP_K + j) * H * PART_BYTES
                part = region(pointers_ptr, rank, first, PART)
                values = casts.to_float32(tl.load(part + column, mask=inside & is_there, other=0.0))
                if weights_ptr is not None:
                    weight = tl.load(weights_ptr + token * TOP_K + j, mask=is_there, other=0.0)
                    values = values * casts.to_float32(weight)
                total += values
            if shared_ptr is not None:
                shared = tl.load(shared_ptr + token * shared_stride + column, mask=inside, other=0.0)
                total += casts.to_float32(shared)
        else:
            for r in tl.static_range(R):
                is_there = tl.max((ranks == r).to(tl.int32), axis=0) > 0
                first = part_region + (r * max_tokens + token) * H * PART_BYTES
                part = region(pointers_ptr, rank, first, PART)
                total += casts.to_float32(tl.load(part + column, mask=inside & is_there, other=0.0))
        if there == 0:  # what a dead rank left is never taken for a result
            total += float("nan")
        tl.store(out_ptr + token * H + column, arithmetic.rounded(total, OUT), mask=inside)
        if slots_ptr is not None:  # noqa: SIM102
            if chunk == 0:
                slots = buffer_of(pointers_ptr, rank, slots_region + token * TOP_K * 4)
                by_slot = tl.load(slots.to(tl.pointer_type(tl.float32)) + lane, mask=is_expert, other=0.0)
                tl.store(slots_ptr + token * TOP_K + lane, by_slot, mask=lane < TOP_K)
    if HALVES == 1 and is_last(counters_ptr + 4):  # noqa: SIM102
        if there == 1:
            signal(pointers_ptr, rank, finished, epoch, R)
