"""The benchmark of picked configurations: every legal one, on problems that are drawn, must give the same bits."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import fit_tiles
from padless.bench import report_file
from padless.bench.cases import picks
from padless.bench.cases.problems import picks as problems
from padless.bench.cases.problems.decoding import MODELS
from padless.bench.cases.problems.picks import AXES, KINDS, ROUTINGS, PicksPoint, legal, make_problem, name_of, picked
from padless.bench.results import ResultFile, failures
from padless.kernels.cost_model import BUILT_IN, Tile, TileCost, estimate_ns
from padless.runtime.jit import CompileError
from padless.testing.compile_ahead import listing
from padless.testing.timing import Timing
from support.bench_records import timing

POINT = PicksPoint("fp8", "tiny", 12, "drawn", 24, 128, 128, 5, 2, 0)


def of_kind(kind: str) -> PicksPoint:
    return replace(POINT, kind=kind)


def test_the_problems_are_drawn_alike_for_every_model() -> None:
    grid = problems.grid(0)
    assert len(set(grid)) == len(grid) == 400
    assert problems.grid(0) == grid != problems.grid(1)
    assert Counter(p.model for p in grid) == dict.fromkeys(MODELS, 40)
    assert {p.kind for p in grid} == set(KINDS)
    assert {p.routing for p in grid} == set(ROUTINGS)
    products = {p.tokens for p in grid if not KINDS[p.kind].wgrad}
    assert products == {2**i for i in range(15)}
    assert all(p.tokens >= 512 for p in grid if KINDS[p.kind].wgrad)


def test_sizes_are_those_of_the_tokens() -> None:
    longest = []
    for routing in ("even", "drawn", "skewed"):
        point = PicksPoint("fp8", "x", 4095, routing, 4095 * 4, 128, 128, 64, 4, 0)
        sizes = problems.sizes_of(point, 3)
        assert len(sizes) == 64
        assert sum(sizes) == point.rows
        assert max(sizes) <= 4095, "a token chooses different experts"
        assert sizes == problems.sizes_of(point, 3) != [0] * 64
        longest.append(max(sizes))
    assert longest == sorted(set(longest))
    assert longest[0] == 256


@pytest.mark.parametrize("kind", KINDS)
def test_the_pick_is_what_a_call_compiles(kind: str) -> None:
    """Found by listing the kernels that calls ask for."""
    for sizes in ([2, 0, 1, 130, 3], [700, 5, 900, 300, 800]):
        point = replace(of_kind(kind), rows=sum(sizes), n=256)
        problem = make_problem(point, 1, "cpu", "emulator", sizes)
        config = picked(point, problem.tokens, 132)
        with listing("sm_90a", "cubin", 132) as by_default:
            problem.run()
        with listing("sm_90a", "cubin", 132) as by_name:
            problem.run(config=config)
        assert by_default == by_name
        assert len(by_default) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_legal_configuration_is_another_kernel(kind: str) -> None:
    config = picked(of_kind(kind), 640, 132)
    found = legal(config)
    assert next(iter(found.values())) is config
    assert name_of(config) == next(iter(found))
    assert len(found) == len({other.prelude() for other in found.values()}) > 1
    chosen = set(AXES[type(config)])
    for other in found.values():
        differ = {f.name for f in fields(config) if getattr(other, f.name) != getattr(config, f.name)}
        assert differ <= chosen


def test_the_fields_that_a_choice_sets_are_among_those_that_vary() -> None:
    """Else a faster configuration could not be found, or the pick would not be among the legal ones."""
    for kind in KINDS:
        seen = [picked(replace(point, kind=kind), point.rows, 132) for point in problems.grid(0)]
        first = seen[0]
        follows = {"max_groups", "out_dtype", "stage_blocks"}
        for field in fields(first):
            if len({getattr(config, field.name) for config in seen}) > 1:
                assert field.name in {*AXES[type(first)], *follows}


class Clock:
    """Times by the name of a configuration; counts calls of each, and calls them once."""

    def __init__(self, times: dict[str, float]) -> None:
        self.times = times
        self.repeats = 5
        self.seen: list[tuple[int, list[str]]] = []

    def gpu(self, calls: Any) -> dict[str, Timing]:
        self.seen.append((self.repeats, list(calls)))
        for call in calls.values():
            call()
        return {name: Timing((self.times.get(name, 10.0),)) for name in calls}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Three configurations; the call computes by the reference and may be told to be wrong."""
    config = picked(POINT, 0, 132)
    found = dict(list(legal(config).items())[:4])
    monkeypatch.setattr(picks, "legal", lambda config: found)
    return found


attempts: list[str] = []


