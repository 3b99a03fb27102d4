"""Tables of benchmark records as data: `padless.bench.report.terminal` shows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from padless.bench.results import COPY, READ, Record, ratios, summarise, tflops, time_us
from padless.testing.timing import geomean

Records = Sequence[Record]
Sessions = Mapping[str, Record]
Average = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Column:
    """A column: of a row's records the numbers of those that have one, or a text.

    values: the numbers. average: what a row shows of several. digits, sign, unit: how it shows it; sign is "" or "+".
    text: instead of numbers. totals: whether rows over all records have it too. left, width: on a terminal.
    """

    heading: str
    values: Callable[[Records], Sequence[float]] = lambda records: ()
    digits: int = 2
    unit: str = ""
    average: Average = geomean
    sign: str = ""
    totals: bool = True
    text: Callable[[Records], str] | None = None
    left: bool = False
    width: int | None = None

    def cell(self, records: Records, average: Average | None = None, digits: int | None = None) -> str:
        """The text of a cell for these records; "-" where none of them has a number."""
        if self.text is not None:
            return self.text(records)
        values = self.values(records)
        if not values:
            return "-"
        value = values[0] if len(values) == 1 else (average or self.average)(values)
        shown = number(value, self.digits if digits is None else digits, self.sign)
        return shown if shown == "-" else shown + self.unit


@dataclass(frozen=True)
class Table:
    """Headings and cells. between: spaces between columns on a terminal, 0 for a frame."""

    title: str
    columns: Sequence[Column]
    rows: list[list[str]] = field(default_factory=list)
    between: int = 0
    caption: str = ""


def number(value: float | None, digits: int, sign: str = "") -> str:
    """A table's cell: "-" for what is not there."""
    return "-" if value is None or not math.isfinite(value) else f"{value:{sign}.{digits}f}"


def table_of(title: str, columns: Sequence[Column], groups: Iterable[Records], between: int = 0) -> Table:
    """A row for each group of records."""
    return Table(title, columns, [[column.cell(part) for column in columns] for part in groups], between)


def by_point(records: Records) -> list[Records]:
    """Each record by itself."""
    return [[record] for record in records]


def time_tables(
    records: Records,
    names: Sequence[str],
    point: Sequence[str],
    per_table: int,
    heading: Callable[[str], str],
    between: int = 0,
    width: int | None = None,
) -> list[Table]:
    """GPU times of every point, so many contenders a table. point: its coordinates."""
    parts = [names[first : first + per_table] for first in range(0, len(names), per_table)]
    columns = [[*axes(*point), *(time(name, heading(name), width=width) for name in part)] for part in parts]
    return [table_of("GPU time (us)", part, by_point(records), between) for part in columns]


def by_axes(records: Records, axes: Sequence[str]) -> list[Records]:
    """Records that have the same coordinates together, in the coordinates' order."""
    parts: dict[tuple[int, ...], list[Record]] = {}
    for record in records:
        parts.setdefault(tuple(record["point"][axis] for axis in axes), []).append(record)
    return [parts[key] for key in sorted(parts)]


# --- columns ---------------------------------------------------------------------------------------------


def labels(*names: str, **style: object) -> list[Column]:
    """Columns of texts that are made elsewhere: the first to the left unless a style says otherwise."""
    return [Column(name, **{"left": i == 0, **style}) for i, name in enumerate(names)]  # type: ignore[arg-type]


def axes(*names: str, width: int | None = None) -> list[Column]:
    """Coordinates of a row's first point."""
    return [
        Column(name, text=lambda part, name=name: str(part[0]["point"][name]), width=width)  # type: ignore[misc]
        for name in names
    ]


POINTS = Column("points", text=lambda part: str(len(part)))


def times(records: Records, name: str) -> list[float]:
    """GPU times of a contender."""
    return [us for record in records if (us := time_us(record, "gpu", name)) is not None]


def time(name: str, heading: str | None = None, digits: int = 1, **style: object) -> Column:
    """GPU time of a contender in microseconds."""
    return Column(name if heading is None else heading, lambda part: times(part, name), digits, **style)  # type: ignore[arg-type]


def ratio(heading: str, top: str, bottom: str = "padless", digits: int = 3, **style: object) -> Column:
    """Time of one contender over that of another."""
    return Column(heading, lambda part: ratios(part, "gpu", top, bottom), digits, **style)  # type: ignore[arg-type]


def with_least(columns: Iterable[Column], heading: str = "smallest") -> list[Column]:
    """Each column, followed by the least of its numbers."""
    return [found for c in columns for found in (c, Column(heading, c.values, c.digits, c.unit, average=min))]


def measured(records: Records, names: Sequence[str]) -> list[str]:
    """Those contenders that some record has a time of."""
    return [name for name in names if times(records, name)]


TFLOPS = Column(
    "TFLOP/s", lambda records: [rate for r in records if (rate := tflops(r)) is not None], digits=0, totals=False
)
SAVED = Column("saved", lambda records: [r["memory_saving_percent"] for r in records], 1, "%", fmean, totals=False)

# --- tables that several kinds have ----------------------------------------------------------------------


def summary_table(records: Records) -> Table:
    """Every comparison with its points, geomean and extremes."""
    rows = [
        [title, str(points), *(number(value, 3) for value in values)]
        for title, (points, *values) in summarise(records).items()
    ]
    headings = labels("comparison", "points", "geomean", "smallest", "largest")
    return Table("How many times faster (ratios of times on the same inputs)", headings, rows)


# Headings of shares: a limit over the time of padless.
OF = {"floor": "of the\nfloor", COPY: "of a copy\nof as many\nbytes", READ: "of a read\nof as many\nbytes"}


def stacked(name: str) -> str:
    """A contender's name, one word a line, as columns are narrow."""
    return name.replace("_", " ") if len(name) < 10 else "\n".join(name.replace("_", " ").split())


def points_table(
    title: str, records: Records, names: Sequence[str], limits: Sequence[str], *, rate: bool = False
) -> Table:
    """One line per point: GPU times of what was measured among names, the rate, and limits over padless's time."""
    point = list(records[0]["point"]) if records else []
    present, limits = measured(records, names), measured(records, limits)
    columns = [*axes(*point), *(time(name, stacked(name)) for name in present), *([TFLOPS] if rate else [])]
    columns += [ratio(OF[limit], limit, digits=2) for limit in limits]
    between = 1 if len(point) + len(present) + len(limits) > 11 else 2
    return table_of(title, columns, by_point(records), between)


def caption(records: Records, sessions: Sessions) -> str:
    """The way L2 was flushed before every call, and the ceilings that make the floor, of the records' sessions."""
    ids = dict.fromkeys(record.get("session", "") for record in records)
    flushes = dict.fromkeys(_flush(sessions.get(name)) for name in ids)
    parts = [f"L2 flushed before every call: {' / '.join(flushes)}."] if ids else []
    ceilings = [sessions[name].get("ceilings", {}) for name in ids if name in sessions]
    rates = []
    for name, unit in (("dense_tflops", "TFLOP/s"), ("copy_gb_per_s", "GB/s")):
        values = [ceiling[name] for ceiling in ceilings if ceiling.get(name)]
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
