"""Benchmark results as tables on the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from padless.bench.bounds import UNITS, bounds
from padless.bench.results import (
    AXES,
    COPY,
    READ,
    Record,
    accelerations,
    baseline_of,
    correlation_table,
    failures,
    memory_savings,
    ratios,
    summarise,
    tflops,
    time_us,
)
from padless.testing.timing import geomean

# Above this many points, a grouped benchmark's table has one line per (M, groups) instead of one per point.
_MAX_POINT_LINES = 40
_SHOWN_FAILURES = 10
NO_SESSIONS: Mapping[str, Record] = {}
DECODE_LIMITS = ("floor", COPY, READ)
_DECODE_PEERS = ("deepgemm_masked", "mslk")
# Headings of shares: a limit over the time of padless.
_OF = {
    "floor": "of the\nfloor",
    COPY: "of a copy\nof as many\nbytes",
    READ: "of a read\nof as many\nbytes",
}
# Characters that the columns M, N, K and groups take, and those of a contender's time.
_AXES_WIDTH = 34
_TIME_WIDTH = 12


def print_grouped(
    console: Console, records: Sequence[Record], sessions: Mapping[str, Record] = NO_SESSIONS
) -> None:
    """Points of the paper's grid, the comparisons, what limits allow, the correlations and what went wrong.

    sessions: session records by id, for captions and for limits that need a ceiling.
    """
    if not records:
        console.print("nothing measured")
        return
    baseline = baseline_of(records)
    if len(records) <= _MAX_POINT_LINES:
        shown = _point_tables(records, baseline, console.width)
    else:
        shown = [_aggregate_table(records, baseline)]
    shown[-1].caption = caption(records, sessions)
    for table in (*shown, _summary_table(records), *_bound_tables(records, ("floor", UNITS), sessions)):
        console.print(table)
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


def print_dense(
    console: Console, records: Sequence[Record], sessions: Mapping[str, Record] = NO_SESSIONS
) -> None:
    """Dense shapes: one line each, the comparisons, what limits allow and what went wrong."""
    names = ("padless", "deepgemm", "cublaslt_block", "cublaslt_tensor", "floor")
    table = _points_table("Dense products: GPU time (us)", records, names, ("floor",), rate=True)
    table.caption = caption(records, sessions)
    for shown in (table, _summary_table(records), *_bound_tables(records, ("floor", UNITS), sessions)):
        console.print(shown)
    print_failures(console, records)


def print_decode(
    console: Console, records: Sequence[Record], sessions: Mapping[str, Record] = NO_SESSIONS
) -> None:
    """Decode points: one line each, a summary by number of groups, the comparisons, what limits allow and what went
    wrong.
    """
    names = ("padless", "deepgemm_masked", "mslk", "floor", COPY, READ)
    table = _points_table("Decode sizes: GPU time (us)", records, names, DECODE_LIMITS)
    by_groups = _by_groups_tables(records)
    (by_groups[-1] if by_groups else table).caption = caption(records, sessions)
    limits = _bound_tables(records, DECODE_LIMITS, sessions)
    for shown in (table, *by_groups, _summary_table(records), *limits):
        console.print(shown)
    print_failures(console, records)


def caption(records: Sequence[Record], sessions: Mapping[str, Record]) -> str:
    """How L2 was flushed before every call, and the ceilings that make the floor, of the records' sessions."""
    ids = dict.fromkeys(record.get("session", "") for record in records)
    flushes = dict.fromkeys(_flush(sessions.get(name)) for name in ids)
    parts = [f"L2 flushed before every call: {' / '.join(flushes)}."] if ids else []
    ceilings = [sessions[name].get("ceilings", {}) for name in ids if name in sessions]
    rates = []
    for field, unit in (("dense_tflops", "TFLOP/s"), ("copy_gb_per_s", "GB/s")):
        values = [ceiling[field] for ceiling in ceilings if ceiling.get(field)]
        if values:
            low, high = f"{min(values):.0f}", f"{max(values):.0f}"
            rates.append(f"{low if low == high else f'{low} to {high}'} {unit}")
    if rates:
        parts.append(f"Floor: at {' or '.join(rates)}, whichever takes longer.")
    return " ".join(parts)


def _flush(session: Record | None) -> str:
    if session is None:
        return "unknown (no session record)"
    # Runs before the field existed wrote as much and read nothing.
    return str(session.get("flush", "512 MB written, nothing read (record without flush)"))


