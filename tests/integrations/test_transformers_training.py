"""Models of transformers with experts_implementation="padless_train": gradients, steps, recipes and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import padless
import padless.integrations.transformers as integration
from support.hub_checkpoints import (
    VOCABULARY,
    error,
    experts_of,
    following_routing,
    load,
    recorded_routing,
    write_bf16,
    write_fp8,
)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """folder_of(name): a bfloat16 model in a folder, written once."""
    root, written = tmp_path_factory.mktemp("models"), {}

    def folder(name: str) -> Path:
        if name not in written:
            written[name] = write_bf16(name, root / name)
        return written[name]

    return folder


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(7))


def step(model: Any) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, logits and gradients of one step."""
    model.train()
    ids = tokens().to(model.device)
    result = model(ids, labels=ids)
    result.loss.backward()
    return (float(result.loss.detach()), result.logits.detach(), {n: p.grad for n, p in model.named_parameters()})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_gradients(name: str, device: str, folder_of: Callable[[str], Path]) -> None:
    """Loss, logits and the gradient of every parameter near those of transformers' own bfloat16 experts."""
    original = load(folder_of(name), experts_implementation="eager").to(device)
    model = load(folder_of(name), experts_implementation="padless_train").to(device)
    with recorded_routing(original) as decisions:  # near ties of the routers are decided by rounding
        want = step(original)
    with following_routing(model, decisions):
        got = step(model)
    assert abs(got[0] - want[0]) < 0.002 * want[0]
    assert 1e-4 < error(got[1], want[1]) < 0.015
    assert got[2].keys() == want[2].keys()
    for parameter, gradient in got[2].items():
        if want[2][parameter] is None or not want[2][parameter].any():
            assert gradient is None or not gradient.any(), parameter
            continue
        # A token with another model's choice of experts has its weights too: nothing of it reaches the router.
        assert error(gradient, want[2][parameter]) < (0.2 if parameter.endswith("gate.weight") else 0.1), parameter
    assert any("experts.gate_up_proj" in parameter for parameter in got[2])


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_logits_are_those_of_inference(name: str, folder_of: Callable[[str], Path]) -> None:
    """Bit for bit the model that serves the weights' codes, which `quantize_experts` makes of the same parameters."""
    trained = load(folder_of(name), experts_implementation="padless_train").train()
    served = integration.quantize_experts(load(folder_of(name), experts_implementation="padless"), padless.FP8_BLOCK)
    with torch.no_grad():
        assert torch.equal(trained(tokens()).logits, served(tokens()).logits)


def test_recipes(folder_of: Callable[[str], Path]) -> None:
    """The recipe "bf16" is closer to bfloat16 than "fp8" is, in the gradients of the first layer's experts."""
    want = step(load(folder_of("qwen3_moe"), experts_implementation="eager"))[2]
    errors = {}
    for recipe in ("fp8", "bf16"):
        model = load(folder_of("qwen3_moe"), experts_implementation="padless_train")
        assert integration.set_recipe(model, recipe) is model
        found = step(model)[2]
        errors[recipe] = {n: error(g, want[n]) for n, g in found.items() if "layers.0.mlp.experts." in n}
    assert len(errors["fp8"]) == 2
    assert all(errors["bf16"][name] < 0.4 * worse for name, worse in errors["fp8"].items())


def test_training_lowers_the_loss_as_bfloat16_does(folder_of: Callable[[str], Path]) -> None:
    """Four steps of AdamW: every loss is within 0.5% of the first one of bfloat16's."""
    losses = {}
    for name in ("eager", "padless_train"):
        model = load(folder_of("qwen3_moe"), experts_implementation=name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses[name] = []
        for _ in range(4):
            optimizer.zero_grad()
            losses[name].append(step(model)[0])
            optimizer.step()
    assert losses["padless_train"][-1] < 0.85 * losses["padless_train"][0]
    for got, want in zip(losses["padless_train"], losses["eager"], strict=True):
        assert abs(got - want) < 0.005 * losses["eager"][0]


def test_a_trained_model_is_saved_as_ever(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    model = load(folder_of("qwen3_moe"), experts_implementation="padless_train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step(model)
    optimizer.step()
    model.save_pretrained(tmp_path)
    again = load(tmp_path, experts_implementation="padless_train")
    with torch.no_grad():  # new codes are made of new weights: a fresh model computes the same
        assert torch.equal(model.eval()(tokens()).logits, again(tokens()).logits)
    for got, want in zip(experts_of(again), experts_of(model), strict=True):
        assert torch.equal(got.gate_up_proj, want.gate_up_proj)
        assert torch.equal(got.down_proj, want.down_proj)


@pytest.mark.parametrize("name", ["gpt_oss", "fp8"])
def test_experts_that_are_refused(name: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """gpt-oss has biases and a gate of its own; FP8 checkpoints have no weights to train."""
    folder = folder_of("gpt_oss") if name == "gpt_oss" else write_fp8(folder_of("qwen3_moe"), tmp_path / "fp8")
    model = load(folder, experts_implementation="padless" if name == "fp8" else "padless_train")
    model.set_experts_implementation("padless_train")
    said = "GptOssExperts has transposed weights" if name == "gpt_oss" else "Experts has quantized weights"
    with pytest.raises(ValueError, match=rf"{said}.*choose another one"):
        model(tokens())


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("is_transposed", True, r"transposed weights, \(E, K, N\)"),
        ("has_bias", True, "biases"),
        ("act_fn", torch.nn.GELU(), "activation"),
    ],
)
def test_the_reason_is_the_one(attribute: str, value: Any, said: str, folder_of: Callable[[str], Path]) -> None:
    model = load(folder_of("qwen3_moe"), experts_implementation="padless_train")
    setattr(experts_of(model)[1], attribute, value)
    with pytest.raises(ValueError, match=rf"Qwen3MoeExperts has (an )?{said}"):
        model(tokens())


def test_a_model_without_experts() -> None:
    with pytest.raises(ValueError, match="model has no experts that transformers dispatches"):
        integration.set_recipe(torch.nn.Linear(4, 4), "fp8")
    with pytest.raises(ValueError, match="recipe is 'fp4'"):
        integration.set_recipe(torch.nn.Linear(4, 4), "fp4")
