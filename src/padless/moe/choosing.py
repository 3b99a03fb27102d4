"""From a router's logits to the experts of every token and their weights: `topk`; a layer's choice of experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from padless.arguments import check_type, refuse_kinds, shown
from padless.kernels.sm90_moe_decode.choice import ByLogits, Choice, Given
from padless.moe import ops, twins
from padless.moe.checks import MAX_TOP_K, check_matrix, on_device_of, runs_triton
from padless.moe.router import MAX_LOGITS, Router
from padless.ops.checks import describe
from padless.quantization.quantize import INPUT_DTYPES
from padless.runtime.choices import Score
from padless.runtime.operators import register_autograd


class TopK(NamedTuple):
    """The experts of T tokens, best first.

    weights: (T, k) float32. ids: (T, k) int64, different ones from 0 to E - 1.
    """

    weights: torch.Tensor
    ids: torch.Tensor


def topk(logits: torch.Tensor, router: Router, correction_bias: torch.Tensor | None = None) -> TopK:
    """Chooses every token's experts by a router's logits, and weighs them, in one launch.

    logits: (T, E) bfloat16, float16 or float32 with any strides; E from k to 4096, T may be 0.
    router: the rule.
    correction_bias: (E,) bfloat16, float16 or float32: added to the scores to choose by, not to the weights.

    Everything is computed in float32. Experts are chosen by their scores plus bias where there is a bias or groups are
    left out, else by the logits themselves, which rounding makes equal less often. Among equals the smaller id comes
    first; -0 equals 0. NaN comes before every number, as in torch.topk, and what is chosen by a NaN weighs NaN. Under
    "softmax" -inf weighs 0, and all experts of a token weigh NaN if one logit is NaN or +inf, or all are -inf.

    The bits are fixed: the exponential is that of padless' sigmoid, and a sum adds pairs of neighbours, then pairs
    of these sums, and so on. A token's result depends on its own logits alone.
    Differentiable for logits, by the weights; correction_bias only chooses and gets no gradient. Raises ValueError.

    Example: logits [[0, 2, 1, 2]] and Router(2): ids [[1, 3]], weights [[0.5, 0.5]].
    """
    _check(logits, router, correction_bias)
    if ops.is_traced(logits, correction_bias) or (torch.is_grad_enabled() and logits.requires_grad):
        return TopK(*torch.ops.padless.topk(logits, correction_bias, *_packed(router)))
    return TopK(*_chosen(logits, correction_bias, router))


def _packed(router: Router) -> tuple[Any, ...]:
    """A rule as arguments of an operator."""
    return (
        router.k, router.scoring, router.renormalize, float(router.scaling_factor), router.num_expert_groups,
        router.top_groups,
    )  # fmt: skip


def _check(logits: object, router: object, correction_bias: object) -> None:
    refuse_kinds(logits=logits, correction_bias=correction_bias)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2 or logits.dtype not in INPUT_DTYPES:
        raise ValueError(f"logits must be (T, E) bfloat16, float16 or float32, got {describe(logits)}")
    if not isinstance(router, Router):
        raise ValueError(f"router must be a padless.moe.Router, such as Router(8), got {shown(router)}")
    experts = logits.shape[1]
    if not 1 <= experts <= MAX_LOGITS:
        raise ValueError(f"logits must be (T, E) with E from 1 to {MAX_LOGITS}, got {describe(logits)}")
    router.check_experts(experts)
    check_type("correction_bias", correction_bias, torch.Tensor)
    if isinstance(correction_bias, torch.Tensor) and (
        correction_bias.shape != (experts,)
        or correction_bias.dtype not in INPUT_DTYPES
        or correction_bias.device != logits.device
    ):
        raise ValueError(
            f"correction_bias must be ({experts},) bfloat16, float16 or float32 on {logits.device}, got "
            f"{describe(correction_bias)}"
        )


# --- a layer's experts ------------------------------------------------------------------------------------


def choice_of(
    x: torch.Tensor,
    top_k_index: torch.Tensor | None,
    top_k_weights: torch.Tensor | None,
    logits: torch.Tensor | None,
    router: Router | None,
    correction_bias: torch.Tensor | None,
    num_experts: int,
) -> Choice:
    """Of x (T, H) and `padless.moe.moe`'s arguments. Raises ValueError for those that do not go together."""
    tokens = x.shape[0]
    if logits is None and router is None and correction_bias is None:
        refuse_kinds(top_k_index=top_k_index)
        if (
            not isinstance(top_k_index, torch.Tensor)
            or top_k_index.dim() != 2
            or top_k_index.shape[0] != tokens
            or not 1 <= top_k_index.shape[1] <= MAX_TOP_K
            or top_k_index.dtype not in (torch.int32, torch.int64)
            or top_k_index.device != x.device
        ):
            raise ValueError(
                f"top_k_index must be (T, k) = ({tokens}, 1 to {MAX_TOP_K}) int32 or int64 on {x.device}, got "
                f"{describe(top_k_index)}{_about_logits(top_k_index, tokens, num_experts)}"
            )
        if remedy := _about_logits(top_k_weights, tokens, num_experts, top_k_index.shape[1]):
            raise ValueError(
                f"top_k_weights must be (T, k) = {tuple(top_k_index.shape)}, got {describe(top_k_weights)}{remedy}"
            )
        check_matrix("top_k_weights", top_k_weights, tokens, top_k_index.shape[1], x.device)
        assert top_k_weights is not None
        return Given(top_k_index, top_k_weights)
    if top_k_index is not None or top_k_weights is not None:
        raise ValueError(
            f"top_k_index is {shown(top_k_index)} and top_k_weights {shown(top_k_weights)}; both must be None where "
            "router_logits are given"
        )
    if logits is None or router is None:
        raise ValueError(f"router_logits is {shown(logits)} and router {shown(router)}; both must be given, or neither")
    _check(logits, router, correction_bias)
    if router.k > MAX_TOP_K:
        raise ValueError(f"router has k = {router.k}; a layer takes at most {MAX_TOP_K} experts a token")
    if logits.shape != (tokens, num_experts) or logits.device != x.device:
        raise ValueError(
            f"router_logits must be (T, E) with E = {num_experts} and T = {tokens} on {x.device}, got {describe(logits)}"
        )
    return ByLogits(logits, correction_bias, router)


