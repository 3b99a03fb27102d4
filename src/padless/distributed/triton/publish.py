"""`publish_ids`: this rank's ids and weights into all buffers; `publish`: its tokens into its own. Each then signals."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from padless.distributed.triton.cells import buffer_of, is_last, signal
from padless.quantization.triton import casts, launches
from padless.quantization.triton.fp8_block import _fp8_block_scale


@triton.jit
def _push_ids(
    pointers_ptr,
    ids_ptr,  # (T, k) int32 or int64
    weights_ptr,  # (T, k)
    kept_ids_ptr,  # (T, k) int32: the plan's copy
    rank,
    T,
    num_experts,
    table,  # Tmax * k
    half,
    ids_region,
    weights_region,
    R: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """The share of this program of a grid in what all ranks are told: ids below 0, and past T, as -1, from E on as E."""
    count = T * TOP_K
    pieces = tl.cdiv(table, 1024)
    for piece in range(tl.program_id(0), pieces * R, tl.num_programs(0)):
        peer = (rank + 1 + piece % R) % R
        at = piece // R * 1024 + tl.arange(0, 1024)
        first = (half * R + rank) * table * 4
        ids = buffer_of(pointers_ptr, peer, ids_region + first).to(tl.pointer_type(tl.int32))
        weights = buffer_of(pointers_ptr, peer, weights_region + first).to(tl.pointer_type(tl.float32))
        values = tl.load(ids_ptr + at, mask=at < count, other=-1)
        values = tl.where(values < 0, -1, tl.minimum(values, num_experts)).to(tl.int32)
        tl.store(ids + at, values, mask=at < table)
        if peer == rank:
            tl.store(kept_ids_ptr + at, values, mask=at < count)
        prob = casts.to_float32(tl.load(weights_ptr + at, mask=at < count, other=0.0))
        tl.store(weights + at, prob, mask=at < count)


@triton.jit(do_not_specialize=["T", "rank"])
def publish_ids(
    pointers_ptr,  # (R,) int64
    counters_ptr,  # int32, see `State`
    ids_ptr,
    weights_ptr,
    kept_ids_ptr,
    rank,
    T,
    num_experts,
    table,
    listed,  # offsets of regions
    ids_region,
    weights_region,
    R: tl.constexpr,
    TOP_K: tl.constexpr,
):
    epoch = tl.load(counters_ptr + 6) + 1
    half = (epoch % 2).to(tl.int64)
    _push_ids(
        pointers_ptr, ids_ptr, weights_ptr, kept_ids_ptr, rank, T, num_experts, table, half, ids_region, weights_region,
        R, TOP_K,
    )  # fmt: skip
    if is_last(counters_ptr + 5):
        tl.store(counters_ptr + 6, epoch)
        signal(pointers_ptr, rank, listed + half * R * 8, epoch, R)


@triton.jit(do_not_specialize=["T", "rank"])
def publish(
    pointers_ptr,  # (R,) int64
    counters_ptr,  # int32, see `State`
    x_ptr,  # (T, H) values to quantize to FP8_BLOCK; else (T, CODE_BYTES) bytes
    scale_ptr,  # (T, SCALE_BYTES) bytes, or None
    ids_ptr,  # (T, k) int32 or int64, or None where `publish_ids` has gone before, and for a saved plan
    weights_ptr,  # (T, k)
    kept_ids_ptr,  # (T, k) int32: the plan's copy
    rank,
    T,
    x_stride,  # values of a row
    num_experts,
    table,  # Tmax * k
    max_tokens,
    published,  # offsets of regions
    ids_region,
    weights_region,
    scales_region,
    x_region,
    record_bytes,
    R: tl.constexpr,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    QUANTIZE: tl.constexpr,
    LIFT: tl.constexpr,  # of `RowFormat`
    PUSH_SCALES: tl.constexpr,  # to all ranks, instead of into the record
    CODE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    launches.begin(PROGRAMMATIC)
    epoch = tl.load(counters_ptr) + 1
    half = (epoch % 2).to(tl.int64)
    if ids_ptr is not None:
        ids_epoch = tl.load(counters_ptr + 6) + 1
        ids_half = (ids_epoch % 2).to(tl.int64)
        _push_ids(
            pointers_ptr, ids_ptr, weights_ptr, kept_ids_ptr, rank, T, num_experts, table, ids_half, ids_region,
            weights_region, R, TOP_K,
        )  # fmt: skip
    own = buffer_of(pointers_ptr, rank, x_region + half * max_tokens * record_bytes)
    for token in range(tl.program_id(0), T, tl.num_programs(0)):
        record = own + tl.cast(token, tl.int64) * record_bytes
        if QUANTIZE:
            block, scale = _quantize_row(x_ptr + tl.cast(token, tl.int64) * x_stride, record, H, LIFT, HARDWARE_CAST)
            COLUMNS: tl.constexpr = (H + 127) // 128
            if PUSH_SCALES:
                at = ((half * R + rank) * max_tokens + token) * COLUMNS * 4
                for step in tl.static_range(R):
                    there = buffer_of(pointers_ptr, (rank + 1 + step) % R, scales_region + at)
                    tl.store(there.to(tl.pointer_type(tl.float32)) + block, scale, mask=block < COLUMNS)
            else:
                tl.store((record + H).to(tl.pointer_type(tl.float32)) + block, scale, mask=block < COLUMNS)
        else:
            words = tl.arange(0, triton.next_power_of_2(CODE_BYTES // 4))
            source = (x_ptr + tl.cast(token, tl.int64) * CODE_BYTES).to(tl.pointer_type(tl.int32), bitcast=True)
            source = tl.multiple_of(source, 16)
            there = tl.multiple_of(record.to(tl.pointer_type(tl.int32)), 16)
            inside = words < CODE_BYTES // 4
            tl.store(there + words, tl.load(source + words, mask=inside), mask=inside)
            if SCALE_BYTES > 0:
                lane = tl.arange(0, triton.next_power_of_2(SCALE_BYTES))
                scales = tl.load(scale_ptr + tl.cast(token, tl.int64) * SCALE_BYTES + lane, mask=lane < SCALE_BYTES)
                behind = (record + CODE_BYTES).to(tl.pointer_type(tl.uint8))
                tl.store(behind + lane, scales, mask=lane < SCALE_BYTES)
    if is_last(counters_ptr + 2):
        tl.store(counters_ptr, epoch)
        if ids_ptr is not None:
            tl.store(counters_ptr + 6, ids_epoch)
        signal(pointers_ptr, rank, published + half * R * 8, epoch, R)


@triton.jit
def _quantize_row(x_ptr, record, H: tl.constexpr, LIFT: tl.constexpr, HARDWARE_CAST: tl.constexpr):
    """Stores the H codes of a row of FP8_BLOCK; (blocks, their scales), a power of two of them."""
    COLUMNS: tl.constexpr = (H + 127) // 128
    BLOCKS: tl.constexpr = triton.next_power_of_2(COLUMNS)
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < H
    x = casts.to_float32(tl.load(x_ptr + column, mask=inside, other=0.0)) * LIFT
    scale, inverse = _fp8_block_scale(tl.max(casts.magnitude_bits(x), axis=1))
    codes = casts.to_e4m3(x * inverse[:, None], HARDWARE_CAST)
    there = tl.multiple_of(record.to(tl.pointer_type(tl.uint8)), 16)
    tl.store(there + column, codes, mask=inside)
    return block, scale * (1 / LIFT)
