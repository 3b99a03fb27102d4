"""The Python twin of ``kernels/scheduler.cuh`` and ``kernels/group_table.cuh``: which worker gets which tile, when.

Used by tests (the two are compared exhaustively), by the picture of the demo and to reason about balance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """One unit of work: rows [row, row + rows) of D and columns from ``column``, all of one group."""

    group: int
    group_end: int
    row: int
    rows: int
    column: int


def clean_offs(offs: Sequence[int], m: int) -> list[int]:
    """Cumulative end rows made safe: ascending and inside [0, m], whatever they were."""
    ends, highest = [], 0
    for end in offs:
        highest = min(max(highest, end), m)
        ends.append(highest)
    return ends


def tiles(
    offs: Sequence[int],
    m: int,
    n: int,
    block_m: int,
    block_n: int,
    raster_m: int,
    worker: int = 0,
    workers: int = 1,
) -> Iterator[Tile]:
    """The tiles of one worker of ``workers``, in order. ``block_n`` counts the columns of a whole cluster."""
    n_tiles = -(-n // block_n)
    number = 0
    start = 0
    for group, end in enumerate(clean_offs(offs, m)):
        m_tiles = -(-(end - start) // block_m)
        for band in range(0, m_tiles, raster_m):
            for n_tile in range(n_tiles):
                for m_tile in range(band, min(band + raster_m, m_tiles)):
                    if number % workers == worker:
                        row = start + m_tile * block_m
                        yield Tile(group, end, row, min(block_m, end - row), n_tile * block_n)
                    number += 1
        start = end
