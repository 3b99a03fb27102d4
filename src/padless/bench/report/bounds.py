"""Bounds by the peers' times: their ratios to a product that takes no longer than a limit.

A peer's time over padless's says how much faster padless is; the same time over a limit says how much faster anything
could be. Limits of a record, in microseconds:

    floor                  the larger of its FLOPs on valid rows at the dense ceiling and its bytes at the copy ceiling
    floor in 64-row units  the same with every group rounded up to 64 rows, the M of one wgmma: the limit
                           where rows of A are the wgmma's M and tiles never cross groups; bytes are those of the floor
    copy, read             of as many bytes, where they were measured (padless.bench.traffic)

The dense ceiling is that of the record's session: the fastest dense product with the same scales at 8192^3. It is
measured, not a law; a point may be a little faster than its floor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from padless.bench.group_sizes import padded_rows
from padless.bench.report.table import Column, Table, labels, number
from padless.bench.results import COMPARISONS, NOT_PEERS, Record, time_us
from padless.testing.timing import geomean

UNIT_ROWS = 64
UNITS = "floor in 64-row units"


@dataclass(frozen=True)
class Ratio:
    """A peer's time over something's, over all records that have both."""

    points: int
    geomean: float
    smallest: float


@dataclass(frozen=True)
class Bound:
    """One peer: its time over padless's, and over each limit's (None where no record has it)."""

    title: str
    padless: Ratio | None
    limits: dict[str, Ratio | None]


def limit_us(record: Record, limit: str, sessions: Mapping[str, Record]) -> float | None:
    """A limit of a record in microseconds; None where it was not measured or its session is not known.

    sessions: session records by id, for the dense ceiling that 64-row units need.
    """
    if limit == UNITS:
        return _floor_in_units_us(record, sessions.get(record.get("session", ""), {}))
    return time_us(record, "gpu", limit)


def _floor_in_units_us(record: Record, session: Record) -> float | None:
    floor = time_us(record, "gpu", "floor")
    dense_tflops = session.get("ceilings", {}).get("dense_tflops")
    if floor is None or not dense_tflops:
        return None
    sizes = record.get("sizes", [record["point"]["M"]])  # a dense product is one group
    rows = sum(sizes)
    flops = record["flops"] * padded_rows(sizes, UNIT_ROWS) / rows if rows else 0.0
    # Bytes are those of the floor, so what they take is in it already.
    return max(floor, 1e-6 * flops / dense_tflops)


def bounds(records: Sequence[Record], limits: Sequence[str], sessions: Mapping[str, Record]) -> list[Bound]:
    """A line for each peer whose GPU time at least one record has together with one of the limits."""
    found = []
    for title, clock, peer, own in COMPARISONS:
        if clock != "gpu" or peer in NOT_PEERS:
            continue
        times = [time_us(record, clock, peer) for record in records]
        ratios = {limit: _ratio(times, [limit_us(record, limit, sessions) for record in records]) for limit in limits}
        if any(ratios.values()):
            own_ratio = _ratio(times, [time_us(record, clock, own) for record in records])
            found.append(Bound(title.removesuffix(f" / {own}"), own_ratio, ratios))
    return found


def _ratio(times: Sequence[float | None], limits: Sequence[float | None]) -> Ratio | None:
    values = [time / limit for time, limit in zip(times, limits, strict=True) if time is not None and limit]
    return Ratio(len(values), geomean(values), min(values)) if values else None


def bounds_tables(records: Sequence[Record], limits: Sequence[str], sessions: Mapping[str, Record]) -> list[Table]:
    """Bounds by the peers' times, if there are peers: one table or none."""
    lines = bounds(records, limits, sessions)
    if not lines:
        return []
    limits = [limit for limit in limits if any(line.limits[limit] for line in lines)]
    columns = labels("peer")
    for heading in ("padless", *limits):
        columns += [Column(f"/ {heading}", width=12), Column("smallest")]
    rows = []
    for line in lines:
        found = [line.padless, *(line.limits[limit] for limit in limits)]
        values = [value for r in found for value in ((None, None) if r is None else (r.geomean, r.smallest))]
        rows.append([line.title, *(number(value, 3) for value in values)])
    title = "What the peers' times allow: a peer's time / that of padless, and / each limit"
    return [Table(title, columns, rows, between=2)]
