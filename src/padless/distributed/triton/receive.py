"""`localize`: the ids of all ranks as this rank's experts; `fan_out`: each token that has rows here, to all of them.

MN-major scales of a row lie a line of memory apart, 4 bytes in each: stored row by row they took an eighth of `fan_out`.
So every rank stores the scales of its tokens at all ranks when it quantizes them, while the links have nothing else to
do, and programs whose tokens are their own rank's, which end first, place them in runs along the rows.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from padless.distributed.triton.cells import buffer_of, wait


@triton.jit(do_not_specialize=["rank", "limit"])
def localize(
    pointers_ptr,
    counters_ptr,
    status_ptr,  # int64, host memory
    local_index_ptr,  # (E,) int32
    table_ptr,  # (R, Tmax * k) int32: local experts, -1 for none
    rank,
    num_experts,
    table,  # Tmax * k
    listed,
    aborted,
    ids_region,
    limit,
    R: tl.constexpr,
    CLOCK: tl.constexpr,
    POLLS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    epoch = tl.load(counters_ptr + 6)
    half = (epoch % 2).to(tl.int64)
    cells = listed + half * R * 8
    there = wait(counters_ptr, 6, pointers_ptr, rank, cells, aborted, epoch, status_ptr, limit, R, CLOCK, POLLS)
    ids = buffer_of(pointers_ptr, rank, ids_region + half * R * table * 4).to(tl.pointer_type(tl.int32))
    pieces = tl.cdiv(table, BLOCK)
    for piece in range(tl.program_id(0), pieces * R, tl.num_programs(0)):
        source = piece // pieces
        at = piece % pieces * BLOCK + tl.arange(0, BLOCK)
        slot = source * table + at
        values = tl.load(ids + slot, mask=at < table * there, other=-1)
        is_expert = (values >= 0) & (values < num_experts)
        local = tl.load(local_index_ptr + values, mask=is_expert, other=-1)
        tl.store(table_ptr + slot, local, mask=at < table)
        wrong = tl.max((values >= num_experts).to(tl.int32), axis=0)
        if wrong > 0:
            tl.store(status_ptr + 2, 1 + tl.cast(source, tl.int64))


@triton.jit(do_not_specialize=["rank", "limit", "capacity", "scale_stride_m", "scale_stride_k"])
def fan_out(
    pointers_ptr,
    counters_ptr,
    status_ptr,
    inverse_ptr,  # (R * Tmax, k) int32
    all_offs_ptr,  # (Eloc,) int32, or None for a saved plan
    offs_ptr,  # (Eloc,) int32: cut at the capacity
    overflow_ptr,  # () int32
    prob_ptr,  # (C,) float32
    data_ptr,  # (C, CODE_BYTES) uint8
    scale_ptr,  # (C, SCALES or PLACED), strides (scale_stride_m, scale_stride_k), int32 or uint8; or None
    tokens_ptr,  # (slots,) int32: source * Tmax + token of each row, where scales are placed; else None
    rank,
    max_tokens,
    capacity,
    num_local_experts,
    scale_stride_m,
    scale_stride_k,
    published,
    aborted,
    weights_region,
    scales_region,
    x_region,
    record_bytes,
    limit,
    R: tl.constexpr,
    TOP_K: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    SCALES: tl.constexpr,  # in a token's record
    SCALE_BYTES: tl.constexpr,  # of one scale: 1 or 4
    PLACED: tl.constexpr,  # scales of a token that all ranks were given, or 0
    GROUPS: tl.constexpr,  # a power of two, at least Eloc
    CLOCK: tl.constexpr,
    POLLS: tl.constexpr,
):
    SLOTS: tl.constexpr = triton.next_power_of_2(TOP_K)
    pid = tl.program_id(0)
    epoch = tl.load(counters_ptr)
    half = (epoch % 2).to(tl.int64)
    ids_half = (tl.load(counters_ptr + 6) % 2).to(tl.int64)
    if all_offs_ptr is not None and pid == 0:
        group = tl.arange(0, GROUPS)
        ends = tl.load(all_offs_ptr + group, mask=group < num_local_experts, other=0)
        store_offs(offs_ptr, overflow_ptr, status_ptr, group, ends, num_local_experts, capacity)
    lane = tl.arange(0, SLOTS)
    cells = published + half * R * 8
    there = wait(counters_ptr, 0, pointers_ptr, rank, cells, aborted, epoch, status_ptr, limit, R, CLOCK, POLLS)
    for pair in range(pid, R * max_tokens * there, tl.num_programs(0)):
        source = (rank + 1 + pair % R) % R  # all links together, none by all ranks
        token = tl.cast(pair // R, tl.int64)
        at = (source * max_tokens + token) * TOP_K
        rows = tl.load(inverse_ptr + at + lane, mask=lane < TOP_K, other=-1)
        kept = (rows >= 0) & (rows < capacity)
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            record = buffer_of(pointers_ptr, source, x_region + (half * max_tokens + token) * record_bytes)
            words, scales = load_record(record, CODE_BYTES, SCALES, SCALE_BYTES)
            if all_offs_ptr is not None:
                first = weights_region + ids_half * R * max_tokens * TOP_K * 4
                weights = buffer_of(pointers_ptr, rank, first).to(tl.pointer_type(tl.float32))
                tl.store(prob_ptr + rows, tl.load(weights + at + lane, mask=kept), mask=kept)
            for j in tl.static_range(TOP_K):
                row = tl.load(inverse_ptr + at + j)
                if (row >= 0) & (row < capacity):
                    store_row(
                        data_ptr, scale_ptr, row, words, scales, scale_stride_m, scale_stride_k, CODE_BYTES, SCALES
                    )
    if PLACED > 0:
        rows = tl.minimum(tl.load(all_offs_ptr + num_local_experts - 1), capacity) * there
        scales = buffer_of(pointers_ptr, rank, scales_region + half * R * max_tokens * PLACED * 4)
        share = tl.where(tl.num_programs(0) % R == 0, R, 1)
        if pid % share == share - 1:  # one that has had its own rank's tokens, where a program has those of one rank
            first, programs = pid // share, tl.num_programs(0) // share
            _place(scales, tokens_ptr, scale_ptr, scale_stride_k, rows, first, programs, PLACED)


@triton.jit
def _place(scales, tokens_ptr, scale_ptr, stride, rows, first, programs, COLUMNS: tl.constexpr):
    """This program's share of rows' scales, from those of all tokens: scale[row, column] at row + column * stride."""
    ROWS: tl.constexpr = 128
    WIDTH: tl.constexpr = 16 if COLUMNS > 16 else triton.next_power_of_2(COLUMNS)
    CHUNKS: tl.constexpr = (COLUMNS + WIDTH - 1) // WIDTH
    every = scales.to(tl.pointer_type(tl.int32))
    for piece in range(first, tl.cdiv(rows, ROWS) * CHUNKS, programs):
        row = piece // CHUNKS * ROWS + tl.arange(0, ROWS)
        column = piece % CHUNKS * WIDTH + tl.arange(0, WIDTH)
        token = tl.load(tokens_ptr + row, mask=row < rows, other=0).to(tl.int64)
        inside = (row[:, None] < rows) & (column[None, :] < COLUMNS)
        found = tl.load(every + token[:, None] * COLUMNS + column[None, :], mask=inside)
        tl.store(scale_ptr + row[:, None] + column[None, :].to(tl.int64) * stride, found, mask=inside)


@triton.jit
def store_offs(offs_ptr, overflow_ptr, status_ptr, group, ends, num_local_experts, capacity):
    """Ends of groups, cut at the capacity, and how many rows are over it."""
    tl.store(offs_ptr + group, tl.minimum(ends, capacity), mask=group < num_local_experts)
    over = tl.maximum(tl.max(tl.where(group < num_local_experts, ends, 0), axis=0) - capacity, 0)
    tl.store(overflow_ptr, over)
    if over > 0:
        tl.store(status_ptr + 1, over.to(tl.int64))


@triton.jit
def load_record(record, CODE_BYTES: tl.constexpr, SCALES: tl.constexpr, SCALE_BYTES: tl.constexpr, wanted=True):
    """(codes as 32-bit words, scales' bits) of a token at an address of any rank; nothing is read if not wanted."""
    word = tl.arange(0, triton.next_power_of_2(CODE_BYTES // 4))
    codes = tl.multiple_of(record.to(tl.pointer_type(tl.int32)), 16)
    words = tl.load(codes + word, mask=(word < CODE_BYTES // 4) & wanted)
    if SCALES > 0:
        column = tl.arange(0, triton.next_power_of_2(SCALES))
        if SCALE_BYTES == 4:
            behind = (record + CODE_BYTES).to(tl.pointer_type(tl.int32))
        else:
            behind = (record + CODE_BYTES).to(tl.pointer_type(tl.uint8))
        scales = tl.load(behind + column, mask=(column < SCALES) & wanted)
    else:
        scales = 0
    return words, scales


@triton.jit
def store_row(
    data_ptr,
    scale_ptr,
    row,
    words,
    scales,
    scale_stride_m,
    scale_stride_k,
    CODE_BYTES: tl.constexpr,
    SCALES: tl.constexpr,
):
    """A record as one row of the result."""
    word = tl.arange(0, triton.next_power_of_2(CODE_BYTES // 4))
    to = (data_ptr + row.to(tl.int64) * CODE_BYTES).to(tl.pointer_type(tl.int32), bitcast=True)
    to = tl.multiple_of(to, 16)
    tl.store(to + word, words, mask=word < CODE_BYTES // 4)
    if SCALES > 0:
        column = tl.arange(0, triton.next_power_of_2(SCALES))
        place = row.to(tl.int64) * scale_stride_m + column.to(tl.int64) * scale_stride_k
        tl.store(scale_ptr + place, scales, mask=column < SCALES)
