"""Gradients of any size: a step whose output's gradient is 2^-48 times as large has 2^-48 times the gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from padless import NVFP4
from padless.autograd import grouped_linear
from padless.nn import experts_function, lifted, linear_function
from padless.quantization import lifting
from support.training_layer import EVERY_RECIPE, Layer, gradients, layer, module

SMALLER = 2.0**-48  # a mean over a batch of 16 million tokens is 2^-24 of each one's
EVERY = [name for name, r in EVERY_RECIPE.items() if NVFP4 not in (r.dgrad, r.wgrad)]  # rounded by chance


def smaller(problem: Layer) -> Layer:
    return replace(problem, dout=problem.dout * SMALLER)


def unequal(recipe: str) -> list[str]:
    """Gradients that are not `SMALLER` times those of the same step with dout as it is."""
    problem = layer(hidden=160, intermediate=160)
    usual, small = (gradients(module(problem, EVERY_RECIPE[recipe]), p) for p in (problem, smaller(problem)))
    assert all(usual[name].abs().amax() > 0 for name in Layer.NAMES)
    return [name for name in Layer.NAMES if not torch.equal(small[name], usual[name] * SMALLER)]


@pytest.mark.parametrize("recipe", EVERY)
def test_gradients_of_experts_scale_with_the_outputs_gradient(recipe: str) -> None:
    """To the bit."""
    assert unequal(recipe) == []


@pytest.mark.parametrize("recipe", EVERY)
def test_gradients_of_a_linear_layer_scale_with_the_outputs_gradient(recipe: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, dy = (torch.randn(size, generator=generator) for size in ((150, 64), (3, 96, 64), (150, 96)))
    offs = torch.tensor([1, 1, 130], dtype=torch.int32)
    found = []
    for gradient in (dy, dy * SMALLER):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        grouped_linear(*leaves, offs, EVERY_RECIPE[recipe]).backward(gradient)
        found.append([leaf.grad for leaf in leaves])
    for usual, small in zip(*found, strict=True):
        assert usual.abs().amax() > 0
        assert torch.equal(small, usual * SMALLER)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_lifting_is_exact(dtype: torch.dtype) -> None:
    x = torch.randn(50, 3).to(dtype)
    assert torch.equal(lifting.lift(x).double(), x.double() * lifting.LIFT)


def test_what_is_lost_without_lifting_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    lowering = "lowered_by_lift"
    for module_, name in ((linear_function, "lift"), (lifted, lowering), (experts_function, lowering)):
        monkeypatch.setattr(module_, name, lambda t: t)
    assert unequal("fp8") == ["x", "prob", "w13", "w2"]
    assert unequal("fp8_bf16_wgrad") == ["x", "prob", "w13"]


@pytest.mark.parametrize("part", ["rows", "columns"])
def test_an_operand_that_is_not_lowered_is_seen(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient is 2^60 times too large, and no other is."""
    problem = layer(hidden=160, intermediate=160)
    usual = gradients(module(problem, "fp8"), problem)
    right = experts_function.lowered

    def forgotten(operand: object) -> object:
        is_columns = isinstance(operand, lifted.GroupedColumns)
        return operand if is_columns == (part == "columns") else right(operand)

    monkeypatch.setattr(experts_function, "lowered", forgotten)
    got = gradients(module(problem, "fp8"), problem)
    wrong = [name for name in Layer.NAMES if not torch.equal(got[name], usual[name])]
    assert wrong == (["x"] if part == "rows" else ["w13", "w2"])
