"""From a router's logits to the experts of every token and their weights: `Router`, the rule, and `topk`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from padless.arguments import check_flag, check_integer, check_number, check_type, is_one_of, refuse_kinds, shown
from padless.moe import ops, twins
from padless.moe.checks import on_device_of, runs_triton
from padless.ops.checks import describe
from padless.quantization.quantize import INPUT_DTYPES
from padless.runtime.choices import Score
from padless.runtime.operators import register_autograd

SCORINGS = ("softmax", "sigmoid")
MAX_CHOSEN = 64
MAX_LOGITS = 1 << twins.ID_BITS


@dataclass(frozen=True)
class Router:
    """A rule that chooses k experts of a token by its logits and weighs them.

    k: experts of a token, from 1 to 64.
    scoring: "softmax" over all experts' logits, or the "sigmoid" of each.
    renormalize: whether the chosen experts' scores are divided by their sum. For "softmax" that is the softmax over the
        chosen logits alone, and is computed so; for "sigmoid" 1e-20 is added to the sum.
    scaling_factor: what the weights are multiplied by at last.
    num_expert_groups, top_groups: experts are taken from the top_groups best of so many groups of adjacent experts, each
        of two experts or more. A group's score is the sum of its two best experts', biased.

    Of models in use: Mixtral, Qwen3-MoE and gpt-oss have Router(k); DeepSeek-V3 Router(8, "sigmoid", scaling_factor=2.5,
    num_expert_groups=8, top_groups=4) and a correction bias; Kimi-K2 and GLM-4.5 the same without groups.
    Raises ValueError for what does not go together.
    """

    k: int
    scoring: Score = "softmax"
    renormalize: bool = True
    scaling_factor: float = 1.0
    num_expert_groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        check_integer("k", self.k, 1, MAX_CHOSEN)
        if not is_one_of(self.scoring, SCORINGS):
            raise ValueError(f"scoring is {shown(self.scoring)}; allowed: {', '.join(map(repr, SCORINGS))}")
        check_flag("renormalize", self.renormalize)
        check_number("scaling_factor", self.scaling_factor)
        check_integer("num_expert_groups", self.num_expert_groups, 1, MAX_LOGITS // 2)
        check_integer("top_groups", self.top_groups, 1, self.num_expert_groups)

    def check_experts(self, num_experts: int) -> None:
        """Raises ValueError unless the rule can be applied to so many experts."""
        groups = self.num_expert_groups
        if num_experts % groups or (groups > 1 and num_experts < 2 * groups):
            raise ValueError(
                f"num_expert_groups is {groups} and there are {num_experts} experts; each group must have as many, and "
                "two at least"
            )
        among = num_experts // groups * self.top_groups
        if self.k > among:
            raise ValueError(
                f"k is {self.k} and a token chooses among {among} experts ({self.top_groups} of {groups} groups of "
                f"{num_experts}); it must be at most as many"
            )


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
