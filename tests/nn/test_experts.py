"""`padless.nn.Experts` on a CPU: its gradients against the layer in float64 under torch's own autograd."""

from __future__ import annotations

import pytest
import torch

from padless.nn import RECIPES, Experts, Recipe
from support.training_layer import Layer, layer, layer_in_torch, sqnr

BF16 = torch.bfloat16
ALL = {
    **RECIPES,
    "fp8, Z in bf16": Recipe(save="bf16"),
    "fp8, recompute": Recipe(save="recompute"),
    "bf16, recompute": Recipe(BF16, BF16, BF16, save="recompute"),
    "bf16 dgrad": Recipe(dgrad=BF16, save="recompute"),
    "bf16 forward": Recipe(forward=BF16),
    "bf16 forward and dgrad": Recipe(forward=BF16, dgrad=BF16),
}


def module(problem: Layer, recipe: Recipe | str, **options: object) -> Experts:
    num_experts, hidden, intermediate = problem.w2.shape
    made = Experts(hidden, intermediate, num_experts, recipe=recipe, **options)
    with torch.no_grad():
        made.w13.copy_(problem.w13)
        made.w2.copy_(problem.w2)
    return made


def gradients(made: Experts, problem: Layer, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The output and the gradients of one step."""
    p = problem.leaves(dtype)
    made.zero_grad()
    out = made(p["x"], problem.index, p["prob"], p["shared"])
    out.backward(problem.dout.to(dtype))
    found = {"out": out.detach(), "w13": made.w13.grad, "w2": made.w2.grad}
    return found | {name: p[name].grad for name in ("x", "prob", "shared")}


def truth(problem: Layer, gate_up: str = "concatenated") -> dict[str, torch.Tensor]:
    p = problem.leaves(torch.float64)
    out = layer_in_torch(p, problem.index, gate_up)
    out.backward(problem.dout.double())
    return {"out": out.detach()} | {name: p[name].grad for name in Layer.NAMES}


@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
@pytest.mark.parametrize("name", ALL)
def test_gradients_against_float64(name: str, gate_up: str) -> None:
    problem = layer(intermediate=160) if gate_up == "interleaved" else layer()
    recipe = ALL[name]
    got = gradients(module(problem, recipe, gate_up=gate_up), problem)
    exact = not (recipe.fp8_forward or recipe.fp8_dgrad or recipe.fp8_wgrad or recipe.save == "fp8")
    for what, want in truth(problem, gate_up).items():
        least = 44.0 if exact else 22.0
        assert what == "shared" or sqnr(got[what], want) >= least, (what, sqnr(got[what], want))
    assert torch.equal(got["shared"], problem.dout)
    assert (got["w13"][-1] == 0).all(), "an expert without tokens"
