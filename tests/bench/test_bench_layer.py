"""The benchmark of the layer: contenders compute one layer, wrong or missing ones show, and passes have their bytes."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from padless import FP8_BLOCK
from padless.bench import commands, report_file
from padless.bench.case import CASES
from padless.bench.cases import layer
from padless.bench.cases.problems.layer import MODELS, LayerPoint, make_layer
from padless.bench.results import BenchResult, ResultFile, failures
from padless.bench.run import resolve_grid, resolve_peers
from support.bench_records import StandInTimer, timing

POINT = LayerPoint("tiny", 19, 5, 3, 256, 128)


@pytest.fixture(scope="module")
def problem():  # type: ignore[no-untyped-def]
    return make_layer(POINT, 3, "cpu")


def test_contenders_compute_one_layer(problem) -> None:  # type: ignore[no-untyped-def]
    found = layer.calls(problem)
    assert set(found) == {layer.BF16, layer.TODAY, layer.PADLESS}
    right, record = layer.check(problem, found)
    assert failures([record | {"point": asdict(POINT)}]) == []
    assert set(right) == set(found) == set(layer.TOLERANCE) - {layer.DEEPGEMM}
    assert all(0 < error < layer.TOLERANCE[name] for name, error in record["row_error"].items())


# Experts of 0, 1, 127, 129 and 0 rows; then 3 of 9 experts a token, most with less than a tile.
DEEPGEMM_CASES = """
import torch
from padless.bench.cases.problems.layer import LayerPoint, make_layer
from padless.bench.peers.deepgemm import DeepGemm
from padless.bench.cases import layer
from padless.testing.judge import row_errors, worst
from support.deepgemm import stand_in_deepgemm

ragged = make_layer(LayerPoint("ragged", 257, 5, 1, 256, 128), 1, "cpu")
order = torch.randperm(257, generator=torch.Generator().manual_seed(0))
ragged.ids = (2 + (order > 127).long())[:, None]
ragged.ids[order == 5] = 1
scattered = make_layer(LayerPoint("scattered", 13, 9, 3, 384, 384), 2, "cpu")
peer = DeepGemm(None)
peer._library = stand_in_deepgemm()
empty = torch.empty


def poisoned(*args, **kwargs):
    t = empty(*args, **kwargs)
    t.view(torch.uint8).fill_(0x7F)
    return t


for problem in (ragged, scattered):
    found = layer.calls(problem, [peer])[layer.DEEPGEMM]
    torch.empty = poisoned
    out = found()
    torch.empty = empty
    every = torch.arange(problem.point.tokens)
    print(sorted(problem.sizes)[-4:], worst(row_errors(out, problem.expected(every, quantized=True))))
"""


def test_deepgemm_between_a_frameworks_passes_computes_the_layer() -> None:
    """Every token against float64, in Triton's interpreter, with buffers full of NaN; the product in float64."""
    here = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", DEEPGEMM_CASES],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([*sys.path, str(here)])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
    assert found[0][0] == "[0, 1, 127, 129]"
    assert [0.01 < float(error) < layer.TOLERANCE[layer.DEEPGEMM] for _, error in found] == [True] * 2


