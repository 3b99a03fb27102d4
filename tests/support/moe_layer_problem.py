"""Random layers, and the layer in float64: every token's experts one after the other, from dequantized weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from padless import FP8_BLOCK, MXFP4, MXFP8, NVFP4, BlockScaledFormat, BlockScaledTensor, dequantize, quantize
from support.moe_cases import draw_ids

# Formats of weights, and of activations where they are not those that follow.
PAIRS: tuple[tuple[BlockScaledFormat, Any], ...] = (
    (FP8_BLOCK, None),
    (MXFP8, None),
    (NVFP4, None),
    (MXFP4, None),
    (MXFP4, torch.bfloat16),
    (MXFP4, MXFP4),
)


def pair_name(pair: tuple[BlockScaledFormat, Any]) -> str:
    fmt, activations = pair
    return f"{fmt.name}-{getattr(activations, 'name', activations)}"


@dataclass(frozen=True)
class Layer:
    """Weights, biases and options of a layer, and tokens."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w13: BlockScaledTensor
    w2: BlockScaledTensor
    options: dict[str, Any]

    def run(self, moe: Any, **more: Any) -> torch.Tensor:
        return moe(self.x, self.ids, self.weights, self.w13, self.w2, **(self.options | more))

    def only(self, tokens: torch.Tensor) -> Layer:
        options = dict(self.options)
        if options.get("shared") is not None:
            options["shared"] = options["shared"][tokens]
        return replace(self, x=self.x[tokens], ids=self.ids[tokens], weights=self.weights[tokens], options=options)


def draw_layer(
    pair: tuple[BlockScaledFormat, Any],
    *,
    tokens: int = 21,
    top_k: int = 3,
    experts: int = 5,
    h: int = 160,
    i: int = 128,
    gated: bool = True,
    bias: bool = False,
    shared: bool = False,
    seed: int = 0,
    scale_layout: str = "plain",
    **options: Any,
) -> Layer:
    """A random layer; weights scaled so that activations stay near 1. scale_layout: of the weights."""
    fmt, activations = pair
    g = torch.Generator().manual_seed(seed)
    n = 2 * i if gated else i
    w13 = torch.randn(experts, n, h, generator=g) / h**0.5
    w2 = torch.randn(experts, h, i, generator=g) / i**0.5
    if bias:
        options["bias13"] = torch.randn(experts, n, generator=g) * 0.3
        options["bias2"] = (torch.randn(experts, h, generator=g) * 0.3).bfloat16()
    if shared:
        options["shared"] = torch.randn(tokens, h, generator=g).bfloat16()
    return Layer(
        torch.randn(tokens, h, generator=g).bfloat16(),
        draw_ids(tokens, top_k, experts, seed),
        torch.rand(tokens, top_k, generator=g),
        quantize(w13, fmt, kind="weight", scale_layout=scale_layout),
        quantize(w2, fmt, kind="weight", scale_layout=scale_layout),
        options | {"activations": activations},
    )


def exact_activation(h: torch.Tensor, o: dict[str, Any]) -> torch.Tensor:
    """float64, written apart from the package's own."""
    kind, n = o.get("activation", "swiglu"), h.shape[-1]
    if kind == "relu2":
        return h.clamp(min=0) ** 2
    if kind in ("gelu", "silu"):
        return torch.nn.functional.gelu(h, approximate="tanh") if kind == "gelu" else h * h.sigmoid()
    gate_up = o.get("gate_up", "concatenated")
    if gate_up == "concatenated":
        gate, up = h.chunk(2, dim=-1)
    elif gate_up == "alternating":
        gate, up = h[..., 0::2], h[..., 1::2]
    else:
        gate = torch.cat([h[..., c : c + 32] for c in range(0, n, 64)], dim=-1)
        up = torch.cat([h[..., c + 32 : c + 64] for c in range(0, n, 64)], dim=-1)
    if (limit := o.get("limit")) is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    up = up + o.get("up_offset", 0.0)
    if kind == "geglu":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return gate * (gate * o.get("alpha", 1.0)).sigmoid() * up


def dense(layer: Layer) -> torch.Tensor:
    """(T, H) float64, activations not quantized."""
    o, experts = layer.options, layer.w13.data.shape[0]
    w13, w2 = dequantize(layer.w13).double(), dequantize(layer.w2).double()
    out = torch.zeros(layer.x.shape, dtype=torch.float64)
    if o.get("shared") is not None:
        out += o["shared"].double()
    for t in range(out.shape[0]):
        for j in range(layer.ids.shape[1]):
            e = int(layer.ids[t, j])
            if 0 <= e < experts:
                h = w13[e] @ layer.x[t].double()
                h = h if o.get("bias13") is None else h + o["bias13"][e].double()
                y = w2[e] @ exact_activation(h, o)
                y = y if o.get("bias2") is None else y + o["bias2"][e].double()
                out[t] += layer.weights[t, j].double() * y
    return out


def on_device(layer: Layer, device: str) -> Layer:
    """The layer with all its tensors on the device."""

    def moved(t: Any) -> Any:
        if isinstance(t, BlockScaledTensor):
            return replace(t, data=moved(t.data), scale=moved(t.scale), global_scale=moved(t.global_scale))
        return t.to(device) if isinstance(t, torch.Tensor) else t

    tensors = {name: moved(getattr(layer, name)) for name in ("x", "ids", "weights", "w13", "w2")}
    return replace(layer, **tensors, options={name: moved(value) for name, value in layer.options.items()})
