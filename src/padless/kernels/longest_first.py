"""The Python twin of ``device/longest_first.cuh``: the order in which the tiles of a weight gradient are scheduled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from padless.kernels.schedule import Tile, walk_of_groups


def tiles(
    offs: Sequence[int],
    tokens: int,
    n: int,
    k: int,
    block_m: int,
    raster_m: int,
    skips_empty: bool = False,
    *,
    block_n: int = 128,
) -> Iterator[Tile]:
    """All tiles, in the order of their numbers: groups from the longest to the shortest, ties by number; in a group,
    bands of ``raster_m`` row tiles; in a band, column after column.

    offs: cumulative end tokens, any values; ``tokens`` bounds them. n, k: rows and columns of a group's result, in which
    rows and columns of a tile are counted. skips_empty: groups without a token have no tiles.
    """
    for group, start, end in walk_of_groups(offs, tokens):
        if skips_empty and start == end:
            continue
        for band in range(0, n, raster_m * block_m):
            for column in range(0, k, block_n):
                for row in range(band, min(band + raster_m * block_m, n), block_m):
                    yield Tile(group, row, min(block_m, n - row), column)
