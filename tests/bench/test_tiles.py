"""padless bench tiles on the CPU: every tile is a contender, wrong ones are noticed, the record is the cost model's."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from padless.bench.cases import tiles
from padless.bench.group_sizes import Point
from padless.bench.problem import GroupedProblem, make_grouped
from padless.kernels.cost_model import BUILT_IN, Tile
from support.bench_records import StandInTimer


@pytest.fixture(scope="module")
def problem() -> GroupedProblem:
    return make_grouped(Point(70, 256, 128, 3), [40, 0, 30], 5, "cpu")


def test_the_records_tiles_are_the_cost_models() -> None:
    named = {name: Tile(**fields) for name, fields in tiles.facts()["tiles"].items()}
    assert list(named.values()) == list(BUILT_IN[tiles.KERNEL].costs)


def test_every_tile_is_called_with_its_configuration(
    problem: GroupedProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.slow
def test_the_kernels_are_what_is_measured(problem: GroupedProblem) -> None:
    """Every tile by the emulator."""
    record = tiles.measure(problem, StandInTimer(), "emulator")
    assert (record["wrong"], record["errors"]) == ({}, {})
    assert list(record["gpu"]) == list(tiles.tiles())
