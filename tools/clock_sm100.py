"""Predictions of the clock for this library's Blackwell kernels on a B200, which they have never run on.

    python tools/clock_sm100.py            the tables of docs/timing_b200.md
    python tools/clock_sm100.py --write    the same, put into the page and a record
    python tools/clock_sm100.py --tiles    cycles of every tile: the tables that ``select_config`` goes by

The tiles' cycles come from emulated clusters, the calls' times from the queue of tiles with memory behind it. Dense
products stand beside the final kernel of a published ladder, played by the same clock at one frequency.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

import torch

from clock_h200 import MEASURED
from clock_ladder import FIXED_NS, GHZ, PUBLISHED, SIZES, design_of
from clock_page import Tables, model_digest, write_block
from padless.emulator.fake_driver import driver_of
from padless.emulator.timing import B200, Timeline, timed
from padless.emulator.timing.chip import Call, TileTimes, band, call_time, first_touches
from padless.emulator.timing.roles import Design, bytes_from_memory, gemm_cycles
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, NVFP4, BlockScaledFormat
from padless.kernels.sm100_dense.config import HALF_N, DenseProblem, Sm100DenseConfig
from padless.kernels.sm100_dense.config import TILE_CYCLES as DENSE_CYCLES
from padless.kernels.sm100_dense.config import select_config as select_dense
from padless.kernels.sm100_grouped.config import TILE_CYCLES, Sm100GroupedConfig, select_grouped_config
from padless.ops.grouped_gemm import gemm, group_offsets, grouped_gemm
from padless.quantization.quantize import quantize

FORMATS = {
    "NVFP4": (NVFP4, NVFP4),
    "MXFP8": (MXFP8, MXFP8),
    "MXFP8 x MXFP4": (MXFP8, MXFP4),
    "FP8_BLOCK": (FP8_BLOCK, FP8_BLOCK),
}
RECORD = MEASURED / "clock" / "2026-11-22-sm100.json"
TOOLS = ("clock_ladder.py", "clock_sm100.py")
STAGE = 128  # bytes of K
CONTEST_GHZ = 1.5  # of the competition's own speed of light
CONTEST_CALLS = 15  # one after the other between its two events, each with operands of its own
FEW, MANY = 16, 28  # stages: past the first filling of the deepest ring
Config = Sm100DenseConfig | Sm100GroupedConfig


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
    Problem("decode, 32 x 16 rows", "NVFP4", (16,) * 32, 4096, 7168),
    Problem("decode, 32 x 64 rows", "NVFP4", (64,) * 32, 4096, 7168),
    Problem("prefill, 8 x 2048 rows", "NVFP4", (2048,) * 8, 4096, 7168),
    Problem("decode, 32 x 16 rows", "MXFP8", (16,) * 32, 4096, 7168),
    Problem("prefill, 8 x 2048 rows", "MXFP8", (2048,) * 8, 8192, 5120, 565.0),
    Problem("decode, 32 x 16 rows", "MXFP8 x MXFP4", (16,) * 32, 4096, 7168),
    Problem("prefill, 8 x 2048 rows", "MXFP8 x MXFP4", (2048,) * 8, 8192, 5120),
    Problem("decode, 32 x 16 rows", "FP8_BLOCK", (16,) * 32, 4096, 7168),
    Problem("prefill, 8 x 2048 rows", "FP8_BLOCK", (2048,) * 8, 8192, 5120),
)


# ------------------------------------------------------------------------------------------------- tiles


def run_tiles(fmt: str, config: Config, count: int, stages: int, rows: int = 0, pairs: int = 1) -> Timeline:
    """One cluster, or ``pairs`` of CTAs, that computes ``count`` tiles, of a group each (of the dense kernel: side by
    side), of ``rows`` rows, or whole ones."""
    generator = torch.Generator().manual_seed(0)
    k = stages * STAGE * (2 if fmt == "NVFP4" else 1)
    dense = isinstance(config, Sm100DenseConfig)
    whole, columns = config.tile if isinstance(config, Sm100DenseConfig) else (config.tile_m, config.cluster_n)
    rows = rows or whole
    values = torch.randn(rows * (1 if dense else count), k, generator=generator)
    weights = torch.randn(*((columns * count,) if dense else (count, columns)), k, generator=generator)
    offs = group_offsets([rows] * (1 if dense else count))
    format_a, format_b = FORMATS[fmt]
    if format_a == FP8_BLOCK:
        a, b = quantize(values, format_a), quantize(weights, format_b, kind="weight")
    else:
        a = quantize(values, format_a, scale_layout="blocked_groups", offs=offs)
        b = quantize(weights, format_b, kind="weight", scale_layout="blocked")
    driver = driver_of("emulator:sm_100a")
    sms = config.cta_group if isinstance(config, Sm100DenseConfig) else config.cluster
    with driver.configured(machine=timed(B200, record=False), num_sms=pairs * sms):
        if isinstance(config, Sm100DenseConfig):
            gemm(a, b, backend="emulator:sm_100a", config=config, out_dtype=config.out_dtype)
        else:
            grouped_gemm(a, b, offs, backend="emulator:sm_100a", config=config)
    result = driver.last_result
    assert result is not None
    timeline: Timeline = result.timeline
    return timeline


@lru_cache(maxsize=256)
def sort_times(fmt: str, config: Config, rows: int = 0) -> TileTimes:
    """Cycles of a tile of ``rows`` rows, or a whole one, as sort 0, by stages of 128 bytes of K.

    The period is the difference of two lengths of K; what a second and third tile add to one, beyond their stages, lies
    between two tiles, and with few stages it is all that a tile's stores take."""
    one, long = (run_tiles(fmt, config, 1, stages, rows) for stages in (FEW, MANY))
    period = (long.cycles - one.cycles) / (MANY - FEW)
    between = (run_tiles(fmt, config, 3, FEW, rows).cycles - one.cycles) / 2 - FEW * period
    least = (run_tiles(fmt, config, 3, 4, rows).cycles - run_tiles(fmt, config, 1, 4, rows).cycles) / 2
    start = one.window()[0]
    end = max(one.cycles - start - FEW * period, 0.0)
    return TileTimes(start, end, {0: period}, {0: max(between, 0.0)}, {0: least})


