# mypy: disable-error-code="no-untyped-def"
"""The Triton kernels behind `padless.bench.peers.padded_layer`."""

from __future__ import annotations

import triton
import triton.language as tl

from padless.quantization.triton import casts
from padless.quantization.triton import fp8_block as fp8

_BLOCK = tl.constexpr(128)  # columns to a scale


@triton.jit
def count_slots(ids_ptr, counts_ptr, slots, NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the slots of each expert to counts (NUM_EXPERTS,) int32: a histogram a program, an atomic an expert."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(ids_ptr + slot, mask=slot < slots, other=BINS - 1).to(tl.int32)
    counts = tl.histogram(e, BINS)
    bins = tl.arange(0, BINS)
    tl.atomic_add(counts_ptr + bins, counts, mask=(bins < NUM_EXPERTS) & (counts > 0))


@triton.jit
def place_groups(
    counts_ptr, next_row_ptr, ends_ptr, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, MULTIPLE: tl.constexpr
):
    """One program: where each group of padded rows starts, for the first of its slots, and where its slots end."""
    e = tl.arange(0, BLOCK)
    count = tl.load(counts_ptr + e, mask=e < NUM_EXPERTS, other=0)
    padded = (count + (MULTIPLE - 1)) // MULTIPLE * MULTIPLE
    start = tl.cumsum(padded, 0) - padded
    tl.store(next_row_ptr + e, start, mask=e < NUM_EXPERTS)
    tl.store(ends_ptr + e, start + count, mask=e < NUM_EXPERTS)


@triton.jit
def scatter_quantize(
    x_ptr,  # (T, K) bf16, contiguous
    ids_ptr,  # (T, TOP_K) int64, contiguous
    next_row_ptr,  # (experts,) int32: the next free row of each
    codes_ptr,  # (rows, K) uint8
    scale_ptr,  # (rows, K / 128) float32, strides (1, scale_ld)
    inverse_ptr,  # (T, TOP_K) int32: the row of each slot
    scale_ld,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of two, at least TOP_K
    BLOCK: tl.constexpr,  # a power of two, at least K
    HARDWARE_CAST: tl.constexpr,
):
    """A program quantizes a token once and stores it to a free row of each of its experts."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, SLOTS)
    e = tl.load(ids_ptr + token * TOP_K + lane, mask=lane < TOP_K, other=0)
    rows = tl.atomic_add(next_row_ptr + e, 1, mask=lane < TOP_K)
    tl.store(inverse_ptr + token * TOP_K + lane, rows, mask=lane < TOP_K)
    column = tl.arange(0, BLOCK)
    block = tl.arange(0, BLOCK // _BLOCK)
    x = casts.to_float32(tl.load(x_ptr + token * K + column, mask=column < K, other=0.0))
    x = tl.reshape(x, (BLOCK // _BLOCK, _BLOCK))
    scale, multiplier = fp8._fp8_block_scale(tl.max(casts.magnitude_bits(x), axis=1))
    codes = tl.reshape(casts.to_e4m3(x * multiplier[:, None], HARDWARE_CAST), (BLOCK,))
    for j in tl.static_range(TOP_K):
        row = tl.sum(tl.where(lane == j, rows, 0), axis=0).to(tl.int64)
        tl.store(codes_ptr + row * K + column, codes, mask=column < K)
        tl.store(scale_ptr + block.to(tl.int64) * scale_ld + row, scale, mask=block < K // _BLOCK)


@triton.jit
def swiglu_quantize(
    h_ptr,  # (rows, 2 K) bf16, gate next to up, contiguous
    ends_ptr,  # (experts,) int32 of place_groups
    codes_ptr,  # (rows, K) uint8
    scale_ptr,  # (rows, K / 128) float32, strides (1, scale_ld)
    scale_ld,
    NUM_EXPERTS: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
):
    """silu(gate) * up, quantized; nothing behind the last group."""
    chunks: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    first = tl.program_id(0) // chunks * ROWS
    if first < tl.load(ends_ptr + NUM_EXPERTS - 1):
        chunk = tl.program_id(0) % chunks
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        at = h_ptr + row * (2 * K) + column
        gate = casts.to_float32(tl.load(at, mask=column < K, other=0.0))
        up = casts.to_float32(tl.load(at + K, mask=column < K, other=0.0))
        x = gate / (1.0 + tl.exp(-gate)) * up
        x = tl.reshape(x, (ROWS, COLUMNS // _BLOCK, _BLOCK))
        scale, multiplier = fp8._fp8_block_scale(tl.max(casts.magnitude_bits(x), axis=2))
        codes = tl.reshape(casts.to_e4m3(x * multiplier[:, :, None], HARDWARE_CAST), (ROWS, COLUMNS))
        tl.store(codes_ptr + row * K + column, codes, mask=column < K)
        block = chunk * (COLUMNS // _BLOCK) + tl.arange(0, COLUMNS // _BLOCK)[None, :]
        tl.store(scale_ptr + block.to(tl.int64) * scale_ld + row, scale, mask=block < K // _BLOCK)
