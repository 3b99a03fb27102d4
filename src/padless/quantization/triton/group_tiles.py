"""Cuts the rows of ragged groups into tiles of 128 tokens on the device: one small kernel, no look from the host.

Tile i holds up to 128 rows of one group and is row i of the scales of `GroupedColumns`. The tiles after those of the
groups hold the rows past the last group, and columns past the last group that are to be zeroed.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from padless.formats import ceil_div
from padless.kernels.group_tiles import TokenGroups
from padless.quantization import columns_rules
from padless.quantization.triton.launches import launch

# Words of a tile in the table, each a row of it: first row of the source, rows, how many of them are tokens of a group
# (all or none), first column / 32, columns / 32.
_WORDS = 5
UNIT = tl.constexpr(32)  # columns: every start is a multiple
_TILE = tl.constexpr(128)
_TILES_AT_ONCE = tl.constexpr(128)


class GroupTiles(NamedTuple):
    """table: (5, num_tiles) int32. starts, block_starts: (G,) int32, as in `GroupedColumns`."""

    table: torch.Tensor
    starts: torch.Tensor
    block_starts: torch.Tensor

    @property
    def num_tiles(self) -> int:
        return self.table.shape[1]


def num_tiles(num_rows: int, num_groups: int, alignment: int) -> int:
    """Tiles that hold all rows, columns and rows of scales, whatever the sizes of the groups are.

    Columns: tiles and columns of a group differ by less than (128 - alignment) columns.
    """
    columns = columns_rules.padded_tokens(num_rows, num_groups, alignment)
    for_columns = columns // 128 + ceil_div((128 - alignment) * num_groups, 128)
    return max(for_columns, num_rows // 128 + num_groups + 1)


def token_groups(offs: torch.Tensor, num_rows: int, alignment: int) -> TokenGroups:
    """The same groups for a CUDA kernel, which finds its tiles by itself and writes starts and block_starts."""
    starts, block_starts = (torch.empty(offs.shape[0], dtype=torch.int32, device=offs.device) for _ in range(2))
    count = num_tiles(num_rows, offs.shape[0], alignment)
    return TokenGroups(offs.contiguous(), starts, block_starts, alignment, count)


def group_tiles(offs: torch.Tensor, num_rows: int, alignment: int) -> GroupTiles:
    """The tiles of groups that end at offs, (G,) int32: one launch."""
    num_groups = offs.shape[0]
    count = num_tiles(num_rows, num_groups, alignment)
    table = torch.empty((_WORDS, count), dtype=torch.int32, device=offs.device)
    starts, block_starts = (torch.empty(num_groups, dtype=torch.int32, device=offs.device) for _ in range(2))
    launch(_group_tiles, num_groups + 1)(
        offs.contiguous(),
        table,
        starts,
        block_starts,
        num_rows,
        num_groups,
        count,
        columns_rules.padded_tokens(num_rows, num_groups, alignment) // 32,
        ALIGNMENT=alignment,
        GROUPS=max(triton.next_power_of_2(num_groups), 16),
        num_warps=4,
    )
    return GroupTiles(table, starts, block_starts)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


# What M decides is not compiled in: a new number of rows must not mean a new kernel.
@triton.jit(do_not_specialize=["M", "num_groups", "num_tiles", "column_units"])
def _group_tiles(
    offs_ptr,  # (num_groups,) int32 cumulative END rows
    table_ptr,  # (5, num_tiles) int32
    starts_ptr,  # (num_groups,) int32
    block_starts_ptr,  # (num_groups,) int32
    M,
    num_groups,
    num_tiles,
    column_units,  # T' / 32
    ALIGNMENT: tl.constexpr,
    GROUPS: tl.constexpr,  # num_groups rounded up to a power of two
):
    """One program for the tiles of each group, and one for those behind."""
    this = tl.program_id(0)
    group = tl.arange(0, GROUPS)
    end = tl.load(offs_ptr + group, mask=group < num_groups, other=0)
    end = tl.associative_scan(tl.minimum(tl.maximum(end, 0), M), 0, _larger)
    start = tl.load(offs_ptr + group - 1, mask=(group > 0) & (group <= num_groups), other=0)
    start = tl.associative_scan(tl.minimum(tl.maximum(start, 0), M), 0, _larger)
    size = end - start  # 0 from num_groups on: the largest end so far stays
    before = group < this
    column = tl.sum(tl.where(before, (size + ALIGNMENT - 1) // ALIGNMENT * (ALIGNMENT // UNIT), 0), axis=0)
    tile = tl.sum(tl.where(before, (size + _TILE - 1) // _TILE, 0), axis=0)
    row = tl.sum(tl.where(before, size, 0), axis=0)  # ends are ascending from 0: the end of the group before

    is_group = this < num_groups
    rows = tl.sum(tl.where(group == this, size, 0), axis=0)
    rows = tl.where(is_group, rows, M - row)
    units = (rows + ALIGNMENT - 1) // ALIGNMENT * (ALIGNMENT // UNIT)
    units = tl.where(is_group, units, column_units - column)
    count = tl.where(is_group, (rows + _TILE - 1) // _TILE, num_tiles - tile)
    tl.store(starts_ptr + this, column * UNIT, mask=is_group)
    tl.store(block_starts_ptr + this, tile, mask=is_group)

    first = row * 0
    while first < count:  # range does not take count in the interpreter of Triton 3.6
        i = first + tl.arange(0, _TILES_AT_ONCE)
        inside = i < count
        rows_of_tile = tl.minimum(tl.maximum(rows - i * _TILE, 0), _TILE)
        units_of_tile = tl.minimum(tl.maximum(units - i * (_TILE // UNIT), 0), _TILE // UNIT)
        out = table_ptr + tile + i
        tl.store(out, row + i * _TILE, mask=inside)
        tl.store(out + num_tiles, rows_of_tile, mask=inside)
        tl.store(out + 2 * num_tiles, tl.where(is_group, rows_of_tile, 0), mask=inside)
        tl.store(out + 3 * num_tiles, column + i * (_TILE // UNIT), mask=inside)
        tl.store(out + 4 * num_tiles, units_of_tile, mask=inside)
        first += _TILES_AT_ONCE
