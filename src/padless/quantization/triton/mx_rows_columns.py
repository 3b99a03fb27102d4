"""Rows and columns of ragged groups in MXFP8 on a GPU: one read, both codes written, in a Triton kernel.

The arithmetic of `padless.quantization.mx_rows_columns.by_torch`, bit for bit. A program takes 128 tokens of one group
x 128 features, which hold one 32x4x4 tile of the rows' scales and four rows of the columns'. One launch of
`group_tiles` before it finds the tiles.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from padless.formats import MXFP8, ceil_div
from padless.quantization import rules
from padless.quantization.triton import casts, tiles
from padless.quantization.triton import group_tiles as groups
from padless.quantization.triton.launches import launch
from padless.quantization.triton.row_blocks import MAX_MANTISSAS, mx_scale

_EMAX, _MAX_MANTISSA = tl.constexpr(rules.ELEMENT_EMAX[MXFP8]), tl.constexpr(MAX_MANTISSAS[MXFP8])
_TILE = tl.constexpr(128)
_BLOCKS = tl.constexpr(4)
_BLOCK = tl.constexpr(32)
_ATOM = tl.constexpr(512)  # bytes of a tile of scales


def mx_rows_columns(
    x: torch.Tensor,
    offs: torch.Tensor,
    row_codes: torch.Tensor,
    row_scale: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    *,
    rows: bool,
    tiled: bool,
) -> None:
    """Writes all of the outputs of `padless.quantization.mx_rows_columns.empty`, all uint8, for x (M, F)."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_rows, features = x.shape
    found = groups.group_tiles(offs, num_rows, 128)
    blocks = ceil_div(features, 128)
    launch(_mx_rows_columns, found.num_tiles * blocks)(
        x, found.table, row_codes, row_scale, codes, scale, features, x.stride(0), scale.shape[0] // 4,
        found.num_tiles, row_scale.numel() // (512 * blocks),
        ROWS=rows, TILED=tiled, HARDWARE_CAST=casts.casts_in_hardware(x.device), num_warps=8,
    )  # fmt: skip


# What M decides is not compiled in: a new number of rows must not mean a new kernel.
@triton.jit(do_not_specialize=["num_scale_tiles", "num_tiles", "num_row_tiles"])
def _mx_rows_columns(
    x_ptr,  # (M, F) bf16, fp16 or fp32, strides (x_stride, 1)
    table_ptr,  # (5, num_tiles) int32, group_tiles
    row_codes_ptr,  # (M, F) uint8, contiguous
    row_scale_ptr,  # (M, ceil(F / 32)) uint8, contiguous; TILED (num_row_tiles, ceil(F / 128), 512)
    codes_ptr,  # (M, F) uint8, contiguous
    scale_ptr,  # (4 * num_scale_tiles, F) uint8, contiguous
    F,
    x_stride,
    num_scale_tiles,
    num_tiles,
    num_row_tiles,
    ROWS: tl.constexpr,
    TILED: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
):
    feature_blocks = tl.cdiv(F, _TILE)
    pid = tl.program_id(0)
    block = pid % feature_blocks
    tile = pid // feature_blocks
    first_row, rows, tokens, _, _ = tiles.place(table_ptr, tile, num_tiles)
    if (rows == 0) & (tile >= num_scale_tiles):
        return
    of_tile = tl.arange(0, _TILE)
    row, column = first_row + of_tile, block * _TILE + of_tile
    inside = (of_tile[:, None] < rows) & (column[None, :] < F)
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    x = casts.to_float32(x)
    bits = casts.magnitude_bits(x)
    at = row.to(tl.int64)[:, None] * F + column[None, :]

    if ROWS:
        byte, multiplier = mx_scale(
            tl.max(tl.reshape(bits, (_TILE, _BLOCKS, _BLOCK)), axis=2), "rceil", _EMAX, _MAX_MANTISSA
        )
        y = tl.reshape(x, (_TILE, _BLOCKS, _BLOCK)) * multiplier[:, :, None]
        tl.store(row_codes_ptr + at, casts.to_e4m3(tl.reshape(y, (_TILE, _TILE)), HARDWARE_CAST), mask=inside)
        of_row = tl.arange(0, _BLOCKS)[None, :]
        if TILED:
            in_tile = (of_tile % 32 * 16 + of_tile // 32 * 4)[:, None] + of_row
            to = row_scale_ptr + (tile.to(tl.int64) * feature_blocks + block) * _ATOM + in_tile
            tl.store(to, tl.where(tokens > 0, byte, 0), mask=tile < num_row_tiles)
        else:
            columns = tl.cdiv(F, _BLOCK)
            to = row_scale_ptr + row.to(tl.int64)[:, None] * columns + block * _BLOCKS + of_row
            tl.store(to, byte, mask=(of_tile[:, None] < rows) & (block * _BLOCKS + of_row < columns))

    byte, multiplier = mx_scale(
        tl.max(tl.reshape(bits, (_BLOCKS, _BLOCK, _TILE)), axis=1), "rceil", _EMAX, _MAX_MANTISSA
    )
    y = tl.reshape(tl.reshape(x, (_BLOCKS, _BLOCK, _TILE)) * multiplier[:, None, :], (_TILE, _TILE))
    tl.store(codes_ptr + at, tl.where(tokens > 0, casts.to_e4m3(y, HARDWARE_CAST), 0), mask=inside)
    scale_row = tile.to(tl.int64) * _BLOCKS + tl.arange(0, _BLOCKS)[:, None]
    in_scale = (column[None, :] < F) & (tile < num_scale_tiles)
    tl.store(scale_ptr + scale_row * F + column[None, :], tl.where(tokens > 0, byte, 0), mask=in_scale)
