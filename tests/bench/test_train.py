"""The benchmark of a training step: contenders compute one layer's gradients, and wrong or missing ones show."""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from padless.bench import report_file
from padless.bench.cases import train
from padless.bench.cases.train import contenders
from padless.bench.cases.train.contenders import BF16, KEPT, Maker, Step, makers
from padless.bench.cases.train.problem import TrainPoint, TrainProblem, make_problem
from padless.bench.peers.torchao import TorchAo, few
from padless.bench.results import ResultFile, failures, time_us
from support.bench_records import StandInTimer

POINT = TrainPoint("tiny", 30, 4, 2, 144, 128)


@pytest.fixture(scope="module")
def problem() -> TrainProblem:
    return make_problem(POINT, 3, "cpu")


@pytest.fixture(scope="module")
def record(problem: TrainProblem) -> dict[str, Any]:
    return train.measure_train(problem, StandInTimer(), makers(compiled=False, every_recipe=True)) | {
        "point": asdict(POINT)
    }


def test_contenders_compute_one_step(record: dict[str, Any]) -> None:
    assert failures([record]) == []
    names = {BF16, *contenders.MEASURED, "padless fp8" + KEPT}
    assert set(record["row_error"]) == names
    for name, found in record["row_error"].items():
        assert set(found) == {"out", "x", "prob", "w13", "w2"}
        assert all(1e-4 < error < (0.02 if name in (BF16, "padless bf16") else 0.2) for error in found.values()), name
    assert {f"forward: {name}" for name in contenders.MEASURED} < set(record["gpu"])
    assert {f"product: {name}" for name in train.PRODUCTS} < set(record["gpu"])


def test_the_float64_gradients_are_torchs(problem: TrainProblem) -> None:
    """All tokens at once, in float64."""
    p = {name: getattr(problem, name).double().requires_grad_() for name in ("x", "prob", "w13", "w2")}
    out = torch.zeros_like(p["x"])
    for e in range(POINT.experts):
        token, slot = torch.nonzero(problem.ids == e, as_tuple=True)
        y = problem._expert(p["x"][token], p["w13"][e], p["w2"][e])
        out = out.index_add(0, token, y * p["prob"][token, slot, None])
    out.backward(problem.dout.double())
    for name, want in problem.expected.items():
        got = problem.rows_of(name, out.detach() if name == "out" else p[name].grad)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def changed(problem: TrainProblem, name: str, result: str) -> Step:
    """A step one of whose results is off."""
    step = contenders.padless_step(problem, name, contenders.MEASURED["padless bf16"])
    right = step.results

    def results() -> dict[str, torch.Tensor]:
        found = right()
        return found | {result: found[result] * 1.3}

    step.results = results
    return step


def test_wrong_and_broken_contenders_are_noticed_and_not_timed(problem: TrainProblem) -> None:
    def broken(problem: TrainProblem) -> Step:
        raise RuntimeError("no such kernel")

    results = ("out", "x", "prob", "w13", "w2")
    wrong = [Maker(f"off in {r}", partial(changed, name=f"off in {r}", result=r)) for r in results]
    found = train.measure_train(problem, StandInTimer(), [Maker("broken", broken), *wrong])
    assert set(found["errors"]) == {"broken"}
    assert set(found["wrong"]) == {maker.name for maker in wrong}
    assert not any("off" in name for name in found["gpu"])


