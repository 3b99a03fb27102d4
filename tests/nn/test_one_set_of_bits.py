"""A layer that trains multiplies, activates and rounds as the layer that serves the same weights: bits, not tolerances.

What would convince: outputs equal bit for bit to `padless.moe.moe` of the weights' codes, in every recipe whose
forward pass is of such codes, for sizes whose activation the epilogue computes and for sizes where a separate pass
does, with gate and up in halves and in runs, in every mode that a module is called in. Rounding gate and up once less
changes bits of these layers (`test_another_rounding_is_seen`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from padless import moe
from padless.formats import FP8_BLOCK, MXFP8
from padless.moe import fused
from padless.nn import Experts
from padless.quantization.quantize import quantize
from support.training_layer import EVERY_RECIPE, Layer, layer

RECIPES = [name for name, recipe in EVERY_RECIPE.items() if recipe.forward in (FP8_BLOCK, MXFP8)]
FUSED, APART = 192, 160  # intermediate sizes whose activation the epilogue computes, and a separate pass


def served(problem: Layer, recipe: str, gate_up: Any, **options: Any) -> torch.Tensor:
    """The layer of codes, by the inference call."""
    format = EVERY_RECIPE[recipe].forward
    assert not isinstance(format, torch.dtype)
    codes = (quantize(w.bfloat16(), format, kind="weight") for w in (problem.w13, problem.w2))
    return moe.moe(problem.x.bfloat16(), problem.index, problem.prob, *codes, gate_up=gate_up, **options)


def trained(problem: Layer, recipe: str, gate_up: Any, **options: Any) -> Experts:
    """The module with the same weights."""
    experts, hidden, intermediate = problem.w2.shape
    made = Experts(
        hidden, intermediate, experts, recipe=EVERY_RECIPE[recipe], gate_up=gate_up, dtype=torch.bfloat16, **options
    )
    with torch.no_grad():
        made.w13.copy_(problem.w13)
        made.w2.copy_(problem.w2)
    return made


def arguments(problem: Layer) -> tuple[torch.Tensor, ...]:
    return problem.x.bfloat16(), problem.index, problem.prob


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("intermediate", [APART, FUSED])
@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
def test_recipes(recipe: str, intermediate: int, gate_up: str) -> None:
    problem = layer(intermediate=intermediate, seed=intermediate)
    assert torch.equal(trained(problem, recipe, gate_up)(*arguments(problem)), served(problem, recipe, gate_up))


def test_sizes_are_of_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the two intermediate sizes is activated in the epilogue of the first product, the other is not."""
    fuses, seen = fused.fuses, {}

    def noted(w13: Any, *more: Any) -> bool:
        seen[w13.shape[-2] // 2] = answer = fuses(w13, *more)
        return answer

    monkeypatch.setattr("padless.moe.layer.fuses", noted)
    for intermediate in (APART, FUSED):
        served(layer(tokens=20, intermediate=intermediate), "fp8", "concatenated")
    assert seen == {APART: False, FUSED: True}


def in_training(made: Experts, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
    return made.train()(x.requires_grad_(), *more)


def evaluated(made: Experts, *given: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return made.eval()(*given)


def checkpointed(made: Experts, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(made, x.requires_grad_(), *more, use_reentrant=False)
    out.float().square().sum().backward()  # and again for the backward pass
    return out


def compiled(made: Experts, *given: torch.Tensor) -> torch.Tensor:
    torch._dynamo.reset()
    out: torch.Tensor = torch.compile(made, fullgraph=True, backend="aot_eager")(*given)
    return out


def under_autocast(made: Experts, *given: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return made(*given)


def in_parts(made: Experts, *given: torch.Tensor) -> torch.Tensor:
    return torch.cat([made(*(t[rows] for t in given)) for rows in (slice(0, 1), slice(1, 33), slice(33, None))])


@pytest.mark.parametrize("way", [in_training, evaluated, checkpointed, compiled, under_autocast, in_parts])
@pytest.mark.parametrize("intermediate", [APART, FUSED])
def test_ways_to_call(way: Callable[..., torch.Tensor], intermediate: int) -> None:
    problem = layer(tokens=40, intermediate=intermediate)
    made = trained(problem, "fp8", "concatenated", keep_codes=way is evaluated)
    assert torch.equal(way(made, *arguments(problem)).detach(), served(problem, "fp8", "concatenated"))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("intermediate", [APART, FUSED, 768])
@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
@pytest.mark.parametrize("tokens", [1, 40, 1000])
def test_recipes_on_a_gpu(recipe: str, intermediate: int, gate_up: str, tokens: int) -> None:
    problem = layer(tokens=100 * max(tokens // 100, 1), intermediate=intermediate, hidden=512)
    for name, value in vars(problem).items():
        rows = tokens if name in ("x", "index", "prob", "shared", "dout") else None
        setattr(problem, name, value[:rows].cuda())
    made = trained(problem, recipe, gate_up).cuda()
    assert torch.equal(made(*arguments(problem)), served(problem, recipe, gate_up))


def test_another_rounding_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 gate and up in the epilogue alone: these layers have other bits then."""
    problem = layer(intermediate=FUSED)
    want = served(problem, "fp8", "concatenated")
    made = fused.epilogue_of

    def of_float32(*given: Any, **more: Any) -> Any:
        return replace(made(*given, **more), gate_in_bf16=False)

    monkeypatch.setattr(fused, "epilogue_of", of_float32)
    assert not torch.equal(served(problem, "fp8", "concatenated"), want)
