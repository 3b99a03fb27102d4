"""The benchmark of layers at a few tokens: what is replayed is checked, and what is wrong is named and not timed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from padless import FP8_BLOCK
from padless.bench import commands, report_file
from padless.bench.cases import decoding
from padless.bench.cases.problems.decoding import MODELS, STREAMED_BYTES, DecodingPoint, Stack, make_stack
from padless.bench.peers import Contender, Peer
from padless.bench.peers.triton_moe import TritonMoe, configurations, sorted_rows
from padless.bench.problem import GroupedProblem
from padless.bench.results import ResultFile, failures
from padless.testing.timing import Timing
from support.bench_records import StandInTimer

FP8 = DecodingPoint("tiny", 5, 6, 2, 256, 128, "FP8_BLOCK", 3)
FP4 = DecodingPoint("tiny FP4", 3, 5, 2, 160, 96, "MXFP4", 2)


@pytest.fixture(scope="module")
def stack() -> Stack:
    return make_stack(FP8, 3, "cpu")


class Exact(Peer):
    """A library whose products are right, but for what `spoil` does to them, and which has a layer."""

    name = "exact"

    def __init__(self, spoil: Any = lambda out: out) -> None:
        super().__init__()
        self._spoil = spoil

    def decode(self, problem: GroupedProblem) -> list[Contender]:
        from padless.ops.grouped_gemm import grouped_gemm

        out = problem.empty_out()
        call = lambda: self._spoil(grouped_gemm(problem.a, problem.b, problem.offs, out=out))  # noqa: E731
        return [Contender("exact products", call, lambda: out, buffer=out)]


def test_contenders_are_checked_on_what_is_replayed(stack: Stack) -> None:
    record = decoding.measure(stack, [Exact()], StandInTimer(), graphs=False)
    assert failures([record | {"point": asdict(FP8)}]) == []
    assert {decoding.PADLESS, decoding.BF16, "exact products"} <= set(record["gpu"])
    assert all(0 < error < 0.1 for error in record["row_error"].values())
    assert record["gpu"]["padless"]["us"] == pytest.approx(len("padless") / 3, abs=0.01), "a layer's share"


def test_layers_of_mxfp4_have_biases_and_gpt_oss_gate() -> None:
    stack = make_stack(FP4, 3, "cpu")
    layer = stack.layers[0]
    assert layer.bias13 is not None
    assert layer.bias2 is not None
    record = decoding.measure(stack, [Exact()], StandInTimer(), graphs=False)
    assert failures([record | {"point": asdict(FP4)}]) == []
    assert "exact products" not in record["gpu"], "a library of FP8_BLOCK products"
    without = replace(layer, bias13=None)
    tokens = layer.checked_tokens()
    assert not torch.allclose(layer.expected(tokens, quantized=True), without.expected(tokens, quantized=True))


def untouched(out: torch.Tensor) -> None:
    out[-1] = float("nan")


def shifted(out: torch.Tensor) -> None:
    out[0] *= 1.1


def broken(out: torch.Tensor) -> None:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize("spoil", [untouched, shifted, broken])
def test_wrong_and_broken_contenders_are_named_and_not_timed(stack: Stack, spoil: Any) -> None:
    record = decoding.measure(stack, [Exact(spoil)], StandInTimer(), graphs=False)
    assert "exact products" not in record["gpu"]
    (line,) = failures([record | {"point": asdict(FP8)}])
    assert "exact products" in line


def test_a_peer_that_raises_half_way_leaves_nothing(stack: Stack) -> None:
    class Half(Exact):
        def decode(self, problem: GroupedProblem) -> list[Contender]:
            if problem is stack.products[1][0]:
                raise RuntimeError("out of memory")
            return super().decode(problem)

    parts, errors = decoding.parts_of(stack, [Half()])
    assert "exact products" not in parts
    assert set(errors) == {"exact"}


def test_the_last_layer_is_looked_at(stack: Stack) -> None:
    class LastWrong(Exact):
        def decode(self, problem: GroupedProblem) -> list[Contender]:
            self._spoil = shifted if problem is stack.products[-1][1] else lambda out: out
            spoil, (right,) = self._spoil, super().decode(problem)
            return [replace(right, call=lambda: (right.call(), spoil(right.buffer)))]

    assert "exact products" in decoding.measure(stack, [LastWrong()], StandInTimer(), graphs=False)["wrong"]


def test_every_layer_has_weights_and_tokens_of_its_own(stack: Stack) -> None:
    first, *others = stack.layers
    for other in others:
        assert not torch.equal(first.w13.data.view(torch.uint8), other.w13.data.view(torch.uint8))
        assert not torch.equal(first.x, other.x)
    fewer = stack.with_tokens(2, 3)
    assert fewer.layers[1].w2.data is stack.layers[1].w2.data
    assert [layer.x.shape[0] for layer in fewer.layers] == [2, 2, 2]
    assert fewer.point == replace(FP8, tokens=2)


def test_ids_are_those_of_the_logits_and_no_rounding_decides(stack: Stack) -> None:
    for layer in stack.layers:
        weights, ids = layer.logits.float().topk(2, dim=1)
        assert torch.equal(ids.sort(dim=1).values, layer.ids.sort(dim=1).values)
        torch.testing.assert_close(weights.softmax(1).sort(1).values, layer.weights.sort(1).values)
        rest = layer.logits.float().scatter(1, ids, -torch.inf)
        assert bool((weights.min(dim=1).values > rest.max(dim=1).values).all())


def test_bytes_are_those_of_the_experts_that_have_a_token(stack: Stack) -> None:
    total = 0
    for layer in stack.layers:
        for expert in set(layer.ids.flatten().tolist()):
            total += sum(t[expert].nbytes for w in (layer.w13, layer.w2) for t in (w.data, w.scale))
    assert stack.bytes == pytest.approx(total / 3, abs=1)


def test_the_grid() -> None:
    grid = decoding.grid("full", 0)
    assert len(set(grid)) == len(grid) == 70
    assert len(MODELS) == 10
    for point in grid:
        bits = 4 if point.format == "MXFP4" else 8
        read = point.layers * point.top_k * 3 * point.hidden * point.intermediate * bits / 8
        assert read >= STREAMED_BYTES
        weights = point.layers * point.experts * 3 * point.hidden * point.intermediate
        assert weights * (2 + bits / 8) < 75 * 2**30, "codes and bf16 fit on an H100"


def test_models_and_tokens_are_chosen() -> None:
    grid = decoding.grid("full", 0)
    assert commands.chosen_points(grid, None, None) == grid
    some = commands.chosen_points(grid, ["qwen3-30b", "GLM"], [1, 64])
    assert [(p.model, p.tokens) for p in some] == [
        ("Qwen3-30B", 1), ("Qwen3-30B", 64), ("GLM-4.5-Air", 1), ("GLM-4.5-Air", 64),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="models must begin the names"):
        commands.chosen_points(grid, ["Qwen4"], None)
    with pytest.raises(ValueError, match=r"tokens must be among .*got \[3\]"):
        commands.chosen_points(grid, None, [1, 3])


def test_a_run_keeps_a_models_weights_and_adds_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[DecodingPoint] = []
    monkeypatch.setattr(decoding, "make_stack", lambda *given: made.append(given[0]) or make_stack(*given[:2], "cpu"))
    monkeypatch.setattr(decoding.machine, "clocks", dict)
    measure = decoding.measure
    monkeypatch.setattr(decoding, "measure", lambda *given: measure(*given, graphs=False))
    console = Console(width=200, record=True)
    session: Any = SimpleNamespace(
        peers=[],
        timer=StandInTimer(),
        settings=SimpleNamespace(seed=3),
        ceilings=SimpleNamespace(copy_bytes_per_s=2e12),
        console=console,
    )
    run = decoding.start(session)
    other = replace(FP8, model="another", hidden=128)
    records = [run(point) for point in (FP8, replace(FP8, tokens=1), other)]
    assert made == [FP8, other]
    for record in records:
        assert record["floor_us"] == pytest.approx(record["bytes"] / 2e6)
    assert "tiny T 1: floor" in console.export_text()


def test_a_measured_point_is_shown_and_drawn(stack: Stack, tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "decoding.jsonl")
    for tokens in (2, 1):
        record = decoding.measure(stack.with_tokens(tokens, 0), [Exact()], StandInTimer(), graphs=False)
        record |= {"kind": "decoding", "point": asdict(replace(FP8, tokens=tokens)), "seed": 0, "floor_us": 1.25}
        file.append(record)
    console = Console(width=100, record=True)
    report_file(file.path, tmp_path / "decoding.png", console=console)
    text = console.export_text()
    assert "…" not in text
    assert text.index("tiny  1 ") < text.index("tiny  2 ")
    assert (tmp_path / "decoding.png").stat().st_size > 1000


# --- plain Triton ----------------------------------------------------------------------------------------

TRITON_CASES = """
import torch
from support.interpreter import accept_one_element
from padless.bench.group_sizes import Point
from padless.bench.peers.triton_moe import TritonConfig, launches
from padless.bench.problem import make_grouped, sample_reference

