"""Formats that activations are quantized to for a model's weights, chosen by the user: `set_activations`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from padless.formats import FORMAT_NAMES, BlockScaledFormat
from padless.integrations.transformers.weights import CHOSEN, expert_weights, is_quantized
from padless.kernels.table import ROUTES
from padless.moe.layer import BF16


def set_activations(model: nn.Module, format: BlockScaledFormat | torch.dtype | None) -> nn.Module:
    """Sets what the quantized experts of a model quantize their activations to; returns the model.

    format: a format that padless multiplies with the weights' (docs/supported.md says on which GPU), torch.bfloat16 for
        activations that are not quantized, or None for the default. FP4 weights take FP8_BLOCK or bfloat16 on Hopper:
        FP8_BLOCK rows are what FP8 checkpoints with FP4 experts were made for, bfloat16 ones are more exact and faster.

    Raises ValueError for another format and where no quantized experts are found.
    """
    found: list[Any] = [module for module in model.modules() if is_quantized(module)]
    if not found:
        raise ValueError(
            "model has no quantized experts; load an FP8 or MXFP4 checkpoint, or call quantize_experts(model) first"
        )
    name = None if format is None else _name(format)
    for module in found:
        weights = expert_weights(module).w13.format.name
        allowed = sorted({route.a for route in ROUTES if route.operation == "grouped_gemm" and route.b == weights})
        if name is not None and name not in allowed:
            raise ValueError(
                f"format is {name} and the experts' weights are {weights}; allowed beside these: {', '.join(allowed)}"
            )
    for module in found:
        setattr(module, CHOSEN, name)
    return model


def _name(format: object) -> str:
    if format is torch.bfloat16:
        return BF16
    if isinstance(format, BlockScaledFormat) and format.name in FORMAT_NAMES:
        return format.name
    raise ValueError(f"format is {format!r}; allowed: None, torch.bfloat16, {', '.join(FORMAT_NAMES)}")
