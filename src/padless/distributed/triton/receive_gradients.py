"""`fan_out_gradients`: rows in FP8_BLOCK of all ranks, decoded on the way to all of their places."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from padless.distributed.triton.cells import buffer_of, wait
from padless.moe.triton import arithmetic


@triton.jit(do_not_specialize=["rank", "limit", "capacity"])
def fan_out_gradients(
    pointers_ptr,
    counters_ptr,
    status_ptr,
    inverse_ptr,  # (R * Tmax, k) int32
    out_ptr,  # (C, H), bfloat16 or float32
    rank,
    max_tokens,
    capacity,
    published,  # offsets of regions
    aborted,
    x_region,
    record_bytes,
    limit,
    R: tl.constexpr,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    OUT: tl.constexpr,  # dtype of rows
    HARDWARE_CAST: tl.constexpr,
    CLOCK: tl.constexpr,
    POLLS: tl.constexpr,
):
    SLOTS: tl.constexpr = triton.next_power_of_2(TOP_K)
    COLUMNS: tl.constexpr = (H + 127) // 128
    epoch = tl.load(counters_ptr)
    half = (epoch % 2).to(tl.int64)
    lane = tl.arange(0, SLOTS)
    block = tl.arange(0, triton.next_power_of_2(COLUMNS))
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    cells = published + half * R * 8
    there = wait(counters_ptr, 0, pointers_ptr, rank, cells, aborted, epoch, status_ptr, limit, R, CLOCK, POLLS)
    for pair in range(tl.program_id(0), R * max_tokens * there, tl.num_programs(0)):
        source = (rank + 1 + pair % R) % R  # all links together, none by all ranks
        token = tl.cast(pair // R, tl.int64)
        at = (source * max_tokens + token) * TOP_K
        rows = tl.load(inverse_ptr + at + lane, mask=lane < TOP_K, other=-1)
        kept = (rows >= 0) & (rows < capacity)
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            record = buffer_of(pointers_ptr, source, x_region + (half * max_tokens + token) * record_bytes)
            codes = tl.multiple_of(record.to(tl.pointer_type(tl.uint8)), 16)
            scales = (record + H).to(tl.pointer_type(tl.float32))
            scale = tl.load(scales + block, mask=block < COLUMNS, other=0.0)
            values = arithmetic.from_e4m3(tl.load(codes + column, mask=column < H, other=0), HARDWARE_CAST)
            values = arithmetic.rounded(values * scale[:, None], OUT)
            for j in tl.static_range(TOP_K):
                row = tl.load(inverse_ptr + at + j)
                if (row >= 0) & (row < capacity):
                    to = tl.multiple_of(out_ptr + row.to(tl.int64) * H, 16)
                    tl.store(to + column, values, mask=column < H)
