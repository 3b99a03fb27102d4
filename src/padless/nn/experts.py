"""The experts of a Mixture-of-Experts layer with their weights: `Experts`; and the layer with its router: `MoE`."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from padless.arguments import (
    check_device,
    check_flag,
    check_integer,
    check_tensor_type,
    check_type,
    is_one_of,
    refuse_tangents,
    shown,
)
from padless.distributed import ExpertParallel
from padless.distributed.functions import tracked
from padless.formats import NVFP4
from padless.moe.checks import MAX_EXPERTS, MAX_TOP_K
from padless.moe.twins import LEAST_SUM
from padless.nn.codes import ExpertCodes, expert_codes
from padless.nn.experts_function import Plan, apply_experts, check_gate_up, check_tokens
from padless.nn.linear import QuantizedModule, check_dtype
from padless.nn.recipe import Recipe
from padless.nn.weight_codes import has_backward
from padless.nn.weight_gradient import DelayedWgrad, check_delayed
from padless.runtime.choices import Score, SwigluGateUp

SCORES = ("softmax", "sigmoid")


class Experts(QuantizedModule):
    """Gated experts w2 @ (silu(gate) * up), trained in the formats of a recipe.

    hidden, intermediate, num_experts: H, I, E; the first two multiples of 16.
    recipe: a `padless.nn.Recipe` or the name of one.
    gate_up: which rows of w13 make gate and up, "concatenated" or "interleaved" by 32.
    delayed_wgrad: where weight gradients are left for later.
    dtype, device: of the parameters ``w13`` (E, 2 I, H) and ``w2`` (E, H, I): bfloat16, float16 or float32.
    ep: a `padless.distributed.ExpertParallel` of E experts with rows in bfloat16 or float32, for recipes without NVFP4.
        The parameters are then those of this rank's experts alone, ep.local_experts, and calls are collective, as are
        their backward passes.
    keep_codes: False quantizes the weights in every forward pass. True keeps their codes for the following ones, such as
        those of a step's other microbatches, and asks for this: call `forget_codes` after any change of a weight but a
        step of a torch.optim.Optimizer, an in-place operation of torch on the parameter itself, or another parameter in
        its place. An attribute that may be assigned.

    With ``ep``: rows are quantized where their experts are, and the rows of an expert are those of all ranks' tokens, in
    the order of ranks: for the same tokens and output gradients, a weight's gradient has the bits of one process with
    all tokens. It is that of the sum of all ranks' losses. A token's row and its gradient cross the link once to a rank
    and back; nothing is sorted again for the backward pass. What requires gradients may differ by rank: with grad mode
    on, all ranks have a backward pass, which makes the same exchanges. Grad mode must be the same on all. Raises
    ValueError.
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
        gate_up: SwigluGateUp = "concatenated",
        delayed_wgrad: DelayedWgrad | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        ep: ExpertParallel | None = None,
        keep_codes: bool = False,
    ) -> None:
        super().__init__(recipe, delayed_wgrad, keep_codes)
        check_integer("hidden", hidden, 1)
        check_integer("intermediate", intermediate, 1)
        check_integer("num_experts", num_experts, 1, MAX_EXPERTS)
        self.hidden, self.intermediate, self.num_experts = hidden, intermediate, num_experts
        check_gate_up(gate_up, intermediate)
        if ep is not None:
            check_exchange(ep, num_experts, hidden)
        self.gate_up, self.ep = gate_up, ep
        here = num_experts if ep is None else len(ep.local_experts)
        self._add_weight("w13", (here, 2 * intermediate, hidden), dtype=dtype, device=device)
        self._add_weight("w2", (here, hidden, intermediate), dtype=dtype, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights uniformly from +- 1 / sqrt(K), as torch.nn.Linear does.

        With ``ep`` every rank draws those of all experts, one after the other, and keeps its own: ranks of one seed then
        have different experts, the same ones on any number of ranks. DTensors are drawn as torch draws them: on GPUs
        ranks have different experts, on CPUs those of one seed have the same.
        """
        if self.ep is None or hasattr(self.w13, "to_local"):
            super().reset_parameters()
            return
        for weight in (self.w13, self.w2):
            bound, drawn = 1 / math.sqrt(weight.shape[2]), torch.empty_like(weight[0])
            for expert in range(self.num_experts):
                nn.init.uniform_(drawn, -bound, bound)
                if expert in self.ep.local_experts:
                    with torch.no_grad():  # and not by .data, whose writes kept codes do not notice
                        weight[self.ep.local_experts.index(expert)].copy_(drawn)

    def distribute(self, mesh: Any) -> None:
        """Makes the parameters DTensors of all E experts, Shard(0) over the ranks that ``ep`` was made of.

        mesh: their one-dimensional DeviceMesh, such as mesh["ep"]. FSDP2 may then shard them over another dimension of
        the same mesh, and checkpoints have all experts. What is frozen stays so. Raises ValueError without ``ep``, with
        ``delayed_wgrad`` or a ``main_grad``, for a mesh of other ranks, where experts do not lie in runs of E / R, and
        where it was called before. Later calls refuse a ``main_grad`` of these parameters, too: their gradients go to
        autograd.
        """
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard  # half a second

        ep = self.ep
        runs = () if ep is None else tuple(e * ep.num_ranks // self.num_experts for e in range(self.num_experts))
        if ep is None or ep.expert_map != runs or self.num_experts % ep.num_ranks:
            raise ValueError("distribute is for experts with ep, which lie in runs of E / R on the ranks; give no map")
        if self.delayed_wgrad is not None:
            raise ValueError("delayed_wgrad is given, and gradients of DTensors go to autograd; give None")
        ranks = dist.get_process_group_ranks(ep.group)
        if not isinstance(mesh, DeviceMesh) or mesh.mesh.tolist() != ranks:
            raise ValueError(f"mesh must be the one-dimensional DeviceMesh of ep's ranks {ranks}, got {mesh}")
        for name in ("w13", "w2"):
            weight = getattr(self, name)
            if isinstance(weight, DTensor):
                raise ValueError(f"{name} is a DTensor already; call distribute once")
            refuse_main_grad(name, weight)
        for name in ("w13", "w2"):
            weight = getattr(self, name)
            made = DTensor.from_local(weight.data, mesh, [Shard(0)], run_check=False)
            setattr(self, name, nn.Parameter(made, weight.requires_grad))

    def forward(
        self,
        x: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        shared: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`padless.autograd.experts` of x (T, H), ids and weights (T, k) and shared (T, H): (T, H).

        With ``ep``: of this rank's tokens, x in the type of ep's rows; `ExpertParallel.combine` states the sum, to which
        shared is added in float32, with one more rounding to x's dtype.
        """
        parameter13, parameter2 = self.w13, self.w2
        w13, w2 = local(parameter13), local(parameter2)
        with checking(self.ep):
            check_tokens(x, top_k_index, top_k_weights, shared, self.num_experts)
            if x.shape[1] != self.hidden or w13.device != x.device:
                raise ValueError(
                    f"x must be (T, {self.hidden}) on the weights' {w13.device}, got {tuple(x.shape)} on {x.device}"
                )
            check_delayed(self.delayed_wgrad, w13=w13, w2=w2)
            for name, weight, part in (("w13", parameter13, w13), ("w2", parameter2, w2)):
                if part is not weight and part.requires_grad:
                    refuse_main_grad(name, weight)
            if self.ep is not None:
                check_sent(self.ep, self.recipe, x)
                x, here = tracked(x), len(self.ep.local_experts)
                check_shape("w13", w13, (here, 2 * self.intermediate, self.hidden))
                check_shape("w2", w2, (here, self.hidden, self.intermediate))
            backward = has_backward(x, top_k_weights, w13, w2)
            operands = self._operands("w13", parameter13, w13, backward), self._operands("w2", parameter2, w2, backward)
        plan = Plan(self.recipe, self.gate_up, self.delayed_wgrad, self.ep)
        return apply_experts(x, top_k_index, top_k_weights, w13, w2, shared, plan, *operands)

    def codes(self) -> ExpertCodes:
        """The codes that the next forward pass multiplies with, bit for bit, for who samples from this layer.

        With ``ep`` they are those of ep.local_experts; parameters that are DTensors are gathered first, on all
        ranks that have them. Raises ValueError for a recipe whose forward product has no codes.
        """
        w13, w2 = (getattr(w, "full_tensor", lambda w=w: w)().detach() for w in (self.w13, self.w2))
        return expert_codes(w13, w2, self.recipe, gate_up=self.gate_up)

    def extra_repr(self) -> str:
        sizes = f"{self.hidden}, {self.intermediate}, {self.num_experts}"
        if self.ep is not None:
            sizes += f", {len(self.ep.local_experts)} of them on rank {self.ep.rank} of {self.ep.num_ranks}"
        return f"{sizes}, gate_up={self.gate_up!r}, recipe={self.recipe}"


def local(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of a weight that may be a DTensor, followed by autograd."""
    to_local = getattr(weight, "to_local", None)
    return weight if to_local is None else to_local()


def refuse_main_grad(name: str, weight: torch.Tensor) -> None:
    """Raises ValueError for a weight that has a ``main_grad`` and is a DTensor or to be one.

    Its gradient passes from its part here to the DTensor by autograd, which nothing in ``main_grad`` would take.
    """
    if getattr(weight, "main_grad", None) is not None:
        raise ValueError(
            f"{name} has a main_grad, and gradients of DTensors go to autograd; delete {name}.main_grad and read "
            f"{name}.grad"
        )


def check_exchange(ep: ExpertParallel, num_experts: int, hidden: int) -> None:
    """Raises ValueError for an exchange that experts of these sizes cannot be trained with."""
    check_type("ep", ep, ExpertParallel)
    s = ep.settings
    if (s.num_experts, s.hidden) != (num_experts, hidden) or not s.row_format.is_plain:
        raise ValueError(
            f"ep is for {s.num_experts} experts and {s.hidden} columns in {s.row_format.format}; it must be for "
            f"{num_experts} and {hidden} in torch.bfloat16 or torch.float32, make it with fmt="
        )


def check_sent(ep: ExpertParallel, recipe: Recipe, x: torch.Tensor) -> None:
    """Raises ValueError for a recipe or tokens that an exchange is not for."""
    if NVFP4 in (recipe.forward, recipe.dgrad, recipe.wgrad):
        raise ValueError(
            f"recipe is {recipe} and NVFP4's global scale is of all ranks' rows; with ep FP8_BLOCK, MXFP8 and "
            "torch.bfloat16 are allowed"
        )
    if x.dtype != ep.settings.row_format.format:
        raise ValueError(f"x is {x.dtype} and ep's rows are {ep.settings.row_format.format}; convert x")
    refuse_tangents(x=x)


def check_shape(name: str, weight: torch.Tensor, wanted: tuple[int, int, int]) -> None:
    """Raises ValueError for a weight of other experts, or of another size, than a layer was made for."""
    if tuple(weight.shape) != wanted:
        found = tuple(weight.shape)
        raise ValueError(f"{name} is {found} and with ep it is of this rank's experts; it must be {wanted}")


def checking(ep: ExpertParallel | None) -> AbstractContextManager[None]:
    """A block of checks, whose error is told to ranks that wait for this one."""
    return nullcontext() if ep is None else ep.checking()


class MoE(nn.Module):
    """A Mixture-of-Experts layer: a router, experts, and perhaps an expert that every token has.

    hidden, intermediate, num_experts: as for `Experts`. top_k: experts of a token, from 1 to 16.
    shared_intermediate: I of the shared gated expert, plain linear layers in ``dtype``; None for no such expert.
    score: "softmax" or "sigmoid", what turns the router's outputs into scores, in float32.
    normalize: whether the scores of a token's experts are divided by their sum, as of `padless.moe.Router`.
    recipe, gate_up, delayed_wgrad, dtype, device, ep, keep_codes: as for `Experts`; the router's weight is in ``dtype``
        too. With ``ep`` every rank has the router and the shared expert, whose gradients are of its own tokens, and
        top_k is ep's.

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
        score: Score = "softmax",
        normalize: bool = True,
        recipe: Recipe | str = "fp8",
        gate_up: SwigluGateUp = "concatenated",
        delayed_wgrad: DelayedWgrad | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        ep: ExpertParallel | None = None,
        keep_codes: bool = False,
    ) -> None:
        super().__init__()
        check_type("ep", ep, ExpertParallel)
        if ep is not None and ep.settings.top_k != top_k:
            raise ValueError(f"top_k is {top_k} and ep's {ep.settings.top_k}; they must be the same")
        check_integer("hidden", hidden, 1)
        check_integer("num_experts", num_experts, 1, MAX_EXPERTS)
        check_integer("top_k", top_k, 1, min(num_experts, MAX_TOP_K))
        if shared_intermediate is not None:
            check_integer("shared_intermediate", shared_intermediate, 1)
        check_flag("normalize", normalize)
        check_device(device)
        check_dtype(dtype)
        if not is_one_of(score, SCORES):
            raise ValueError(f"score is {shown(score)}; allowed: {', '.join(map(repr, SCORES))}")
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
            ep=ep,
            keep_codes=keep_codes,
        )
        self.shared: SharedExpert | None = None
        if shared_intermediate is not None:
            self.shared = SharedExpert(hidden, shared_intermediate, dtype=dtype, device=device)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(scores (T, E) float32, top_k_index (T, k) int64, top_k_weights (T, k) float32) of x (T, H)."""
        logits = self.router(x.to(self.router.weight.dtype)).to(torch.float32)
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        weights, index = scores.topk(self.top_k, dim=-1)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)  # sigmoids may all be 0
        return scores, index, weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output for x (.., H), of its shape and dtype."""
        with checking(self.experts.ep):
            check_tensor_type("x", x)
            hidden = self.experts.hidden
            if x.dim() == 0 or x.shape[-1] != hidden or not x.is_floating_point():
                raise ValueError(f"x must be (.., {hidden}) in bfloat16, float16 or float32, got {shown(x)}")
            tokens = x.reshape(-1, x.shape[-1])
            _, index, weights = self.route(tokens)
            shared = None if self.shared is None else self.shared(tokens)
        out: torch.Tensor = self.experts(tokens, index, weights, shared)
        # FSDP2 loses its hooks of a view that is written to.
        return out if x.dim() == 2 else torch.ops.aten._unsafe_view(out, x.shape)

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
        gate, up = self.w13(x.to(self.w13.weight.dtype)).chunk(2, dim=-1)
        out: torch.Tensor = self.w2(nn.functional.silu(gate) * up)
        return out
