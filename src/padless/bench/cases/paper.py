"""The paper's comparison: time, memory and bitwise equality over its grid, its Figure 2 and its Tables 2 and 3."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from padless.bench.group_sizes import Point, balanced_grid, full_grid, quick_grid
from padless.bench.measure import measure_grouped
from padless.bench.report import table
from padless.bench.report.bounds import UNITS, bounds_tables
from padless.bench.results import AXES, Record, accelerations, baseline_of, correlation_table, memory_savings
from padless.bench.session import Session

GRIDS = {"quick": quick_grid, "balanced": balanced_grid, "full": full_grid}
# Above this many points, there is one line per (M, groups) instead of one per point.
_MAX_POINT_LINES = 40
# Characters that the columns M, N, K and groups take, and those of a contender's time.
_AXES_WIDTH = 34
_TIME_WIDTH = 12
_ORDER = ("padless", "padless_on_padded", "pad", "pad_then_padless", "deepgemm_on_padded", "pad_then_deepgemm")


def grid(name: str, seed: int) -> list[Point]:
    """14 points ("quick"), 72 ("balanced") or the paper's 576 ("full")."""
    return GRIDS[name]()


def measure_at(session: Session, point: Point) -> Record:
    """padless, padding + the same GEMM, and peers."""
    return session.with_floor(measure_grouped(session.grouped(point), session.peers, session.timer))


def draw(records: table.Records, path: Path) -> Path:
    """Figure 2."""
    from padless.bench.report.figures import draw_figure2

    return draw_figure2(records, path)


def tables(records: table.Records, sessions: table.Sessions, width: int) -> Sequence[table.Table | str]:
    """Points, the comparisons, what limits allow, the correlations and equality of bits."""
    baseline = baseline_of(records)
    if len(records) <= _MAX_POINT_LINES:
        shown = _point_tables(records, baseline, width)
    else:
        shown = [_aggregate_table(records, baseline)]
    shown[-1] = replace(shown[-1], caption=table.caption(records, sessions))
    found: list[table.Table | str] = [
        *shown,
        table.summary_table(records),
        *bounds_tables(records, ("floor", UNITS), sessions),
    ]
    title = f"Table 2: correlation with acceleration over {baseline} (%)"
    found.append(_correlation(title, records, accelerations(records, baseline)))
    title = "Table 3: correlation with memory saving (%)"
    found.append(_correlation(title, records, memory_savings(records)))
    identical = [record["bitwise_identical"] for record in records if "bitwise_identical" in record]
    if identical:
        found.append(f"Valid rows bitwise identical to pad + the same GEMM: {sum(identical)} of {len(identical)}")
    return found


def _saved(heading: str) -> table.Column:
    return table.Column(heading, table.SAVED.values, 1, average=fmean)


def _gains(baseline: str) -> Callable[[table.Records], list[float]]:
    return lambda part: [gain for gain in accelerations(part, baseline) if math.isfinite(gain)]


def _point_tables(records: table.Records, baseline: str, width: int) -> list[table.Table]:
    """One line per point: results first, then the times of as many contenders a table as the width allows."""
    columns = [*table.axes(*AXES), table.time("padless", "padless us"), table.TFLOPS]
    columns += [table.Column("accel. %", _gains(baseline), 1), _saved("memory %"), table.Column("bits", text=_bits)]
    shown = [table.table_of("Points, valid rows", columns, table.by_point(records))]
    names = sorted({name for record in records for name in record["gpu"]}, key=_column_order)
    per_table = max(2, (width - _AXES_WIDTH) // _TIME_WIDTH)
    return shown + table.time_tables(records, names, AXES, per_table, lambda name: name.replace("_", " "))


def _column_order(name: str) -> tuple[int, str]:
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)


def _bits(part: table.Records) -> str:
    same = part[0].get("bitwise_identical")
    return "-" if same is None else "same" if same else "DIFFER"


def _aggregate_table(records: table.Records, baseline: str) -> table.Table:
    def faster(part: table.Records) -> list[float]:
        return [1 + gain / 100 for gain in _gains(baseline)(part)]

    columns = [*table.axes("M", "groups"), table.POINTS, table.TFLOPS, table.Column("faster, geomean", faster, 3)]
    columns += [table.Column("smallest", faster, 3, average=min), _saved("memory %")]
    return table.table_of(f"By M and groups, over {baseline}", columns, table.by_axes(records, ("M", "groups")))


def _correlation(title: str, records: table.Records, values: Sequence[float]) -> table.Table:
    names = (*AXES, "value")
    matrix: Any = correlation_table(records, values)
    rows = [[name, *(table.number(value, 4) for value in row)] for name, row in zip(names, matrix, strict=True)]
    return table.Table(title, table.labels("", *names), rows)
