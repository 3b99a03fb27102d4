"""Layers of frozen experts with adapters: result and every gradient of `padless.nn.LoraExperts` near float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from padless.formats import FORMAT_BY_NAME
from padless.moe import moe
from padless.moe.activation import Activation
from padless.nn.lora import LoraExperts
from padless.quantization.quantize import quantize
from padless.verify.fuzz import adapters
from padless.verify.fuzz.layers import draw_ids
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options
from padless.verify.fuzz.whole_layer import decoded_weights

_GATES = {"plain": Activation(), "alternating": Activation("swiglu", "alternating", 1.702, None, 1.0)}
# Of a whole tensor's norm. A result passes five roundings or more: to bfloat16, to e4m3 or to e2m1.
_BF16, _FP8, _FP4 = 2.0**-4, 2.0**-2, 0.85
# Of a routing weight's gradient by the layer's own rows: a row's rounding to bfloat16.
_OF_ROWS = 2.0**-8


def constants(draw: Draw) -> Options:
    """Formats, the rank, the gate, and how adapters are chosen."""
    fixed = adapters.constants(draw)
    for size in ("n", "k"):
        del fixed[size]
    return fixed | {
        "gate": draw.one(tuple(_GATES)),
        "bias": draw.maybe(0.5),
        "rslora": draw.maybe(0.3),
        "top_k": draw.one((1, 2, 4)),
        "id_dtype": draw.one(("int32", "int64")),
        "by_token": draw.maybe(0.7),
        "adapters": draw.randint(1, 3),
        "h": draw.multiple(32, min(draw.limits.k, 256)),
        "i": draw.multiple(32, min(draw.limits.n, 128)),
    }


def rest(draw: Draw, fixed: Options) -> Options:
    del fixed
    return {
        "tokens": draw.one((1, 2, 17, draw.randint(1, 40))),
        "experts": draw.one((1, 2, 5)),
        "same": draw.maybe(0.2),  # then all other experts are groups without rows
        "seed": draw.data_seed(),
    }


def judge_layer(o: Options, place: Place) -> None:
    """Forward and backward; tokens without an adapter have the bits of `moe`."""
    generator = place.generator(o["seed"] + 1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=place.device, generator=generator)

    experts, h, i, rank = o["experts"], o["h"], o["i"], o["rank"]
    format, activation = FORMAT_BY_NAME[o["w"]], _GATES[o["gate"]]
    w13 = quantize(normal(experts, 2 * i, h) / math.sqrt(h), format, kind="weight")
    w2 = quantize(normal(experts, h, i) / math.sqrt(i), format, kind="weight")
    biases = [nn.Parameter(normal(experts, n)) if o["bias"] else None for n in (2 * i, h)]
    names = tuple(f"adapter{number}" for number in range(o["adapters"]))
    activations = torch.bfloat16 if o["a"] == "BF16" else None
    alpha = 2.0 * (math.sqrt(rank) if o["rslora"] else rank)
    layer = LoraExperts(
        w13, w2, bias13=biases[0], bias2=biases[1], activation=activation, activations=activations, rank=rank,
        alpha=alpha, rslora=o["rslora"], adapters=names, dtype=DTYPES[o["dtype"]],
    )  # fmt: skip
    with torch.no_grad():
        for factors in (layer.a13, layer.b13, layer.a2, layer.b2):
            for p in factors.values():
                p.copy_(normal(*p.shape) / math.sqrt(p.shape[2]) / (1 if factors in (layer.a13, layer.a2) else 2))
    ids, x, dout = draw_ids(o, place), normal(o["tokens"], h).bfloat16(), normal(o["tokens"], h).bfloat16()
    weights = torch.rand(ids.shape, device=place.device, generator=generator) + 0.1
    chosen = None
    if o["by_token"]:
        chosen = torch.randint(-1, len(names), (o["tokens"],), device=place.device, generator=generator)
    leaves = {"x": x.clone().requires_grad_(), "weights": weights.clone().requires_grad_()}
    with torch.enable_grad():
        out = layer(leaves["x"], ids, leaves["weights"], adapter_ids=chosen)
        out.backward(dout)
    leaves |= dict(layer.named_parameters())
    got = {"out": out.detach()} | {name: t.grad for name, t in leaves.items() if t.grad is not None}
    wanted = _exact(o, layer, x, ids, weights, dout, chosen) | {"weights": _of_rows(layer, x, ids, dout, chosen)}
    place.judge.wrong("other tensors have gradients", got.keys() != wanted.keys())
    bound = _BF16 if o["a"] == "BF16" else _FP4 if o["w"] == "NVFP4" else _FP8
    for name in got.keys() & wanted.keys():
        values, size = wanted[name]
        error = (got[name].double() - values).norm()
        limit = _OF_ROWS if name == "weights" else bound
        place.judge.wrong(f"{name} is far", ~(error <= limit * size + 2.0**-40))
    if chosen is not None:
        plain = moe(
            x, ids, weights, w13, w2, activation=activation.kind, gate_up=activation.gate_up, alpha=activation.alpha,
            up_offset=activation.up_offset, bias13=None if biases[0] is None else biases[0].detach(),
            bias2=None if biases[1] is None else biases[1].detach(), activations=activations,
        )  # fmt: skip
        none = (chosen < 0)[:, None]
        place.judge.same("tokens without an adapter", torch.where(none, out.detach(), 0), torch.where(none, plain, 0))


def _of_rows(
    layer: LoraExperts, x: torch.Tensor, ids: torch.Tensor, dout: torch.Tensor, chosen: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of routing weights and their size: dots of dout and the slots' rows, which the layer gives one by one.

    Rows that are computed otherwise are no oracle: a dot over a few columns of rows that were rounded to four bits can
    be off by its own size.
    """
    ones = torch.ones((len(x), 1), device=x.device)
    with torch.no_grad():
        rows = [layer(x, ids[:, j : j + 1], ones, adapter_ids=chosen) for j in range(ids.shape[1])]
    terms = torch.stack(rows, 1).double() * dout[:, None].double()
    return terms.sum(-1), terms.square().sum().sqrt()


