"""Weights of MXFP8, MXFP4 and NVFP4 in bfloat16, as one Triton kernel: codes and scales are read once.

The arithmetic of `padless.dequantize`, bit for bit: code * scale (* global scale) in float32, rounded once.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from padless.formats import NVFP4, TILE_COLUMNS, TILE_ROWS, BlockScaledTensor, ceil_div, round_up
from padless.moe.triton import arithmetic
from padless.quantization.triton import casts
from padless.quantization.triton.launches import launch
from padless.quantization.triton.row_blocks import ELEMENTS

FORMATS = frozenset(ELEMENTS)
_ROWS, _COLUMNS = 16, 256
_TO_E2M1 = tl.constexpr(2.0**126)
_TILE_ROWS, _TILE_COLUMNS = tl.constexpr(TILE_ROWS), tl.constexpr(TILE_COLUMNS)


def dequantized_weights(weights: BlockScaledTensor) -> torch.Tensor:
    """(G, N, K) bfloat16 of weights of `FORMATS` with scales in layout "plain" or "blocked"; no size is 0."""
    groups, n, k = weights.logical_shape
    out = torch.empty((groups, n, k), dtype=torch.bfloat16, device=weights.data.device)
    chunks = ceil_div(k, _COLUMNS)
    given = weights.global_scale
    launch(_dequantize, ceil_div(groups * n, _ROWS) * chunks)(
        weights.data.contiguous().view(torch.uint8), weights.scale.contiguous().view(torch.uint8),
        None if given is None else given.reshape(-1), out, groups * n, n, k, chunks,
        weights.scale_columns, round_up(n, TILE_ROWS),
        ELEMENT=ELEMENTS[weights.format], BLOCK=weights.format.block_k, IS_NVFP4=weights.format == NVFP4,
        BLOCKED=weights.scale_layout == "blocked", GLOBAL_BY_GROUP=given is not None and given.numel() > 1,
        ROWS=_ROWS, COLUMNS=_COLUMNS, HARDWARE=casts.casts_in_hardware(out.device), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _from_e2m1(codes):
    """float32 of e2m1 codes (uint8), whose exponent and mantissa are those of a float32 that is 2^126 times as small."""
    bits = codes.to(tl.int32)
    return (((bits & 7) << 22) | ((bits & 8) << 28)).to(tl.float32, bitcast=True) * _TO_E2M1


@triton.jit
def _from_e8m0(codes):
    """float32 of e8m0 codes (uint8): 2^-127 for 0, which is subnormal, and NaN for 255."""
    bits = codes.to(tl.int32)
    value = tl.where(bits == 0, 0x00400000, tl.where(bits == 255, casts.NAN_BITS, bits << 23))
    return value.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows"])
def _dequantize(
    codes_ptr,  # (rows, K), or (rows, K / 2) of e2m1, low half first
    scale_ptr,  # (rows, scale_columns), or with BLOCKED 32x4x4 tiles of each weight
    global_ptr,  # (1,) or (rows / N,) float32, or None
    out_ptr,  # (rows, K) bfloat16
    rows,
    N,
    K,
    chunks,
    scale_columns,
    padded_rows,  # N up to whole tiles of scales
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_NVFP4: tl.constexpr,
    BLOCKED: tl.constexpr,
    GLOBAL_BY_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    chunk = tl.program_id(0) % chunks
    row = (tl.program_id(0) // chunks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there = (row < rows)[:, None]
    if ELEMENT == "e2m1":
        byte = chunk * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        packed = tl.load(
            codes_ptr + row[:, None] * (K // 2) + byte[None, :], mask=there & (byte < K // 2)[None, :], other=0
        )
        value = tl.reshape(tl.join(_from_e2m1(packed & 15), _from_e2m1(packed >> 4)), (ROWS, BLOCKS, BLOCK))
    else:
        place = chunk * COLUMNS + tl.arange(0, COLUMNS)
        codes = tl.load(codes_ptr + row[:, None] * K + place[None, :], mask=there & (place < K)[None, :], other=0)
        if ELEMENT == "e4m3":
            flat = arithmetic.from_e4m3(codes, HARDWARE)
        else:
            flat = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
        value = tl.reshape(flat, (ROWS, BLOCKS, BLOCK))

    block = chunk * BLOCKS + tl.arange(0, BLOCKS)
    if BLOCKED:
        of_tile = row % N
        tile_row = row // N * (padded_rows // _TILE_ROWS) + of_tile // _TILE_ROWS
        tile = tile_row[:, None] * tl.cdiv(scale_columns, _TILE_COLUMNS) + (block // _TILE_COLUMNS)[None, :]
        in_tile = of_tile % 32 * 16 + of_tile % _TILE_ROWS // 32 * 4
        scale_place = tile * (_TILE_ROWS * _TILE_COLUMNS) + in_tile[:, None] + (block % _TILE_COLUMNS)[None, :]
    else:
        scale_place = row[:, None] * scale_columns + block[None, :]
    scale_codes = tl.load(scale_ptr + scale_place, mask=there & (block < scale_columns)[None, :], other=0)
    scale = arithmetic.from_e4m3(scale_codes, HARDWARE) if IS_NVFP4 else _from_e8m0(scale_codes)
    value = value * scale[:, :, None]
    if global_ptr is not None:
        if GLOBAL_BY_GROUP:
            factor = tl.load(global_ptr + row // N, mask=row < rows, other=0.0)
            value = value * factor[:, None, None]
        else:
            value = value * tl.load(global_ptr)
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(
        out_ptr + row[:, None] * K + column[None, :],
        tl.reshape(value.to(tl.bfloat16) if HARDWARE else arithmetic.rounded(value, tl.bfloat16), (ROWS, COLUMNS)),
        mask=there & (column < K)[None, :],
    )
