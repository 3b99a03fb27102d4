"""Figures of benchmark records: the paper's Figure 2, and bars of how many times faster contenders are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from padless.bench.results import Record, accelerations, baseline_of, memory_savings
from padless.testing.timing import geomean

_BASELINE_TITLES = {"pad_then_deepgemm": "padding + DeepGEMM", "pad_then_padless": "padding + the same GEMM"}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def draw_figure2(records: Sequence[Record], path: str | Path) -> Path:
    """Writes both panels as a PNG: (a) acceleration over padding and a padded GEMM, (b) memory saved, in percent.

    records: of `run_paper`, at least one. Every point is drawn; a line joins the means over K (a) and over N and K (b).
    """
    if not records:
        raise ValueError("records must hold at least one measured point to draw, got none")
    baseline = baseline_of(records)
    figure = _figure(12.0)
    left, right = figure.subplots(1, 2)
    _panel(left, records, accelerations(records, baseline), "N", "M")
    left.set_title(f"(a) acceleration over {_BASELINE_TITLES.get(baseline, baseline)}")
    left.set_ylabel("acceleration (%)")
    right.set_xscale("log", base=2)  # before the ticks, which it would replace
    _panel(right, records, memory_savings(records), "M", "groups")
    right.set_title("(b) memory saved by not padding groups to 128 rows")
    right.set_ylabel("rows not stored (%)")
    for axis in (left, right):
        axis.axhline(0.0, color="0.6", linewidth=0.8)
        axis.grid(alpha=0.3)
    return _saved(figure, Path(path))


def draw_bars(gains: Mapping[str, Mapping[str, Sequence[float]]], label: str, path: Path) -> Path:
    """Writes a PNG with a panel for each title: by name a bar for the geomean of its values and a dot for each."""
    figure = _figure(4.6 * len(gains))
    panels = figure.subplots(1, len(gains), squeeze=False)[0]
    for axis, (title, by_name) in zip(panels, gains.items(), strict=True):
        for row, values in enumerate(by_name.values()):
            if values:
                axis.barh(row, geomean(values), color=f"C{row % 10}", alpha=0.5)
                axis.scatter(values, [row] * len(values), s=10, color=f"C{row % 10}")
        axis.set_yticks(range(len(by_name)), list(by_name), fontsize="small")
        axis.invert_yaxis()
        axis.axvline(1.0, color="0.4", linewidth=0.8)
        axis.set_xlabel(label)
        axis.set_title(title)
    return _saved(figure, path)


def draw_lines(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], x: str, y: str, path: Path) -> Path:
    """Writes a PNG with a panel for each title: by name a line through points (x, y), both axes logarithmic."""
    across = min(5, len(panels))
    down = -(-len(panels) // across)
    figure = _figure(4.2 * across, 3.6 * down)
    axes = figure.subplots(down, across, squeeze=False).flatten()
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    for axis, (title, lines) in zip(axes, panels.items(), strict=False):
        for name, points in lines.items():
            index = names.index(name)
            axis.plot(*zip(*points, strict=True), color=f"C{index}", marker=_MARKERS[index], markersize=4, label=name)
        ticks = sorted({at for points in lines.values() for at, _ in points})
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_title(title)
        axis.grid(alpha=0.3, which="both")
        axis.set_xlabel(x)
        axis.set_ylabel(y)
    axes[0].legend(fontsize="small")
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    return _saved(figure, path)


def _figure(width: float, height: float = 4.8) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _saved(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def _panel(axis: Any, records: Sequence[Record], values: Sequence[float], x: str, series: str) -> None:
    """Values against point field `x`, one colour and marker per value of point field `series`.

    Points of different series stand next to each other, by up to 3% of x: x takes a few values only.
    """
    kinds = sorted({record["point"][series] for record in records})
    for index, kind in enumerate(kinds):
        pairs = [
            (record["point"][x], value)
            for record, value in zip(records, values, strict=True)
            if record["point"][series] == kind and math.isfinite(value)
        ]
        if not pairs:
            continue
        colour, marker = f"C{index}", _MARKERS[index % len(_MARKERS)]
        aside = 1.0 + 0.06 * (index / max(len(kinds) - 1, 1) - 0.5)
        at = [tick * aside for tick, _ in pairs]
        axis.scatter(at, [value for _, value in pairs], s=12, alpha=0.45, color=colour, marker=marker)
        ticks = sorted({tick for tick, _ in pairs})
        means = [fmean([value for x_value, value in pairs if x_value == tick]) for tick in ticks]
        axis.plot([tick * aside for tick in ticks], means, color=colour, marker=marker, label=f"{series} = {kind}")
    ticks = sorted({record["point"][x] for record in records})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel(x)
    axis.legend(fontsize="small")
