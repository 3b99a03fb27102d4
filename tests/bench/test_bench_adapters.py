"""The benchmark of adapters: each part computes what it says, is checked before it is timed, and fails by itself.

A sceptic is convinced by: the contenders' results near float64 with adapters that change them by far more than the
tolerance; gradients of two computations that share no code but the problem; a planted fault in each part that is named
and not timed.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from rich.console import Console

from padless.bench.cases import adapters
from padless.bench.cases.problems import adapters as problems
from padless.bench.cases.problems.adapters import AdapterPoint
from padless.bench.commands import chosen_points
from padless.bench.report.terminal import show
from padless.bench.results import failures
from padless.nn.lora import LoraExperts
from padless.nn.lora.low_rank import Factors
from padless.testing.judge import row_errors
from support.bench_records import StandInTimer

FP8 = AdapterPoint("tiny", 21, 5, 2, 256, 128, "FP8_BLOCK", "forward")
FP4 = AdapterPoint("tiny", 19, 4, 2, 160, 96, "MXFP4", "forward")


def measured(point: AdapterPoint) -> dict[str, Any]:
    found = adapters.measure(point, 3, StandInTimer(), "cpu", lambda text: None, graphs=lambda call: call)
    return found | {"point": asdict(point), "kind": "adapters", "seed": 3, "session": "s"}


@pytest.mark.parametrize("point", [FP8, FP4], ids=lambda p: p.format)
@pytest.mark.parametrize("part", ["forward", "decode"])
def test_with_and_without_are_near_float64(point: AdapterPoint, part: Any) -> None:
    record = measured(replace(point, part=part, adapters=3 if part == "decode" else 1))
    assert failures([record]) == []
    assert set(record["gpu"]) == {adapters.WITH, adapters.WITHOUT}
    assert all(0 < error < adapters.TOLERANCE[point.format] for error in record["row_error"].values())


@pytest.mark.parametrize("point", [FP8, FP4], ids=lambda p: p.format)
def test_adapters_change_the_result_by_more_than_is_allowed(point: AdapterPoint) -> None:
    problem = problems.make_problem(point, 3, "cpu")
    layer = problems.with_adapters(problem, ("a", "b"), 1)
    tokens = problems.checked_tokens(problem)
    none, a, b = (problems.expected(problem, layer, tokens, [name] * len(tokens)) for name in (None, "a", "b"))
    for one, other in ((a, none), (b, none), (a, b)):
        assert float(row_errors(one, other).min()) > 2 * adapters.TOLERANCE[point.format]


@pytest.mark.parametrize("point", [FP8, FP4], ids=lambda p: p.format)
def test_a_step_has_the_gradients_of_torch(point: AdapterPoint) -> None:
    record = measured(replace(point, part="step"))
    assert failures([record]) == []
    assert set(record["gpu"]) == {adapters.PADLESS, adapters.TORCH}
    factors = {f"{name}.adapter" for name in ("a13", "b13", "a2", "b2")}
    assert set(record["gradient_error"]) == {"out", "x", "weights"} | factors
    assert all(0 < error < adapters.TOLERANCE[point.format] for error in record["gradient_error"].values())


def test_a_models_steps_lower_the_loss_and_count_bytes() -> None:
    record = measured(replace(FP4, part="model", layers=3))
    assert failures([record]) == []
    assert record["losses"] == sorted(record["losses"], reverse=True)
    assert len(record["losses"]) == adapters.WARM_UP + adapters.STEPS
    values = FP4.experts * 3 * FP4.hidden * FP4.intermediate
    assert record["codes_bytes"] == 3 * (values // 2 + values // 32)
    factors = FP4.experts * problems.RANK * (FP4.hidden + 2 * FP4.intermediate + FP4.intermediate + FP4.hidden)
    assert 3 * factors * 8 <= record["adapter_bytes"] <= 3 * factors * 8 + 3 * 4 * 8  # and a count of steps each
    assert record["tokens_per_s"] > 0


class Backwards(LoraExperts):
    """Adds the adapter the other way round."""

    def _of_names(self, *arguments: Any) -> Factors:
        return super()._of_names(*arguments)._replace(scaling=-self.scaling)


@pytest.mark.parametrize("part", ["forward", "step", "decode"])
def test_a_wrong_adapter_is_named_and_not_timed(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "LoraExperts", Backwards)
    record = measured(replace(FP8, part=part))
    name = adapters.PADLESS if part == "step" else adapters.WITH
    assert set(record["wrong"]) == {name}
    assert name not in record["gpu"]


def test_steps_that_do_not_learn_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *arguments: None)
    assert set(measured(replace(FP4, part="model", layers=1))["wrong"]) == {adapters.PADLESS}


def test_a_part_that_raises_does_not_lose_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(adapters, "measure_model", broken)
    record = measured(replace(FP4, part="model"))
    assert "out of memory" in record["errors"]["model"]
    assert len(failures([record])) == 1
    assert failures([measured(FP4)]) == []


def test_parts_are_chosen_and_every_table_fits() -> None:
    points = adapters.grid("full", 0)
    assert {p.part for p in chosen_points(points, None, None, ["step", "decode"])} == {"step", "decode"}
    assert len(chosen_points(points, ["gpt-oss-120b"], [8192], ["forward"])) == 1
    with pytest.raises(ValueError, match=r"part must be among .*'forward'.*, got \['froward'\]"):
        chosen_points(points, None, None, ["froward"])
    assert all(p.experts * (p.adapters + 1) <= 1024 for p in points if p.part == "decode")
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    records = [measured(replace(FP4, part=part)) for part in ("forward", "step", "decode", "model")]
    show(console, *adapters.tables(records, {}, 100))
    text = console.export_text()
    assert all(word in text for word in ("without", "torch bf16", "tokens/s", "rank 16"))
    assert max(map(len, text.splitlines())) <= 100
