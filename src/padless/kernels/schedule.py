"""The Python twin of ``kernels/device/scheduler.cuh``: the order in which the tiles of a ragged problem are taken.

The host side reads it to choose tiles and to order lists; tests compare it with the header exhaustively.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from padless.row_groups import clamped_ends


@dataclass(frozen=True)
class Tile:
    """One unit of work: rows [row, row + rows) of D and columns from ``column``, all of one group."""

    group: int
    row: int
    rows: int
    column: int


SMALL_TABLE = 32  # groups that one warp sorts, always (kernels/device/group_table.cuh)
FLAT_ROWS = 64  # groups of at most so many rows need not be sorted: a tile takes as long for any of them


def walk_of_groups(offs: Sequence[int], m: int, block_m: int = 0) -> list[tuple[int, int, int]]:
    """(group, first row, end row) in the order in which tiles of ``block_m`` rows walk the groups; 0: weight gradients.

    From the group with the most rows to the one with the fewest, ties by number. More than SMALL_TABLE groups, of which
    none has more rows than a tile or than FLAT_ROWS, are walked by number, those without a row last, if offs are valid.
    """
    ends = clamped_ends(offs, m)
    starts = [0, *ends][: len(ends)]
    groups = [(g, start, end) for g, (start, end) in enumerate(zip(starts, ends, strict=True))]
    most = max((end - start for _, start, end in groups), default=0)
    if len(ends) > SMALL_TABLE and most <= min(block_m, FLAT_ROWS) and ends == list(offs):
        return sorted(groups, key=lambda group: (group[1] == group[2], group[0]))
    return sorted(groups, key=lambda group: (group[1] - group[2], group[0]))


def tiles(
    offs: Sequence[int], m: int, n: int, block_m: int, block_n: int, raster_m: int, half_tiles_for: int | None = None
) -> Iterator[Tile]:
    """All tiles, in the order of their numbers. ``block_n`` counts the columns of a whole cluster.

    Groups from large to small; in a group, bands of ``raster_m`` m-tiles; in a band, column after column.
    ``half_tiles_for``: the number of workers for which the last ones are cut in two (``tiles_to_cut``); None cuts none.
    Half tiles without a row, which have a number too, are left out.
    """
    whole = list(_whole_tiles(offs, m, n, block_m, block_n, raster_m))
    cut = 0 if half_tiles_for is None else tiles_to_cut(len(whole), half_tiles_for)
    yield from whole[: len(whole) - cut]
    for tile in whole[len(whole) - cut :]:
        half = block_m // 2
        yield replace(tile, rows=min(tile.rows, half))
        if tile.rows > half:
            yield replace(tile, row=tile.row + half, rows=tile.rows - half)


def has_half_tiles(block_m: int) -> bool:
    """Whether the FP8_BLOCK kernel on Hopper cuts tiles of so many rows in two in the last round (``tiles_to_cut``)."""
    return block_m == 256


def tiles_to_cut(count: int, workers: int) -> int:
    """The number of tiles, the last of ``count``, that are cut in two: of those in the last round, as many as leave no
    worker more than one half tile of it. Example: for 66 workers all of 10, 16 of 50.
    """
    last_round = count % workers
    return min(last_round, workers - last_round)


def _whole_tiles(offs: Sequence[int], m: int, n: int, block_m: int, block_n: int, raster_m: int) -> Iterator[Tile]:
    n_tiles = -(-n // block_n)
    for group, start, end in walk_of_groups(offs, m, block_m):
        m_tiles = -(-(end - start) // block_m)
        for band in range(0, m_tiles, raster_m):
            for n_tile in range(n_tiles):
                for m_tile in range(band, min(band + raster_m, m_tiles)):
                    row = start + m_tile * block_m
                    yield Tile(group, row, min(block_m, end - row), n_tile * block_n)


def walk_of_list(sizes: Sequence[tuple[int, int, int]], block_m: int, block_n: int) -> list[tuple[int, int]]:
    """Problems (M, N, K) of a list as (number, tiles up to and with it), from the costliest tiles to the cheapest.

    A tile costs its K; of equal ones the problem with more rows comes first, then the lower number.
    """
    walk, tiles_before = [], 0
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i][2], -sizes[i][0], i)):
        m, n, _ = sizes[i]
        tiles_before += -(-m // block_m) * -(-n // block_n)
        walk.append((i, tiles_before))
    return walk
