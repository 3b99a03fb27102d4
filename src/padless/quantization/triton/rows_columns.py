"""Rows and token-contiguous columns of ragged groups in FP8_BLOCK on a GPU: one read, both codes written.

A CUDA kernel takes the usual operands on Hopper (`padless.kernels.sm90_rows_columns`), the Triton kernel here others.
The same arithmetic as `fp8_block` of `padless.quantization.rules` and `columns` of `.columns_rules`, bit for bit.
A program takes a tile of 128 tokens of one group x 128 features. One launch of `group_tiles` before it finds the tiles.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from padless.formats import ceil_div
from padless.kernels.sm90_rows_columns import host
from padless.layouts import empty_mn_major
from padless.quantization import columns_rules
from padless.quantization.triton import casts, tiles
from padless.quantization.triton import group_tiles as groups
from padless.quantization.triton.launches import launch
from padless.runtime.driver import Driver, stream_of

# A thread of the 256 holds 64 values, of 16 bits in 32 registers: three programs fit on a multiprocessor of Hopper, so
# that some load while others compute. Without the rows 128 threads are 2 to 9% faster (tools/tune_columns.py).
NUM_WARPS, MAX_REGISTERS = 8, 80
NUM_WARPS_OF_COLUMNS, MAX_REGISTERS_OF_COLUMNS = 4, 96
MAX_REGISTERS_OF_FLOAT32 = 128


class Columns(NamedTuple):
    """The kernel's outputs of a `GroupedColumns`: codes (features, T') uint8 and scale (S, ..) float32."""

    codes: torch.Tensor
    scale: torch.Tensor


def empty_columns(
    num_rows: int, num_groups: int, features: int, block: tuple[int, int], alignment: int, device: torch.device
) -> Columns:
    """Uninitialised codes and scales: the kernels write all of both."""
    width = columns_rules.padded_tokens(num_rows, num_groups, alignment)
    scales = (columns_rules.num_scale_rows(num_rows, num_groups), columns_rules.scale_columns(features, block))
    return Columns(
        torch.empty((features, width), dtype=torch.uint8, device=device),
        torch.empty(scales, dtype=torch.float32, device=device),
    )


def rows_columns(
    x: torch.Tensor,
    offs: torch.Tensor,
    block: tuple[int, int],
    alignment: int,
    rows: bool,
    driver: Driver | None = None,
    tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(row codes uint8, MN-major row scale, column codes uint8, column scale, starts, block_starts) of checked
    arguments.

    rows False: the first two have no rows. driver: of a Hopper GPU that may run the CUDA kernel, or None. tokens: (M,)
    int32, where the rows are x[tokens]; only the CUDA kernel reads them from where they are.
    """
    in_cuda = driver is not None and host.fits(x, offs)
    if tokens is not None and not in_cuda:
        x, tokens = x.index_select(0, tokens), None
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_rows, features = x.shape[0] if tokens is None else tokens.shape[0], x.shape[1]
    kept_rows = num_rows if rows else 0
    row_codes = torch.empty((kept_rows, features), dtype=torch.uint8, device=x.device)
    row_scale = empty_mn_major(kept_rows, ceil_div(features, 128), x.device)
    columns = empty_columns(num_rows, offs.shape[0], features, block, alignment, x.device)
    if in_cuda:
        assert driver is not None
        of = groups.token_groups(offs, num_rows, alignment)
        starts, block_starts = of.starts, of.block_starts
        to = (row_codes, with_padding(row_scale)) if rows else (None, None)
        prepared = host.prepare(driver, x, tokens, of, to[0], to[1], columns.codes, columns.scale, block[0] == 128)
        prepared.launch(stream_of(x))
    else:
        found = groups.group_tiles(offs, num_rows, alignment)
        starts, block_starts = found.starts, found.block_starts
        _launch(x, found, row_codes, with_padding(row_scale), columns, rows, block[0] == 128)
    return row_codes, row_scale, columns.codes, columns.scale, starts, block_starts


def _launch(
    x: torch.Tensor,
    found: groups.GroupTiles,
    row_codes: torch.Tensor,
    row_scale: torch.Tensor,
    columns: Columns,
    rows: bool,
    square: bool,
) -> None:
    """The Triton kernel for any x."""
    num_rows, features = x.shape
    words = tiles.word_type(x)
    launch(_rows_columns, found.num_tiles * ceil_div(features, 128))(
        x,
        found.table,
        row_codes,
        row_scale,
        columns.codes.view(torch.int32),
        columns.scale,
        num_rows,
        features,
        x.stride(0),
        row_scale.stride(1),
        columns.codes.shape[1] // 32,
        columns.scale.shape[0],
        found.num_tiles,
        ROWS=rows,
        SQUARE=square,
        HARDWARE_CAST=casts.casts_in_hardware(x.device),
        DTYPE=words,
        num_warps=NUM_WARPS if rows or not words else NUM_WARPS_OF_COLUMNS,
        maxnreg=MAX_REGISTERS_OF_FLOAT32 if not words else MAX_REGISTERS if rows else MAX_REGISTERS_OF_COLUMNS,
    )


