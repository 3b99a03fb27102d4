"""The demo's picture: the rows every expert got, and the rows that padding would have added behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from padless.demo.layer import PADDED_TO, padded_rows
from padless.formats import round_up

COLOURS = ("#33658a", "#2f9c95", "#5b8c3e", "#c99a1b", "#7a5195", "#5d6d7e")  # white text reads on each
PADDING = {"facecolor": "#ffffff", "edgecolor": "#c0392b", "hatch": "//////", "linewidth": 0.8}
BAR = 0.7
INK, FAINT = "#222222", "#8a8a8a"


def draw_padding(sizes: list[int], path: Path, subtitle: str) -> None:
    """Write a PNG to path. sizes: rows per expert."""
    import matplotlib

    matplotlib.use("Agg")  # files only: a screen is never needed
    from matplotlib import pyplot as plt

    style = {"font.size": 10, "text.color": INK, "axes.labelcolor": INK, "hatch.linewidth": 0.7}
    with plt.rc_context(style):
        height = 3.5 + 0.42 * len(sizes)
        figure = plt.figure(figsize=(12, height), dpi=140, facecolor="white")
        grid = figure.add_gridspec(
            2, 2, height_ratios=[1.15, 0.42 * len(sizes)], width_ratios=[2.4, 1],
            left=0.1, right=0.975, top=1 - 1.1 / height, bottom=0.62 / height, hspace=0.5, wspace=0.09,
        )  # fmt: skip
        _memory(figure.add_subplot(grid[0, :]), sizes)
        strips = figure.add_subplot(grid[1, 0])
        _strips(strips, sizes)
        _last_tiles(figure.add_subplot(grid[1, 1], sharey=strips), sizes)
        _heading(figure, height, sizes, subtitle)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def _heading(figure: Any, height: float, sizes: list[int], subtitle: str) -> None:
    rows, padded = sum(sizes), padded_rows(sizes)
    more = f"{(padded - rows) / rows:.1%}" if rows else "0%"
    top = 1 - 0.3 / height
    figure.text(0.012, top, "Where padding would have gone", fontsize=16, fontweight="bold", va="center")
    figure.text(
        0.985, top, f"{rows:,} rows routed · {padded - rows:,} rows of padding avoided ({more})",
        fontsize=11, ha="right", va="center",
    )  # fmt: skip
    figure.text(0.012, 1 - 0.58 / height, subtitle, fontsize=9.5, color=FAINT, va="center")


def _memory(axes: Any, sizes: list[int]) -> None:
    """The activation matrix twice, rows left to right: as padless reads it and as a padded copy."""
    start = start_padded = 0
    for g, size in enumerate(sizes):
        padded = round_up(size, PADDED_TO)
        axes.barh(1, size, left=start, height=BAR, color=_colour(g), edgecolor="white", linewidth=0.6)
        axes.barh(0, size, left=start_padded, height=BAR, color=_colour(g), edgecolor="white", linewidth=0.6)
        _padding(axes, 0, start_padded + size, padded - size)
        if size > 0.03 * sum(sizes):
            axes.text(start + size / 2, 1, str(g), color="white", ha="center", va="center", fontweight="bold")
        start, start_padded = start + size, start_padded + padded
    axes.set_yticks([1, 0], ["padless", f"padded to {PADDED_TO}"])
    axes.set_ylim(-0.45, 1.45)
    axes.set_xlim(0, max(start_padded, 1))
    axes.set_title("The activations in memory, expert after expert (hatched: padding)", loc="left", fontsize=10.5)
    _bare(axes, "row")


def _strips(axes: Any, sizes: list[int]) -> None:
    """One strip per expert, on a grid of the tiles that a padded layout is made of."""
    longest = max(max(padded_rows([size]) for size in sizes), PADDED_TO)
    for g, size in enumerate(sizes):
        padded = padded_rows([size])
        axes.barh(g, size, height=BAR, color=_colour(g))
        _padding(axes, g, size, padded - size)
        text = f"{size:,} row{'s' * (size != 1)}" + (f"  + {padded - size} of padding" if padded > size else "")
        axes.text(padded + 0.01 * longest, g, text, va="center", fontsize=9)
    axes.set_xlim(0, longest * 1.34)
    axes.set_xticks(range(0, longest + 1, PADDED_TO * max(1, round(longest / PADDED_TO / 8))))
    axes.set_xticks(range(0, longest + 1, PADDED_TO), minor=True)
    axes.grid(axis="x", which="both", color="#e4e4e4", linewidth=0.6)
    axes.set_yticks(range(len(sizes)), [f"expert {g}" for g in range(len(sizes))])
    axes.set_ylim(len(sizes) - 0.45, -0.55)
    axes.set_title(f"Rows of every expert (grid: tiles of {PADDED_TO} rows)", loc="left", fontsize=10.5)
    _bare(axes, "rows of this expert")


def _last_tiles(axes: Any, sizes: list[int]) -> None:
    """Only the last tile of every expert, where the padding is: wide enough to see its share."""
    for g, size in enumerate(sizes):
        if size == 0:
            axes.text(2, g, "no rows, no tile", va="center", fontsize=9, color=FAINT)
            continue
        used = size - (round_up(size, PADDED_TO) - PADDED_TO)
        axes.barh(g, used, height=BAR, color=_colour(g))
        _padding(axes, g, used, PADDED_TO - used)
        axes.text(
            PADDED_TO + 3, g, f"{used / PADDED_TO:.0%} used", va="center", fontsize=9, color=INK
        )  # fmt: skip
    axes.set_xlim(0, PADDED_TO * 1.27)
    axes.set_xticks(range(0, PADDED_TO + 1, 32))
    axes.tick_params(labelleft=False)
    axes.set_title("Its last tile, close up", loc="left", fontsize=10.5)
    _bare(axes, "row in the tile")


def _padding(axes: Any, y: float, start: int, rows: int) -> None:
    if rows:  # an empty bar would still draw its edge
        axes.barh(y, rows, left=start, height=BAR, **PADDING)


def _colour(group: int) -> str:
    return COLOURS[group % len(COLOURS)]


def _bare(axes: Any, x_label: str) -> None:
    axes.set_axisbelow(True)
    axes.set_xlabel(x_label, fontsize=9, color=FAINT)
    axes.tick_params(axis="x", labelsize=8.5, colors=FAINT, which="both", length=0)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
