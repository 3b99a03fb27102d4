"""One benchmark's run, and the report of what earlier runs measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from padless.bench.case import CASES, Case
from padless.bench.peers import Peer
from padless.bench.peers.find import resolve_peers
from padless.bench.report.table import Records, Sessions
from padless.bench.report.terminal import show, show_failures, wide_console
from padless.bench.results import BenchResult, BrokenRecord, Record, read_records, sessions_of
from padless.bench.session import DEFAULT_OUT_DIR, DEFAULT_SETTINGS, RunSettings, open_session, run_points
from padless.testing import machine


def run_case(
    name: str,
    points: str | Sequence[Any] | None = None,
    peers: Sequence[Peer] | Sequence[str] | None = None,
    out_dir: str | Path = DEFAULT_OUT_DIR,
    settings: RunSettings = DEFAULT_SETTINGS,
) -> BenchResult:
    """Measures the points of a benchmark, appends them to `out_dir`/`name`.jsonl and prints the tables.

    points: the name of a grid (None: the usual one) or a list of points; those that the file holds are not measured
        again.
    peers: peers or their names; None for the benchmark's. Those that cannot be used are skipped with their reason.

    Raises ValueError without a CUDA GPU, for an unknown name, and for a missing settings.peers_dir.
    """
    case = CASES[name]
    module = case.load()
    wanted = resolve_grid(case, points, settings.seed)
    chosen = resolve_peers(case.peers if peers is None else peers, settings.peers_dir)
    machine.require_gpu(f"padless bench {name}")
    if case.needs:
        getattr(module, case.needs)()
    ahead = wanted if case.compiles else ()
    facts = module.session_facts() if hasattr(module, "session_facts") else {}
    session = open_session(name, out_dir, chosen, settings, ahead, facts)
    session.points = wanted
    measure = module.start(session) if hasattr(module, "start") else partial(module.measure_at, session)
    records = run_points(session, name, wanted, measure)
    show_records(case, records, sessions_of(session.file.records), session.console)
    figure = draw(case, records, Path(out_dir) / case.figure, session.console) if case.figure else None
    return BenchResult(records, session.file.path, figure)


def resolve_grid(case: Case, points: str | Sequence[Any] | None, seed: int = 0) -> list[Any]:
    """The points of a named grid, or those given."""
    points = case.default if points is None else points
    if not isinstance(points, str):
        return list(points)
    if points not in case.grids:
        allowed = ", ".join(map(repr, case.grids))
        raise ValueError(f"points of {case.name} is {points!r}; allowed: {allowed}, or a list of points")
    grid: list[Any] = case.load().grid(points, seed)
    return grid


def show_records(case: Case, records: Records, sessions: Sessions, console: Console) -> None:
    """Prints a benchmark's tables and what went wrong."""
    if not records:
        console.print("nothing measured")
        return
    show(console, *case.load().tables(records, sessions, console.width))
    show_failures(console, records)


def draw(case: Case, records: Records, path: Path, console: Console) -> Path | None:
    """Draws a benchmark's figure if there is something to draw and matplotlib is there; says where it is or why not."""
    if not records:
        return None
    try:
        drawn: Path | None = case.load().draw(records, path)
    except ImportError:
        console.print("no figure: it needs matplotlib (pip install 'padless[bench]')", markup=False)
        return None
    if drawn is not None:
        console.print(f"figure: {drawn}", highlight=False, markup=False)
    return drawn


# --- reports ---------------------------------------------------------------------------------------------


def report_file(file: str | Path, figure: str | Path | None = None, console: Console | None = None) -> BenchResult:
    """Prints the tables of a result file, those that its records' `kind` asks for.

    figure: where to draw the figure, of the paper's grid, of formats or of decoding; None draws none.

    A file that cannot be read as records, or that holds no point, is said to be so and is a failure of the result.
    Raises ValueError for a file that is not there, that holds other records, or that has no figure to draw.
    """
    console = wide_console() if console is None else console
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"file must be a result file of padless bench, got {str(path)!r}, which is no file")
    try:
        records = read_records(path)
        parts = _by_kind(records)
    except (UnicodeDecodeError, BrokenRecord) as error:
        return _unusable(path, f"{path} is broken: {str(error).removeprefix(f'{path} ')}", console)
    _check(path, parts, wants_figure=figure is not None)
    if not parts:
        return _unusable(path, f"nothing measured: {path} holds no point", console)
    drawn = None
    for name, part in parts.items():
        case = CASES[name]
        try:
            show_records(case, part, sessions_of(records), console)
            if figure is not None and case.figure:
                drawn = draw(case, part, Path(figure), console)
        except BrokenRecord as error:
            strange = f"records of kind {name!r} are not as this version writes them: {error}"
            return _unusable(path, f"{path} is broken: {strange}", console)
    return BenchResult([record for part in parts.values() for record in part], path, drawn)


def _by_kind(records: Sequence[Record]) -> dict[str, list[Record]]:
    parts: dict[str, list[Record]] = {}
    for record in records:
        kind = str(record.get("kind"))
        needed = (
            {"id": str} if kind == "session" else {"point": dict, "gpu": dict} if kind in CASES else {"kind": object}
        )
        for name, wanted in needed.items():
            if name not in record or not isinstance(record[name], wanted):
                raise BrokenRecord(f"a record has no {name!r}, or a strange one: {json.dumps(record)[:80]}")
        if kind != "session":
            parts.setdefault(kind, []).append(record)
    return parts


def _unusable(path: Path, problem: str, console: Console) -> BenchResult:
    console.print(problem, highlight=False, markup=False, soft_wrap=True)
    return BenchResult([], path, problems=(problem,))


def _check(path: Path, kinds: Sequence[str] | dict[str, list[Record]], *, wants_figure: bool) -> None:
    unknown = sorted(set(kinds) - set(CASES))
    if unknown:
        raise ValueError(f"{path} holds records of kind {unknown}; those that can be shown: {sorted(CASES)}")
    with_figure = [name for name, case in CASES.items() if case.figure]
    if wants_figure and sum(name in with_figure for name in kinds) != 1:
        raise ValueError(
            f"figure can be drawn of one kind of records, {' or '.join(with_figure)}; {path} holds {sorted(kinds)}"
        )
