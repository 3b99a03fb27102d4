"""Tables and the picture of `padless bench formats`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from padless.bench.results import Record, failures, time_us
from padless.bench.tables import narrow_table
from padless.testing.timing import geomean

BASELINE = "torch_bf16"
_AXES = ("case", "M", "N", "K", "groups", "rows")
# Characters that these columns take, and the widest heading of a contender's.
_AXES_WIDTH = 44
_NAME_WIDTH = 11


def contenders_of(records: Sequence[Record]) -> list[str]:
    """Names of everything that was timed, in the order of first appearance, torch last."""
    names = list(dict.fromkeys(name for record in records for name in record["gpu"]))
    return [name for name in names if BASELINE not in name] + [name for name in names if BASELINE in name]


def speedups(records: Sequence[Record], name: str) -> list[float]:
    """t(torch's bf16 product) / t(name) of every record that has both."""
    pairs = ((time_us(r, "gpu", BASELINE), time_us(r, "gpu", name)) for r in records)
    return [base / own for base, own in pairs if base is not None and own]


def floor_shares(records: Sequence[Record], name: str) -> list[float]:
    """Time that the contender's own bytes take at the rate of a copy, over its time."""
    pairs = ((r["floors_us"].get(name), time_us(r, "gpu", name)) for r in records)
    return [floor / own for floor, own in pairs if floor is not None and own]


def print_formats(console: Console, records: Sequence[Record]) -> None:
    """Times of every point, a summary for each case, and what is missing or wrong."""
    if not records:
        console.print("nothing measured")
        return
    names = contenders_of(records)
    for table in _time_tables(records, names, console.width):
        console.print(table)
    console.print(_summary(records, names))
    missing = list(dict.fromkeys(name for record in records for name in record["missing"]))
    if missing:
        console.print(f"no kernel on this GPU for: {', '.join(missing)}", highlight=False)
    for line in failures(records)[:10]:
        console.print(f"[red]{line}[/red]")


def _time_tables(records: Sequence[Record], names: Sequence[str], width: int) -> list[Table]:
    """One line per point, with the times of as many contenders a table as the width allows."""
    per_table = max(2, (width - _AXES_WIDTH) // (_NAME_WIDTH + 2))
    result = []
    for first in range(0, len(names), per_table):
        part = names[first : first + per_table]
        table = narrow_table("GPU time (us)")
        for axis in _AXES:
            table.add_column(axis, justify="right")
        for name in part:
            table.add_column(_heading(name), justify="right", max_width=_NAME_WIDTH)
        for record in records:
            times = (time_us(record, "gpu", name) for name in part)
            cells = ("-" if us is None else f"{us:.1f}" for us in times)
            table.add_row(*(str(record["point"][axis]) for axis in _AXES), *cells)
        result.append(table)
    return result


def _heading(name: str) -> str:
    """A name whose every word fits into a column."""
    return " ".join(word if len(word) <= _NAME_WIDTH else word.replace("_", " ") for word in name.split())


def by_case(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records of prefill, of decode, and of the competition's shapes together."""
    cases: dict[str, list[Record]] = {}
    for record in records:
        case = record["point"]["case"]
        cases.setdefault(case if case in ("prefill", "decode") else "competition", []).append(record)
    return cases


def _summary(records: Sequence[Record], names: Sequence[str]) -> Table:
    table = narrow_table(
        "Times faster than torch's bf16 product; and share of the copy rate that its bytes reach"
    )
    for heading in ("case", "contender", "points", "faster, geomean", "smallest", "largest", "of its floor"):
        table.add_column(heading, justify="left" if heading in ("case", "contender") else "right")
    for case, part in by_case(records).items():
        for name in names:
            gains, shares = speedups(part, name), floor_shares(part, name)
            if gains and name != BASELINE:
                cells = (geomean(gains), min(gains), max(gains), geomean(shares))
                table.add_row(case, name, str(len(gains)), *(f"{value:.2f}" for value in cells))
    return table


def draw_formats(records: Sequence[Record], path: Path, console: Console) -> Path | None:
    """Writes a PNG: for each case and contender, times faster than torch's bf16 product. Says why if it cannot."""
    names = [name for name in contenders_of(records) if name != BASELINE]
    if not any(speedups(records, name) for name in names):
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        console.print("no figure: it needs matplotlib (pip install 'padless[bench]')", markup=False)
        return None
    cases = by_case(records)
    figure = Figure(figsize=(4.6 * len(cases), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (case, part) in zip(
        figure.subplots(1, len(cases), squeeze=False)[0], cases.items(), strict=True
    ):
        _panel(axis, case, part, names)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    console.print(f"figure: {path}", highlight=False, markup=False)
    return path


def _panel(axis: Any, case: str, records: Sequence[Record], names: Sequence[str]) -> None:
    """A bar for the geomean of every contender, a dot for every point."""
    for row, name in enumerate(names):
        gains = speedups(records, name)
        if gains:
            axis.barh(row, geomean(gains), color=f"C{row % 10}", alpha=0.5)
            axis.scatter(gains, [row] * len(gains), s=10, color=f"C{row % 10}")
    axis.set_yticks(range(len(names)), names, fontsize="small")
    axis.invert_yaxis()
    axis.axvline(1.0, color="0.4", linewidth=0.8)
    axis.set_xlabel("times faster than torch's bf16 grouped product")
    axis.set_title(f"{case}, {len(records)} points")
