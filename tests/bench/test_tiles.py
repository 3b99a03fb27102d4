"""padless bench tiles on the CPU: every tile is a contender, wrong ones are noticed, the record is the cost model's."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from padless.bench import run as run_module
from padless.bench import run_tiles
from padless.bench import session as session_module
from padless.bench.cases import tiles
from padless.bench.group_sizes import Point
from padless.bench.problem import GroupedProblem, make_grouped
from padless.bench.results import ResultFile
from padless.bench.session import Ceilings, RunSettings, Session
from padless.kernels.cost_model import BUILT_IN, Tile
from padless.testing import machine
from support.bench_records import StandInTimer


@pytest.fixture(scope="module")
def problem() -> GroupedProblem:
    return make_grouped(Point(70, 256, 128, 3), [40, 0, 30], 5, "cpu")


def test_the_records_tiles_are_the_cost_models() -> None:
    named = {name: Tile(**fields) for name, fields in tiles.session_facts()["tiles"].items()}
    assert list(named.values()) == list(BUILT_IN[tiles.KERNEL].costs)


def test_every_tile_is_called_with_its_configuration(problem: GroupedProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    from padless.ops import grouped_gemm as module

    seen: list[Any] = []
    real = module.grouped_gemm

    def spy(*args: Any, config: Any, **options: Any) -> torch.Tensor:
        seen.append(config)
        return real(*args, **options)

    monkeypatch.setattr(module, "grouped_gemm", spy)
    for contender in tiles.contenders(problem):
        contender.call()
    wanted = [(t.block_m, t.block_n, t.cluster_n, t.raster_m) for t in tiles.tiles().values()]
    assert [(c.block_m, c.block_n, c.cluster_n, c.raster_m) for c in seen] == wanted


def test_the_record_of_a_point(problem: GroupedProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tiles.measure(problem, StandInTimer(2.0))
    assert list(record["gpu"]) == list(tiles.tiles())
    assert (record["sizes"], record["wrong"], record["errors"]) == ([40, 0, 30], {}, {})
    assert record["bytes"] == problem.point.bytes
    json.dumps(record, allow_nan=False)
    right = tiles.contenders

    def one_is_wrong(problem: GroupedProblem, backend: str | None) -> Any:
        found = right(problem, backend)
        call, output = found[2].call, found[2].output
        assert output is not None

        def twice() -> None:
            call()
            output()[3] *= 2

        found[2] = type(found[2])(found[2].name, twice, output)
        return found

    monkeypatch.setattr(tiles, "contenders", one_is_wrong)
    record = tiles.measure(problem, StandInTimer(2.0))
    assert list(record["wrong"]) == ["128 x 128"]
    assert "128 x 128" not in record["gpu"]


def test_a_run_from_the_grid_to_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one run of all benchmarks with a stand-in for the GPU: file, tables, and that it goes on."""
    file = ResultFile(tmp_path / "tiles.jsonl")
    text = io.StringIO()
    settings = RunSettings(progress=False, console=Console(file=text, width=100), seed=3)
    opened: list[Any] = []

    def open_session(*args: Any) -> Session:
        opened.append(args)
        ceilings = Ceilings(4.0e12, 1.4e15, {})
        return Session(file, [], StandInTimer(), ceilings, settings, "now", started=1e9)

    monkeypatch.setattr(run_module, "open_session", open_session)
    monkeypatch.setattr(machine, "require_gpu", lambda what: None)
    made = session_module.make_grouped
    monkeypatch.setattr(session_module, "make_grouped", lambda point, sizes, seed, _: made(point, sizes, seed, "cpu"))
    points = [Point(70, 256, 128, 3), Point(33, 136, 144, 2)]
    first = run_tiles(points[:1], tmp_path, settings)
    assert opened == [("tiles", tmp_path, [], settings, (), tiles.session_facts())]
    assert [record["point"] for record in first.records] == [vars(points[0])]
    result = run_tiles(points, tmp_path, settings)
    assert (result.failures, result.figure, result.file) == ([], None, file.path)
    assert [record["point"] for record in result.records] == [vars(point) for point in points]
    assert result.records[0] == first.records[0]
    assert "1 of 2 points are there already" in text.getvalue()
    # The names of tiles are as long as their times: 256 x 128 over 128 x 64.
    (line,) = [line.split() for line in text.getvalue().splitlines() if line.split()[:4] == ["33", "136", "144", "2"]]
    assert line == ["33", "136", "144", "2", "9.0", "9.0", "9.0", "8.0", "1.125"]


@pytest.mark.slow
def test_the_kernels_are_what_is_measured(problem: GroupedProblem) -> None:
    """Every tile by the emulator."""
    record = tiles.measure(problem, StandInTimer(), "emulator")
    assert (record["wrong"], record["errors"]) == ({}, {})
    assert list(record["gpu"]) == list(tiles.tiles())