def tile_times(fmt: str, config: Config) -> TileTimes:
    """Cycles of a kernel's tiles, by the columns of their products where these follow from their rows, else sort 0."""
    whole = sort_times(fmt, config)
    if isinstance(config, Sm100DenseConfig) or not config.shortens_tiles:
        return whole
    step = config.column_step
    sorts = {columns: sort_times(fmt, config, columns) for columns in range(step, config.mma_n, step)}
    sorts[config.mma_n] = whole
    return TileTimes(
        whole.start,
        whole.end,
        {sort: times.period[0] for sort, times in sorts.items()},
        {sort: times.between[0] for sort, times in sorts.items()},
        {sort: times.least[0] for sort, times in sorts.items()},
        {sort: times.end for sort, times in sorts.items()},
    )


def rounded(times: TileTimes) -> tuple[int, ...]:
    """(a stage, between two tiles, a tile at least, start and end) as the dense kernel's table has it."""
    return round(times.period[0]), round(times.between[0]), round(times.least[0]), round(times.start + times.end)


def rounded_grouped(fmt: str, config: Sm100GroupedConfig) -> tuple[int, ...]:
    """The same of a whole tile, and a stage of the shortest, as the grouped kernel's table has it."""
    least = sort_times(fmt, config, config.column_step) if config.shortens_tiles else sort_times(fmt, config)
    return *rounded(sort_times(fmt, config)), round(least.period[0])


def dense_configs() -> Iterator[tuple[tuple[int, int], Sm100DenseConfig]]:
    """Every tile of the dense kernel."""
    for cta_group, block_n in DENSE_CYCLES:
        yield (cta_group, block_n), Sm100DenseConfig(cta_group=cta_group, block_n=block_n)


def grouped_configs(fmt: str) -> Iterator[tuple[tuple[bool, int, int], Sm100GroupedConfig]]:
    """Every tile of the grouped kernel that may be chosen."""
    for tokens_on_n, mma_n, cta_group in TILE_CYCLES[fmt]:
        config = Sm100GroupedConfig(cta_group, tokens_on_n, mma_n, kind=kind_of(fmt))
        yield (tokens_on_n, mma_n, cta_group), config


def tiles_table() -> Iterator[str]:
    """Lines of the configurations' tables."""
    for key, dense in dense_configs():
        yield f"dense {key}: {rounded(sort_times('MXFP8', dense))},"
    for fmt in TILE_CYCLES:
        for tile, config in grouped_configs(fmt):
            yield f"{fmt} {tile}: {rounded_grouped(fmt, config)},"


# ------------------------------------------------------------------------------------------------- calls


def row_bytes_of(fmt: BlockScaledFormat, kind: str, k: int) -> float:
    """Bytes of a row's codes and of its scales."""
    rows, columns = fmt.block(kind)
    return k / fmt.codes_per_byte + k / columns / rows * (4 if fmt == FP8_BLOCK else 1)


