"""Predictions of the clock for MXFP8 training steps on a B200, at problems that others published times of.

    python tools/clock_training.py            the tables of docs/timing_b200_training.md
    python tools/clock_training.py --write    the same, put into the page and a record

A step is its launches in a row, each programmatic: quantizing passes, forward product, input gradient, weight gradient.
Products are extrapolated from emulated tiles, of sm100_grouped as in clock_sm100.py, of sm100_mxfp8_wgrad here. Passes
take their bytes, at memory's rate at best, and at worst at the rate that torchao's quantizer was measured at.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import torch

from clock_h200 import MEASURED
from clock_ladder import GHZ as LOADED_GHZ
from clock_page import Tables, model_digest, write_block
from clock_sm100 import FEW, MANY, Problem, call_of, chosen, tile_times
from padless.emulator.fake_driver import driver_of
from padless.emulator.timing import B200, Timeline, timed
from padless.emulator.timing.chip import Call, TileTimes, call_time, first_touches
from padless.kernels.sm100_mxfp8_wgrad.config import Mxfp8WgradConfig, select_config
from padless.ops.grouped_gemm import group_offsets
from padless.ops.grouped_gemm_wgrad_mxfp8 import grouped_gemm_wgrad_mxfp8
from padless.quantization.mx_rows_columns import quantize_mx_rows_columns

RECORD = MEASURED / "clock" / "2026-11-28-sm100-training.json"
TOOLS = ("clock_ladder.py", "clock_sm100.py", "clock_training.py")
CLOCKS = (B200.clocks_ghz[1], B200.clocks_ghz[0], LOADED_GHZ)  # the band's ends, and what fits kernels under full load
CODE = 1 + 1 / 32  # bytes of an element in MXFP8, with its share of a scale
BLOCK = 128  # tokens of a stage of the weight gradient

Times = tuple[float, float, float]  # microseconds at CLOCKS


@dataclass(frozen=True)
class Linear:
    """One grouped layer, rows (M, K) times weights (groups, N, K): rows in groups of equal size."""

    rows: int
    groups: int
    n: int
    k: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of the groups."""
        return tuple(self.rows // self.groups + (g < self.rows % self.groups) for g in range(self.groups))


# torchao's README of MXFP8 MoE training, pytorch/ao at 36027d8 (2026-08-21). Its breakdown by kernel, us on a B200 at
# 1000 W, torchao 0.16.0+gitaa38ae104; by its rows and columns: products, quantizers with the kernels that move scales.
BROKEN_DOWN = Linear(131072, 8, 2048, 7168)
TORCHAO = {
    "x along K and along the tokens": (525.3, 29.7, 472.2, 207.9),
    "weights along K and along N": (65.4, 13.3, 70.7, 12.9),
    "forward product": (1671.2,),
    "dy along N and along the tokens": (144.4, 19.4, 141.5, 199.8),
    "input gradient": (1683.4,),
    "weight gradient": (2103.3,),
}
# Its quantizer of x along K: bytes over microseconds.
TORCHAO_GB_PER_S = BROKEN_DOWN.rows * BROKEN_DOWN.k * (2 + CODE) / TORCHAO["x along K and along the tokens"][0] / 1e3
# The autograd function, us forward and backward on a B200, torchao 0.14.0+gitc7b8e13da.
TORCHAO_STEPS = {
    Linear(128000, groups, n, k): us
    for (n, k), found in {
        (8192, 5120): {1: 23867.00, 2: 23359.00, 4: 23945.50, 8: 22170.60},
        (2048, 7168): {1: 10996.00, 2: 11283.40, 4: 9919.36, 8: 10397.20},
    }.items()
    for groups, us in found.items()
}
# cuDNN's fused MXFP8 kernels in a whole expert layer on a GB200: rows, experts, H, I, us; marin-community/marin#7282,
# 2026-07-17. Six products with their activations and the quantizers of x and of the output's gradient.
CUDNN_LAYER = (262144, 64, 2560, 1280, 8777.0)


# ------------------------------------------------------------------------------------------------- weight gradients


def run_wgrad(config: Mxfp8WgradConfig, stages: int, tiles: int = 1) -> Timeline:
    """One multiprocessor, or a pair, that computes so many tiles of a weight gradient, one after the other."""
    generator = torch.Generator().manual_seed(0)
    tokens = stages * BLOCK
    offs = group_offsets([tokens])
    dy, x = (
        quantize_mx_rows_columns(torch.randn(tokens, features, generator=generator), offs, rows=False)[1]
        for features in (config.tile, config.tile * tiles)
    )
    driver = driver_of("emulator:sm_100a")
    with driver.configured(machine=timed(B200, record=False, sms=config.cta_group)):
        grouped_gemm_wgrad_mxfp8(dy, x, offs, backend="emulator:sm_100a", config=config)
    result = driver.last_result
    assert result is not None
    timeline: Timeline = result.timeline
    return timeline


@lru_cache(maxsize=2)
def wgrad_times(config: Mxfp8WgradConfig) -> TileTimes:
    """Cycles of its tiles, a CTA or pair each: between two of them lie all of one's stores and the next one's start."""
    one, long, three = run_wgrad(config, FEW), run_wgrad(config, MANY), run_wgrad(config, FEW, 3)
    period = (long.cycles - one.cycles) / (MANY - FEW)
    between = (three.cycles - one.cycles) / 2 - FEW * period
    start = one.window()[0]
    return TileTimes(start, max(one.cycles - start - FEW * period, 0.0), {0: period}, {0: between})


def wgrad_config(linear: Linear) -> Mxfp8WgradConfig:
    """The one that the call chooses."""
    return select_config(linear.rows, linear.n, linear.k, linear.groups, B200.num_sms)


def wgrad_call(linear: Linear, config: Mxfp8WgradConfig) -> Call:
    """Tiles in the grid's order, columns first. Those that run at the same time read an operand's part once, and later
    ones read it again: a group's operands are as large as L2."""
    size, workers = max(linear.sizes), B200.num_sms // config.cta_group
    tiles = [
        (group, row, column)
        for group in range(linear.groups)
        for row in range(0, linear.n, config.tile)
        for column in range(0, linear.k, config.tile)
    ]
    part = size * config.tile * CODE
    loads: list[float] = []
    for first in range(0, len(tiles), workers):
        together = tiles[first : first + workers]
        loads += first_touches((((g, row), part), ((g, column), part)) for g, row, column in together)
    stores = [2.0 * config.tile**2] * len(tiles)
    products = float(linear.rows * linear.n * linear.k)
    return Call([0] * len(tiles), ceil(size / BLOCK), products, workers, loads, stores)


# ------------------------------------------------------------------------------------------------- parts


def in_a_row(call: Call, times: TileTimes) -> Times:
    """Microseconds of a call among others."""
    launch = B200["launch_ns"] - B200["row_ns"]
    fast, slow, loaded = ((call_time(call, times, B200, ghz).ns - launch) / 1e3 for ghz in CLOCKS)
    return fast, slow, loaded


def product(linear: Linear) -> Times:
    """rows (M, K) times weights, (M, N); the input gradient is that of N and K exchanged."""
    problem = Problem("", "MXFP8", linear.sizes, linear.n, linear.k)
    config = chosen(problem)
    return in_a_row(call_of(problem, config), tile_times("MXFP8", config))


def transposed(linear: Linear) -> Linear:
    """The input gradient's product."""
    return Linear(linear.rows, linear.groups, linear.k, linear.n)


def weight_gradient(linear: Linear) -> Times:
    """dY^T X of every group, in bfloat16."""
    config = wgrad_config(linear)
    return in_a_row(wgrad_call(linear, config), wgrad_times(config))


def traffic(read: float, written: float) -> Times:
    """A pass of so many bytes. Not the clock's frequency, but the rate of memory is what it may be slower by."""
    best = read / B200["memory_gb_per_s"] / 1e3 + written / B200["memory_write_gb_per_s"] / 1e3
    worst = (read + written) / TORCHAO_GB_PER_S / 1e3
    row = B200["row_ns"] / 1e3
    return best + row, worst + row, worst + row


def both_ways(elements: float, reads: int = 1) -> Times:
    """A quantizer along both dimensions of values of 16 bits."""
    return traffic(2.0 * elements * reads, 2 * CODE * elements)


def added(*parts: Times) -> Times:
    """One after the other."""
    fast, slow, loaded = (sum(part[i] for part in parts) for i in range(3))
    return fast, slow, loaded


def parts_of(linear: Linear) -> dict[str, Times]:
    """Every part of a step, by the names of TORCHAO. Weights are read once for each of their two copies."""
    return {
        "x along K and along the tokens": both_ways(linear.rows * linear.k),
        "weights along K and along N": both_ways(linear.groups * linear.n * linear.k, reads=2),
        "forward product": product(linear),
        "dy along N and along the tokens": both_ways(linear.rows * linear.n),
        "input gradient": product(transposed(linear)),
        "weight gradient": weight_gradient(linear),
    }


def layer_parts(rows: int, experts: int, h: int, i: int) -> dict[str, Times]:
    """The six products of an expert layer's step, and its passes, the weights' quantization not among them."""
    first, second = Linear(rows, experts, 2 * i, h), Linear(rows, experts, h, i)
    products = [*map(product, (first, second, transposed(first), transposed(second)))]
    activated = traffic(rows * 2 * i * 2, rows * i * CODE)
    # dH and Z are read; dZ is written along rows and tokens, H along the tokens
    back = traffic(rows * (i * 2 + 2 * i * 2), rows * (2 * 2 * i + i) * CODE)
    return {
        "six products": added(*products, *map(weight_gradient, (first, second))),
        "passes": added(both_ways(rows * h), both_ways(rows * h), activated, back),
    }


# ------------------------------------------------------------------------------------------------- tables


def cells(times: Times) -> str:
    """Three columns."""
    return " | ".join(f"{us:.0f}" for us in times)


def training_tables() -> Iterator[str]:
    """Predictions next to what was published, as Markdown; microseconds."""
    clocks = f"at {CLOCKS[0]:g} GHz | at {CLOCKS[1]:g} GHz | at {CLOCKS[2]:g} GHz"
    yield f"| part | {clocks} | torchao, published |"
    yield "|---" * 5 + "|"
    parts = parts_of(BROKEN_DOWN)
    for name, times in parts.items():
        yield f"| {name} | {cells(times)} | {' + '.join(f'{us:g}' for us in TORCHAO[name])} |"
    yield f"| sum | {cells(added(*parts.values()))} | {sum(sum(us) for us in TORCHAO.values()):.0f} |"
    yield ""
    yield f"| rows, groups, N, K | {clocks} | torchao, published | published to the last |"
    yield "|---" * 6 + "|"
    for linear, us in TORCHAO_STEPS.items():
        times = added(*parts_of(linear).values())
        shape = f"{linear.rows}, {linear.groups}, {linear.n}, {linear.k}"
        yield f"| {shape} | {cells(times)} | {us:.0f} | {us / times[2]:.2f} |"
    yield ""
    rows, experts, hidden, intermediate, us = CUDNN_LAYER
    yield f"| a layer of {rows} rows, {experts} experts, H {hidden}, I {intermediate} | {clocks} | cuDNN, published |"
    yield "|---" * 5 + "|"
    found = layer_parts(rows, experts, hidden, intermediate)
    for name, times in found.items():
        yield f"| {name} | {cells(times)} | |"
    yield f"| sum | {cells(added(*found.values()))} | {us:.0f} |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments, say = parser.parse_args(), Tables()
    for line in training_tables():
        say(line)
    if arguments.write:
        write_block("training", say.lines)
        RECORD.write_text(json.dumps({"model": model_digest(*TOOLS), "lines": say.lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