def _about_logits(t: object, tokens: int, num_experts: int, k: int = 0) -> str:
    """The remedy for a tensor that has a number for each expert, in the place of the k chosen ones."""
    if not isinstance(t, torch.Tensor) or t.is_nested or not t.is_floating_point() or num_experts == k:
        return ""
    if t.shape != (tokens, num_experts):
        return ""
    return "; a router's logits are router_logits, given with router=padless.moe.Router(k)"


def given_of(choice: Choice) -> Given:
    """Ids and weights, chosen by logits where that has not been done."""
    if isinstance(choice, Given):
        return choice
    assert isinstance(choice.rule, Router)
    weights, ids = topk(choice.logits, choice.rule, choice.bias)
    return Given(ids, weights)


# --- the operator ----------------------------------------------------------------------------------------


def _fake(logits: torch.Tensor, correction_bias: Any, k: int, *rule: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


@ops.operator(
    "topk",
    "(Tensor logits, Tensor? correction_bias, int k, str scoring, bool renormalize, float scaling_factor, "
    "int num_expert_groups, int top_groups) -> (Tensor, Tensor)",
    _fake,
)
def _topk(
    logits: torch.Tensor, correction_bias: torch.Tensor | None, k: int, scoring: Score, renormalize: bool,
    scaling_factor: float, num_expert_groups: int, top_groups: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    router = Router(k, scoring, renormalize, scaling_factor, num_expert_groups, top_groups)
    return _chosen(logits, correction_bias, router)


def _chosen(
    logits: torch.Tensor, correction_bias: torch.Tensor | None, router: Router
) -> tuple[torch.Tensor, torch.Tensor]:
    if not runs_triton(logits) or logits.shape[0] == 0:
        return twins.topk(logits, correction_bias, router)
    from padless.moe.triton import topk as kernel

    with on_device_of(logits):
        return kernel.topk(logits, correction_bias, router)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.router = Router(*inputs[2:])


def _backward(ctx: Any, dweights: torch.Tensor, _dids: Any) -> tuple[torch.Tensor | None, ...]:
    logits, ids = ctx.saved_tensors
    return (gradient(dweights, logits, ids, ctx.router), *[None] * 7)


register_autograd("topk", _backward, _setup_context)


def gradient(dweights: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, router: Router) -> torch.Tensor:
    """The gradient of logits (T, E), in their dtype, from that of the weights (T, k) with these experts chosen."""
    values = logits.to(torch.float32)
    chosen = values.gather(1, ids)
    d = dweights.to(torch.float32) * router.scaling_factor
    if router.scoring == "softmax" and not router.renormalize:
        scores = values.softmax(1)
        d = d * scores.gather(1, ids)
        return (-scores * d.sum(1, keepdim=True)).scatter_add(1, ids, d).to(logits.dtype)
    scores = chosen.softmax(1) if router.scoring == "softmax" else chosen.sigmoid()
    weights = scores
    if router.renormalize:
        weights = scores / (scores.sum(1, keepdim=True) + twins.LEAST_SUM)
        d = d - (d * weights).sum(1, keepdim=True)
    d = d * weights
    if router.scoring == "sigmoid":
        d = d * (1.0 - scores)
    return torch.zeros_like(values).scatter(1, ids, d).to(logits.dtype)
