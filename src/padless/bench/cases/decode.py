"""Groups of few rows: padless against DeepGEMM's masked GEMM, MSLK, the memory floor, and a copy and a read of as many
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from padless.bench.group_sizes import DecodePoint, Point, decode_grid, decode_sizes
from padless.bench.measure import measure_decode
from padless.bench.problem import make_grouped
from padless.bench.report.bounds import bounds_tables
from padless.bench.report.table import (
    OF,
    POINTS,
    Records,
    Sessions,
    Table,
    axes,
    by_axes,
    caption,
    measured,
    points_table,
    ratio,
    stacked,
    summary_table,
    table_of,
    time,
    with_least,
)
from padless.bench.results import COPY, READ, Record
from padless.bench.session import Session

LIMITS = ("floor", COPY, READ)
_PEERS = ("deepgemm_masked", "mslk")


def grid(name: str, seed: int) -> list[DecodePoint]:
    """180 points ("full") or twelve."""
    return decode_grid(quick=name == "quick")


def start(session: Session) -> Callable[[DecodePoint], Record]:
    """padless, peers, the copy and the read."""
    seed = session.settings.seed

    def measure(decode: DecodePoint) -> Record:
        sizes = decode_sizes(decode, seed)
        point = Point(sum(sizes), decode.N, decode.K, decode.groups)
        problem = make_grouped(point, sizes, seed, "cuda")
        record = measure_decode(problem, session.peers, session.timer)
        return record | {"floor_us": session.floor_us(point.flops, point.bytes)}

    return measure


def tables(records: Records, sessions: Sessions, width: int) -> Sequence[Table]:
    """Points, a summary by number of groups, the comparisons and what limits allow."""
    names = ("padless", "deepgemm_masked", "mslk", "floor", COPY, READ)
    shown = [points_table("Decode sizes: GPU time (us)", records, names, LIMITS)]
    peers = [ratio(f"{stacked(name)}\n/ padless", name) for name in measured(records, _PEERS)]
    shares = [ratio(OF[name], name) for name in measured(records, LIMITS)]
    for title, columns in (("By groups: peers", peers), ("By groups: share of limits", shares)):
        if columns:
            edges = [
                time("padless", "shortest\nus", average=min),
                time("padless", "longest\nus", average=max),
            ]
            all_of_them = [*axes("groups"), POINTS, *edges, *with_least(columns)]
            title = f"{title} (geomean, and the smallest)"
            shown.append(table_of(title, all_of_them, by_axes(records, ("groups",)), 2))
    shown[-1] = replace(shown[-1], caption=caption(records, sessions))
    return [*shown, summary_table(records), *bounds_tables(records, LIMITS, sessions)]
