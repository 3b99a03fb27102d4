"""The benchmark of a whole model: both contenders compute one model, and a wrong or broken one shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers")

from dataclasses import asdict

from padless.bench.case import CASES
from padless.bench.cases import model
from padless.bench.report.terminal import show
from padless.bench.results import failures
from padless.bench.run import resolve_grid
from support.bench_records import StandInTimer

TINY = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return model.random_models(TINY, 1, "cpu")


IDS = torch.randint(0, 97, (2, 23), generator=torch.Generator().manual_seed(0))


def bytes_of(of: Any, ids: torch.Tensor) -> int:
    return sum(p.numel() * p.element_size() for p in of.parameters())


def measured(models: dict[str, Any]) -> dict[str, Any]:
    return model.measure_model(models, IDS, StandInTimer(), bytes_of)


def test_both_compute_one_model_and_share_all_but_the_experts(models: dict[str, Any]) -> None:
    record = measured(models)
    assert failures([record | {"point": asdict(model.ModelPoint("tiny", 2, 23))}]) == []
    assert 1e-4 < record["logits_error"] < model.TOLERANCE  # FP8 shows, and no more
    assert set(record["gpu"]) == {model.GROUPED_MM, model.PADLESS}
    first, second = (dict(models[name].named_parameters()) for name in (model.GROUPED_MM, model.PADLESS))
    shared = {name for name in first if name in second and first[name] is second[name]}
    assert {name for name in first if name not in shared} == {name for name in first if ".experts." in name}
    assert first[next(name for name in first if ".experts." in name)].dtype == torch.bfloat16
    assert record["memory_bytes"][model.PADLESS] < record["memory_bytes"][model.GROUPED_MM]


def test_a_layer_that_is_wrong_is_noticed_and_not_timed(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = models[model.PADLESS].model.layers[1].mlp.experts
    codes = experts.down_proj
    monkeypatch.setitem(
        experts._parameters, "down_proj", torch.nn.Parameter(codes.detach().flip(0), requires_grad=False)
    )
    # Logits of a small random model hardly hang on one layer: judged by a bound between the right and the wrong one.
    wrong = measured(models)["logits_error"]
    monkeypatch.undo()
    right = measured(models)["logits_error"]
    assert wrong > 1.5 * right
    monkeypatch.setattr(model, "TOLERANCE", (wrong + right) / 2)
    monkeypatch.setitem(
        experts._parameters, "down_proj", torch.nn.Parameter(codes.detach().flip(0), requires_grad=False)
    )
    record = measured(models)
    assert set(record["gpu"]) == {model.GROUPED_MM}
    assert len(failures([record | {"point": asdict(model.ModelPoint("tiny", 2, 23))}])) == 1


def test_a_model_that_raises_is_noticed(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **keywords: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(models[model.PADLESS], "forward", broken)
    record = measured(models)
    assert "no such kernel" in record["errors"][model.PADLESS]
    assert set(record["gpu"]) == {model.GROUPED_MM}


def test_one_sequence_is_timed_from_graphs_too(models: dict[str, Any]) -> None:
    asked = []

    def captured(call: Any) -> Any:
        asked.append(call())
        if len(asked) == 2:
            raise RuntimeError("it waits for the GPU")
        return call

    record = model.measure_model(models, IDS[:1], StandInTimer(), bytes_of, captured)
    assert set(record["gpu"]) == {model.GROUPED_MM, model.PADLESS, model.GROUPED_MM + model.IN_GRAPH}
    assert "waits for the GPU" in record["errors"][model.PADLESS + model.IN_GRAPH]
    assert [tuple(logits.shape) for logits in asked] == [(1, 1, 97)] * 2
    assert not torch.equal(*asked)


def test_grids_and_tables(models: dict[str, Any]) -> None:
    case = CASES["model"]
    assert len(resolve_grid(case, "full")) == 5 > len(resolve_grid(case, "quick")) == 2
    record = measured(models) | {"point": asdict(model.ModelPoint("tiny", 2, 23))}
    console = Console(width=140, record=True)
    show(console, *model.tables([record], {}, 140))
    text = console.export_text()
    assert "faster" in text
    assert "tiny" in text
