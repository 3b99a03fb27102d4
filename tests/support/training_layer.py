"""Problems of a grouped layer's training, and their judge: the layer in float64 under torch's own autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from padless import FP8_BLOCK, MXFP8, NVFP4
from padless.nn import RECIPES, Experts, Recipe

BF16 = torch.bfloat16
EVERY_RECIPE = {
    **RECIPES,
    "fp8, recompute": Recipe(save="recompute"),
    "bf16, recompute": Recipe(BF16, BF16, BF16, save="recompute"),
    "bf16 dgrad": Recipe(dgrad=BF16, save="recompute"),
    "bf16 forward": Recipe(forward=BF16, save="fp8"),
    "bf16 forward and dgrad": Recipe(forward=BF16, dgrad=BF16),
    "mxfp8, fp8 wgrad, recompute": Recipe(MXFP8, MXFP8, save="recompute"),
    "mxfp8, recompute": Recipe(MXFP8, MXFP8, MXFP8, save="recompute"),
    "nvfp4 forward": Recipe(NVFP4, FP8_BLOCK, BF16, save="recompute"),
}


LEAST_DB = {
    torch.bfloat16: 44.0,
    MXFP8: 23.0,
    FP8_BLOCK: 22.0,
    NVFP4: 11.0,
}  # by the worst format: seen 45.8, 23.7, 22.6, 11.6


def least_db(recipe: Recipe) -> float:
    """The least SQNR of any gradient in this recipe."""
    formats = {recipe.forward, recipe.dgrad, recipe.wgrad} | ({FP8_BLOCK} if recipe.save == "fp8" else set())
    return min(LEAST_DB[format] for format in formats)


@dataclass
class Layer:
    """Inputs of an expert layer, float32, with ids that are no expert among them, and a gradient of its output."""

    x: torch.Tensor  # (T, H)
    index: torch.Tensor  # (T, k)
    prob: torch.Tensor  # (T, k)
    w13: torch.Tensor  # (E, 2 I, H)
    w2: torch.Tensor  # (E, H, I)
    shared: torch.Tensor  # (T, H)
    dout: torch.Tensor  # (T, H)

    NAMES = ("x", "prob", "w13", "w2", "shared")

    def leaves(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Copies of what can have a gradient."""
        return {name: getattr(self, name).detach().to(dtype).requires_grad_() for name in self.NAMES}


SIZES = (129, 1, 127, 0)  # tokens of the first experts; a third of the other slots are no expert's


def layer(
    tokens: int = 100, hidden: int = 160, intermediate: int = 144, experts: int = 5, top_k: int = 3, seed: int = 0
) -> Layer:
    """Normal values of a trained layer's sizes. Experts have `SIZES` tokens for 100 tokens, for others in proportion."""
    g = torch.Generator().manual_seed(seed)
    ids = [expert for expert, size in enumerate(SIZES) for _ in range(size * tokens * top_k // 300)]
    others = tokens * top_k - len(ids)
    ids += [experts - 1] * (others - others // 3) + [-1, experts + 7] * (others // 6) + [experts] * (others // 3 % 2)
    index = torch.tensor(ids, dtype=torch.int64)[torch.randperm(tokens * top_k, generator=g)].view(tokens, top_k)
    return Layer(
        torch.randn(tokens, hidden, generator=g),
        index,
        torch.rand(tokens, top_k, generator=g),
        torch.randn(experts, 2 * intermediate, hidden, generator=g) / hidden**0.5,
        torch.randn(experts, hidden, intermediate, generator=g) / intermediate**0.5,
        torch.randn(tokens, hidden, generator=g) / 3,
        torch.randn(tokens, hidden, generator=g),
    )


def split(z: torch.Tensor, gate_up: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up) of z (.., 2 I)."""
    if gate_up == "concatenated":
        half = z.shape[-1] // 2
        return z[..., :half], z[..., half:]
    runs = z.unflatten(-1, (-1, 2, 32))
    return runs[..., 0, :].flatten(-2), runs[..., 1, :].flatten(-2)


def layer_in_torch(p: dict[str, torch.Tensor], index: torch.Tensor, gate_up: str = "concatenated") -> torch.Tensor:
    """The layer's output from leaves of any one dtype, expert by expert."""
    out = p["shared"]
    for e in range(p["w13"].shape[0]):
        token, slot = torch.nonzero(index == e, as_tuple=True)
        gate, up = split(p["x"][token] @ p["w13"][e].T, gate_up)
        y = (torch.nn.functional.silu(gate) * up) @ p["w2"][e].T
        out = out.index_add(0, token, y * p["prob"][token, slot, None])
    return out


def sqnr(got: torch.Tensor, want: torch.Tensor) -> float:
    """Signal over error in dB; NaN where got has one."""
    got, want = got.detach().double(), want.detach().double()
    return float(10 * torch.log10(want.square().sum() / (got - want).square().sum()))


def worst_row(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error of a row relative to that row, by their norms; rows of zeros count absolutely."""
    got, want = got.detach().double().flatten(0, -2), want.detach().double().flatten(0, -2)
    norm = want.norm(dim=1)
    return float(((got - want).norm(dim=1) / torch.where(norm == 0, 1.0, norm)).max())


def module(problem: Layer, recipe: Recipe | str, **options: Any) -> Experts:
    """`padless.nn.Experts` with the problem's weights."""
    num_experts, hidden, intermediate = problem.w2.shape
    made = Experts(hidden, intermediate, num_experts, recipe=recipe, **options)
    with torch.no_grad():
        made.w13.copy_(problem.w13)
        made.w2.copy_(problem.w2)
    return made


def gradients(
    made: Experts, problem: Layer, dtype: torch.dtype = torch.float32, call: Callable[..., torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The output and the gradients of one step of the module, or of ``call``, which is made of it."""
    p = problem.leaves(dtype)
    made.zero_grad()
    out = (made if call is None else call)(p["x"], problem.index, p["prob"], p["shared"])
    out.backward(problem.dout.to(dtype))
    found = {"out": out.detach(), "w13": made.w13.grad, "w2": made.w2.grad}
    return found | {name: p[name].grad for name in ("x", "prob", "shared")}


def truth(problem: Layer, gate_up: str = "concatenated") -> dict[str, torch.Tensor]:
    """The same in float64 by torch's autograd, nothing quantized."""
    p = problem.leaves(torch.float64)
    out = layer_in_torch(p, problem.index, gate_up)
    out.backward(problem.dout.double())
    return {"out": out.detach()} | {name: p[name].grad for name in Layer.NAMES}