def call_of(problem: Problem, config: Sm100GroupedConfig) -> Call:
    """Work of a chip, groups from large to small as they are handed out, an output of 16 bits."""
    format_a, format_b = FORMATS[problem.fmt]
    a_byte = format_a.codes_per_byte  # values, as the tensor cores count them
    row_bytes, column_bytes = (
        row_bytes_of(format_a, "activation", problem.k),
        row_bytes_of(format_b, "weight", problem.k),
    )
    order = [
        (group, row, min(config.tile_m, size - row), column)
        for group, size in sorted(enumerate(problem.sizes), key=lambda item: -item[1])
        for row in range(0, size, config.tile_m)
        for column in range(0, problem.n, config.cluster_n)
    ]
    widths = [min(config.cluster_n, problem.n - column) for *_, column in order]
    loads = first_touches(
        (((group, row), rows * row_bytes), ((group, column), width * column_bytes))
        for (group, row, rows, column), width in zip(order, widths, strict=True)
    )
    stores = [2.0 * rows * width for (_, _, rows, _), width in zip(order, widths, strict=True)]
    stages = ceil(problem.k / a_byte / STAGE)
    sorts = [config.columns(rows) if config.shortens_tiles else 0 for _, _, rows, _ in order]
    products = float(sum(problem.sizes) * problem.n * problem.k / a_byte)
    return Call(sorts, stages, products, B200.num_sms // config.cluster, loads, stores)


def light_us(problem: Problem) -> float:
    """Microseconds that no kernel can go below: its bytes at memory's rate, or its products at the highest clock."""
    call = call_of(problem, Sm100GroupedConfig())
    memory = sum(call.loads) / B200["memory_gb_per_s"] + sum(call.stores) / B200["memory_write_gb_per_s"]
    tensor = call.products / (B200["tensor_bytes_per_clk"] * B200.num_sms) / B200.clocks_ghz[1]
    return max(memory, tensor) / 1e3


def kind_of(fmt: str) -> str:
    """The kernel's kind, as far as a tile's shape depends on it."""
    return "FP8_BLOCK" if fmt == "FP8_BLOCK" else "MXFP8"


def chosen(problem: Problem) -> Sm100GroupedConfig:
    """The tile that ``select_grouped_config`` takes on a B200."""
    row_bytes = problem.k // FORMATS[problem.fmt][0].codes_per_byte
    config = select_grouped_config(
        sum(problem.sizes), problem.n, len(problem.sizes), row_bytes, problem.fmt, B200.num_sms
    )
    return replace(config, kind=kind_of(problem.fmt))


def predict(problem: Problem, config: Sm100GroupedConfig) -> tuple[float, float]:
    """Microseconds at the highest and at the lowest clock."""
    fast, slow = band(call_of(problem, config), tile_times(problem.fmt, config), B200)
    return fast / 1e3, slow / 1e3


def grouped_table() -> Iterator[str]:
    """Predictions with the chosen tile, beside the best one, as Markdown."""
    after = "with the best tile | speed of light | published, us"
    yield f"| problem | tile, CTAs | bound by | predicted, us | at {GHZ} GHz, us | {after} |"
    yield "|---" * 8 + "|"
    for problem in PROBLEMS:
        config = chosen(problem)
        fast, slow = predict(problem, config)
        call, times = call_of(problem, config), tile_times(problem.fmt, config)
        fastest, loaded = (call_time(call, times, B200, ghz) for ghz in (B200.clocks_ghz[1], GHZ))
        best = min(predict(problem, other)[0] for _, other in grouped_configs(problem.fmt))
        published = "-" if problem.published_us is None else f"{problem.published_us:g}"
        yield (
            f"| {problem.fmt} {problem.name} | {config.tile_m} x {config.tile_n}, {config.cluster} | {fastest.bound} | "
            f"{fast:.1f} to {slow:.1f} | {loaded.ns / 1e3:.1f} | {best:.1f} | {light_us(problem):.1f} | {published} |"
        )
    yield ""
    yield from contest_table()


def contest_table() -> Iterator[str]:
    """Parts of the four competition shapes' times, and their geometric means, as Markdown."""
    parts = "launch, alone | in a row | until the first product | tiles | of that alone: products | speed of light"
    yield f"| us at {B200.clocks_ghz[1]} GHz | {parts} | after the last product | a call alone | in a row |"
    yield "|---" * 10 + "|"
    launch, (low, high) = B200["launch_ns"] / 1e3, B200.clocks_ghz
    means, rows = (dict.fromkeys((high, low, CONTEST_GHZ), 1.0) for _ in range(2))
    floors = dict.fromkeys(("launch and memory", "until the first product", "after the last product", "tiles"), 1.0)
    between = (launch + (CONTEST_CALLS - 1) * B200["row_ns"] / 1e3) / CONTEST_CALLS
    for problem in PROBLEMS[:4]:
        config = chosen(problem)
        call, times = call_of(problem, config), tile_times(problem.fmt, config)
        time = call_time(call, times, B200, high)
        start, end = (cycles / high / 1e3 for cycles in (times.start, times.ends.get(call.tiles[-1], times.end)))
        alone = time.cycles / high / 1e3 - start - end
        busy = {ghz: call_time(call, times, B200, ghz).ns / 1e3 - launch for ghz in means}
        tiles = busy[high] - start - end
        cells = (
            launch,
            between,
            start,
            tiles,
            alone,
            light_us(problem),
            end,
            launch + busy[high],
            between + busy[high],
        )
        yield f"| {problem.name} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |"
        means = {ghz: mean * (launch + busy[ghz]) ** (1 / 4) for ghz, mean in means.items()}
        rows = {ghz: mean * (between + busy[ghz]) ** (1 / 4) for ghz, mean in rows.items()}
        least = between
        for part, us in zip(floors, (light_us(problem), start, end, tiles - light_us(problem)), strict=True):
            least += us
            floors[part] *= least ** (1 / 4)
    for what, found in (("in a row", rows), ("alone", means)):
        shown = ", ".join(f"{mean:.1f} at {ghz:g} GHz" for ghz, mean in found.items())
        yield f"\nGeometric mean of A to D {what}, us: {shown}."
    parts = ", ".join(f"{mean:.1f} with {part}" for part, mean in floors.items())
    yield f"\nIn a row at {high} GHz, part by part: {parts}."


# ------------------------------------------------------------------------------------------------- dense


def dense_tflops(size: int, config: Sm100DenseConfig, times: TileTimes | None = None, cuts: bool = True) -> float:
    """TFLOP/s of a cube at the ladder's clock. ``times``: of another kernel's tiles; ``cuts``: as the kernel does."""
    rows, columns = config.tile
    workers = B200.num_sms // config.cta_group
    tiles = ceil(size / rows) * ceil(size / columns)
    left = tiles % workers
    cuts = cuts and columns == 2 * HALF_N and 2 * left <= workers
    half = sort_times("MXFP8", replace(config, block_n=HALF_N))
    whole = sort_times("MXFP8", config) if times is None else times
    both = replace(
        whole, period={0: whole.period[0], 1: half.period[0]}, between={0: whole.between[0], 1: 0.0}, ends={1: half.end}
    )
    sorts = [0] * (tiles - left * cuts) + [1] * (2 * left * cuts)
    loaded = bytes_from_memory(B200, Design(n=columns, compact_order=config.tile_order == "hilbert"), size)
    stored = float(size * size * config.out_dtype.itemsize)
    shares: Sequence[float] = [columns / (1 + sort) / columns / tiles for sort in sorts]
    loads, stores = ([share * total for share in shares] for total in (loaded * (1 + 1 / 32), stored))
    call = Call(sorts, ceil(size / STAGE), float(size) ** 3, workers, loads, stores)
    return 2.0 * size**3 / (call_time(call, both, B200, GHZ).ns - B200["launch_ns"] + FIXED_NS) / 1e3


# Cycles of the kernel before its tiles were multiplied by halves: a stage, between two tiles, start and end; float32.
BEFORE = TileTimes(2416.0, 6104.0, {0: 524.0}, {0: 753.0})


def dense_table() -> Iterator[str]:
    """This library's dense kernel beside a published one's final step, by the same clock, as Markdown."""
    shown = "before | now | the ladder's last | now to that | cuBLAS to that, published"
    yield f"| M = N = K; TFLOP/s at {GHZ} GHz, float32 | {shown} |"
    yield "|---" * 6 + "|"
    for size, final, cublas in zip(SIZES, PUBLISHED[-2], (996.05, 2538.40, 2691.93, 2571.48), strict=True):
        config = select_dense(DenseProblem(size, size, size, torch.float32))
        before = dense_tflops(size, replace(config, tile_order="hilbert" if size >= 8192 else "row"), BEFORE, False)
        now = dense_tflops(size, config)
        ladder = 2.0 * size**3 / (gemm_cycles(B200, design_of(10, size), size) / GHZ + FIXED_NS) / 1e3
        yield f"| {size} | {before:.0f} | {now:.0f} | {ladder:.0f} | {now / ladder:.3f} | {cublas / final:.3f} |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments, say = parser.parse_args(), Tables()
    for lines in (tiles_table(),) if arguments.tiles else (grouped_table(), ("",), dense_table()):
        for line in lines:
            say(line)
    if arguments.write and not arguments.tiles:
        write_block("sm100", say.lines)
        RECORD.write_text(json.dumps({"model": model_digest(*TOOLS), "lines": say.lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
