"""The clock's H200 on kernels that nothing was fitted to: MXFP8, and the bf16 kernel with all its formats, against the
record of `padless bench formats` at prefill sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from clock_b200 import Error
from clock_h200 import MEASURED
from padless.emulator.fake_driver import driver_of
from padless.emulator.timing import H200, Chip, Timeline, timed
from padless.emulator.timing.chip import Call, TileTimes, call_time, first_touches
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, NVFP4
from padless.kernels.sm90_bf16.host import select_config
from padless.kernels.sm90_mxfp8.host import Sm90Mxfp8Config
from padless.ops.grouped_gemm import group_offsets, grouped_gemm
from padless.quantization.quantize import quantize

RECORD = "2026-11-21-h200-formats.jsonl"
FORMATS = {"FP8_BLOCK": FP8_BLOCK, "MXFP8": MXFP8, "MXFP4": MXFP4, "NVFP4": NVFP4}
BYTES = {"BF16": 2.0, "FP8_BLOCK": 1.0, "MXFP8": 1.0, "MXFP4": 0.5, "NVFP4": 0.5}  # of a value that is loaded
PAIRS = (
    "MXFP8 x MXFP8, sm90_mxfp8_grouped_gemm", "NVFP4 x NVFP4", "MXFP4 x MXFP4", "BF16 x NVFP4", "BF16 x MXFP4",
    "FP8_BLOCK x NVFP4", "FP8_BLOCK x MXFP4",
)  # fmt: skip
SORTS = (64, 128)  # rows of a tile that are timed; tiles of fewer rows count as the next


@dataclass(frozen=True)
class Kernel:
    """A pair of formats with its configuration. element_bytes: of what the tensor cores multiply."""

    pair: str
    config: Any

    @property
    def element_bytes(self) -> int:
        """Two for the bf16 kernel."""
        return 1 if isinstance(self.config, Sm90Mxfp8Config) else 2


def kernel_of(pair: str, m: int, n: int, groups: int) -> Kernel:
    """The kernel that a record's name stands for."""
    if "sm90_mxfp8" in pair:
        return Kernel(pair, Sm90Mxfp8Config(block_m=128, block_n=128))
    a, b = pair.split(" x ")
    return Kernel(pair, select_config(a, b, m, n, groups))


def run_tiles(kernel: Kernel, rows: int, count: int, k_blocks: int, chip: Chip) -> Timeline:
    """One CTA that computes ``count`` tiles with ``rows`` rows."""
    generator = torch.Generator().manual_seed(0)
    k = 128 * k_blocks
    a_name, b_name = kernel.pair.split(",")[0].split(" x ")
    a = torch.randn(rows * count, k, generator=generator)
    operand = a.bfloat16() if a_name == "BF16" else quantize(a, FORMATS[a_name], kind="activation")
    weights = torch.randn(count, kernel.config.block_n, k, generator=generator)
    b = quantize(weights, FORMATS[b_name], kind="weight")
    driver = driver_of("emulator")
    with driver.configured(machine=timed(chip, record=False), num_sms=1):
        grouped_gemm(operand, b, group_offsets([rows] * count), backend="emulator", config=kernel.config)
    result = driver.last_result
    assert result is not None
    timeline: Timeline = result.timeline
    return timeline


@lru_cache(maxsize=64)
def tile_times(kernel: Kernel, chip_name: str = "H200") -> TileTimes:
    """As of clock_h200.tile_times."""
    chip = {"H200": H200}[chip_name]
    period, between = {}, {}
    start = end = 0.0
    for rows in SORTS:
        short, long = (run_tiles(kernel, rows, 1, blocks, chip) for blocks in (8, 16))
        three = run_tiles(kernel, rows, 3, 8, chip)
        period[rows] = (long.cycles - short.cycles) / 8
        between[rows] = (three.cycles - short.cycles) / 2 - 8 * period[rows]
        start = short.window()[0]
        end = short.cycles - start - 8 * period[rows]
    return TileTimes(start, max(end - max(between.values()), 0.0), period, between)


def call_of(kernel: Kernel, sizes: list[int], n: int, k: int, memory: float) -> Call:
    """Groups from large to small, as they are handed out; ``memory``: bytes read and written in all."""
    block_m, block_n = kernel.config.block_m, kernel.config.block_n
    order = [
        (group, row, min(block_m, size - row), column)
        for group, size in sorted(enumerate(sizes), key=lambda item: -item[1])
        for row in range(0, size, block_m)
        for column in range(0, n, block_n)
    ]
    stores = [2.0 * rows * min(block_n, n - column) for *_, rows, column in order]
    # Values read at least once, of which each has an equal share of the bytes.
    values = first_touches(
        (((group, row), rows * k), ((group, column), min(block_n, n - column) * k))
        for group, row, rows, column in order
    )
    a_byte = (memory - sum(stores)) / sum(values)
    products = float(sum(sizes) * n * k * kernel.element_bytes)
    tiles = [min(s for s in SORTS if s >= rows) for *_, rows, _ in order]
    a_name, b_name = kernel.pair.split(",")[0].split(" x ")
    received = sum(rows * BYTES[a_name] + block_n * BYTES[b_name] for rows in tiles) * k / H200.num_sms
    return Call(
        tiles, -(-k // 128), products, H200.num_sms, [v * a_byte for v in values], stores, received,
        kernel.element_bytes == 2,
    )  # fmt: skip


def examine(pairs: tuple[str, ...] = PAIRS) -> Iterator[tuple[str, Error, TileTimes]]:
    """(pair, errors at the prefill points, its tiles) of every pair of formats."""
    with (MEASURED / RECORD).open() as lines:
        records = [json.loads(line) for line in lines]
    points = [r for r in records if r["kind"] == "formats" and r["point"]["case"] == "prefill"]
    for pair in pairs:
        errors = []
        for record in points:
            at = record["point"]
            kernel = kernel_of(pair, at["M"], at["N"], at["groups"])
            call = call_of(kernel, record["sizes"], at["N"], at["K"], record["bytes"][pair])
            ns = call_time(call, tile_times(kernel), H200).ns
            errors.append(ns / 1e3 / record["gpu"][pair]["us"] - 1)
        yield pair, Error(tuple(errors)), tile_times(kernel)
