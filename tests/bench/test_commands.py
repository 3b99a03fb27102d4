"""The commands: which grid each option chooses, and that something wrong becomes an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from padless.bench import commands
from padless.bench.group_sizes import DENSE_SHAPES, Point
from padless.bench.paper import BenchResult
from padless.bench.results import ResultFile
from support.bench_records import record

POINT = Point(8192, 3072, 8192, 32)


@pytest.mark.parametrize(
    ("name", "options", "first"),
    [
        ("paper", {}, "quick"),
        ("paper", {"balanced": True}, "balanced"),
        ("paper", {"full": True, "only": ["mslk"], "peers": Path("x"), "time_limit_s": 9.0}, "full"),
        ("decode", {"full": True}, "full"),
        ("decode", {}, "quick"),
        ("dense", {"full": True}, DENSE_SHAPES),
        ("dense", {}, DENSE_SHAPES[:2]),
        ("quantize", {}, commands.QUICK_QUANTIZE_SHAPES),
    ],
)
def test_options_reach_the_run(
    name: str, options: dict[str, Any], first: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[Any, ...]] = []

    def run(*args: Any) -> BenchResult:
        calls.append(args)
        return BenchResult([record(POINT)], tmp_path / "x.jsonl")

    monkeypatch.setattr(commands, f"run_{name}", run)
    assert getattr(commands, name)(**options, out=tmp_path, seed=3) == 0
    ((got, *rest),) = calls
    assert got == first
    settings = rest[-1]
    assert settings.seed == 3
    assert rest[-2] == tmp_path
    if name != "quantize":
        assert rest[0] == options.get("only")
        assert settings.peers_dir == options.get("peers")
        assert settings.time_limit_s == options.get("time_limit_s")


def test_formats_takes_the_grid_and_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []

    def run(*args: Any) -> BenchResult:
        calls.append(args)
        return BenchResult([record(POINT, wrong={"X": "is wrong"})], tmp_path / "x.jsonl")

    monkeypatch.setattr(commands.formats_bench, "run_formats", run)
    assert commands.formats(full=True, out=tmp_path, seed=3, time_limit_s=9.0) == 1
    ((points, out, settings),) = calls
    assert points == commands.formats_bench.grid(full=True, seed=3)
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


def test_host_prints_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "run_host", lambda: {"host_us": 6.543, "kernel_us": 300.0})
    assert commands.host() == 0
    assert "6.54" in capsys.readouterr().out
