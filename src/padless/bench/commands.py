"""What `padless bench ...` runs: the benchmarks with the command line's options. Each returns the exit code.

The exit code is 1 when something measured is wrong (bits that differ, a result out of tolerance, a contender
that raised), so that a script notices; slow is not wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, Unpack

from padless.bench import blackwell as blackwell_bench
from padless.bench import chain as chain_bench
from padless.bench import chain_problem, layer_problem
from padless.bench import epilogue as epilogue_bench
from padless.bench import formats as formats_bench
from padless.bench import layer as layer_bench
from padless.bench import wgrad as wgrad_bench
from padless.bench.group_sizes import DENSE_SHAPES
from padless.bench.paper import BenchResult, run_paper
from padless.bench.report import report_file
from padless.bench.session import DEFAULT_OUT_DIR, RunSettings, wide_console
from padless.bench.sizes import QUANTIZE_SHAPES, run_decode, run_dense, run_host, run_quantize
from padless.testing.timing import REPEATS

QUICK_DENSE_SHAPES = DENSE_SHAPES[:2]
QUICK_QUANTIZE_SHAPES = QUANTIZE_SHAPES[1:2]


class Options(TypedDict, total=False):
    """What every benchmark against other libraries takes.

    peers: their folder. only: names of those to use, all by default. out: where results go. time_limit_s: no new point
    after so many seconds. repeats: timed calls. seed: of sizes and values.
    """

    peers: Path | None
    only: Sequence[str] | None
    out: Path
    time_limit_s: float | None
    repeats: int | None
    seed: int


def _settings(options: Options) -> RunSettings:
    return RunSettings(
        peers_dir=options.get("peers"),
        seed=options.get("seed", 0),
        repeats=options.get("repeats") or REPEATS,
        time_limit_s=options.get("time_limit_s"),
    )


def _out(options: Options) -> Path:
    return options.get("out", DEFAULT_OUT_DIR)


def paper(*, full: bool = False, balanced: bool = False, **options: Unpack[Options]) -> int:
    """The paper's grid: 576 points (full), 72 (balanced) or 14."""
    grid = "full" if full else "balanced" if balanced else "quick"
    return _exit_code(run_paper(grid, options.get("only"), _out(options), _settings(options)))


def decode(*, full: bool = False, **options: Unpack[Options]) -> int:
    """Decode sizes: 180 points (full) or 12."""
    grid = "full" if full else "quick"
    return _exit_code(run_decode(grid, options.get("only"), _out(options), _settings(options)))


def chain(*, full: bool = False, **options: Unpack[Options]) -> int:
    """Calls one after the other in a CUDA graph: 36 points (full) or six, of 5 replays unless told otherwise."""
    settings = replace(_settings(options), repeats=options.get("repeats") or chain_bench.REPEATS)
    points = chain_problem.grid(full=full)
    return _exit_code(chain_bench.run_chain(points, options.get("only"), _out(options), settings))


def dense(*, full: bool = False, **options: Unpack[Options]) -> int:
    """Dense products: five shapes (full) or two."""
    shapes = DENSE_SHAPES if full else QUICK_DENSE_SHAPES
    return _exit_code(run_dense(shapes, options.get("only"), _out(options), _settings(options)))


def formats(*, full: bool = False, **options: Unpack[Options]) -> int:
    """Every pair of formats against torch's bf16 product: 46 points (full) or 14."""
    points = formats_bench.grid(full=full, seed=options.get("seed", 0))
    return _exit_code(formats_bench.run_formats(points, _out(options), _settings(options)))


def epilogue(*, full: bool = False, **options: Unpack[Options]) -> int:
    """The fused quantising epilogue against separate kernels: 20 points (full) or 12."""
    points = epilogue_bench.grid(full=full)
    return _exit_code(epilogue_bench.run_epilogue(points, _out(options), _settings(options)))


def wgrad(*, full: bool = False, **options: Unpack[Options]) -> int:
    """Weight gradients against torch's bf16 product and DeepGEMM: 19 points (full) or 14."""
    points = wgrad_bench.grid(full=full)
    return _exit_code(wgrad_bench.run_wgrad(points, _out(options), _settings(options), full=full))


def layer(*, full: bool = False, **options: Unpack[Options]) -> int:
    """Whole Mixture-of-Experts layers: 27 points (full) or six."""
    points = layer_problem.grid(full=full)
    return _exit_code(layer_bench.run_layer(points, options.get("only"), _out(options), _settings(options)))


def blackwell(**options: Unpack[Options]) -> int:
    """Dense MXFP8 against torch, and the NVFP4 grouped GEMM competition by its rules: 8 points."""
    return _exit_code(blackwell_bench.run_blackwell(None, _out(options), _settings(options)))


def quantize(*, full: bool = False, **options: Unpack[Options]) -> int:
    """Quantising, padding and un-padding against a copy: four sizes (full) or one."""
    shapes = QUANTIZE_SHAPES if full else QUICK_QUANTIZE_SHAPES
    return _exit_code(run_quantize(shapes, _out(options), _settings(options)))


def host() -> int:
    """What the host adds to a call."""
    console = wide_console()
    for name, value in run_host().items():
        console.print(f"{name:<10} {value:8.2f}", highlight=False)
    return 0


def report(*, files: Sequence[Path], figure: Path | None = None) -> int:
    """Tables of result files again, each with its name, and the figure of one of them."""
    if figure is not None and len(files) != 1:
        raise ValueError(f"--figure takes one result file, got {len(files)}")
    return max([_exit_code(report_file(file, figure)) for file in files], default=0)


def _exit_code(result: BenchResult) -> int:
    wide_console().print(f"records: {result.file}", highlight=False, markup=False)
    return 1 if result.failures else 0
