"""Gain of the grouped NVFP4 kernel by products of K = 96 on a B300, by the clock.

    python tools/clock_k96.py            the tables of docs/timing_b300.md
    python tools/clock_k96.py --write    the same, put into the page and a record

tcgen05.mma of FP4 has a form with K = 96 on sm_103a, which takes as many cycles as one of K = 64 by what NVIDIA states:
1.5 times the rate. The emulator does not execute it. So the kernel's tile runs as it is, from the same ring of the same
bytes, on a B200's clock whose tensor pipe is as much faster; its other units, and the reads of shared memory, stay.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence

import torch

from clock_h200 import MEASURED
from clock_page import Tables, model_digest, write_block
from clock_sm100 import FEW, MANY, STAGE
from padless.emulator.fake_driver import driver_of
from padless.emulator.timing import B200, timed
from padless.emulator.timing.rates import Chip
from padless.emulator.timing.units import mma_cycles
from padless.formats import NVFP4
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
from padless.ops.grouped_gemm import group_offsets, grouped_gemm
from padless.quantization.quantize import quantize

RECORD = MEASURED / "clock" / "2026-11-28-sm103-k96.json"
TOOLS = ("clock_sm100.py", "clock_k96.py")
SOURCE = "NVIDIA: 15 PFLOP/s of dense FP4 of a B300, 10 of a B200"
# Of the tensor pipe's rate: K = 64, a stage of 256 as 96 + 96 + 64, K = 96 alone (768 of K as eight products).
RATES = {"K = 64": 1.0, "96 + 96 + 64": 4 / 3, "K = 96": 1.5}
TILES = ((2, 256), (1, 256), (2, 128))  # CTAs, columns
FEEDS = (1.0, 1.5)  # of the rate into a multiprocessor
MMA_BYTES, K_BYTES = 32, 16  # of K: codes of a product of K = 64, scales of a row a stage
# Triton's Gluon examples on a GB300, NVFP4, PFLOP/s: M = N, then by K's form; K is 16384 or 8192, of the last 16128 or
# 7680. triton-lang/triton, python/examples/gluon/K96_EXPLORATION.md and K96_PERFORMANCE.md, 2026-08-24.
PUBLISHED = {8192: (6.412, 7.026, 7.270), 16384: (6.644, 7.233, 7.921)}
PUBLISHED_SMS, SAMPLED_GHZ = 152, 1.425  # of a GB300; its clock after a run of K = 96, at 1357 W


def chip_with(rate: float, feed: float = 1.0) -> Chip:
    """A B200 with another rate of the tensor pipe, and of L2's feed."""
    changed = B200.changed("stated", SOURCE, tensor_bytes_per_clk=rate * B200["tensor_bytes_per_clk"])
    return changed.changed("stated", "a what-if", l2_feed=feed * B200["l2_feed"])


def config_of(cta_group: int, columns: int) -> Sm100GroupedConfig:
    """A tile of 128 rows a CTA."""
    return Sm100GroupedConfig(cta_group, False, columns)


def tile_cycles(config: Sm100GroupedConfig, stages: int, chips: Sequence[Chip]) -> list[float]:
    """Cycles of one tile of so many stages, on each chip."""
    offs, k = group_offsets([config.tile_m]), stages * STAGE * NVFP4.codes_per_byte
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(config.tile_m, k, generator=generator)
    b = torch.randn(1, config.tile_n, k, generator=generator)
    rows = quantize(a, NVFP4, scale_layout="blocked_groups", offs=offs)
    weights = quantize(b, NVFP4, kind="weight", scale_layout="blocked")
    driver, found = driver_of("emulator:sm_100a"), []
    for chip in chips:
        with driver.configured(machine=timed(chip, record=False), num_sms=config.cluster):
            grouped_gemm(rows, weights, offs, backend="emulator:sm_100a", config=config)
        assert driver.last_result is not None
        found.append(driver.last_result.timeline.cycles)
    return found