def _points_table(
    title: str, records: Sequence[Record], names: Sequence[str], limits: Sequence[str], *, rate: bool = False
) -> Table:
    """One line per point: GPU times of what was measured among names, the rate, and limits over padless's time."""
    axes = list(records[0]["point"]) if records else []
    present, limits = _measured(records, names), _measured(records, limits)
    table = narrow_table(title, between=1 if len(axes) + len(present) + len(limits) > 11 else 2)
    for heading in (*axes, *(_heading(name) for name in present)):
        table.add_column(heading, justify="right")
    for heading in (*(("TFLOP/s",) if rate else ()), *(_OF[limit] for limit in limits)):
        table.add_column(heading, justify="right")
    for record in records:
        own = time_us(record, "gpu", "padless")
        times = [time_us(record, "gpu", limit) for limit in limits]
        table.add_row(
            *(str(record["point"][axis]) for axis in axes),
            *(number(time_us(record, "gpu", name), 1) for name in present),
            *((number(tflops(record), 0),) if rate else ()),
            *(number(time / own if time and own else None, 2) for time in times),
        )
    return table


def _by_groups_tables(records: Sequence[Record]) -> list[Table]:
    """Decode points by number of groups: how many times faster than each peer, and which share of each limit."""
    spans = (("shortest\nus", min), ("longest\nus", max))
    peers = [(f"{_heading(name)}\n/ padless", name) for name in _measured(records, _DECODE_PEERS)]
    shares = [(_OF[name], name) for name in _measured(records, DECODE_LIMITS)]
    result = []
    for title, columns in (("By groups: peers", peers), ("By groups: share of limits", shares)):
        table = narrow_table(f"{title} (geomean, and the smallest)")
        for heading in ("groups", "points", *(heading for heading, _ in spans)):
            table.add_column(heading, justify="right")
        for heading, _ in columns:
            table.add_column(heading, justify="right")
            table.add_column("smallest", justify="right")
        for groups in sorted({record["point"]["groups"] for record in records}):
            part = [record for record in records if record["point"]["groups"] == groups]
            times = [us for record in part if (us := time_us(record, "gpu", "padless")) is not None]
            cells = [str(groups), str(len(part))]
            cells += [number(edge(times, default=math.nan), 1) for _, edge in spans]
            for _, name in columns:
                values = ratios(part, "gpu", name, "padless")
                cells += [number(geomean(values), 3), number(min(values, default=math.nan), 3)]
            table.add_row(*cells)
        if columns:
            result.append(table)
    return result


def _bound_tables(
    records: Sequence[Record], limits: Sequence[str], sessions: Mapping[str, Record]
) -> list[Table]:
    """What the peers' times allow, if there are peers: one table or none."""
    lines = bounds(records, limits, sessions)
    if not lines:
        return []
    limits = [limit for limit in limits if any(line.limits[limit] for line in lines)]
    table = narrow_table("What the peers' times allow: a peer's time / that of padless, and / each limit")
    table.add_column("peer")
    for heading in ("padless", *limits):
        table.add_column(f"/ {heading}", justify="right", max_width=12)
        table.add_column("smallest", justify="right")
    for line in lines:
        cells = [line.title]
        for ratio in (line.padless, *(line.limits[limit] for limit in limits)):
            values = (None, None) if ratio is None else (ratio.geomean, ratio.smallest)
            cells += [number(value, 3) for value in values]
        table.add_row(*cells)
    return [table]


def _measured(records: Sequence[Record], names: Sequence[str]) -> list[str]:
    return [name for name in names if any(time_us(record, "gpu", name) is not None for record in records)]


def _heading(name: str) -> str:
    """A contender's name, one word a line, as columns are narrow."""
    return name.replace("_", " ") if len(name) < 10 else "\n".join(name.replace("_", " ").split())


def narrow_table(title: str, between: int = 2) -> Table:
    """A table with only `between` (1 or 2) spaces between its columns: a dozen of them fit into 100 characters."""
    return Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 0, 0, between - 1), show_edge=False)


def print_bandwidth(console: Console, records: Sequence[Record]) -> None:
    """Memory-bound kernels against the copy ceiling."""
    table = Table(title="Memory-bound kernels")
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
                number(timing["us"], 1),
                f"{timing['spread_percent']:.1f}%",
                number(rate, 0),
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
            number(time_us(record, "gpu", "padless"), 1),
            number(tflops(record), 0),
            number(gain, 1),
            number(record["memory_saving_percent"], 1),
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
            table.add_row(*_axes(record), *(number(time_us(record, "gpu", name), 1) for name in part))
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
            number(geomean(rates), 0),
            number(geomean(gains), 3),
            number(min(gains, default=math.nan), 3),
            number(sum(memory_savings(part)) / len(part), 1),
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
            number(line.geomean, 3),
            number(line.smallest, 3),
            number(line.largest, 3),
        )
    return table


def _correlation(title: str, records: Sequence[Record], values: Sequence[float]) -> Table:
    table = Table(title=title)
    names = (*AXES, "value")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for name, row in zip(names, correlation_table(records, values), strict=True):
        table.add_row(name, *(number(value, 4) for value in row))
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


def number(value: float | None, digits: int) -> str:
    """A table's cell: "-" for what is not there."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