accept_one_element()
sizes = [0, 1, 17, 0, 40, 3]
for n, k, config in (
    (256, 384, TritonConfig(16, 32, 64, 4, 3)),
    (128, 384, TritonConfig(16, 64, 256, 4, 2)),
    (384, 128, TritonConfig(32, 128, 128, 8, 3)),
):
    problem = make_grouped(Point(sum(sizes), n, k, len(sizes)), sizes, 5, "cpu")
    out = problem.empty_out()
    (launch,) = launches(problem, out, [config])
    launch()
    print(bool(out.isnan().any()), sample_reference(problem).row_error(out))
"""


def test_the_triton_kernel_multiplies_what_every_expert_has() -> None:
    """In Triton's interpreter: groups of 0, 1 and 17 rows, K an odd multiple of 128, tiles over and under a group."""
    here = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", TRITON_CASES],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([*sys.path, str(here)])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [line.split() for line in done.stdout.splitlines()]
    assert len(found) == 3
    assert all(unwritten == "False" and 0 < float(error) < 0.01 for unwritten, error in found)


def test_rows_are_sorted_and_every_group_starts_a_tile() -> None:
    order = sorted_rows([0, 1, 17, 2], 16, torch.device("cpu"))
    assert order.used.item() == 64
    assert order.groups[:4].tolist() == [1, 2, 2, 3]
    assert order.rows[:64].tolist() == [
        0, *[20] * 15, *range(1, 18), *[20] * 15, 18, 19, *[20] * 14,
    ]  # fmt: skip
    assert order.rows.numel() == 16 * order.groups.numel() >= 64


