"""The table of records that time one problem with several tiles, by which the cost model is judged."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from padless.bench.results import AXES, Record, time_us
from padless.bench.tables import narrow_table


def print_tiles(console: Console, records: Sequence[Record]) -> None:
    """A line a point: microseconds with each tile, and what the first tile takes over the fastest one."""
    names = list(dict.fromkeys(name for record in records for name in record["gpu"]))
    table = narrow_table("Tiles: GPU time (us), and the first tile's over the least", 1)
    for heading in (*AXES, *names, "first / least"):
        table.add_column(heading, justify="right")
    for record in records:
        times = [time_us(record, "gpu", name) for name in names]
        known = [us for us in times if us is not None]
        cells = ["-" if us is None else f"{us:.1f}" for us in times]
        ratio = f"{times[0] / min(known):.3f}" if times[0] is not None else "-"
        table.add_row(*(str(record["point"][axis]) for axis in AXES), *cells, ratio)
    console.print(table)
