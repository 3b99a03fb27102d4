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

import math
from collections.abc import Mapping, Sequence

from padless.bench.group_sizes import padded_rows
from padless.bench.report.table import Column, Table, labels, number
from padless.bench.results import COMPARISONS, NOT_PEERS, Record, Spread, spread, time_us

UNIT_ROWS = 64
UNITS = "floor in 64-row units"
_NONE = Spread(0, math.nan, math.nan, math.nan)


def limit_us(record: Record, limit: str, sessions: Mapping[str, Record]) -> float | None:
    """A limit of a record in microseconds; None where it was not measured or its session is not known.

    sessions: session records by id, for the dense ceiling that 64-row units need.
    """
    if limit != UNITS:
        return time_us(record, "gpu", limit)
    floor = time_us(record, "gpu", "floor")
    dense_tflops = sessions.get(record.get("session", ""), {}).get("ceilings", {}).get("dense_tflops")
    if floor is None or not dense_tflops:
        return None
    sizes = record.get("sizes", [record["point"]["M"]])  # a dense product is one group
    rows = sum(sizes)
    flops = record["flops"] * padded_rows(sizes, UNIT_ROWS) / rows if rows else 0.0
    # Bytes are those of the floor, so what they take is in it already.
    return max(floor, 1e-6 * flops / dense_tflops)


def bounds(
    records: Sequence[Record], limits: Sequence[str], sessions: Mapping[str, Record]
) -> dict[str, dict[str, Spread | None]]:
    """For each peer whose GPU time at least one record has together with one of the limits: its time over that of
    "padless", and over each limit's (None where no record has it).
    """
    found = {}
    for title, clock, peer, own in COMPARISONS:
        if clock == "gpu" and peer not in NOT_PEERS:
            times = [time_us(record, clock, peer) for record in records]
            line = {}
            for limit in (own, *limits):
                pairs = zip(times, (limit_us(record, limit, sessions) for record in records), strict=True)
                line[limit] = spread([us / least for us, least in pairs if us is not None and least])
            if any(line[limit] for limit in limits):
                found[title.removesuffix(f" / {own}")] = line
    return found


def bounds_tables(records: Sequence[Record], limits: Sequence[str], sessions: Mapping[str, Record]) -> list[Table]:
    """Bounds by the peers' times, if there are peers: one table or none."""
    lines = bounds(records, limits, sessions)
    if not lines:
        return []
    shown = ["padless", *(limit for limit in limits if any(line[limit] for line in lines.values()))]
    columns = labels("peer")
    for heading in shown:
        columns += [Column(f"/ {heading}", width=12), Column("smallest")]
    rows = []
    for title, line in lines.items():
        values = [value for limit in shown for value in (line[limit] or _NONE)[1:3]]
        rows.append([title, *(number(value, 3) for value in values)])
    title = "What the peers' times allow: a peer's time / that of padless, and / each limit"
    return [Table(title, columns, rows, between=2)]