def problem_with(wrong: str = "", refused: str = "", broken: str = "") -> Any:
    problem = make_problem(POINT, 1, "cpu", "reference")

    def run(config: Any = None) -> torch.Tensor:
        if name_of(config) == refused:
            attempts.append(name_of(config))
            raise CompileError("does not fit in shared memory")
        if name_of(config) == broken:
            raise RuntimeError("launch failed")
        problem.run()
        if name_of(config) == wrong:
            problem.out[-1, -1] = float("nan")
        return problem.out

    return problem._replace(run=run)


def test_the_hopeless_are_left_after_the_first_calls(few: dict[str, Any]) -> None:
    pick, fast, near, slow = few
    clock = Clock({pick: 20.0, fast: 10.0, near: 12.0, slow: 13.0})
    record = picks.measure(problem_with(), clock, 132, {})  # type: ignore[arg-type]
    finals = (picks.FINAL_CALLS, [pick, fast, near])
    assert clock.seen == [(picks.FIRST_CALLS, [pick, fast, near, slow]), (5, [pick, fast, near]), finals]
    assert record["picked"] == pick
    assert picks.over_best(record) == 2.0
    assert picks.best_of(record) == fast
    assert failures([record | {"point": asdict(POINT)}]) == []


class LuckyClock(Clock):
    """A configuration is fast until the last calls."""

    lucky = ""

    def gpu(self, calls: Any) -> dict[str, Timing]:
        self.times = self.times | {self.lucky: 10.1 if self.repeats == picks.FINAL_CALLS else 9.0}
        return super().gpu(calls)


def test_a_pick_is_judged_by_calls_that_did_not_choose_the_fastest(few: dict[str, Any]) -> None:
    pick, lucky, *others = few
    clock = LuckyClock({pick: 10.0} | dict.fromkeys(others, 11.0))
    clock.lucky = lucky
    record = picks.measure(problem_with(), clock, 132, {})  # type: ignore[arg-type]
    assert record["gpu"][lucky]["us"] == 9.0
    assert picks.over_best(record) == 1.0
    assert picks.best_of(record) == pick
    clock.times |= {pick: 8.0}
    record = picks.measure(problem_with(), clock, 132, {})  # type: ignore[arg-type]
    assert record["final"] == {}, "the fastest needs no further calls"
    assert picks.over_best(record) == 1.0


def test_other_bits_are_wrong_and_what_does_not_fit_is_left_out(few: dict[str, Any]) -> None:
    pick, first, second, third = few
    unfit: dict[str, str] = {}
    attempts.clear()
    for _ in range(2):
        record = picks.measure(problem_with(first, second, third), Clock({}), 132, unfit)  # type: ignore[arg-type]
    assert attempts == [second], "what does not compile is not tried again"
    assert set(record["gpu"]) == {pick}
    assert set(record["left_out"]) == {second}
    found = failures([record | {"point": asdict(POINT)}])
    assert [name in line for name, line in zip((first, third), found, strict=True)] == [True, True]


def test_an_output_that_is_not_written_is_noticed(few: dict[str, Any]) -> None:
    _, other, *_ = few
    problem = problem_with()
    right = problem.run

    def run(config: Any = None) -> torch.Tensor:
        return problem.out if name_of(config) == other else right(config)

    record = picks.measure(problem._replace(run=run), Clock({}), 132, {})  # type: ignore[arg-type]
    assert other in record["wrong"]


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_operands(kind: str) -> None:
    """The reference on a small problem: no row and no group is left NaN, and added to zeros it is the product."""
    problem = make_problem(of_kind(kind), 2, "cpu", "reference", [3, 0, 1, 17, 3])
    picks.fresh(problem)
    out = problem.run()
    assert bool(out.float().isfinite().all())
    assert float(out.float().std()) > 0


def test_what_was_measured_is_shown(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "picks.jsonl")
    first, second = list(legal(picked(POINT, 0, 132)))[:2]
    for draw, ratio in enumerate((1.0, 1.02, 1.05, 1.2)):
        gpu = {first: timing(10 * ratio), second: timing(10.0)}
        file.append(
            {"kind": "picks", "seed": 0, "point": asdict(replace(POINT, draw=draw)), "picked": first, "gpu": gpu}
        )
    bf16 = asdict(of_kind("bf16"))
    file.append({"kind": "picks", "seed": 0, "point": bf16, "picked": first, "gpu": {first: timing(3.0)}})
    console = Console(width=100, record=True)
    report_file(file.path, console=console)
    text = console.export_text()
    assert "…" not in text
    lines = [line.split() for line in text.splitlines()]
    assert ["fp8", "4", "50%", "75%", "1.065", "1.200"] in lines
    assert ["all", "5", "60%", "80%", "1.051", "1.200"] in lines
    assert text.index("1.200", text.index("Worst picks")) < text.index("1.050", text.index("Worst picks"))


