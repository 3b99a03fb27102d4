"""`receive_few`: what `localize`, the sort and `fan_out` do, in one launch, for few slots of all ranks.

A program for each (rank, token): it compares the token's slots with all others, which gives their rows, and moves it.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from padless.distributed.triton.cells import buffer_of, wait
from padless.distributed.triton.receive import load_record, store_offs, store_row
from padless.quantization.triton import launches


@triton.jit
def _keys(
    ids_ptr, local_index_ptr, cell, slot, slots, table, there, num_experts, num_local_experts, TOP_K: tl.constexpr
):
    """(local expert of each slot, num_local_experts for none, one more past the last slot; whether an id is wrong)."""
    source = slot // table
    count = (tl.load(cell + source, mask=slot < slots, other=0) & 0xFFFFFFFF).to(tl.int32) * TOP_K * there
    ids = tl.load(ids_ptr + slot, mask=(slot < slots) & (slot % table < count), other=-1)
    is_expert = (ids >= 0) & (ids < num_experts)
    local = tl.load(local_index_ptr + ids, mask=is_expert, other=-1)
    keys = tl.where(local >= 0, local, num_local_experts)
    return tl.where(slot < slots, keys, num_local_experts + 1), ids >= num_experts


@triton.jit(do_not_specialize=["rank", "limit", "capacity", "scale_stride_m", "scale_stride_k"])
def receive_few(
    pointers_ptr,
    counters_ptr,
    status_ptr,  # int64, host memory
    local_index_ptr,  # (E,) int32
    inverse_ptr,  # (R * Tmax, k) int32, as all below a result
    offs_ptr,  # (Eloc,) int32
    overflow_ptr,  # () int32
    prob_ptr,  # (C,) float32
    data_ptr,  # (C, CODE_BYTES) uint8
    scale_ptr,  # (C, SCALES), strides (scale_stride_m, scale_stride_k), int32 or uint8; or None
    rank,
    num_experts,
    num_local_experts,
    max_tokens,
    capacity,
    scale_stride_m,
    scale_stride_k,
    published,
    aborted,
    ids_region,
    weights_region,
    x_region,
    record_bytes,
    limit,
    R: tl.constexpr,
    TOP_K: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two, at least Eloc
    SLOTS: tl.constexpr,  # a power of two, at least R * Tmax * k
    CLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    launches.wait(PROGRAMMATIC)
    LANES: tl.constexpr = triton.next_power_of_2(TOP_K)
    pid = tl.program_id(0)
    epoch = tl.load(counters_ptr)
    half = (epoch % 2).to(tl.int64)
    ids_half = (tl.load(counters_ptr + 6) % 2).to(tl.int64)
    cells = published + half * R * 8
    there = wait(pointers_ptr, rank, cells, aborted, epoch, status_ptr, limit, R, CLOCK)
    launches.release(PROGRAMMATIC)  # not before: what begins next holds its place on the GPU while this waits
    cell = buffer_of(pointers_ptr, rank, cells).to(tl.pointer_type(tl.int64))
    table = max_tokens * TOP_K
    slots = R * table
    first = ids_half * slots * 4
    ids = buffer_of(pointers_ptr, rank, ids_region + first).to(tl.pointer_type(tl.int32))
    slot = tl.arange(0, SLOTS)
    keys, are_wrong = _keys(
        ids, local_index_ptr, cell, slot, slots, table, there, num_experts, num_local_experts, TOP_K
    )
    if pid == 0:
        wrong = tl.max(tl.where(are_wrong, slot // table + 1, 0), axis=0)
        if wrong > 0:
            tl.store(status_ptr + 2, wrong.to(tl.int64))
        group = tl.arange(0, GROUPS)
        ends = tl.sum((keys[None, :] <= group[:, None]).to(tl.int32), axis=1)
        store_offs(offs_ptr, overflow_ptr, status_ptr, group, ends, num_local_experts, capacity)
    source = (rank + 1 + pid % R) % R  # all links together, none by all ranks
    token = pid // R
    lane = tl.arange(0, LANES)
    mine = (source * max_tokens + token) * TOP_K + lane
    past = tl.where(lane < TOP_K, mine, slots)
    my_keys, _ = _keys(ids, local_index_ptr, cell, past, slots, table, there, num_experts, num_local_experts, TOP_K)
    earlier = (keys[None, :] == my_keys[:, None]) & (slot[None, :] < mine[:, None])
    rows = tl.sum(((keys[None, :] < my_keys[:, None]) | earlier).to(tl.int32), axis=1)
    is_here = my_keys < num_local_experts
    tl.store(inverse_ptr + mine, tl.where(is_here, rows, -1 - rows), mask=lane < TOP_K)
    kept = is_here & (rows < capacity)
    if tl.max(kept.to(tl.int32), axis=0) > 0:
        record = buffer_of(pointers_ptr, source, x_region + (half * max_tokens + token) * record_bytes)
        words, scales = load_record(record, CODE_BYTES, SCALES, SCALE_BYTES)
        weights = buffer_of(pointers_ptr, rank, weights_region + first).to(tl.pointer_type(tl.float32))
        tl.store(prob_ptr + rows, tl.load(weights + mine, mask=kept), mask=kept)
        for j in tl.static_range(TOP_K):
            if tl.max((kept & (lane == j)).to(tl.int32), axis=0) > 0:
                row = tl.sum(tl.where(lane == j, rows, 0), axis=0)
                store_row(data_ptr, scale_ptr, row, words, scales, scale_stride_m, scale_stride_k, CODE_BYTES, SCALES)
