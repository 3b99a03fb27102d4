"""Benchmarks: the paper's comparison, decode and dense sizes, chains, formats, epilogues, the memory-bound kernels.

`run_case(name, points, peers, out_dir, settings)` runs each of them; ``run_<name>`` is the same with its name.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from padless.bench.cases.host import run_host
    from padless.bench.results import BenchResult
    from padless.bench.run import report_file, run_case
    from padless.bench.session import RunSettings

__all__ = ["BenchResult", "RunSettings", "report_file", "run_case", "run_host"]
_HOMES = {
    "BenchResult": "results",
    "RunSettings": "session",
    "report_file": "run",
    "run_case": "run",
    "run_host": "cases.host",
}


def _without_peers(name: str, points: Any = None, *out_dir_and_settings: Any, **options: Any) -> Any:
    from padless.bench.run import run_case

    return run_case(name, points, None, *out_dir_and_settings, **options)


def __getattr__(name: str) -> Any:
    """Imports at the first use: the command line imports this package to name the benchmarks."""
    from padless.bench.case import CASES

    if name in _HOMES:
        return getattr(import_module(f"padless.bench.{_HOMES[name]}"), name)
    case = CASES.get(name.removeprefix("run_")) if name.startswith("run_") else None
    if case is None:
        raise AttributeError(f"module 'padless.bench' has no attribute {name!r}")
    if case.peers == ():
        return partial(_without_peers, case.name)
    return partial(import_module("padless.bench.run").run_case, case.name)
