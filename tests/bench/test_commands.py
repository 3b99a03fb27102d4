"""The commands: which grid each option chooses, and that something wrong becomes an exit code."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from padless import bench
from padless.bench import commands
from padless.bench.case import CASES
from padless.bench.cases import formats
from padless.bench.group_sizes import Point
from padless.bench.results import BenchResult, ResultFile
from padless.bench.run import resolve_grid
from support.bench_records import record

POINT = Point(8192, 3072, 8192, 32)


Calls = list[tuple[Any, ...]]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    """What is run, in place of running it."""
    calls: Calls = []

    def run(*args: Any) -> BenchResult:
        calls.append(args)
        wrong = {"wrong": {"X": "is wrong"}} if args[0] == "formats" else {}
        return BenchResult([record(POINT, **wrong)], tmp_path / "x.jsonl")

    monkeypatch.setattr(commands, "run_case", run)
    return calls


@pytest.mark.parametrize(
    ("name", "options", "grid"),
    [
        ("paper", {}, "quick"),
        ("paper", {"balanced": True}, "balanced"),
        ("paper", {"full": True, "only": ["mslk"], "peers": Path("x"), "time_limit": 9.0}, "full"),
        ("decode", {"full": True}, "full"),
        ("decode", {}, "quick"),
        ("dense", {"full": True}, "full"),
        ("dense", {}, "quick"),
        ("quantize", {}, "quick"),
        ("tiles", {"repeats": 3}, "quick"),
    ],
)
def test_options_reach_the_run(name: str, options: dict[str, Any], grid: str, runs: Calls, tmp_path: Path) -> None:
    assert commands.bench(name, **options, out=tmp_path, seed=3) == 0
    ((*got, settings),) = runs
    assert got == [name, grid, options.get("only"), tmp_path]
    assert settings.seed == 3
    assert settings.peers_dir == options.get("peers")
    assert settings.time_limit_s == options.get("time_limit")
    assert settings.repeats == options.get("repeats", 10)


@pytest.mark.parametrize(
    ("name", "full", "quick"),
    [
        ("paper", 576, 14),
        ("decode", 180, 12),
        ("dense", 5, 2),
        ("chain", 36, 6),
        ("formats", 46, 14),
        ("epilogue", 20, 12),
        ("wgrad", 21, 16),
        ("layer", 27, 6),
        ("decoding", 70, None),
        ("picks", 400, None),
        ("train", 7, 3),
        ("pretrain", 4, 1),
        ("quantize", 4, 1),
        ("tiles", 288, 7),
        ("blackwell", 8, None),
        ("adapters", 9, None),
    ],
)
def test_the_grids(name: str, full: int, quick: int | None) -> None:
    case = CASES[name]
    assert [len(resolve_grid(case, grid, 3)) for grid in case.grids if grid != "balanced"] == (
        [full] if quick is None else [quick, full]
    )
    assert case.default in case.grids


def test_every_case_has_its_module_and_command_line() -> None:
    for name, case in CASES.items():
        module = case.load()
        assert case.name == name
        measure = "start" if hasattr(module, "start") else "measure_at"
        assert all(callable(getattr(module, part)) for part in ("grid", measure, "tables"))
        assert hasattr(module, "draw") == bool(case.figure)
        assert not case.needs or callable(getattr(module, case.needs))
        assert isinstance(module.session_facts() if hasattr(module, "session_facts") else {}, dict)
        assert set(case.options) <= set(inspect.signature(commands.bench).parameters)
        assert getattr(bench, f"run_{name}").func
    with pytest.raises(AttributeError, match="has no attribute 'run_weather'"):
        bench.run_weather  # noqa: B018


def test_one_grid_at_a_time(runs: Calls) -> None:
    with pytest.raises(ValueError, match="--balanced and --full exclude each other"):
        commands.bench("paper", full=True, balanced=True)
    assert not runs


def test_formats_takes_the_grid_and_the_settings(runs: Calls, tmp_path: Path) -> None:
    assert commands.bench("formats", full=True, out=tmp_path, seed=3, time_limit=9.0) == 1
    ((name, points, peers, out, settings),) = runs
    assert (name, points, peers) == ("formats", "full", None)
    assert resolve_grid(CASES[name], points, 3) == formats.grid("full", 3)
    assert out == tmp_path
    assert (settings.seed, settings.time_limit_s, settings.peers_dir) == (3, 9.0, None)


def test_wrong_results_are_an_exit_code(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "paper.jsonl")
    file.append(record(POINT))
    right = ResultFile(tmp_path / "right.jsonl")
    right.append(record(POINT))
    assert commands.report(files=[file.path, right.path]) == 0
    file.append(record(Point(16384, 3072, 8192, 32), bitwise_identical=False))
    assert commands.report(files=[file.path, right.path]) == 1
    assert commands.report(files=[right.path]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["paper.jsonl", "right.jsonl"]
    with pytest.raises(ValueError, match="--figure takes one result file, got 2"):
        commands.report(files=[file.path, right.path], figure=tmp_path / "x.png")


def test_host_prints_what_it_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(commands.host_case, "run_host", lambda: {"host_us": 6.543, "kernel_us": 300.0})
    assert commands.host() == 0
    assert "6.54" in capsys.readouterr().out
