"""Forward of an experts module as transformers' registries take it: `experts_forward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.integrations.moe import _default_apply_gate

from padless.formats import FP8_BLOCK
from padless.integrations.operators import project, without_backward
from padless.integrations.transformers.weights import ADAPTERS, ExpertWeights, expert_weights
from padless.moe.combining import combine
from padless.moe.layer import BF16, moe
from padless.moe.routing import route

NAME = "padless"
_FP8_GATE = FP8Experts._apply_gate


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts, (T, H) in hidden_states' dtype.

    self: an experts module of transformers with quantized weights.
    hidden_states: (T, H). top_k_index: (T, k) int32 or int64; ids that are no expert of this rank, such as num_experts
        under expert parallelism, add nothing. top_k_weights: (T, k) bfloat16, float16 or float32.

    Differentiable for hidden_states and top_k_weights where `padless.moe.moe` is: FP8_BLOCK weights and activations,
    plain SwiGLU, no bias. Elsewhere the forward runs with grad mode on, and backward raises NotImplementedError.
    Experts with adapters (`adapt_experts`) are differentiable whatever they are. Raises ValueError for weights that are
    not quantized.
    """
    adapters = getattr(self, ADAPTERS, None)
    if adapters is not None:
        return _adapted(self, adapters, hidden_states, top_k_index, top_k_weights)
    run = _Run(self)
    if torch.is_grad_enabled() and run.has_backward():
        return run(hidden_states, top_k_weights, top_k_index)
    return without_backward(run, hidden_states, top_k_weights, top_k_index)


def _adapted(
    module: Any, adapters: Any, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """With the codes that the module has now: moving a model would have copied those of its `LoraExperts`."""
    weights = expert_weights(module)
    adapters.w13, adapters.w2, adapters.bias13, adapters.bias2 = weights.w13, weights.w2, weights.bias13, weights.bias2
    adapters.activations = weights.activation_format
    out: torch.Tensor = adapters(x, top_k_index, top_k_weights)
    return out


class _Run:
    """The forward of one module, with the tensors that could require grad first."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def has_backward(self) -> bool:
        """Whether autograd follows the call by itself."""
        weights = expert_weights(self.module)
        formats = (weights.w13.format.name, weights.w2.format.name, weights.activations)
        plain = weights.bias13 is None and weights.bias2 is None and fused_activation(self.module) == {}
        return plain and formats == (FP8_BLOCK.name,) * 3

    def __call__(
        self, hidden_states: torch.Tensor, top_k_weights: torch.Tensor, top_k_index: torch.Tensor
    ) -> torch.Tensor:
        module, dtype = self.module, hidden_states.dtype
        weights = expert_weights(module)
        x = hidden_states.to(torch.bfloat16) if weights.activations == BF16 else hidden_states
        how = fused_activation(module)
        if how is None:
            return _with_own_gate(module, x, top_k_index, top_k_weights, weights, dtype)
        return moe(
            x,
            top_k_index,
            top_k_weights,
            weights.w13,
            weights.w2,
            bias13=weights.bias13,
            bias2=weights.bias2,
            activations=weights.activation_format,
            out_dtype=dtype,
            **how,
        )


def fused_activation(module: Any) -> dict[str, Any] | None:
    """Arguments of `padless.moe` for the module's activation, or None where the module has to compute it itself.

    Known are SwiGLU through transformers' own default gates, and of its FP8 experts' gate also the clamped form
    and gpt-oss' (alpha, up + 1).
    """
    if not getattr(module, "has_gate", True) or getattr(module, "has_post_expert_norm", False):
        return None
    named: dict[str, Any] | None = getattr(module, "padless_activation", None)
    if named is not None:
        return named
    gate = type(module)._apply_gate
    if gate is _FP8_GATE:
        return _fp8_activation(module)
    return {} if gate is _default_apply_gate and _is_silu(module) else None


def _fp8_activation(module: Any) -> dict[str, Any] | None:
    if getattr(module, "gate_softcap", None) is not None:
        return None
    limit = getattr(module, "limit", None)
    alpha = getattr(module, "swiglu_alpha", None)
    how: dict[str, Any] = {} if limit is None else {"limit": float(limit)}
    if alpha is not None:
        return how | {"alpha": float(alpha), "up_offset": 1.0}
    return how if _is_silu(module) else None


def _is_silu(module: Any) -> bool:
    return isinstance(module.act_fn, (nn.SiLU, SiLUActivation)) or module.act_fn is nn.functional.silu


def _with_own_gate(
    module: Any,
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    weights: ExpertWeights,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The layer with the module's own activation, in x's dtype, between two products."""
    routing = route(top_k_index, weights.w13.data.shape[0])
    h = project(x, routing.tokens, routing.offs, weights.w13, weights.bias13, weights.activations).to(dtype)
    # Rows of the tail hold anything, and stay separate rows until `combine` leaves them out.
    h = module._apply_gate(h) if getattr(module, "has_gate", True) else module.act_fn(h)
    y = project(h.contiguous(), None, routing.offs, weights.w2, weights.bias2, weights.activations)
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y.to(dtype))
    return combine(y, routing.inverse, top_k_weights, out_dtype=dtype)