def test_kernels_of_the_missing_problems_are_compiled_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []

    def ahead(rehearsals: Any, gpu: Any) -> Any:
        asked.extend(r.calls.args[:2] for r in rehearsals)
        return SimpleNamespace(kernels=set(), problems=[])

    monkeypatch.setattr(picks, "compile_ahead", ahead)
    monkeypatch.setattr(picks, "cuda_driver", lambda: SimpleNamespace(arch="sm_90a", num_sms=lambda device: 132))
    monkeypatch.setattr(picks.torch.cuda, "current_device", lambda: 0)
    file = ResultFile(tmp_path / "picks.jsonl")
    done = replace(POINT, kind="mxfp8")
    file.append({"kind": "picks", "seed": 3, "point": asdict(done)})
    session: Any = SimpleNamespace(
        file=file,
        settings=SimpleNamespace(seed=3),
        console=Console(record=True),
        points=[done, POINT, replace(POINT, draw=1), replace(POINT, groups=512)],
    )
    picks.start(session)
    assert asked == [("fp8", 256), ("fp8", 1024)]


def test_a_rehearsal_asks_for_every_configuration() -> None:
    with listing("sm_90a", "cubin", 132) as asked:
        problems.rehearse("bf16", 8, 132)
    assert len(asked) == len(legal(picked(of_kind("bf16"), 0, 132)))


# --- tools/fit_tiles.py ----------------------------------------------------------------------------------

TRUE = {
    Tile(256, 128, 2, 8): TileCost(600, 500, 381),
    Tile(128, 192, 1, 16): TileCost(700, 600, 249),
    Tile(128, 128, 1, 8): TileCost(392, 361, 600),
    Tile(128, 64, 1, 8): TileCost(190, 170, 249),
    Tile(128, 128, 2, 8): TileCost(360, 300, 300),
}


def recorded(noise: float) -> list[dict[str, Any]]:
    """Records of a GPU on which tiles cost TRUE, with errors of the clock."""
    draw = random.Random(5)
    found = []
    for draws in range(120):
        m, n, k = (draw.choice(axis) for axis in ((512, 4096, 20480, 65536), (1024, 3072, 7168), (1536, 2048, 4096)))
        groups = draw.choice((8, 32, 128))
        point = asdict(replace(POINT, rows=m, n=n, k=k, groups=groups, draw=draws))
        gpu = {}
        for tile, cost in TRUE.items():
            name = ", ".join(f"{field} {value}" for field, value in asdict(tile).items())
            us = estimate_ns(m, n, k, groups, tile, cost, 132) / 1000
            gpu[name] = timing(us * (1 + noise * draw.uniform(-1, 1)))
        found.append({"kind": "picks", "point": point, "picked": next(iter(gpu)), "first": {}, "gpu": gpu})
    return found


def test_costs_are_found_that_pick_the_fastest() -> None:
    """On problems that were not fitted to, and with a tile that the table lacks."""
    records = recorded(0.01)
    seen, unseen = fit_tiles.Problems(records[::2], 132), fit_tiles.Problems(records[1::2], 132)
    before = unseen.ratios(BUILT_IN[fit_tiles.KERNEL].costs)
    costs = fit_tiles.fitted(seen, dict(BUILT_IN[fit_tiles.KERNEL].costs))
    after = unseen.ratios(costs)
    assert Tile(128, 128, 2, 8) in costs
    good = [sum(ratio <= 1.03 for ratio in ratios) / len(ratios) for ratios in (before, after)]
    assert good[0] < 0.7
    assert good[1] >= 0.9


def test_a_pick_that_was_not_measured_is_no_good() -> None:
    records = recorded(0.0)[:1]
    records[0]["gpu"] = dict(list(records[0]["gpu"].items())[:1])
    costs = {Tile(128, 64, 1, 8): TileCost(1, 1, 1)}
    assert fit_tiles.Problems(records, 132).ratios(costs).tolist() == [math.inf]


def test_the_tool_prints_the_table_and_the_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ResultFile(tmp_path / "picks.jsonl")
    for record in recorded(0.0)[:6]:
        file.append(record)
    gpu = {"block_m 64, block_n 64": timing(2.0), "block_m 128, block_n 64": timing(1.0)}
    slower = {"kind": "picks", "point": asdict(of_kind("mxfp8")), "picked": next(iter(gpu)), "first": {}, "gpu": gpu}
    file.append(slower)
    assert fit_tiles.main([str(file.path)]) == 0
    text = capsys.readouterr().out
    assert "fitted to all: 6 problems" in text
    assert "Tile(256, 128, 2, 8): TileCost(" in text
    assert "about 4 (1): 1.000 block_m 128, block_n 64; 2.000 block_m 64, block_n 64*" in text
