"""Benchmark results as tables on the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from padless.bench.results import (
    AXES,
    Record,
    accelerations,
    baseline_of,
    correlation_table,
    failures,
    memory_savings,
    summarise,
    tflops,
    time_us,
)
from padless.bench.timing import geomean

# Above this many points, a grouped benchmark's table has one line per (M, groups) instead of one per point.
_MAX_POINT_LINES = 40
_SHOWN_FAILURES = 10
# Characters that the columns M, N, K and groups take, and those of a contender's time.
_AXES_WIDTH = 34
_TIME_WIDTH = 12


def print_grouped(console: Console, records: Sequence[Record]) -> None:
    """Points of the paper's grid, the comparisons, the correlations and what went wrong."""
    if not records:
        console.print("nothing measured")
        return
    baseline = baseline_of(records)
    if len(records) <= _MAX_POINT_LINES:
        for table in _point_tables(records, baseline, console.width):
            console.print(table)
    else:
        console.print(_aggregate_table(records, baseline))
    console.print(_summary_table(records))
    for title, values in (
        (f"Table 2: correlation with acceleration over {baseline} (%)", accelerations(records, baseline)),
        ("Table 3: correlation with memory saving (%)", memory_savings(records)),
    ):
        console.print(_correlation(title, records, values))
    identical = [record["bitwise_identical"] for record in records if "bitwise_identical" in record]
    if identical:
        console.print(
            f"Valid rows bitwise identical to pad + the same GEMM: {sum(identical)} of {len(identical)}"
        )
    print_failures(console, records)


def print_points(console: Console, title: str, records: Sequence[Record], names: Sequence[str]) -> None:
    """One line per point with the GPU time of each contender, and the comparisons."""
    present = [name for name in names if any(time_us(r, "gpu", name) is not None for r in records)]
    table = Table(title=title)
    axes = list(records[0]["point"]) if records else []
    for axis in axes:
        table.add_column(axis, justify="right")
    for name in present:
        table.add_column(f"{name} us", justify="right")
    table.add_column("TFLOP/s", justify="right")
    table.add_column("of floor", justify="right")
    for record in records:
        cells = [str(record["point"][axis]) for axis in axes]
        cells += [_number(time_us(record, "gpu", name), 1) for name in present]
        floor, own = time_us(record, "gpu", "floor"), time_us(record, "gpu", "padless")
        cells += [_number(tflops(record), 0), _number(floor / own if floor and own else None, 2)]
        table.add_row(*cells)
    console.print(table)
    console.print(_summary_table(records))
    print_failures(console, records)


def print_bandwidth(console: Console, title: str, records: Sequence[Record]) -> None:
    """Memory-bound kernels against the copy ceiling."""
    table = Table(title=title)
    for name in ("kernel", "M", "K", "us", "spread", "GB/s", "of a copy"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    for record in records:
        point = record["point"]
        for name, timing in record["gpu"].items():
            rate = record["bytes"][name] / timing["us"] * 1e-3
            table.add_row(
                name,
                str(point["M"]),
                str(point["K"]),
                _number(timing["us"], 1),
                f"{timing['spread_percent']:.1f}%",
                _number(rate, 0),
                f"{100 * rate / record['copy_gb_per_s']:.0f}%",
            )
    console.print(table)
    print_failures(console, records)


def print_failures(console: Console, records: Sequence[Record]) -> None:
    """What is wrong, if anything."""
    found = failures(records)
    for line in found[:_SHOWN_FAILURES]:
        console.print(f"[red]{line}[/red]")
    if len(found) > _SHOWN_FAILURES:
        console.print(f"[red]and {len(found) - _SHOWN_FAILURES} more[/red]")


def _point_tables(records: Sequence[Record], baseline: str, width: int) -> list[Table]:
    """One line per point: results first, then the times of as many contenders a table as the width allows."""
    result = Table(title="Points, valid rows")
    for column in (*AXES, "padless us", "TFLOP/s", "accel. %", "memory %", "bits"):
        result.add_column(column, justify="right")
    for record, gain in zip(records, accelerations(records, baseline), strict=True):
        result.add_row(
            *_axes(record),
            _number(time_us(record, "gpu", "padless"), 1),
            _number(tflops(record), 0),
            _number(gain, 1),
            _number(record["memory_saving_percent"], 1),
            _bits(record),
        )
    names = sorted({name for record in records for name in record["gpu"]}, key=_column_order)
    per_table = max(2, (width - _AXES_WIDTH) // _TIME_WIDTH)
    tables = [result]
    for first in range(0, len(names), per_table):
        part = names[first : first + per_table]
        table = Table(title="GPU time (us)")
        for column in (*AXES, *(name.replace("_", " ") for name in part)):
            table.add_column(column, justify="right")
        for record in records:
            table.add_row(*_axes(record), *(_number(time_us(record, "gpu", name), 1) for name in part))
        tables.append(table)
    return tables


def _axes(record: Record) -> list[str]:
    return [str(record["point"][axis]) for axis in AXES]


def _aggregate_table(records: Sequence[Record], baseline: str) -> Table:
    table = Table(title=f"By M and groups, over {baseline}")
    for column in ("M", "groups", "points", "TFLOP/s", "faster, geomean", "smallest", "memory %"):
        table.add_column(column, justify="right")
    keys = sorted({(record["point"]["M"], record["point"]["groups"]) for record in records})
    for m, groups in keys:
        part = [r for r in records if (r["point"]["M"], r["point"]["groups"]) == (m, groups)]
        gains = [1 + gain / 100 for gain in accelerations(part, baseline) if math.isfinite(gain)]
        rates = [rate for record in part if (rate := tflops(record)) is not None]
        table.add_row(
            str(m),
            str(groups),
            str(len(part)),
            _number(geomean(rates), 0),
            _number(geomean(gains), 3),
            _number(min(gains, default=math.nan), 3),
            _number(sum(memory_savings(part)) / len(part), 1),
        )
    return table


def _summary_table(records: Sequence[Record]) -> Table:
    table = Table(title="How many times faster (ratios of times on the same inputs)")
    table.add_column("comparison")
    for column in ("points", "geomean", "smallest", "largest"):
        table.add_column(column, justify="right")
    for line in summarise(records):
        table.add_row(
            line.title,
            str(line.points),
            _number(line.geomean, 3),
            _number(line.smallest, 3),
            _number(line.largest, 3),
        )
    return table


def _correlation(title: str, records: Sequence[Record], values: Sequence[float]) -> Table:
    table = Table(title=title)
    names = (*AXES, "value")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for name, row in zip(names, correlation_table(records, values), strict=True):
        table.add_row(name, *(_number(value, 4) for value in row))
    return table


def _bits(record: Record) -> str:
    if "bitwise_identical" not in record:
        return "-"
    return "same" if record["bitwise_identical"] else "DIFFER"


_ORDER = (
    "padless",
    "padless_on_padded",
    "pad",
    "pad_then_padless",
    "deepgemm_on_padded",
    "pad_then_deepgemm",
)


def _column_order(name: str) -> tuple[int, str]:
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
