"""Predicted times of this library's grouped kernel on a B200, which it has never run on: the four problems of a
published NVFP4 grouped GEMM and large products. Run as a program it prints a Markdown table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import torch

from padless.emulator.fake_driver import driver_of
from padless.emulator.timing import B200, Timeline, timed
from padless.emulator.timing.chip import Call, TileTimes, band
from padless.formats import MXFP8, NVFP4
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig, select_grouped_config
from padless.ops.grouped_gemm import group_offsets, grouped_gemm
from padless.quantization.quantize import quantize

FORMATS = {"NVFP4": NVFP4, "MXFP8": MXFP8}
K_BLOCK = 256


@dataclass(frozen=True)
class Problem:
    """published_us: of another kernel at the same problem, where there is one, for the reader's eye only."""

    name: str
    fmt: str
    sizes: tuple[int, ...]
    n: int
    k: int
    published_us: float | None = None


PROBLEMS = (
    Problem("A", "NVFP4", (80, 176, 128, 72, 64, 248, 96, 160), 4096, 7168, 47.5),
    Problem("B", "NVFP4", (40, 76, 168, 72, 164, 148, 196, 160), 7168, 2048, 45.0),
    Problem("C", "NVFP4", (192, 320), 3072, 4096, 14.3),
    Problem("D", "NVFP4", (128, 384), 4096, 1536, 10.5),
    Problem("8192 cubed", "NVFP4", (8192,), 8192, 8192),
    Problem("8192 cubed", "MXFP8", (8192,), 8192, 8192),
)


def run_tiles(fmt: str, config: Sm100GroupedConfig, rows: int, count: int, k_blocks: int) -> Timeline:
    """One cluster that computes ``count`` tiles of ``rows`` rows each, every one of a group of its own."""
    generator = torch.Generator().manual_seed(0)
    offs, k = group_offsets([rows] * count), K_BLOCK * k_blocks
    layout = "blocked_groups"
    a = quantize(torch.randn(rows * count, k, generator=generator), FORMATS[fmt], scale_layout=layout, offs=offs)
    weights = torch.randn(count, config.cluster_n, k, generator=generator)
    b = quantize(weights, FORMATS[fmt], kind="weight", scale_layout="blocked")
    driver = driver_of("emulator:sm_100a")
    with driver.configured(machine=timed(B200, record=False), num_sms=config.cluster):
        grouped_gemm(a, b, offs, backend="emulator:sm_100a", config=config)
    result = driver.last_result
    assert result is not None
    timeline: Timeline = result.timeline
    return timeline


@lru_cache(maxsize=32)
def tile_times(fmt: str, config: Sm100GroupedConfig) -> TileTimes:
    """Cycles of whole tiles, in which a tile with fewer rows counts as a whole one."""
    rows = config.tile_m
    short, long = (run_tiles(fmt, config, rows, 1, blocks) for blocks in (4, 8))
    three = run_tiles(fmt, config, rows, 3, 4)
    period = (long.cycles - short.cycles) / 4
    between = (three.cycles - short.cycles) / 2 - 4 * period
    start = short.window()[0]
    end = short.cycles - start - 4 * period - between
    return TileTimes(start, max(end, 0.0), {0: period}, {0: between})


def predict(problem: Problem) -> tuple[Sm100GroupedConfig, TileTimes, float, float]:
    """(configuration, its tiles, microseconds at the highest and at the lowest clock)."""
    rows = sum(problem.sizes)
    config = select_grouped_config(rows, problem.n, len(problem.sizes))
    times = tile_times(problem.fmt, config)
    per_row = 2 if problem.fmt == "NVFP4" else 1  # values a byte
    columns = ceil(problem.n / config.cluster_n)
    tiles = [0] * sum(ceil(size / config.tile_m) * columns for size in problem.sizes)
    values = rows * problem.k + len(problem.sizes) * problem.n * problem.k
    memory = values / per_row * (1 + (1 / 8 if per_row == 2 else 1 / 32)) + 2 * rows * problem.n
    products = rows * problem.n * problem.k / per_row
    call = Call(tiles, ceil(problem.k / K_BLOCK), products, memory, B200.num_sms // config.cluster)
    fast, slow = band(call, times, B200)
    return config, times, fast / 1e3, slow / 1e3


def table() -> str:
    """Predictions, as Markdown."""
    lines = [
        "| problem | tile, CTAs | cycles of 256 of K, between tiles | predicted, us | published, us |",
        "|---|---|---|---|---|",
    ]
    for problem in PROBLEMS:
        config, times, fast, slow = predict(problem)
        published = "-" if problem.published_us is None else f"{problem.published_us:g}"
        lines.append(
            f"| {problem.fmt} {problem.name} | {config.tile_m} x {config.tile_n}, {config.cluster} | "
            f"{times.period[0]:.0f}, {times.between[0]:.0f} | {fast:.1f} to {slow:.1f} | {published} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
