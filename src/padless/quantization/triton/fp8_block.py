"""FP8_BLOCK's quantizers as Triton kernels: one read of the values, one write of codes and scales.

The same arithmetic as `padless.quantization.rules.fp8_block`, bit for bit, which rules out two things that Triton
does by default: `/` is an approximate division, and `tl.max` drops NaN, so maxima are taken over bit
patterns.

A tile is 128 columns wide, one block along K. Activations take BLOCK_M rows of it: 64 rows of bf16 are 16 KiB
in flight for a program, in 16-byte loads.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from padless.formats import FP8_BLOCK, BlockScaledTensor, ceil_div, is_mn_major
from padless.layouts import empty_mn_major, to_mn_major
from padless.quantization.triton import casts
from padless.quantization.triton.launches import launch

# FP8_BLOCK's constants as the kernels use them.
_BLOCK = tl.constexpr(128)
_E4M3_MAX = tl.constexpr(448.0)
_AMAX_FLOOR_BITS = tl.constexpr(0x38D1B717)  # float32 nearest to 1e-4


def fp8_block(
    x: torch.Tensor, kind: str, scale_major: str, rows: torch.Tensor | None = None, *, factor: float = 1.0
) -> BlockScaledTensor:
    """`padless.quantize(x, FP8_BLOCK, ...)` of checked arguments, on the GPU or in Triton's interpreter.

    factor: a power of two that activations are multiplied by in float32.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    shape = tuple(x.shape) if rows is None else (rows.shape[0], x.shape[1])
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = _empty_scale(shape, x.device, kind, scale_major)
    stored, hardware_cast = codes.view(torch.uint8), casts.casts_in_hardware(x.device)
    *groups, m, columns = shape
    if codes.numel() > 0 and kind == "activation":
        block_m = casts.tile_rows(m, x.dtype)
        programs = ceil_div(columns, 128) * ceil_div(m, block_m)
        sizes = (m, columns, x.stride(0), scale.stride(1) if is_mn_major(scale) else m, *scale.stride())
        warps = 4 if block_m >= 32 else 1
        launch(_fp8_block_activation, programs)(
            x, stored, scale, *sizes, rows, x.shape[0], BLOCK_M=block_m, FACTOR=factor, HARDWARE_CAST=hardware_cast,
            num_warps=warps,
        )  # fmt: skip
    elif codes.numel() > 0:
        programs = math.prod(groups) * ceil_div(m, 128) * ceil_div(columns, 128)
        stride = x.stride(0) if groups else 0
        launch(_fp8_block_weight, programs)(
            x, stored, scale, m, columns, stride, x.stride(-2), HARDWARE_CAST=hardware_cast, num_warps=8
        )
    return BlockScaledTensor(codes, scale, FP8_BLOCK)


def _empty_scale(values: tuple[int, ...], device: torch.device, kind: str, scale_major: str) -> torch.Tensor:
    shape = FP8_BLOCK.scale_shape(values, kind)
    if kind == "activation" and scale_major == "mn" and shape[0] > 0:
        return empty_mn_major(shape[0], shape[1], device)
    scale = torch.empty(shape, dtype=torch.float32, device=device)
    # No kernel runs for no rows, so this zeroes what is then all padding.
    return to_mn_major(scale) if kind == "activation" and scale_major == "mn" else scale


# What M decides is not compiled in: a new number of rows must not mean a new kernel.
@triton.jit(do_not_specialize=["M", "scale_rows", "scale_stride_k", "x_rows"])
def _fp8_block_activation(
    x_ptr,  # (x_rows, K) bf16, fp16 or fp32, strides (x_stride, 1)
    codes_ptr,  # (M, K) uint8, contiguous
    scale_ptr,  # (M, ceil(K / 128)) float32, strides (scale_stride_m, scale_stride_k)
    M,
    K,
    x_stride,
    scale_rows,  # M, or M rounded up to 4 where the rows from M on are padding to be zeroed
    scale_stride_m,
    scale_stride_k,
    rows_ptr,  # (M,) int32 or int64: rows of x; None where M is x_rows
    x_rows,
    BLOCK_M: tl.constexpr,
    FACTOR: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
):
    num_k_blocks = tl.cdiv(K, _BLOCK)
    pid = tl.program_id(0)
    k_block = pid % num_k_blocks  # neighbours in time are neighbours in memory
    row = (pid // num_k_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = k_block * _BLOCK + tl.arange(0, _BLOCK)
    inside = (row[:, None] < M) & (column[None, :] < K)
    row64 = row.to(tl.int64)

    source = casts.source_rows(rows_ptr, row64, M, x_rows)
    x = casts.to_float32(tl.load(x_ptr + source[:, None] * x_stride + column[None, :], mask=inside, other=0.0))
    if FACTOR != 1.0:
        x = x * FACTOR
    scale, inverse = _fp8_block_scale(tl.max(casts.magnitude_bits(x), axis=1))
    codes = casts.to_e4m3(x * inverse[:, None], HARDWARE_CAST)
    tl.store(codes_ptr + row64[:, None] * K + column[None, :], codes, mask=inside)
    scale = tl.where(row < M, scale, 0.0)
    scale_offset = row64 * scale_stride_m + k_block.to(tl.int64) * scale_stride_k
    tl.store(scale_ptr + scale_offset, scale, mask=row < scale_rows)


@triton.jit
def _fp8_block_weight(
    x_ptr,  # (G, N, K) bf16, fp16 or fp32, strides (x_stride_g, x_stride_n, 1)
    codes_ptr,  # (G, N, K) uint8, contiguous
    scale_ptr,  # (G, ceil(N / 128), ceil(K / 128)) float32, contiguous
    N,
    K,
    x_stride_g,
    x_stride_n,
    HARDWARE_CAST: tl.constexpr,
):
    num_k_blocks = tl.cdiv(K, _BLOCK)
    num_n_blocks = tl.cdiv(N, _BLOCK)
    pid = tl.program_id(0)  # also the position of this block's scale
    k_block = pid % num_k_blocks
    n_block = (pid // num_k_blocks) % num_n_blocks
    group = (pid // (num_k_blocks * num_n_blocks)).to(tl.int64)
    row = n_block * _BLOCK + tl.arange(0, _BLOCK)
    column = k_block * _BLOCK + tl.arange(0, _BLOCK)
    inside = (row[:, None] < N) & (column[None, :] < K)
    row64 = row.to(tl.int64)

    x_offset = group * x_stride_g + row64[:, None] * x_stride_n + column[None, :]
    x = casts.to_float32(tl.load(x_ptr + x_offset, mask=inside, other=0.0))
    scale, inverse = _fp8_block_scale(tl.max(tl.max(casts.magnitude_bits(x), axis=1), axis=0))
    codes = casts.to_e4m3(x * inverse, HARDWARE_CAST)
    tl.store(codes_ptr + (group * N + row64[:, None]) * K + column[None, :], codes, mask=inside)
    tl.store(scale_ptr + pid, scale)


@triton.jit
def _fp8_block_scale(amax_bits):
    """(scale, 1 / scale) of FP8_BLOCK blocks from the bits of their amax."""
    floored = tl.maximum(amax_bits, _AMAX_FLOOR_BITS).to(tl.float32, bitcast=True)
    scale = casts.divided_by(floored, _E4M3_MAX)
    inverse = casts.quotient(1.0, scale)
    one_nan = tl.full(amax_bits.shape, casts.NAN_BITS, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(amax_bits > casts.INF_BITS, one_nan, scale), inverse
