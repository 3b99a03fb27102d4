"""Layers with adapters for tests: adapters whose B is not zero, the layer in float64 with all gradients, and limits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from padless import MXFP4, dequantize
from padless.moe import Activation
from padless.nn.lora import LoraExperts
from support.moe_layer_problem import Layer, exact_activation
from support.training_layer import sqnr, worst_row

GPT_OSS = {"gate_up": "alternating", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
OPTIONS = ("gate_up", "alpha", "limit", "up_offset")
BF16_PAIR = (MXFP4, torch.bfloat16)
# Rows are rounded to e4m3, e2m1 or bfloat16, each with its own error; limits are the formats', not the layer's.
LEAST_DB = {"FP8_BLOCK": 21.0, "MXFP8": 21.0, "NVFP4": 9.0, "MXFP4": 9.0, "BF16": 36.0}


def least_db(pair: Any) -> float:
    fmt, activations = pair
    if activations is torch.bfloat16:
        return LEAST_DB["BF16"]
    name = activations.name if activations is not None else {"MXFP4": "FP8_BLOCK"}.get(fmt.name, fmt.name)
    return LEAST_DB[name]


def module(layer: Layer, *, train_biases: bool = False, **options: Any) -> LoraExperts:
    """Adapters whose B is random, not zero."""
    o = layer.options
    activation = Activation(o.get("activation", "swiglu"), **{k: o[k] for k in OPTIONS if k in o})
    biases = {k: o.get(k) for k in ("bias13", "bias2")}
    if train_biases:
        biases = {k: nn.Parameter(b.float()) for k, b in biases.items()}
    found = LoraExperts(layer.w13, layer.w2, activation=activation, activations=o["activations"], **(biases | options))
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name in found.adapters:
            for a, b in ((found.a13, found.b13), (found.a2, found.b2)):
                a[name].copy_(torch.randn(a[name].shape, generator=g) / a[name].shape[2] ** 0.5)
                b[name].copy_(torch.randn(b[name].shape, generator=g) / b[name].shape[2] ** 0.5 / found.scaling)
    return found


def truth(
    layer: Layer, m: LoraExperts, dout: torch.Tensor, adapter_ids: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Result and gradients by autograd in float64, an expert and an adapter at a time."""
    p = {name: t.detach().double().requires_grad_() for name, t in m.named_parameters()}
    x, weights = layer.x.double().requires_grad_(), layer.weights.double().requires_grad_()
    w13, w2 = dequantize(layer.w13).double(), dequantize(layer.w2).double()
    biases = [
        None if b is None else p.get(n, b.detach().double()) for n, b in (("bias13", m.bias13), ("bias2", m.bias2))
    ]
    where = torch.full((len(x),), -1 if m.active is None else m.adapters.index(m.active))
    where = where if adapter_ids is None else adapter_ids
    out = torch.zeros_like(x)
    for e in range(w13.shape[0]):
        for n, name in [*enumerate(m.adapters), (None, None)]:
            has = (where == n) if n is not None else ~((where >= 0) & (where < len(m.adapters)))
            token, slot = torch.nonzero((layer.ids == e) & has[:, None], as_tuple=True)

            def projected(
                rows: torch.Tensor, w: torch.Tensor, bias: Any, place: str, e: int = e, name: Any = name
            ) -> Any:
                y = rows @ w[e].t() if bias is None else rows @ w[e].t() + bias[e]
                if name is None:
                    return y
                return y + rows @ p[f"a{place}.{name}"][e].t() @ p[f"b{place}.{name}"][e].t() * m.scaling

            hidden = exact_activation(projected(x[token], w13, biases[0], "13"), layer.options)
            y = projected(hidden, w2, biases[1], "2")
            out = out.index_add(0, token, weights[token, slot][:, None] * y)
    out.backward(dout.double())
    found = {"out": out.detach(), "x": x.grad, "weights": weights.grad}
    return found | {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in p.items()}


def run(
    layer: Layer, m: LoraExperts, dout: torch.Tensor, adapter_ids: torch.Tensor | None, again: bool = False
) -> dict[str, torch.Tensor]:
    m.zero_grad()
    x, weights = layer.x.clone().requires_grad_(), layer.weights.clone().requires_grad_()
    if again:
        out = checkpoint(m, x, layer.ids, weights, adapter_ids=adapter_ids, use_reentrant=False)
    else:
        out = m(x, layer.ids, weights, adapter_ids=adapter_ids)
    out.backward(dout.to(out))
    found = {"out": out.detach(), "x": x.grad, "weights": weights.grad}
    return found | {
        n.removeprefix("_orig_mod."): torch.zeros_like(t) if t.grad is None else t.grad for n, t in m.named_parameters()
    }


def dout_of(layer: Layer) -> torch.Tensor:
    return torch.randn(layer.x.shape, generator=torch.Generator().manual_seed(7)).bfloat16()


def check(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], least: float) -> None:
    assert got.keys() == want.keys()
    for name, t in want.items():
        if not bool(t.any()):
            assert not bool(got[name].any()), name
        else:
            assert sqnr(got[name], t) >= least, (name, sqnr(got[name], t))
    assert worst_row(got["x"], want["x"]) <= 4 * 10 ** (-least / 20), worst_row(got["x"], want["x"])