def test_a_wrong_or_broken_contender_is_noticed_and_not_timed(problem, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    right = layer.calls

    def broken() -> torch.Tensor:
        raise RuntimeError("no such kernel")

    def changed(*args: Any) -> dict[str, Any]:
        found = right(*args)
        return found | {layer.TODAY: broken, layer.PADLESS: lambda: found[layer.BF16]() * 1.2}

    monkeypatch.setattr(layer, "calls", changed)
    record = layer.measure_layer(problem, (), StandInTimer(), graphs=False) | {"point": asdict(POINT)}
    assert set(record["gpu"]) & set(layer.TOLERANCE) == {layer.BF16}
    assert len(failures([record])) == 2


def test_operands_outlive_what_is_captured(problem, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """A graph has their addresses alone: memory that was free again would be read and written by others."""
    operands: list[weakref.ref[torch.Tensor]] = []

    def part(*arguments: Any) -> Any:
        t = torch.ones(3)
        operands.append(weakref.ref(t))
        return lambda: t.sum()

    class Graph:
        def replay(self) -> None:
            assert all(t() is not None for t in operands)

    class Replaying(StandInTimer):
        def gpu(self, calls: Any) -> Any:
            calls["products"]()
            calls["passes"]()
            calls["pass: combine"]()
            return super().gpu(calls)

    monkeypatch.setattr(layer, "products", part)
    monkeypatch.setattr(layer, "joined_passes", part)
    monkeypatch.setattr(layer, "passes", lambda problem: {"combine": part()})
    monkeypatch.setattr(layer, "capture", lambda call: Graph())
    layer.measure_layer(problem, (), Replaying(), graphs=True)
    assert len(operands) == 3
    assert [t() for t in operands] == [None] * 3, "freed once it is measured"


def test_a_measured_point_is_shown(problem, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    record = layer.measure_layer(problem, (), StandInTimer(), graphs=False)
    record |= {"kind": "layer", "point": asdict(POINT), "seed": 0, "floor_us": 3.0, "copy_gb_per_s": 1000.0}
    assert {f"pass: {name}" for name in layer.PASSES} | {"passes", "products"} < set(record["gpu"])
    file = ResultFile(tmp_path / "layer.jsonl")
    file.append(record)
    console = Console(width=100, record=True)
    report_file(file.path, console=console)
    text = console.export_text()
    assert "…" not in text
    assert "tiny" in text
    assert "%" in text


def test_bytes_of_the_passes(problem) -> None:  # type: ignore[no-untyped-def]
    """Counted from the tensors that go in and out."""
    from padless.moe import combine, gather_quantize, route

    routing = route(problem.ids, 5)
    rows = gather_quantize(problem.x, routing.inverse, FP8_BLOCK)
    y = torch.zeros((57, 256), dtype=torch.bfloat16)
    out = combine(y, routing.inverse, problem.weights)
    inverse, weights = routing.inverse.nbytes, problem.weights.nbytes
    assert problem.pass_bytes() == {
        "route": problem.ids.nbytes + sum(t.nbytes for t in routing),
        "gather_quantize": problem.x.nbytes + inverse + rows.data.nbytes + 57 * 2 * 4,
        "combine": y.nbytes + inverse + weights + out.nbytes,
    }
    record = {"gpu": {"pass: combine": timing(2.0)}, "pass_bytes": {"combine": 4000}, "copy_gb_per_s": 4.0}
    assert layer.pass_rate(record, "combine") == pytest.approx(0.5)
    record["gpu"]["copy: combine"] = timing(1.8)
    assert layer.pass_rate(record, "combine") == pytest.approx(0.9)
    moved = {name: 2 * copy().nbytes for name, copy in layer.copies(problem).items()}
    assert all(0 <= bytes_ - problem.pass_bytes()[name] < 2 for name, bytes_ in moved.items())
    assert set(moved) == {"gather_quantize", "combine"}
    assert layer.over_parts(record) is None
    record["gpu"] |= {"padless": timing(18.0), "products": timing(14.0)}
    assert layer.over_parts(record) == pytest.approx(1.2)
    assert layer.over_floor(record, "padless") is None
    record["floor_us"] = 11.0
    assert layer.over_floor(record, "padless") == pytest.approx(1.5)
    assert layer.over_floor(record, layer.DEEPGEMM) is None


def test_the_products_alone_are_those_of_the_layer(problem) -> None:  # type: ignore[no-untyped-def]
    """Summed with weights they give its bits."""
    from padless.moe import combine, route

    y = layer.products(problem)()
    out = combine(y, route(problem.ids, 5).inverse, problem.weights)
    assert torch.equal(out, layer.padless_layer(problem))


def test_the_grid() -> None:
    full, quick = layer.grid("full", 0), layer.grid("quick", 0)
    assert len(set(full)) == len(full) == 27
    assert {point.model for point in full} == set(MODELS)
    assert len(quick) == 6
    assert set(quick) <= set(full)
    assert LayerPoint("x", 8192, 1, 8, 2, 3).flops == 8192 * 8 * 36


def test_a_run_adds_the_floor_and_the_copys_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 256 tokens in CUDA graphs; the session's peers, seed and ceilings reach the point."""
    seen: list[Any] = []

    def measure(problem: Any, peers: Any, timer: Any, *, graphs: bool) -> dict[str, Any]:
        seen.append((problem, peers, graphs))
        return {"flops": 7, "bytes": 5}

    monkeypatch.setattr(layer, "make_layer", lambda point, seed, device: (point.tokens, seed, device))
    monkeypatch.setattr(layer, "measure_layer", measure)
    session: Any = SimpleNamespace(
        peers=["a peer"],
        timer=None,
        settings=SimpleNamespace(seed=3),
        ceilings=SimpleNamespace(copy_bytes_per_s=2e12),
        floor_us=lambda flops, bytes_: 10 * flops + bytes_,
    )
    run = layer.start(session)
    records = [run(LayerPoint("tiny", tokens, 5, 3, 256, 128)) for tokens in (256, 257)]
    assert seen == [((256, 3, "cuda"), ["a peer"], True), ((257, 3, "cuda"), ["a peer"], False)]
    assert [(r["floor_us"], r["copy_gb_per_s"]) for r in records] == [(75, 2000.0)] * 2


def test_options_reach_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[Any, ...]] = []

    def run(*args: Any) -> BenchResult:
        seen.append(args)
        return BenchResult([], tmp_path / "layer.jsonl")

    monkeypatch.setattr(commands, "run_case", run)
    assert commands.bench("layer", full=True, out=tmp_path, seed=3, time_limit=9.0) == 0
    ((name, points, only, out, settings),) = seen
    assert resolve_grid(CASES[name], points, 3) == layer.grid("full", 3)
    assert (name, only, out, settings.seed, settings.time_limit_s) == ("layer", None, tmp_path, 3, 9.0)
    assert [peer.name for peer in resolve_peers(CASES[name].peers, None)] == ["deepgemm"]
