"""`receive_few`: what `localize`, the sort and `fan_out` do, in one launch, for few slots of all ranks.

A program for each (rank, token), and for some groups each: it counts the slots that are sorted ahead of the token's,
or of the groups' ends. That gives the rows, to which it moves the token.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from padless.distributed.triton.cells import buffer_of, wait
from padless.distributed.triton.receive import load_record, store_row
from padless.quantization.triton import launches


@triton.jit
def _ids(ids_ptr, slot, slots):
    """Ids of slots, -1 past the last one."""
    return tl.load(ids_ptr + slot, mask=slot < slots, other=-1)


@triton.jit
def _places(local_index_ptr, ids, slot, num_experts, num_local_experts, SLOTS: tl.constexpr):
    """Numbers by which slots are sorted: of their local expert, num_local_experts for none, and then of the slot."""
    local = tl.load(local_index_ptr + ids, mask=(ids >= 0) & (ids < num_experts), other=-1)
    return tl.where(local >= 0, local, num_local_experts) * SLOTS + slot


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
    LANES: tl.constexpr,  # a power of two, at least k: groups of a program that has no token
    SLOTS: tl.constexpr,  # a power of two, at least R * Tmax * k
    CLOCK: tl.constexpr,
    POLLS: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    launches.wait(PROGRAMMATIC)
    pid = tl.program_id(0)
    epoch = tl.load(counters_ptr)
    half = (epoch % 2).to(tl.int64)
    ids_half = (tl.load(counters_ptr + 6) % 2).to(tl.int64)
    cells = published + half * R * 8
    there = wait(counters_ptr, 0, pointers_ptr, rank, cells, aborted, epoch, status_ptr, limit, R, CLOCK, POLLS)
    launches.release(PROGRAMMATIC)  # not before: what begins next holds its place on the GPU while this waits
    table = max_tokens * TOP_K
    slots = R * table * there
    first = ids_half * R * table * 4
    ids_ptr = buffer_of(pointers_ptr, rank, ids_region + first).to(tl.pointer_type(tl.int32))
    lane = tl.arange(0, LANES)
    source = (rank + 1 + pid % R) % R  # all links together, none by all ranks
    token = pid // R
    mine = (source * max_tokens + token) * TOP_K + lane
    has_token = (token < max_tokens) & (lane < TOP_K)
    ids = _ids(ids_ptr, mine, tl.where(has_token, slots, 0))
    place = _places(local_index_ptr, ids, mine, num_experts, num_local_experts, SLOTS)
    is_here = place < num_local_experts * SLOTS
    if tl.max((ids >= num_experts).to(tl.int32), axis=0) > 0:
        tl.store(status_ptr + 2, 1 + source.to(tl.int64))
    record = buffer_of(pointers_ptr, source, x_region + (half * max_tokens + token) * record_bytes)
    moves = tl.max((has_token & is_here).to(tl.int32), axis=0) > 0
    words, scales = load_record(record, CODE_BYTES, SCALES, SCALE_BYTES, moves)  # on its way while slots are counted
    group = (pid - R * max_tokens) * LANES + lane
    is_group = (group >= 0) & (group < num_local_experts)
    before = tl.where(is_group, (group + 1) * SLOTS, place)
    slot = tl.arange(0, SLOTS)
    every = _places(local_index_ptr, _ids(ids_ptr, slot, slots), slot, num_experts, num_local_experts, SLOTS)
    rows = tl.sum((every[None, :] < before[:, None]).to(tl.int32), axis=1)
    tl.store(offs_ptr + group, tl.minimum(rows, capacity), mask=is_group)
    if pid == tl.num_programs(0) - 1:
        over = tl.maximum(tl.max(tl.where(is_group, rows, 0), axis=0) - capacity, 0)
        tl.store(overflow_ptr, over)
        if over > 0:
            tl.store(status_ptr + 1, over.to(tl.int64))
    tl.store(inverse_ptr + mine, tl.where(is_here, rows, -1 - rows), mask=has_token)
    kept = has_token & is_here & (rows < capacity)
    if moves:
        weights = buffer_of(pointers_ptr, rank, weights_region + first).to(tl.pointer_type(tl.float32))
        tl.store(prob_ptr + rows, tl.load(weights + mine, mask=kept), mask=kept)
        for j in tl.static_range(TOP_K):
            if tl.max((kept & (lane == j)).to(tl.int32), axis=0) > 0:
                row = tl.sum(tl.where(lane == j, rows, 0), axis=0)
                store_row(data_ptr, scale_ptr, row, words, scales, scale_stride_m, scale_stride_k, CODE_BYTES, SCALES)
