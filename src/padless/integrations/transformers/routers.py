"""Routers of transformers' models by `padless.moe.topk`, in one launch behind their product: `use_padless_routers`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from padless.moe.choosing import topk
from padless.moe.router import Router

# Classes that are known to have one of these rules, in transformers 5.17 and 5.23.
SOFTMAX = ("MiniMaxTopKRouter", "MixtralTopKRouter")  # float32 weights; those of the next are in the logits' dtype
ROUNDED_SOFTMAX = (
    "FlexOlmoTopKRouter", "GptOssTopKRouter", "MellumTopKRouter", "OlmoeTopKRouter", "Qwen2MoeTopKRouter",
    "Qwen3MoeTopKRouter", "Qwen3NextTopKRouter", "Qwen3OmniMoeTalkerTextTopKRouter", "Qwen3OmniMoeTextTopKRouter",
    "Qwen3OmniMoeThinkerTextTopKRouter", "Qwen3VLMoeTextTopKRouter", "Qwen3_5MoeTopKRouter", "Qwen4ExpTextTopKRouter",
)  # fmt: skip
SIGMOID = (
    "AXK1TopkRouter", "BailingHybridTopkRouter", "DeepseekV32TopkRouter", "DeepseekV3TopkRouter", "Dots1TopkRouter",
    "Dots3NoteTextTopkRouter", "ExaoneMoeTopkRouter", "Glm4MoeLiteTopkRouter", "Glm4MoeTopkRouter",
    "Glm4vMoeTextTopkRouter", "Glm5NextTextTopkRouter", "GlmMoeDsaTopkRouter", "HYV4TopkRouter",
    "KimiLinearTopkRouter", "MiMoV2FlashTopkRouter", "NemotronHTopkRouter", "SolarOpenTopkRouter",
)  # fmt: skip
KNOWN = (*SOFTMAX, *ROUNDED_SOFTMAX, *SIGMOID)
_TOKENS = 32  # that a router is compared with its own forward on


def use_padless_routers(model: nn.Module) -> nn.Module:
    """Makes the routers of a model choose and weigh experts by `padless.moe.topk`; returns the model.

    A router's sizes and options are read now. Its product stays torch's, its results what they were: logits (T, E),
    weights (T, k) in the same dtype and int64 ids (T, k), differentiable as they were. Weights differ by roundings, and
    of equal scores the smaller id comes first, where torch leaves open which does. Other routers stay as they are.

    Raises ValueError where no router is known, and for one that does not give what its own forward gives.
    """
    found = [module for module in model.modules() if type(module).__name__ in KNOWN]
    if not found:
        raise ValueError(f"model has no router that padless knows; these are {', '.join(KNOWN)}")
    made = [partial(_routed, module, rule_of(module)) for module in found]
    for module, forward in zip(found, made, strict=True):
        _check_same(module, forward)
    for module, forward in zip(found, made, strict=True):
        # accelerate's hooks call what they found as forward under this name.
        setattr(module, "_old_forward" if hasattr(module, "_old_forward") else "forward", forward)
    return model


def rule_of(module: Any) -> Router:
    """The rule of a router of `KNOWN`."""
    if type(module).__name__ in SIGMOID:
        return Router(
            module.top_k,
            "sigmoid",
            renormalize=bool(module.norm_topk_prob),
            scaling_factor=float(module.routed_scaling_factor),
            num_expert_groups=module.num_group,
            top_groups=module.topk_group,
        )
    return Router(module.top_k, renormalize=bool(getattr(module, "norm_topk_prob", True)))


def _routed(
    module: Any, router: Router, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A router's forward: (logits (T, E), weights (T, k), ids (T, k))."""
    x, weight = hidden_states.reshape(-1, module.hidden_dim), module.weight
    if router.scoring == "sigmoid":
        logits = nn.functional.linear(x.float(), weight.float())
        weights, ids = topk(logits, router, module.e_score_correction_bias)
        return logits, weights, ids
    logits = nn.functional.linear(x, weight, getattr(module, "bias", None))
    weights, ids = topk(logits, router)
    return logits, weights if type(module).__name__ in SOFTMAX else weights.to(logits.dtype), ids


def _check_same(module: Any, forward: Any) -> None:
    """Raises ValueError unless forward gives the weights of the class' own on random tokens; on meta it cannot tell."""
    if module.weight.is_meta:
        return
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TOKENS, module.hidden_dim, generator=generator, dtype=torch.float32, device="cpu")
    x = x.to(module.weight)
    with torch.no_grad():
        want, got = type(module).forward(module, x), forward(x)
    # Sorted: which of equal scores are chosen, and in which order, is left open.
    weights, expected = (t[1].float().sort(1).values for t in (got, want))
    kinds = [[(t.dtype, t.shape) for t in result] for result in (got, want)]
    bound = 2 * torch.finfo(want[1].dtype).eps + 1e-5
    if kinds[0] != kinds[1] or ((weights - expected).abs() > bound * expected.abs()).any():
        raise ValueError(
            f"{type(module).__name__} of this transformers does not give what padless knows of it; leave its routers as "
            "they are, or use transformers 5.17 to 5.23"
        )
