"""`padless tune` on Blackwell: times every tile of the grouped kernel next to the one that is chosen.

The choice there goes by predicted cycles (``select_grouped_config``), so nothing is stored: what is printed says where
they are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from padless.kernels.sm100_grouped.config import Sm100GroupedConfig, select_grouped_config
from padless.ops.grouped_gemm import grouped_gemm
from padless.testing.operands import Operands, make_operands
from padless.testing.timing import Timer

FORMATS = ("MXFP8", "NVFP4")
GROUPS, N, K = 8, 4096, 4096
ROWS = (8, 32, 64, 128, 192, 256, 512, 2048)  # of each group


@dataclass(frozen=True)
class Point:
    """GROUPS groups of ``rows`` rows each, N x K weights."""

    fmt: str
    rows: int


# Microseconds of every configuration on one point.
Clock = Callable[[Point, Sequence[Sm100GroupedConfig]], Sequence[float]]


def points() -> list[Point]:
    """Every format with every number of rows."""
    return [Point(fmt, rows) for fmt in FORMATS for rows in ROWS]


def tiles(rows: int) -> list[Sm100GroupedConfig]:
    """The chosen configuration for groups of ``rows`` rows, then all other tiles of a CTA, a pair and two pairs."""
    chosen = select_grouped_config(GROUPS * rows, N, GROUPS)
    others = [
        replace(chosen, cta_group=ctas, tokens_on_n=tokens_on_n, mma_n=n, multicast=multicast)
        for ctas, multicast in ((1, 1), (2, 1), (2, 2))
        for tokens_on_n in (False, True)
        for n in (32, 64, 128, 256)
        if n >= 128 or (tokens_on_n and multicast == 1)
    ]
    return [chosen, *(config for config in others if config != chosen)]


def name_of(config: Sm100GroupedConfig) -> str:
    """Such as "256 x 256" (tokens x columns of D) with a mark where two CTAs share the tile, or two pairs the tokens."""
    who = "" if config.cta_group == 1 else ", pair" if config.multicast == 1 else ", two pairs"
    return f"{config.tile_m} x {config.tile_n}{who}"


def compare(clock: Clock, advance: Callable[[], None]) -> dict[Point, Mapping[Sm100GroupedConfig, float]]:
    """Microseconds of every tile on every point, the chosen one first; ``advance`` is called after each point."""
    found: dict[Point, Mapping[Sm100GroupedConfig, float]] = {}
    for point in points():
        configs = tiles(point.rows)
        found[point] = dict(zip(configs, clock(point, configs), strict=True))
        advance()
    return found


def print_comparison(console: Console, found: Mapping[Point, Mapping[Sm100GroupedConfig, float]]) -> None:
    """For every point the chosen tile, the fastest one, and how much it would save."""
    table = Table(title=f"{GROUPS} groups, N = {N}, K = {K}: us", title_justify="left", box=None)
    for heading in ("format", "rows a group", "chosen", "us", "fastest", "us", "chosen / fastest"):
        table.add_column(heading, justify="right")
    for point, times in found.items():
        chosen, best = next(iter(times)), min(times, key=lambda config: times[config])
        own, fastest = times[chosen], times[best]
        cells = [name_of(chosen), f"{own:.1f}", name_of(best), f"{fastest:.1f}", f"{own / fastest:.3f}"]
        table.add_row(point.fmt, str(point.rows), *cells)
    console.print(table)


def gpu_clock(repeats: int) -> Clock:
    """Times them on the current GPU by a `products_clock`."""
    time = products_clock(repeats)

    def clock(point: Point, configs: Sequence[Sm100GroupedConfig]) -> list[float]:
        operands = make_operands(point.fmt, point.fmt, [point.rows] * GROUPS, N, K, seed=0, device="cuda")
        return time([(operands, config) for config in configs])

    return clock


def products_clock(repeats: int) -> Callable[[Sequence[tuple[Operands, Any]]], list[float]]:
    """Times products of (operands, configuration) on the current GPU, in turns, L2 flushed between calls: medians of
    ``repeats``.
    """
    timer = Timer(repeats=repeats, pause_s=0.01)

    def clock(products: Sequence[tuple[Operands, Any]]) -> list[float]:
        calls = {}
        for i, (o, config) in enumerate(products):
            out = torch.empty((o.a.shape[0], o.b.shape[1]), dtype=torch.bfloat16, device="cuda")
            calls[str(i)] = partial(grouped_gemm, o.a, o.b, o.offs, out=out, config=config)
        times = timer.gpu(calls)
        torch.cuda.empty_cache()
        return [timing.median_us for timing in times.values()]

    return clock