def _exact(
    o: Options, layer: LoraExperts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, dout: torch.Tensor,
    chosen: torch.Tensor | None,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Result and gradients by autograd in float64, each with the size that its error is measured by.

    That is a tensor's norm, and where an element is a sum whose terms may cancel, as a factor's whose rank is 1, the
    root of the sum of the terms' squares. Of an adapter that no token has they are zero, of one that is not active
    there are none. Routing weights' are those of `_of_rows`.
    """
    tokens, scaling = len(x), 2.0
    leaves = {"x": x.double().requires_grad_()}
    p = {n: t.detach().bfloat16().double() if n[0] in "ab" and "." in n else t.detach().double()
         for n, t in layer.named_parameters()}  # fmt: skip
    p = {n: t.requires_grad_() for n, t in p.items()}
    active = layer.adapters.index(str(layer.active))
    where = torch.full((tokens,), active, device=x.device) if chosen is None else chosen
    w13, w2 = decoded_weights(layer.w13), decoded_weights(layer.w2)
    out = torch.zeros_like(leaves["x"])
    terms: list[tuple[str, int, torch.Tensor, torch.Tensor]] = []  # (side and adapter, expert, rows, their products)
    with torch.enable_grad():
        for e in range(o["experts"]):
            for number in (-1, *range(len(layer.adapters))):
                token, slot = torch.nonzero((ids == e) & (where == number)[:, None], as_tuple=True)
                name = layer.adapters[number] if number >= 0 else None

                def projected(rows: torch.Tensor, w: torch.Tensor, side: str, e: int = e, name: Any = name) -> Any:
                    y = rows @ w[e].T
                    y = y + p[f"bias{side}"][e] if o["bias"] else y
                    if name is None:
                        return y
                    y = y + scaling * (rows @ p[f"a{side}.{name}"][e].T @ p[f"b{side}.{name}"][e].T)
                    y.retain_grad()
                    terms.append((f"{side}.{name}", e, rows.detach(), y))
                    return y

                z = projected(leaves["x"][token], w13, "13")
                gate, up = z.chunk(2, -1) if o["gate"] == "plain" else (z[:, 0::2], z[:, 1::2])
                act = _GATES[o["gate"]]
                y = projected(gate * torch.sigmoid(act.alpha * gate) * (up + act.up_offset), w2, "2")
                out = out.index_add(0, token, weights[token, slot][:, None].double() * y)
        out.backward(dout.double())
    sizes: dict[str, torch.Tensor] = {}
    for at, e, rows, y in terms:
        assert y.grad is not None
        a2, b2, r2, d2 = (t.detach().square() for t in (p[f"a{at}"][e], p[f"b{at}"][e], rows, scaling * y.grad))
        sizes[f"a{at}"] = sizes.get(f"a{at}", 0.0) + ((d2 @ b2).sum(1) * r2.sum(1)).sum()
        sizes[f"b{at}"] = sizes.get(f"b{at}", 0.0) + ((r2 @ a2.T).sum(1) * d2.sum(1)).sum()
    found = {"out": (out.detach(), out.detach().norm())}
    for n, t in (leaves | p).items():
        of_adapter = n.split(".")[-1] if "." in n else None
        if of_adapter is not None and chosen is None and of_adapter != layer.active:
            continue
        gradient = torch.zeros_like(t) if t.grad is None else t.grad
        found[n] = (gradient, torch.maximum(gradient.norm(), torch.as_tensor(sizes.get(n, 0.0)).sqrt()))
    return found