def test_codes_are_made_in_every_step_or_kept(problem: TrainProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    from padless.nn import linear, weight_codes

    made: list[int] = []
    right = weight_codes.weight_operands

    def counted(weight: torch.Tensor, recipe: Any, **how: Any) -> Any:
        made.append(1)
        return right(weight, recipe, **how)

    for module in (linear, contenders):
        monkeypatch.setattr(module, "weight_operands", counted)
    for name, expected in (("padless fp8", 6), ("padless fp8" + KEPT, 2)):
        made.clear()
        step = contenders.padless_step(problem, name, contenders.MEASURED["padless fp8"])
        for _ in range(3):
            step.call()
        assert len(made) == expected


def test_a_measured_point_is_shown(record: dict[str, Any], tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "train.jsonl")
    kept = dict.fromkeys(record["saved_bytes_per_row"], 11616.0)
    host = dict.fromkeys(record["saved_bytes_per_row"], 4321.0)
    graphed = dict.fromkeys(record["saved_bytes_per_row"], 38.0)
    file.append(
        record
        | {
            "kind": "train",
            "seed": 0,
            "saved_bytes_per_row": kept,
            "host_us": host,
            "graphed_host_us": graphed,
            "passes_host_us": graphed,
        }
    )
    console = Console(width=100, record=True)
    report_file(file.path, console=console)
    text = console.export_text()
    assert "…" not in text
    assert "11616" in text
    assert "4321" in text
    assert " 38\n" in text
    assert f"{time_us(record, 'gpu', 'padless fp8'):.0f}" in text
    ratio = time_us(record, "gpu", BF16) / time_us(record, "gpu", "padless fp8 1d1d")
    assert f"{ratio:.2f}x" in text


def test_the_grid() -> None:
    full, quick = train.grid("full", 0), train.grid("quick", 0)
    assert len(set(full)) == len(full) == 7
    assert {(point.model, point.tokens) for point in quick} < {(point.model, point.tokens) for point in full}
    assert all(point.every_recipe for point in full)
    names = [maker.name for maker in makers(compiled=False, every_recipe=False)]
    assert names == [BF16, *contenders.USUAL, "padless fp8" + KEPT]
    assert [point.slots for point in quick] == [32768, 32768, 65536]


def test_torchao_is_measured_where_its_kernels_compiled(problem: TrainProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    """At DeepSeek-V3's points alone, and where not all of a point's kernels are there the record says so."""
    peer, asked = TorchAo(None), []
    first, second, other = train.grid("quick", 0)

    def compiled(products: Any, seconds: float) -> set[Any]:
        asked.extend(products)
        return set(train.products_of(first)) | set(train.products_of(second)[:1])

    monkeypatch.setattr(peer, "compile_ahead", compiled)
    monkeypatch.setattr(peer, "product", contenders._torch_product)
    monkeypatch.setattr(train, "make_problem", lambda point, *rest: point)
    monkeypatch.setattr(train, "Graphs", lambda: None)
    monkeypatch.setattr(
        train, "measure_train", lambda problem, timer, makers, graphs: {"names": [m.name for m in makers], "errors": {}}
    )
    session: Any = SimpleNamespace(peers=[peer], settings=SimpleNamespace(seed=0), timer=None)
    measure = train.start(session)
    assert asked == [*train.products_of(first), *train.products_of(second)]
    found = [measure(point) for point in (first, second, other)]
    assert ["torchao" in record["names"] for record in found] == [True, False, False]
    assert [list(record["errors"]) for record in found] == [[], ["torchao"], []]


@pytest.mark.parametrize(
    ("program", "done"), [("exit 0", {0, 1}), ("exit 1", set()), ("sleep 9", set()), ("test $5 != 32", {1})]
)
def test_what_does_not_compile_in_time_is_left_out(
    program: str, done: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not there is one whose process failed, or had not ended; $5 is G, and of one product it is 32."""
    script = tmp_path / "compile"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    products = [(8, 32, 16, 48), (8, 2, 16, 48)]
    assert TorchAo(tmp_path).compile_ahead(products, 0.5) == {products[i] for i in done}


def test_torchao_tries_its_tiles_but_not_their_stages() -> None:
    groups, warps, stages = [2, 16, 32, 64, 128], [2, 4, 8], [2, 4, 6]
    tried = [
        SimpleNamespace(kwargs={"NUM_GROUPS": g}, num_warps=w, num_stages=s)
        for g, w, s in product(groups, warps, stages)
    ]
    found = few(tried)
    assert [config.kwargs["NUM_GROUPS"] for config in found] == groups
    assert {(config.num_warps, config.num_stages) for config in found} == {(4, 2)}


def test_another_product_takes_the_place_of_torchs(problem: TrainProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same layer; never captured, since it waits; and wrong where its product is."""
    peer = TorchAo(None)
    assert peer.missing()
    monkeypatch.setattr(peer, "product", lambda x, w, offs: contenders._torch_product(x, w, offs), raising=False)
    maker = next(m for m in makers(compiled=False, every_recipe=False, peers=[peer]) if m.name == "torchao")
    captured: list[Any] = []

    def graphs(call: Any) -> Any:
        captured.append(call)
        return call

    found = train.measure_train(problem, StandInTimer(), [maker], graphs)
    assert (found["errors"], found["wrong"]) == ({}, {})
    assert "torchao" in found["gpu"]
    assert not captured
    monkeypatch.setattr(peer, "product", lambda x, w, offs: contenders._torch_product(x, w.roll(1, 0), offs))
    maker = next(m for m in makers(compiled=False, every_recipe=False, peers=[peer]) if m.name == "torchao")
    assert set(train.measure_train(problem, StandInTimer(), [maker])["wrong"]) == {"torchao"}
