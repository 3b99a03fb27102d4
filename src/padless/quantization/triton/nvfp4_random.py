"""NVFP4 with stochastic rounding, and the 16-wide Hadamard transform, as Triton kernels.

The same as `padless.quantization.nvfp4_random_rules`, bit for bit.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from padless.formats import NVFP4, ceil_div
from padless.quantization.triton import casts
from padless.quantization.triton.launches import launch
from padless.quantization.triton.row_blocks import _nvfp4_scale

_BLOCK_M = 16
_BLOCK_K = 128


def nvfp4_stochastic(x: torch.Tensor, seed: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed codes uint8, scale bytes uint8) of checked arguments; factors: (2,) float32."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, columns = x.shape
    data = torch.empty((rows, columns // 2), dtype=torch.uint8, device=x.device)
    scale = torch.empty((rows, ceil_div(columns, NVFP4.block_k)), dtype=torch.uint8, device=x.device)
    if rows > 0:
        launch(_nvfp4_stochastic, ceil_div(rows, _BLOCK_M) * ceil_div(columns, _BLOCK_K))(
            x,
            data,
            scale,
            seed,
            factors,
            rows,
            columns,
            x.stride(0),
            HARDWARE_CAST=casts.casts_in_hardware(x.device),
            BLOCK_M=_BLOCK_M,
            BLOCK_K=_BLOCK_K,
            num_warps=4,
        )
    return data, scale


def hadamard(x: torch.Tensor, signs: int) -> torch.Tensor:
    """float32 of checked arguments."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=torch.float32, device=x.device)
    if rows > 0:
        launch(_hadamard, ceil_div(rows, _BLOCK_M) * ceil_div(columns, _BLOCK_K))(
            x, out, signs, rows, columns, x.stride(0), BLOCK_M=_BLOCK_M, BLOCK_K=_BLOCK_K, num_warps=4
        )
    return out


# What M decides is not compiled in: a new number of rows must not mean a new kernel.
@triton.jit(do_not_specialize=["M"])
def _nvfp4_stochastic(
    x_ptr,  # (M, K) bf16, fp16 or fp32, strides (x_stride, 1)
    data_ptr,  # (M, K / 2) uint8, contiguous
    scale_ptr,  # (M, ceil(K / 16)) uint8, contiguous
    seed_ptr,  # () int64
    factors_ptr,  # (2,) float32
    M,
    K,
    x_stride,
    HARDWARE_CAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    num_chunks = tl.cdiv(K, BLOCK_K)
    pid = tl.program_id(0)
    chunk = pid % num_chunks
    row = (pid // num_chunks) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
    row64 = row.to(tl.int64)
    BLOCKS: tl.constexpr = BLOCK_K // 16
    QUADS: tl.constexpr = BLOCK_K // 4

    inside = (row[:, None] < M) & (column[None, :] < K)
    x = casts.to_float32(tl.load(x_ptr + row64[:, None] * x_stride + column[None, :], mask=inside, other=0.0))
    amax_bits = tl.max(tl.reshape(casts.magnitude_bits(x), (BLOCK_M, BLOCKS, 16)), axis=2)
    first = tl.load(factors_ptr) + tl.zeros((BLOCK_M, 1), tl.float32)
    second = tl.load(factors_ptr + 1) + tl.zeros((BLOCK_M, 1), tl.float32)
    scale, multiplier = _nvfp4_scale(amax_bits, first, second, True, "te", HARDWARE_CAST)
    scale_column = chunk * BLOCKS + tl.arange(0, BLOCKS)
    scale_columns = tl.cdiv(K, 16)
    scale_inside = (row[:, None] < M) & (scale_column[None, :] < scale_columns)
    tl.store(scale_ptr + row64[:, None] * scale_columns + scale_column[None, :], scale, mask=scale_inside)

    of = tl.broadcast_to(multiplier[:, :, None], (BLOCK_M, BLOCKS, 16))
    y = x * tl.reshape(of, (BLOCK_M, BLOCK_K))
    low, high = tl.split(tl.reshape(y, (BLOCK_M, QUADS, 2, 2)))  # columns 0 and 2 of four, and 1 and 3
    quad = (chunk * QUADS + tl.arange(0, QUADS))[None, :] + tl.zeros((BLOCK_M, QUADS), tl.int32)
    of_row = row[:, None] + tl.zeros((BLOCK_M, QUADS), tl.int32)
    zero = tl.zeros((BLOCK_M, QUADS), tl.int32)
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), quad, of_row, zero, zero)
    codes = _e2m1(low, tl.join(w0, w2)) | (_e2m1(high, tl.join(w1, w3)) << 4)
    pair = chunk * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
    pairs_inside = (row[:, None] < M) & (pair[None, :] < K // 2)
    bytes_ = tl.reshape(codes, (BLOCK_M, BLOCK_K // 2)).to(tl.uint8)
    tl.store(data_ptr + row64[:, None] * (K // 2) + pair[None, :], bytes_, mask=pairs_inside)


@triton.jit
def _e2m1(y, word):
    """e2m1 codes (int32, 0..15) of y, rounded up in magnitude where the word (uint32) says so; NaN to 0."""
    v = ((word >> 9).to(tl.int32) * 2 + 1).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    bits = y.to(tl.int32, bitcast=True)
    m = tl.minimum(tl.abs(y), 6.0)
    steps = tl.where(m < 2.0, m * 2.0, tl.where(m < 4.0, m, m * 0.5))
    below = tl.floor(steps)
    first = tl.where(m < 2.0, 0, tl.where(m < 4.0, 2, 4))
    code = below.to(tl.int32) + first + (v < steps - below).to(tl.int32)
    code = code | ((bits >> 28) & 0x8)
    return tl.where((bits & 0x7FFFFFFF) > casts.INF_BITS, 0, code)


@triton.jit(do_not_specialize=["signs", "M"])
def _hadamard(
    x_ptr,  # (M, K) bf16, fp16 or fp32, strides (x_stride, 1)
    out_ptr,  # (M, K) float32, contiguous
    signs,  # bit i: element i of 16 changes its sign
    M,
    K,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    num_chunks = tl.cdiv(K, BLOCK_K)
    pid = tl.program_id(0)
    row = (pid // num_chunks) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (pid % num_chunks) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (row[:, None] < M) & (column[None, :] < K)
    row64 = row.to(tl.int64)[:, None]
    x = casts.to_float32(tl.load(x_ptr + row64 * x_stride + column[None, :], mask=inside, other=0.0))
    sign = ((signs >> (column % 16)) & 1) << 31
    x = (x.to(tl.int32, bitcast=True) ^ sign[None, :]).to(tl.float32, bitcast=True)
    x = _sums_and_differences(x, BLOCK_M, BLOCK_K, 1)
    x = _sums_and_differences(x, BLOCK_M, BLOCK_K, 2)
    x = _sums_and_differences(x, BLOCK_M, BLOCK_K, 4)
    x = _sums_and_differences(x, BLOCK_M, BLOCK_K, 8)
    tl.store(out_ptr + row64 * K + column[None, :], x * 0.25, mask=inside)


@triton.jit
def _sums_and_differences(x, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, APART: tl.constexpr):
    """(a + b, a - b) in the places of elements a and b that are APART."""
    pairs = tl.permute(tl.reshape(x, (BLOCK_M, BLOCK_K // APART // 2, 2, APART)), (0, 1, 3, 2))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (BLOCK_M, BLOCK_K))
