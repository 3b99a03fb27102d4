"""The benchmark of decoding steps: contenders continue one prompt alike, a wrong one shows, and steps really decode."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers")

from padless.bench.case import CASES
from padless.bench.cases import generate
from padless.bench.cases.model import IN_GRAPH
from padless.bench.report.terminal import show
from padless.bench.results import failures
from padless.bench.run import resolve_grid
from support.bench_records import StandInTimer

SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": 3, "max_position_embeddings": 4096}
LINEAR: dict[str, int] = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
LINEAR |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
TINY: dict[str, tuple[str, dict[str, Any], str]] = {
    "next": ("Qwen3NextConfig", {**SIZES, **LINEAR, **EXPERTS, "num_hidden_layers": 4}, "FP8_BLOCK"),
    "gpt-oss": (
        "GptOssConfig",
        {**SIZES, "num_local_experts": 8, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
        "MXFP4",
    ),
}
PROMPT = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=TINY)
def tiny(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param, generate.random_models(TINY[request.param], 1, "cpu")


def measured(models: dict[str, Any], format: str, captured: Any = lambda call: call) -> dict[str, Any]:
    tolerance = generate.TOLERANCE[format]
    return generate.measure_steps(models, PROMPT, 3, tolerance, StandInTimer(), captured)  # type: ignore[arg-type]


def test_all_continue_one_prompt(tiny: tuple[str, dict[str, Any]]) -> None:
    name, models = tiny
    record = measured(models, TINY[name][2]) | {"point": asdict(generate.GeneratePoint(name, 2, 9))}
    assert failures([record]) == []
    assert set(record["gpu"]) == {one + suffix for one in models for suffix in ("", IN_GRAPH)}
    errors = record["experts_error"]
    assert errors[generate.BATCHED_MM] < 0.02
    assert errors[generate.PADLESS] > 0.02, "codes show"
    parameters = [dict(model.named_parameters()) for model in models.values()]
    assert all(parameters[1][key] is parameters[0][key] for key in parameters[0]), "the same weights, once"
    console = Console(width=140, record=True)
    show(console, *generate.tables([record], {}, 140))
    assert f"{2e6 / len(generate.PADLESS + IN_GRAPH):.0f}" in console.export_text()


def test_a_step_is_the_next_token_of_the_whole_sequence(tiny: tuple[str, dict[str, Any]]) -> None:
    model = tiny[1][generate.GROUPED_MM]
    steps, found = generate.Steps(model, PROMPT, model), PROMPT
    for _ in range(4):
        with torch.no_grad():
            whole = model(found, use_cache=False).logits[:, -1:]
        logits = steps()
        assert generate.logits_error(logits, whole) < 0.03
        found = torch.cat([found, logits.argmax(-1)], 1)


def test_a_wrong_layer_is_noticed_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    models = generate.random_models(TINY["next"], 1, "cpu")
    experts = models[generate.PADLESS].model.layers[1].mlp.experts
    flipped = torch.nn.Parameter(experts.down_proj.detach().flip(0), requires_grad=False)
    monkeypatch.setitem(experts._parameters, "down_proj", flipped)
    record = measured(models, "FP8_BLOCK")
    assert set(record["gpu"]) == {n + s for n in (generate.GROUPED_MM, generate.BATCHED_MM) for s in ("", IN_GRAPH)}


def test_a_model_that_waits_is_timed_without_a_graph() -> None:
    models = generate.random_models(TINY["gpt-oss"], 1, "cpu")
    asked = []

    def captured(call: Any) -> Any:
        asked.append(call)
        if len(asked) == 3:
            raise RuntimeError("it waits for the GPU")
        return call

    record = measured(models, "MXFP4", captured)
    assert "waits for the GPU" in record["errors"][generate.PADLESS]
    assert set(record["gpu"]) == {*models, generate.GROUPED_MM + IN_GRAPH, generate.BATCHED_MM + IN_GRAPH}


def test_grids() -> None:
    case = CASES["generate"]
    full, quick = resolve_grid(case, "full"), resolve_grid(case, "quick")
    assert set(quick) < set(full)
    assert {point.sequences for point in full} == {1, 4, 16, 64}
