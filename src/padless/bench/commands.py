"""What `padless bench ...` runs: the benchmarks with the command line's options. Each returns the exit code.

The exit code is 1 when something measured is wrong (bits that differ, a result out of tolerance, a contender
that raised), so that a script notices; slow is not wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from padless.bench.group_sizes import DENSE_SHAPES
from padless.bench.paper import BenchResult, report_paper, run_paper
from padless.bench.session import DEFAULT_OUT_DIR, RunSettings, wide_console
from padless.bench.sizes import QUANTIZE_SHAPES, run_decode, run_dense, run_host, run_quantize
from padless.bench.timing import REPEATS

QUICK_DENSE_SHAPES = DENSE_SHAPES[:2]
QUICK_QUANTIZE_SHAPES = QUANTIZE_SHAPES[1:2]


def paper(
    *,
    full: bool = False,
    balanced: bool = False,
    peers: Path | None = None,
    only: Sequence[str] | None = None,
    out: Path = DEFAULT_OUT_DIR,
    time_limit_s: float | None = None,
    repeats: int = REPEATS,
    seed: int = 0,
) -> int:
    """The paper's grid: 576 points (full), 72 (balanced) or 14. only: names of the peers to use, all by
    default."""
    grid = "full" if full else "balanced" if balanced else "quick"
    settings = RunSettings(peers_dir=peers, seed=seed, repeats=repeats, time_limit_s=time_limit_s)
    return _exit_code(run_paper(grid, only, out, settings))


def decode(
    *,
    full: bool = False,
    peers: Path | None = None,
    only: Sequence[str] | None = None,
    out: Path = DEFAULT_OUT_DIR,
    time_limit_s: float | None = None,
    repeats: int = REPEATS,
    seed: int = 0,
) -> int:
    """Decode sizes: 180 points (full) or 12."""
    settings = RunSettings(peers_dir=peers, seed=seed, repeats=repeats, time_limit_s=time_limit_s)
    return _exit_code(run_decode("full" if full else "quick", only, out, settings))


def dense(
    *,
    full: bool = False,
    peers: Path | None = None,
    only: Sequence[str] | None = None,
    out: Path = DEFAULT_OUT_DIR,
    time_limit_s: float | None = None,
    repeats: int = REPEATS,
    seed: int = 0,
) -> int:
    """Dense products: five shapes (full) or two."""
    settings = RunSettings(peers_dir=peers, seed=seed, repeats=repeats, time_limit_s=time_limit_s)
    return _exit_code(run_dense(DENSE_SHAPES if full else QUICK_DENSE_SHAPES, only, out, settings))


def quantize(
    *, full: bool = False, out: Path = DEFAULT_OUT_DIR, repeats: int = REPEATS, seed: int = 0
) -> int:
    """Quantising, padding and un-padding against a copy: four sizes (full) or one."""
    settings = RunSettings(seed=seed, repeats=repeats)
    return _exit_code(run_quantize(QUANTIZE_SHAPES if full else QUICK_QUANTIZE_SHAPES, out, settings))


def host() -> int:
    """What the host adds to a call."""
    console = wide_console()
    for name, value in run_host().items():
        console.print(f"{name:<10} {value:8.2f}", highlight=False)
    return 0


def report(*, file: Path, figure: Path | None = None) -> int:
    """Tables and figure of a paper.jsonl again."""
    return _exit_code(report_paper(file, figure))


def _exit_code(result: BenchResult) -> int:
    wide_console().print(f"records: {result.file}", highlight=False, markup=False)
    return 1 if result.failures else 0
