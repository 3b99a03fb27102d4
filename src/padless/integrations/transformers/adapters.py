"""Low-rank adapters over the quantized experts of a model: `adapt_experts`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from padless.integrations.transformers.experts import fused_activation
from padless.integrations.transformers.quantizers import TrainsAdapters
from padless.integrations.transformers.weights import ADAPTERS, expert_weights, is_quantized
from padless.integrations.weights import refuse_offloaded
from padless.moe.activation import Activation
from padless.nn.lora import LoraExperts


def adapt_experts(
    model: nn.Module,
    *,
    rank: int = 16,
    alpha: float = 32.0,
    rslora: bool = False,
    dropout: float = 0.0,
    adapters: Sequence[str] = ("default",),
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, LoraExperts]:
    """Gives every quantized experts module of a model adapters that train; returns these by the experts' names.

    model: one with experts_implementation "padless", on its device. Codes stay where and what they are; W + B A is
        never made. Other parameters keep their requires_grad.
    The other arguments are those of `padless.nn.LoraExperts`. PEFT itself is not used, but
    `padless.nn.lora.save_adapter` and `load_adapter` take the result as it is, and files are PEFT's.

    Raises ValueError, and changes nothing, where no quantized experts are found, for experts that have adapters, and
    for those whose activation the first product does not compute.
    """
    found: dict[str, Any] = {path: module for path, module in model.named_modules() if is_quantized(module)}
    if not found:
        raise ValueError(
            "model has no quantized experts; load an FP8 or MXFP4 checkpoint, or call quantize_experts(model) first"
        )
    made = {}
    for path, module in found.items():
        how = fused_activation(module)
        refuse_offloaded(path, module, "adapt_experts")
        if hasattr(module, ADAPTERS):
            raise ValueError(f"{path} has adapters; give adapt_experts all their names in one call")
        if how is None:
            raise ValueError(f"{path} computes an activation or a norm of its own, which adapters are not made for")
        weights = expert_weights(module)
        made[path] = LoraExperts(
            weights.w13, weights.w2, bias13=weights.bias13, bias2=weights.bias2, activation=Activation(**how),
            activations=weights.activation_format, rank=rank, alpha=alpha, rslora=rslora, dropout=dropout,
            adapters=adapters, dtype=dtype,
        )  # fmt: skip
    for path, lora in made.items():
        setattr(found[path], ADAPTERS, lora.train(found[path].training))
    for part in model.modules():
        if isinstance(quantizer := getattr(part, "hf_quantizer", None), TrainsAdapters):
            quantizer.has_adapters = True
    return made
