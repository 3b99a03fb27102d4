"""Adapters merged into codes: dequantize, add, quantize again, and what that loses."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch

from padless.formats import BlockScaledTensor
from padless.nn.lora.experts import LoraExperts
from padless.nn.lora.peft_names import check_adapter
from padless.quantization.quantize import dequantize, quantize
from padless.runtime.choices import ScaleLayout


class Merged(NamedTuple):
    """Weights with an adapter in them, and the error of quantizing them again.

    w13, w2: codes in the formats and scale layouts of the frozen weights.
    loss13, loss2: (E,) float32, |codes' values - (W + delta)| / |delta| of each expert in the Frobenius norm: 1 is an
        error as large as the adapter itself. Infinite for an adapter that is zero and codes that changed, else 0.
    """

    w13: BlockScaledTensor
    w2: BlockScaledTensor
    loss13: torch.Tensor
    loss2: torch.Tensor


def merged(module: LoraExperts, adapter: str) -> Merged:
    """The frozen weights plus scaling * B A of one adapter, quantized again, an expert at a time.

    The module keeps its weights. NVFP4 weights get a new global scale per expert. Raises ValueError for an adapter that
    the module has not, or has as DTensors.
    """
    check_adapter(module, adapter)
    w13, loss13 = _merged(module.w13, module.a13[adapter], module.b13[adapter], module.scaling)
    w2, loss2 = _merged(module.w2, module.a2[adapter], module.b2[adapter], module.scaling)
    return Merged(w13, w2, loss13, loss2)


@torch.no_grad()
def _merged(
    weights: BlockScaledTensor, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> tuple[BlockScaledTensor, torch.Tensor]:
    parts, losses = [], []
    layout = cast(ScaleLayout, weights.scale_layout)
    for expert in range(weights.data.shape[0]):
        with torch.autocast(weights.device.type, enabled=False):
            delta = (b[expert].float() @ a[expert].float())[None] * scaling
        wanted = dequantize(weights[expert : expert + 1]) + delta
        part = quantize(wanted, weights.format, kind="weight", scale_layout=layout)
        error = (dequantize(part) - wanted).norm()
        losses.append(torch.where(error == 0.0, 0.0, error / delta.norm()))
        parts.append(part)
    scales = [part.global_scale for part in parts if part.global_scale is not None]
    return BlockScaledTensor(
        torch.cat([part.data.view(torch.uint8) for part in parts]).view(weights.format.data_dtype),
        torch.cat([part.scale.view(_bytes(part.scale)) for part in parts]).view(weights.format.scale_dtype),
        weights.format,
        torch.cat([scale.reshape(1) for scale in scales]) if scales else None,
        weights.scale_layout,
    ), torch.stack(losses)


def _bytes(scale: torch.Tensor) -> torch.dtype:
    """A type that torch can concatenate: scales of one byte as bytes."""
    return torch.float32 if scale.dtype == torch.float32 else torch.uint8
