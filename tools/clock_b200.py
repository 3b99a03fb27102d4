"""The clock's B200 against published cycles: single products, and main loops of one CTA."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from padless.emulator.timing import Chip
from padless.emulator.timing.loops import Loop, loop_of, period
from padless.emulator.timing.units import mma_cycles, mma_latency

PUBLISHED = Path(__file__).resolve().parents[1] / "docs" / "measured" / "clock"
CHAIN = 256  # products one after the other in an interval's measurement
CLOCK_GHZ = 1.965  # of one busy multiprocessor: nothing limits power


@dataclass(frozen=True)
class Error:
    """Relative errors of predictions, prediction / measurement - 1."""

    values: tuple[float, ...]

    @property
    def mape(self) -> float:
        """Mean of the magnitudes."""
        return sum(map(abs, self.values)) / len(self.values)

    @property
    def bias(self) -> float:
        """Mean."""
        return sum(self.values) / len(self.values)

    @property
    def largest(self) -> float:
        """Largest magnitude."""
        return max(map(abs, self.values))

    def quantile(self, share: float) -> float:
        """Magnitude that ``share`` of them do not exceed."""
        ordered = sorted(map(abs, self.values))
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    def row(self, name: str) -> str:
        """A line of a Markdown table."""
        return (
            f"| {name} | {len(self.values)} | {self.mape:.1%} | {self.quantile(0.5):.1%} | {self.quantile(0.9):.1%} | "
            f"{self.largest:.1%} | {self.bias:+.1%} |"
        )


def rows_of(name: str) -> list[dict[str, str]]:
    """Rows of a published table, without its first, which says where it is from."""
    with (PUBLISHED / name).open() as lines:
        next(lines)
        return list(csv.DictReader(lines))


def product_errors(chip: Chip, held_out: bool | None = None) -> tuple[Error, Error]:
    """Errors of intervals and of latencies; ``held_out``: of kinds that no constant was fitted to, of the others, or
    all.

    The constants come from kinds BF16 and E4M3; S8, F4, MXF8 and MXF4 are held out."""
    intervals, latencies = [], []
    for row in rows_of("b200-products.csv"):
        fitted = row["kind"] in ("BF16", "E4M3")
        if held_out is not None and held_out == fitted:
            continue
        m, n, pair, shared = int(row["m"]), int(row["n"]), row["ctas"] == "2", row["a"] == "shared"
        rows = m // (2 if pair else 1)
        cycles = mma_cycles(chip, rows, n, 32, pair, shared)
        pipe = max(rows * n * 32 / chip["tensor_bytes_per_clk"], 0) if pair and rows == 64 else n / 2
        latency = pipe + mma_latency(chip, rows, pair, shared)
        predicted = ((CHAIN - 1) * cycles + latency + chip["mma_issue"]) / CHAIN
        intervals.append(predicted / float(row["interval"]) - 1)
        if row["latency"]:
            latencies.append(latency / float(row["latency"]) - 1)
    return Error(tuple(intervals)), Error(tuple(latencies))


@dataclass(frozen=True)
class MeasuredLoop:
    """One published main loop: ``cycles`` of a stage."""

    loop: Loop
    kind: str
    cycles: float


def measured_loops(chip: Chip) -> list[MeasuredLoop]:
    """All of them."""
    out = []
    for row in rows_of("b200-loops.csv"):
        size = 2 if row["type"] == "BF16" else 1
        m, n, k = (int(row[name]) for name in ("tile_m", "tile_n", "tile_k"))
        loop = loop_of(m, n, k * size, mma_cycles(chip, m, n, 32, False, True), int(row["stages"]))
        out.append(MeasuredLoop(loop, row["type"], float(row["ms"]) * 1e6 * CLOCK_GHZ / (131072 // k)))
    return out


def loop_errors(chip: Chip, loops: Sequence[MeasuredLoop]) -> Error:
    """Errors of the law."""
    return Error(tuple(period(chip, each.loop) / each.cycles - 1 for each in loops))


LOOP_RATES = {
    "tma_row": (1.2, 1.8, 0.05), "stream_bytes_per_clk": (36, 60, 1), "mma_least": (30, 60, 2),
    "stage_floor": (150, 220, 5), "ring_latency": (500, 1000, 25), "ring_load": (1.0, 3.0, 0.1),
    "ring_products": (0.8, 2.0, 0.1),
}  # fmt: skip


def fit_loops(chip: Chip, loops: Sequence[MeasuredLoop], rounds: int = 3) -> Chip:
    """The chip with the loop's rates that fit best, one after the other."""
    for _ in range(rounds):
        for name, (low, high, step) in LOOP_RATES.items():
            candidates = [low + i * step for i in range(round((high - low) / step) + 1)]
            tried = {v: loop_errors(chip.changed("fitted", "", **{name: v}), loops).mape for v in candidates}
            chip = chip.changed("fitted", "", **{name: min(tried, key=lambda v: tried[v])})
    return chip
