"""The clock's H200 against the records of this project: tile times by emulation, then whole calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch

from padless.bench.results import COPY, READ
from padless.emulator.fake_driver import driver_of
from padless.emulator.timing import Chip, Timeline, timed
from padless.emulator.timing.chip import Call, TileTimes, call_time, first_touches
from padless.formats import FP8_BLOCK
from padless.kernels.schedule import has_half_tiles, tiles
from padless.kernels.sm90_fp8.config import Problem, Sm90Fp8Config, select_config
from padless.ops.grouped_gemm import group_offsets, grouped_gemm
from padless.quantization.quantize import quantize

UNIT = 64  # rows of one wgmma
MEASURED = Path(__file__).resolve().parents[1] / "docs" / "measured"
Shape = tuple[int, int, int]  # rows and columns of a CTA's tile, CTAs of a cluster


def run_tiles(shape: Shape, rows: int, count: int, k_blocks: int, chip: Chip) -> Timeline:
    """The timeline of one cluster that computes ``count`` tiles with ``rows`` rows, each of a group of its own."""
    generator = torch.Generator().manual_seed(0)
    block_m, block_n, cluster = shape
    k = 128 * k_blocks
    a = quantize(torch.randn(rows * count, k, generator=generator), FP8_BLOCK)
    b = quantize(torch.randn(count, block_n * cluster, k, generator=generator), FP8_BLOCK, kind="weight")
    config = Sm90Fp8Config(block_m=block_m, block_n=block_n, cluster_n=cluster)
    driver = driver_of("emulator")
    with driver.configured(machine=timed(chip), num_sms=cluster, raise_on_reports=True):
        grouped_gemm(a, b, group_offsets([rows] * count), backend="emulator", config=config)
    result = driver.last_result
    assert result is not None
    timeline: Timeline = result.timeline
    return timeline


def tile_times(shape: Shape, chip: Chip) -> TileTimes:
    """Cycles of every sort of tile (units of 64 rows) of a kernel, from three short runs each.

    The period is the difference of two lengths of K, past the ring's first filling; what a second and third tile add to
    one, beyond their K blocks, is what lies between two tiles."""
    period, between = {}, {}
    start = end = 0.0
    for units in range(1, shape[0] // UNIT + 1):
        short, long = (run_tiles(shape, units * UNIT, 1, blocks, chip) for blocks in (8, 20))
        three = run_tiles(shape, units * UNIT, 3, 8, chip)
        period[units] = (long.cycles - short.cycles) / 12
        between[units] = (three.cycles - short.cycles) / 2 - 8 * period[units]
        start = short.window()[0]
        end = short.cycles - short.window()[0] - 8 * period[units]
    return TileTimes(start, max(end - max(between.values()), 0.0), period, between)


def call_of(sizes: Sequence[int], n: int, k: int, shape: Shape, raster_m: int, num_sms: int) -> Call:
    """Work of a chip for a grouped product with an output of 16 bits."""
    block_m, block_n, cluster = shape
    workers = num_sms // cluster
    ends = [sum(sizes[: g + 1]) for g in range(len(sizes))]
    half_tiles = workers if has_half_tiles(block_m) else None
    order = list(tiles(ends, ends[-1], n, block_m, block_n * cluster, raster_m, half_tiles))
    widths = [min(block_n * cluster, n - tile.column) for tile in order]
    loads = first_touches(
        ((t.row, t.rows * k * (1 + 4 / 128)), ((t.group, t.column), width * k * (1 + 4 / 128**2)))
        for t, width in zip(order, widths, strict=True)
    )
    padded = -(-n // (block_n * cluster)) * block_n * cluster
    return Call(
        [-(-tile.rows // UNIT) for tile in order], -(-k // 128),
        float(sum(-(-size // UNIT) * UNIT for size in sizes) * padded * k), workers, loads,
        [2.0 * t.rows * width for t, width in zip(order, widths, strict=True)],
        128.0 * -(-k // 128) * sum(-(-tile.rows // UNIT) * UNIT + block_n for tile in order) / workers,
    )  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One recorded time: groups' sizes, N, K, the tile with its raster, and microseconds."""

    sizes: tuple[int, ...]
    n: int
    k: int
    shape: Shape
    raster_m: int
    us: float


def _records(name: str) -> Iterator[dict[str, Any]]:
    with (MEASURED / name).open() as lines:
        for line in lines:
            yield json.loads(line)


def chosen(m: int, n: int, k: int, groups: int) -> tuple[Shape, int]:
    """The tile that the library takes, and its raster."""
    config = select_config(Problem(m, n, k, groups))
    return (config.block_m, config.block_n, config.cluster_n), config.raster_m


def grid_points(name: str) -> list[Point]:
    """Points of a record of calls (paper, decode, dense)."""
    points = []
    for record in _records(name):
        if record["kind"] == "session" or "padless" not in record.get("gpu", {}):
            continue
        at, sizes = record["point"], record.get("sizes")
        sizes = tuple(sizes) if sizes else (at["M"],)
        shape, raster = chosen(sum(sizes), at["N"], at["K"], len(sizes))
        points.append(Point(sizes, at["N"], at["K"], shape, raster, record["gpu"]["padless"]["us"]))
    return points


def memory_rates(name: str, least: float = 2e8) -> tuple[float, float]:
    """GB/s read and written, from the reads and the copies of as many bytes that were timed beside the calls of a record
    (of ``least`` bytes or more): the slopes of their times. A copy reads one half and writes the other. This library's
    times are not looked at."""
    found = [record for record in _records(name) if record["kind"] != "session" and record["bytes"] >= least]
    sizes = [record["bytes"] for record in found]
    read, copy = (
        linear_regression(sizes, [1e3 * record["gpu"][what]["us"] for record in found]).slope for what in (READ, COPY)
    )  # ns a byte
    return 1 / read, 1 / (2 * copy - read)


def tile_points(name: str) -> list[Point]:
    """Points of a record of tiles, each with every tile."""
    points = []
    known: dict[str, tuple[Shape, int]] = {}
    for record in _records(name):
        if record["kind"] == "session":
            known = {
                key: ((t["block_m"], t["block_n"], t["cluster_n"]), t["raster_m"]) for key, t in record["tiles"].items()
            }
            continue
        at = record["point"]
        for key, value in record["gpu"].items():
            points.append(Point(tuple(record["sizes"]), at["N"], at["K"], *known[key], value["us"]))
    return points


def predict(points: Sequence[Point], times: dict[Shape, TileTimes], chip: Chip) -> list[float]:
    """Microseconds of each."""
    return [
        call_time(call_of(p.sizes, p.n, p.k, p.shape, p.raster_m, chip.num_sms), times[p.shape], chip).ns / 1e3
        for p in points
    ]
