"""Commands of `padless bench`, with the command line's options. Each function returns the exit code.

The exit code is 1 when something measured is wrong (bits that differ, a result out of tolerance, a contender
that raised), so that a script notices; slow is not wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from padless.bench.case import CASES
from padless.bench.cases import host as host_case
from padless.bench.report.terminal import wide_console
from padless.bench.results import BenchResult
from padless.bench.run import report_file, resolve_grid, run_case
from padless.bench.session import DEFAULT_OUT_DIR, RunSettings
from padless.options import check_alone


def bench(
    case: str,
    *,
    full: bool = False,
    balanced: bool = False,
    models: Sequence[str] | None = None,
    tokens: Sequence[int] | None = None,
    part: Sequence[str] | None = None,
    ranks: int | None = None,
    peers: Path | None = None,
    only: Sequence[str] | None = None,
    out: Path = DEFAULT_OUT_DIR,
    time_limit: float | None = None,
    repeats: int | None = None,
    seed: int = 0,
) -> int:
    """A benchmark of `CASES` on its quick grid, or on another that is asked for.

    case: its name. models, tokens: of the grid's points those of models whose names begin so, and with so many tokens;
    None for all. part: names of the parts to run, of a benchmark that has some. ranks: GPUs to spread a point over, of a
    benchmark that can; None for its usual points. peers: folder of other libraries.
    only: names of those to use, the benchmark's by default.
    out: where results go. time_limit: no new point after so many seconds. repeats: timed calls. seed: of sizes and
    values.
    """
    check_alone("--balanced", balanced, {"--full": full})
    known = CASES[case]
    grid = "full" if full else "balanced" if balanced else known.grids[0]
    settings = RunSettings(peers, seed, repeats or known.repeats, time_limit_s=time_limit)
    points: str | list[Any] = grid if ranks is None else known.load().grid_over_ranks(grid, ranks)
    if models or tokens or part:
        points = chosen_points(resolve_grid(known, grid, seed), models, tokens, part)
    return _finish(run_case(case, points, only, out, settings))


def chosen_points(
    points: Sequence[Any],
    models: Sequence[str] | None,
    tokens: Sequence[int] | None,
    parts: Sequence[str] | None = None,
) -> list[Any]:
    """Points of models whose names begin like one of these, in any case, of these numbers of tokens, and of these parts.

    Raises ValueError for a model, a number or a part that no point has.
    """
    if parts:
        allowed = list(dict.fromkeys(point.part for point in points))
        if unknown := set(parts) - set(allowed):
            raise ValueError(f"part must be among {allowed}, got {sorted(unknown)}")
        points = [point for point in points if point.part in parts]
    known = list(dict.fromkeys(point.model for point in points))
    for name in models or ():
        if not any(_begins(model, name) for model in known):
            raise ValueError(f"models must begin the names of some of {known}, got {name!r}")
    counts = sorted({point.tokens for point in points})
    if strange := set(tokens or ()) - set(counts):
        raise ValueError(f"tokens must be among {counts}, got {sorted(strange)}")
    return [
        point
        for point in points
        if (not models or any(_begins(point.model, name) for name in models)) and (not tokens or point.tokens in tokens)
    ]


def _begins(model: str, name: str) -> bool:
    return model.casefold().startswith(name.casefold())


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
    return max([_finish(report_file(file, figure)) for file in files], default=0)


def _finish(result: BenchResult) -> int:
    """Says where the records are; the exit code."""
    wide_console().print(f"records: {result.file}", highlight=False, markup=False)
    return 1 if result.failures else 0
