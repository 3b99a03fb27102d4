"""Quantizing the experts of a bfloat16 model in place: `quantize_experts`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from padless.formats import FP8_BLOCK, MXFP4, MXFP8, NVFP4, BlockScaledFormat
from padless.integrations.transformers.quantizers import gpt_oss_activation, is_gpt_oss
from padless.integrations.transformers.saving import give_quantizer
from padless.integrations.transformers.weights import (
    check_width,
    first_projection,
    is_dispatched,
    keep_codes,
    refuse_parametrized,
)
from padless.integrations.weights import refuse_offloaded
from padless.quantization.quantize import quantize

FORMATS = (FP8_BLOCK, MXFP8, MXFP4, NVFP4)


def quantize_experts(model: nn.Module, format: BlockScaledFormat = FP8_BLOCK) -> nn.Module:
    """Quantizes the experts of a bfloat16, float16 or float32 model in place, module by module; returns the model.

    format: FP8_BLOCK, MXFP8, MXFP4 (4.25 bits a weight) or NVFP4 (4.5). Weights become (E, N, K) codes with scales
    next to them, and with NVFP4 a global scale an expert; the originals are freed, and gradients with them. Other
    experts implementations cannot compute with them. save_pretrained of the model writes them in the hub's FP8 form, or
    gpt-oss' MXFP4 one; NVFP4 and what else transformers could not load is refused there.

    Raises ValueError for another format, where no experts are found, for weights of a width that no product takes, and
    for parametrized or adapted ones.
    """
    if format not in FORMATS:
        allowed = ", ".join(each.name for each in FORMATS)
        raise ValueError(f"format is {getattr(format, 'name', format)!r}; allowed: {allowed}")
    found = [(path, module) for path, module in model.named_modules() if _is_unquantized(module)]
    if not found:
        raise ValueError(
            "model has no experts in bfloat16, float16 or float32 that transformers dispatches by "
            "experts_implementation; a quantized model needs no quantize_experts"
        )
    _refuse_adapters(model)
    for path, module in found:
        refuse_parametrized(module, path)
        refuse_offloaded(path, module, "quantize_experts")
        for name in (first_projection(module), "down_proj"):
            check_width(f"{path}.{name}", getattr(module, name).shape[1 if module.is_transposed else 2], format)
    with torch.no_grad():
        for _, module in found:
            for name in (first_projection(module), "down_proj"):
                _quantize_parameter(module, name, format)
            module.is_transposed = False
            if is_gpt_oss(module):  # as of an MXFP4 file, in the first product's epilogue
                module.padless_activation = gpt_oss_activation(module.config)
    keep_codes(model)
    give_quantizer(model)
    return model


def _is_unquantized(module: Any) -> bool:
    """Whether it is experts that transformers dispatches, with weights of more than a byte."""
    if not is_dispatched(module):
        return False
    weights = [getattr(module, name, None) for name in (first_projection(module), "down_proj")]
    return all(isinstance(t, torch.Tensor) and t.dim() == 3 and t.element_size() > 1 for t in weights)


def _refuse_adapters(model: nn.Module) -> None:
    """Raises ValueError for experts in PEFT's wrappers of a parameter, which parametrize it in each forward."""
    for path, wrapper in model.named_modules():
        name, base = getattr(wrapper, "parameter_name", None), wrapper
        while isinstance(getattr(base, "base_layer", None), nn.Module):
            base, path = base.base_layer, f"{path}.base_layer"
        if isinstance(name, str) and base is not wrapper and _is_unquantized(base):
            raise ValueError(
                f"{path}.{name} has an adapter ({type(wrapper).__name__}), which quantized experts would ignore, with "
                "no gradient: merge and unload it before quantize_experts, or adapt other modules"
            )


def _quantize_parameter(module: Any, name: str, format: BlockScaledFormat) -> None:
    values = getattr(module, name).detach()
    if module.is_transposed:
        values = values.transpose(1, 2).contiguous()
    t = quantize(values, format, kind="weight", scale_layout="plain")
    codes = t.data.view(torch.int8) if format.codes_per_byte == 2 else t.data
    delattr(module, name)
    module.register_parameter(name, nn.Parameter(codes, requires_grad=False))
    module.register_parameter(f"{name}_scale_inv", nn.Parameter(t.scale, requires_grad=False))
    if t.global_scale is not None:
        module.register_parameter(f"{name}_global_scale", nn.Parameter(t.global_scale, requires_grad=False))
