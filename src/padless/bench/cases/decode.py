"""Groups of few rows: padless against DeepGEMM's masked GEMM, MSLK, the memory floor, and a copy and a read of as many
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from padless.bench.group_sizes import DecodePoint, decode_grid
from padless.bench.measure import measure_decode
from padless.bench.problem import make_decode
from padless.bench.report import table
from padless.bench.report.bounds import bounds_tables
from padless.bench.results import COPY, READ, Record
from padless.bench.session import Session

LIMITS = ("floor", COPY, READ)
_PEERS = ("deepgemm_masked", "mslk")


def grid(name: str, seed: int) -> list[DecodePoint]:
    """180 points ("full") or twelve."""
    return decode_grid(quick=name == "quick")


def measure_at(session: Session, point: DecodePoint) -> Record:
    """padless, peers, the copy and the read."""
    problem = make_decode(point, session.settings.seed, "cuda")
    return session.with_floor(measure_decode(problem, session.peers, session.timer))


def tables(records: table.Records, sessions: table.Sessions, width: int) -> Sequence[table.Table]:
    """Points, a summary by number of groups, the comparisons and what limits allow."""
    names = ("padless", "deepgemm_masked", "mslk", "floor", COPY, READ)
    shown = [table.points_table("Decode sizes: GPU time (us)", records, names, LIMITS)]
    peers = [table.ratio(f"{table.stacked(name)}\n/ padless", name) for name in table.measured(records, _PEERS)]
    shares = [table.ratio(table.OF[name], name) for name in table.measured(records, LIMITS)]
    for title, columns in (("By groups: peers", peers), ("By groups: share of limits", shares)):
        if columns:
            edges = [
                table.time("padless", "shortest\nus", average=min),
                table.time("padless", "longest\nus", average=max),
            ]
            all_of_them = [*table.axes("groups"), table.POINTS, *edges, *table.with_least(columns)]
            title = f"{title} (geomean, and the smallest)"
            shown.append(table.table_of(title, all_of_them, table.by_axes(records, ("groups",)), 2))
    shown[-1] = replace(shown[-1], caption=table.caption(records, sessions))
    return [*shown, table.summary_table(records), *bounds_tables(records, LIMITS, sessions)]
