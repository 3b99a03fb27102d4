"""Commands of `padless bench`, with the command line's options. Each function returns the exit code.

The exit code is 1 when something measured is wrong (bits that differ, a result out of tolerance, a contender
that raised), so that a script notices; slow is not wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from padless.bench.case import CASES
from padless.bench.cases import host as host_case
from padless.bench.report.terminal import wide_console
from padless.bench.results import BenchResult
from padless.bench.run import report_file, run_case
from padless.bench.session import DEFAULT_OUT_DIR, RunSettings


def bench(
    case: str,
    *,
    full: bool = False,
    balanced: bool = False,
    peers: Path | None = None,
    only: Sequence[str] | None = None,
    out: Path = DEFAULT_OUT_DIR,
    time_limit: float | None = None,
    repeats: int | None = None,
    seed: int = 0,
) -> int:
    """A benchmark of `CASES` on its quick grid, or on another that is asked for.

    case: its name. peers: folder of other libraries. only: names of those to use, the benchmark's by default.
    out: where results go. time_limit: no new point after so many seconds. repeats: timed calls. seed: of sizes and
    values.
    """
    known = CASES[case]
    grid = "full" if full else "balanced" if balanced else known.grids[0]
    settings = RunSettings(peers, seed, repeats or known.repeats, time_limit_s=time_limit)
    return _exit_code(run_case(case, grid, only, out, settings))


def host() -> int:
    """Time that the host adds to a call."""
    console = wide_console()
    for name, value in host_case.run_host().items():
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
