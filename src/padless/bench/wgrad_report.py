"""Tables of ``padless bench wgrad``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from padless.bench import tables
from padless.bench.results import Record, time_us
from padless.testing.timing import geomean

TORCH, DEEPGEMM = "torch_bf16", "deepgemm_k_grouped"
_AXES = ("sizes", "M", "groups", "N", "K", "alignment")


def print_wgrad(console: Console, records: Sequence[Record]) -> None:
    """A table a contender: time, TFLOP/s, times as fast as the others, share of the floor; then what is wrong."""
    names = list(dict.fromkeys(name for record in records for name in record["gpu"]))
    for name in names:
        console.print(_table(name, [record for record in records if name in record["gpu"]]))
    tables.print_failures(console, records)


def _table(name: str, records: Sequence[Record]) -> Table:
    table = tables.narrow_table(f"Weight gradients: {name}", 1)
    for heading in (*_AXES, "us", "TF", "torch /", "DeepGEMM /", "floor /"):
        table.add_column(heading, justify="right")
    columns: list[list[float]] = [[], [], []]
    for record in records:
        us = time_us(record, "gpu", name)
        assert us is not None
        others = [time_us(record, "gpu", other) for other in (TORCH, DEEPGEMM)]
        ratios = [None if value is None else value / us for value in (*others, record["floors_us"].get(name))]
        for column, ratio in zip(columns, ratios, strict=True):
            column += [] if ratio is None else [ratio]
        cells = [str(record["point"][axis]) for axis in _AXES]
        cells += [f"{us:.1f}", f"{record['flops'] / us / 1e6:.0f}"]
        table.add_row(*cells, *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios))
    means = [f"{geomean(column):.2f}" if column else "-" for column in columns]
    table.add_row("geomean", *[""] * (len(_AXES) + 1), *means)
    return table
