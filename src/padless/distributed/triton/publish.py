"""`publish`: this rank's tokens into its own buffer, its ids and weights into all buffers, then a signal to all."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from padless.distributed.triton.cells import buffer_of, is_last, signal
from padless.quantization.triton import casts
from padless.quantization.triton.fp8_block import _fp8_block_scale


@triton.jit(do_not_specialize=["T", "rank"])
def publish(
    pointers_ptr,  # (R,) int64
    counters_ptr,  # int32: dispatches, combines, tickets
    x_ptr,  # (T, H) values to quantize to FP8_BLOCK; else (T, CODE_BYTES) bytes
    scale_ptr,  # (T, SCALE_BYTES) bytes, or None
    ids_ptr,  # (T, k) int32 or int64, or None for a saved plan
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
    x_region,
    record_bytes,
    R: tl.constexpr,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    QUANTIZE: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
):
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(counters_ptr) + 1
    half = (epoch % 2).to(tl.int64)
    if ids_ptr is not None:
        count = T * TOP_K
        pieces = tl.cdiv(count, 1024)
        for piece in range(pid, pieces * R, programs):
            peer = (rank + 1 + piece % R) % R
            at = piece // R * 1024 + tl.arange(0, 1024)
            first = (half * R + rank) * table * 4
            ids = buffer_of(pointers_ptr, peer, ids_region + first).to(tl.pointer_type(tl.int32))
            weights = buffer_of(pointers_ptr, peer, weights_region + first).to(tl.pointer_type(tl.float32))
            values = tl.load(ids_ptr + at, mask=at < count, other=-1)
            values = tl.where(values < 0, -1, tl.minimum(values, num_experts)).to(tl.int32)
            tl.store(ids + at, values, mask=at < count)
            if peer == rank:
                tl.store(kept_ids_ptr + at, values, mask=at < count)
            prob = casts.to_float32(tl.load(weights_ptr + at, mask=at < count, other=0.0))
            tl.store(weights + at, prob, mask=at < count)
    own = buffer_of(pointers_ptr, rank, x_region + half * max_tokens * record_bytes)
    for token in range(pid, T, programs):
        record = own + tl.cast(token, tl.int64) * record_bytes
        if QUANTIZE:
            _quantize_row(x_ptr + tl.cast(token, tl.int64) * x_stride, record, H, HARDWARE_CAST)
        else:
            words = tl.arange(0, triton.next_power_of_2(CODE_BYTES // 4))
            source = (x_ptr + tl.cast(token, tl.int64) * CODE_BYTES).to(
                tl.pointer_type(tl.int32), bitcast=True
            )
            source = tl.multiple_of(source, 16)
            there = tl.multiple_of(record.to(tl.pointer_type(tl.int32)), 16)
            inside = words < CODE_BYTES // 4
            tl.store(there + words, tl.load(source + words, mask=inside), mask=inside)
            if SCALE_BYTES > 0:
                lane = tl.arange(0, triton.next_power_of_2(SCALE_BYTES))
                scales = tl.load(
                    scale_ptr + tl.cast(token, tl.int64) * SCALE_BYTES + lane, mask=lane < SCALE_BYTES
                )
                behind = (record + CODE_BYTES).to(tl.pointer_type(tl.uint8))
                tl.store(behind + lane, scales, mask=lane < SCALE_BYTES)
    if is_last(counters_ptr + 2):
        tl.store(counters_ptr, epoch)
        signal(pointers_ptr, rank, published + half * R * 8, (epoch.to(tl.int64) << 32) | T, R)


@triton.jit
def _quantize_row(x_ptr, record, H: tl.constexpr, HARDWARE_CAST: tl.constexpr):
    """One row of FP8_BLOCK: H codes, then ceil(H / 128) float32 scales."""
    COLUMNS: tl.constexpr = (H + 127) // 128
    BLOCKS: tl.constexpr = triton.next_power_of_2(COLUMNS)
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < H
    x = casts.to_float32(tl.load(x_ptr + column, mask=inside, other=0.0))
    scale, inverse = _fp8_block_scale(tl.max(casts.magnitude_bits(x), axis=1))
    codes = casts.to_e4m3(x * inverse[:, None], HARDWARE_CAST)
    there = tl.multiple_of(record.to(tl.pointer_type(tl.uint8)), 16)
    tl.store(there + column, codes, mask=inside)
    tl.store((record + H).to(tl.pointer_type(tl.float32)) + block, scale, mask=block < COLUMNS)