def stage_cycles(config: Sm100GroupedConfig, chips: Sequence[Chip]) -> list[float]:
    """Cycles of a stage, 256 of K, on each chip."""
    few, many = (tile_cycles(config, stages, chips) for stages in (FEW, MANY))
    return [(long - short) / (MANY - FEW) for short, long in zip(few, many, strict=True)]


def stage_bytes(config: Sm100GroupedConfig) -> int:
    """Bytes into a multiprocessor a stage: codes of its rows and of its share of the columns, and scales: of its rows,
    and of all columns."""
    return (128 + config.mma_n // config.cta_group) * STAGE + (128 + config.mma_n) * K_BYTES


def resources(config: Sm100GroupedConfig, chip: Chip) -> dict[str, float]:
    """Cycles of a stage that each unit is busy for, whatever the others do."""
    pair, products = config.cta_group == 2, STAGE // MMA_BYTES
    read = (128 + config.mma_n / config.cta_group) * MMA_BYTES / chip["mma_shared_bytes_per_clk"]
    scales = (128 + config.mma_n) * K_BYTES / chip["cp_bytes_per_clk"]
    return {
        "tensor pipe": products * mma_cycles(chip, 128, config.mma_n, MMA_BYTES, pair, a_in_shared=False) + scales,
        "shared memory": products * (read + (chip["mma_pair_extra"] if pair else 0)) + scales,
        "copy engine": stage_bytes(config) / STAGE * chip["tma_row"],
        "L2's feed": stage_bytes(config) / chip["l2_feed"],
    }


def tiles_table() -> Iterator[str]:
    """Cycles of a stage by K's form, and what those of K = 96 are made of, as Markdown."""
    units = list(resources(config_of(*TILES[0]), B200))
    yield f"| tile, CTAs | feed, B/clk | {' | '.join(RATES)} | gain | of K = 96: {' | '.join(units)} | binds |"
    yield "|---" * (4 + len(RATES) + len(units)) + "|"
    for tile in TILES:
        config = config_of(*tile)
        for feed in FEEDS:
            found = stage_cycles(config, [chip_with(rate, feed) for rate in RATES.values()])
            busy = resources(config, chip_with(RATES["K = 96"], feed))
            binds = max(busy, key=lambda unit: busy[unit])
            yield (
                f"| {config.tile_m} x {config.tile_n}, {config.cluster} | {feed * B200['l2_feed']:.0f} | "
                + " | ".join(f"{cycles:.0f}" for cycles in found) + f" | {found[0] / found[-1]:.2f} | "
                + " | ".join(f"{cycles:.0f}" for cycles in busy.values()) + f" | {binds} |"
            )  # fmt: skip


def published_table() -> Iterator[str]:
    """Published rates of a pair's tiles of 256 x 256, and cycles of its stages at the clock that was sampled."""
    cycles = f"cycles a stage at {SAMPLED_GHZ} GHz: {' | '.join(RATES)}"
    yield f"| published, M = N; PFLOP/s | {' | '.join(RATES)} | gain | {cycles} | K = 96, B/clk |"
    yield "|---" * (3 + 2 * len(RATES)) + "|"
    for size, flops in PUBLISHED.items():
        found = [2 * 256**3 * (PUBLISHED_SMS / 2) / pf / 1e6 * SAMPLED_GHZ for pf in flops]
        cells = [*(f"{pf:g}" for pf in flops), f"{flops[-1] / flops[0]:.2f}", *(f"{each:.0f}" for each in found)]
        yield f"| {size} | {' | '.join(cells)} | {stage_bytes(config_of(2, 256)) / found[-1]:.0f} |"


def k96_tables() -> Iterator[str]:
    """Both tables."""
    yield from tiles_table()
    yield ""
    yield from published_table()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments, say = parser.parse_args(), Tables()
    for line in k96_tables():
        say(line)
    if arguments.write:
        write_block("k96", say.lines)
        RECORD.write_text(json.dumps({"model": model_digest(*TOOLS), "lines": say.lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