def with_padding(scale: torch.Tensor) -> torch.Tensor:
    """All rows of MN-major scales, padding included: (ld, columns). Without rows a tensor has no address."""
    return scale.as_strided((scale.stride(1), scale.shape[1]), scale.stride())


# What M decides is not compiled in: a new number of rows must not mean a new kernel.
@triton.jit(do_not_specialize=["M", "row_scale_ld", "column_units", "num_scale_rows", "num_tiles"])
def _rows_columns(
    x_ptr,  # (M, F) bf16, fp16 or fp32, strides (x_stride, 1)
    table_ptr,  # (5, num_tiles) int32, group_tiles
    row_codes_ptr,  # (M, F) uint8, contiguous
    row_scale_ptr,  # (M, ceil(F / 128)) float32, strides (1, row_scale_ld)
    codes_ptr,  # (F, T' / 4) int32: four codes each
    scale_ptr,  # (S, F) float32, or SQUARE (S, ceil(F / 128)), contiguous
    M,
    F,
    x_stride,
    row_scale_ld,
    column_units,  # T' / 32
    num_scale_rows,  # S
    num_tiles,
    ROWS: tl.constexpr,
    SQUARE: tl.constexpr,  # scales of columns are of 128 features
    HARDWARE_CAST: tl.constexpr,
    DTYPE: tl.constexpr,  # "bf16" or "fp16": F, x_stride are even, and x is read in words of two; or ""
):
    num_blocks = tl.cdiv(F, tiles.TILE)
    pid = tl.program_id(0)
    block = pid % num_blocks  # neighbours in time are neighbours in memory
    tile = pid // num_blocks
    first_row, rows, tokens, first_unit, units = tiles.place(table_ptr, tile, num_tiles)
    if (rows == 0) & (units == 0) & (tile >= num_scale_rows):
        return

    column = block * tiles.TILE + tl.arange(0, tiles.TILE)
    row = first_row + 4 * tl.arange(0, tiles.QUADS)
    rows_end = first_row + rows
    if DTYPE != "":
        pair = block * tiles.PAIRS + tl.arange(0, tiles.PAIRS)
        words_ptr = x_ptr.to(tl.pointer_type(tl.int32))
        x = tiles.load_words(words_ptr, row, rows_end, pair, F // 2, x_stride // 2)
        if ROWS:
            scale_column = row_scale_ptr + block.to(tl.int64) * row_scale_ld
            pairs_ptr = row_codes_ptr.to(tl.pointer_type(tl.int16))
            tiles.store_rows_of_words(x, row, rows_end, pair, F // 2, pairs_ptr, scale_column, DTYPE)
            tiles.store_padding(scale_column, M, row_scale_ld, tile == 0)
        if SQUARE:
            tiles.store_square_columns_of_words(
                x, tile, tokens, first_unit, units, column, F, codes_ptr, column_units, scale_ptr + block, num_blocks,
                num_scale_rows, DTYPE,
            )  # fmt: skip
        else:
            tiles.store_columns_of_words(
                x, tile, tokens, first_unit, units, column, F, codes_ptr, column_units, scale_ptr, F, num_scale_rows,
                DTYPE,
            )  # fmt: skip
        return

    x = tiles.load(x_ptr, row, rows_end, column, F, x_stride)
    if ROWS:
        scale_column = row_scale_ptr + block.to(tl.int64) * row_scale_ld
        tiles.store_rows(x, row, rows_end, column, F, row_codes_ptr, F, scale_column, HARDWARE_CAST)
        tiles.store_padding(scale_column, M, row_scale_ld, tile == 0)
    if SQUARE:
        tiles.store_square_columns(
            x, tile, tokens, first_unit, units, column, F, codes_ptr, column_units, scale_ptr + block, num_blocks,
            num_scale_rows, HARDWARE_CAST,
        )  # fmt: skip
    else:
        tiles.store_columns(
            x, tile, tokens, first_unit, units, column, F, codes_ptr, column_units, scale_ptr, F, num_scale_rows,
            HARDWARE_CAST,
        )  # fmt: skip
