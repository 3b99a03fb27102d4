"""Tables of `padless bench chain`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from padless.bench.results import Record, ratios, time_us
from padless.bench.tables import NO_SESSIONS, caption, narrow_table, number, print_failures
from padless.testing.timing import geomean

PADLESS = "padless"
ORDINARY = "padless, ordinary launches"
PROGRAMMATIC = ", programmatic"
DEEPGEMM = "deepgemm_masked"
MLP = "mlp"
MLP_ORDINARY = "mlp, ordinary launches"

_TIMES = (
    (PADLESS, "padless"),
    (ORDINARY, "ordinary\nlaunches"),
    (DEEPGEMM, "deepgemm\nmasked"),
    (DEEPGEMM + PROGRAMMATIC, "the same,\nprogramm."),
    (MLP, "mlp"),
    (MLP_ORDINARY, "mlp, ord.\nlaunches"),
    ("floor", "floor"),
)
# (heading, numerator, denominator)
_RATIOS = (
    ("ordinary\n/ padless", ORDINARY, PADLESS),
    ("deepgemm\n/ padless", DEEPGEMM, PADLESS),
    ("the same,\nprogramm.", DEEPGEMM + PROGRAMMATIC, PADLESS),
    ("mlp, ord.\n/ mlp", MLP_ORDINARY, MLP),
)


def print_chain(
    console: Console, records: Sequence[Record], sessions: Mapping[str, Record] = NO_SESSIONS
) -> None:
    """A line a point, a line for each number of groups and size of the weights, one for all, and what went wrong."""
    if not records:
        console.print("nothing measured")
        return
    console.print(_points(records))
    summary = _by_weights(records)
    summary.caption = caption(records, sessions)
    console.print(summary)
    print_failures(console, records)


def _points(records: Sequence[Record]) -> Table:
    table = narrow_table("Chains of calls in a CUDA graph: GPU time (us) of a call, of a pair for mlp", 1)
    for heading in ("groups", "rows", "N", "K", "calls", *(heading for _, heading in _TIMES)):
        table.add_column(heading, justify="right")
    table.add_column("ordinary\n/ padless", justify="right")
    for record in records:
        point = record["point"]
        table.add_row(
            *(str(point[axis]) for axis in ("groups", "rows", "N", "K")),
            str(record["calls"]),
            *(number(time_us(record, "gpu", name), 1) for name, _ in _TIMES),
            number(geomean(ratios([record], "gpu", ORDINARY, PADLESS)), 3),
        )
    return table


def _by_weights(records: Sequence[Record]) -> Table:
    """By groups and megabytes of weight codes of a call: padless's time, what ordinary launches cost a call, ratios."""
    table = narrow_table("By groups and MB of weights a call (geomean, and the least)", 1)
    for heading in ("groups", "MB", "points", "padless\nus", "ordinary\n+ us"):
        table.add_column(heading, justify="right")
    for heading, _, _ in _RATIOS:
        table.add_column(heading, justify="right")
        table.add_column("least", justify="right")
    parts: dict[tuple[int, float], list[Record]] = {}
    for record in records:
        parts.setdefault((record["point"]["groups"], _weight_mb(record)), []).append(record)
    for (groups, megabytes), part in sorted(parts.items()):
        table.add_row(str(groups), f"{megabytes:.0f}", *_summary(part))
    table.add_row("all", "", *_summary(records))
    return table


def _weight_mb(record: Record) -> float:
    point = record["point"]
    return float(point["groups"] * point["N"] * point["K"] / 1e6)


def _summary(records: Sequence[Record]) -> list[str]:
    pairs = [(time_us(r, "gpu", PADLESS), time_us(r, "gpu", ORDINARY)) for r in records]
    own = [us for us, _ in pairs if us is not None]
    more = [other - us for us, other in pairs if us is not None and other is not None]
    cells = [str(len(records)), number(geomean(own), 1), number(sum(more) / len(more) if more else None, 2)]
    for _, numerator, denominator in _RATIOS:
        values = ratios(records, "gpu", numerator, denominator)
        cells += [number(geomean(values), 3), number(min(values, default=math.nan), 3)]
    return cells
