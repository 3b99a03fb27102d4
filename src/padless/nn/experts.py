"""The experts of a Mixture-of-Experts layer with their weights: `Experts`; and the layer with its router: `MoE`."""

from __future__ import annotations

import torch
from torch import nn

from padless.nn.experts_function import Plan, apply_experts, check_gate_up, check_tokens
from padless.nn.linear import QuantizedModule
from padless.nn.recipe import Recipe
from padless.nn.weight_gradient import DelayedWgrad

SCORES = ("softmax", "sigmoid")


class Experts(QuantizedModule):
    """Gated experts w2 @ (silu(gate) * up), trained in the formats of a recipe.

    hidden, intermediate, num_experts: H, I, E; the first two multiples of 16.
    recipe: a `padless.nn.Recipe` or the name of one.
    gate_up: which rows of w13 make gate and up, "concatenated" or "interleaved" by 32.
    delayed_wgrad: where weight gradients are left for later.
    dtype, device: of the parameters ``w13`` (E, 2 I, H) and ``w2`` (E, H, I): bfloat16, float16 or float32.

    Codes of a weight are made at the first call after a change of it, once for all microbatches of a step.
    Raises ValueError.
    """

    w13: nn.Parameter
    w2: nn.Parameter

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        *,
        recipe: Recipe | str = "fp8",
        gate_up: str = "concatenated",
        delayed_wgrad: DelayedWgrad | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(recipe, delayed_wgrad)
        self.hidden, self.intermediate, self.num_experts = hidden, intermediate, num_experts
        check_gate_up(gate_up, intermediate)
        self.gate_up = gate_up
        self._add_weight("w13", (num_experts, 2 * intermediate, hidden), dtype=dtype, device=device)
        self._add_weight("w2", (num_experts, hidden, intermediate), dtype=dtype, device=device)
        self.reset_parameters()

    def forward(
        self,
        x: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        shared: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`padless.autograd.experts` of x (T, H), ids and weights (T, k) and shared (T, H): (T, H)."""
        w13, w2 = self.w13, self.w2
        check_tokens(x, top_k_index, top_k_weights, shared, self.num_experts)
        if x.shape[1] != self.hidden or w13.device != x.device:
            raise ValueError(
                f"x must be (T, {self.hidden}) on the weights' {w13.device}, got {tuple(x.shape)} on {x.device}"
            )
        operands = self._operands("w13", w13), self._operands("w2", w2)
        plan = Plan(self.recipe, self.gate_up, self.delayed_wgrad)
        return apply_experts(x, top_k_index, top_k_weights, w13, w2, shared, plan, *operands)

    def extra_repr(self) -> str:
        sizes = f"{self.hidden}, {self.intermediate}, {self.num_experts}"
        return f"{sizes}, gate_up={self.gate_up!r}, recipe={self.recipe}"


class MoE(nn.Module):
    """A Mixture-of-Experts layer: a router, experts, and perhaps an expert that every token has.

    hidden, intermediate, num_experts: as for `Experts`. top_k: experts of a token, from 1 to 16.
    shared_intermediate: I of the shared gated expert, plain linear layers in ``dtype``; None for no such expert.
    score: "softmax" or "sigmoid", what turns the router's outputs into scores, in float32.
    normalize: whether the scores of a token's experts are divided by their sum.
    recipe, gate_up, delayed_wgrad, dtype, device: as for `Experts`; the router's weight is in ``dtype`` too.

    Raises ValueError.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        *,
        shared_intermediate: int | None = None,
        score: str = "softmax",
        normalize: bool = True,
        recipe: Recipe | str = "fp8",
        gate_up: str = "concatenated",
        delayed_wgrad: DelayedWgrad | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= min(num_experts, 16):
            raise ValueError(f"top_k is {top_k}; it must be from 1 to 16 and at most num_experts = {num_experts}")
        if score not in SCORES:
            raise ValueError(f"score is {score!r}; allowed: {', '.join(map(repr, SCORES))}")
        self.top_k, self.score, self.normalize = top_k, score, normalize
        self.router = nn.Linear(hidden, num_experts, bias=False, dtype=dtype, device=device)
        self.experts = Experts(
            hidden,
            intermediate,
            num_experts,
            recipe=recipe,
            gate_up=gate_up,
            delayed_wgrad=delayed_wgrad,
            dtype=dtype,
            device=device,
        )
        self.shared: SharedExpert | None = None
        if shared_intermediate is not None:
            self.shared = SharedExpert(hidden, shared_intermediate, dtype=dtype, device=device)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(scores (T, E) float32, top_k_index (T, k) int64, top_k_weights (T, k) float32) of x (T, H)."""
        logits = self.router(x).to(torch.float32)
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        weights, index = scores.topk(self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return scores, index, weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output for x (.., H), of its shape and dtype."""
        tokens = x.reshape(-1, x.shape[-1])
        _, index, weights = self.route(tokens)
        shared = None if self.shared is None else self.shared(tokens)
        out: torch.Tensor = self.experts(tokens, index, weights, shared)
        return out.view(x.shape)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, score={self.score!r}, normalize={self.normalize}"


class SharedExpert(nn.Module):
    """A gated expert that every token has: plain linear layers, gate above up in the first."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.w13 = nn.Linear(hidden, 2 * intermediate, bias=False, dtype=dtype, device=device)
        self.w2 = nn.Linear(intermediate, hidden, bias=False, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """w2 @ (silu(gate) * up) of x (T, H): (T, H)."""
        gate, up = self.w13(x).chunk(2, dim=-1)
        out: torch.Tensor = self.w2(nn.functional.silu(gate) * up)
        return out