def test_configurations_are_those_that_a_group_can_fill() -> None:
    assert {c.block_m for c in configurations(1)} == {16}
    assert {c.block_m for c in configurations(17)} == {16, 32}
    assert len(set(configurations(100))) == len(configurations(100)) == 72


def test_the_fastest_configuration_is_taken_and_swept_once(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    from padless.bench.peers import triton_moe

    wanted = configurations(max(stack.layers[0].sizes))[7]
    swept: list[int] = []

    class Launch:
        def __init__(self, config: Any) -> None:
            self.config = config

        def __call__(self) -> None:
            if self.config.block_k == 256:
                raise RuntimeError("out of shared memory")

    class Clock:
        def gpu(self, calls: Any) -> Any:
            swept.append(len(calls))
            return {name: Timing((1.0 if call.config == wanted else 2.0,)) for name, call in calls.items()}

    monkeypatch.setattr(triton_moe, "launches", lambda problem, out, configs: [Launch(c) for c in configs])
    monkeypatch.setattr(triton_moe, "compile_all", lambda wanted: None)
    peer = TritonMoe()
    peer._timer = Clock()  # type: ignore[assignment]
    first, second = stack.products[0]
    for problem in (first, first, second):
        (contender,) = peer.decode(problem)
        assert contender.call.config == wanted  # type: ignore[attr-defined]
        assert contender.buffer is not None
        assert bool(contender.buffer.isnan().all())
    assert swept == [16, 16], "those that do not fit are left out; a sweep for each product"
    assert peer.choices([first, second]) == [str(wanted)] * 2
    assert FP8_BLOCK.name in peer.formats
