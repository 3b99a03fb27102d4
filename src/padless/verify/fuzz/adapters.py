"""Adapters over frozen codes: result and every gradient of `padless.nn.LoraGroupedLinear` near float64."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from padless.formats import FORMAT_BY_NAME
from padless.nn.lora import LoraGroupedLinear
from padless.quantization.quantize import quantize
from padless.testing.operands import spans
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options
from padless.verify.fuzz.whole_layer import decoded_weights

_PAIRS = (("FP8_BLOCK", None), ("MXFP8", None), ("NVFP4", None), ("MXFP4", "BF16"), ("NVFP4", "BF16"), ("MXFP4", None))
# Of a row's error relative to the root of the sum of its terms' squares. A rounding is at most 2^-9 in bfloat16, of
# which there are four one after the other; 2^-4 in e4m3; and 2^-2 in e2m1 with the scale of its block rounded too.
_BF16, _FP8, _FP4 = 2.0**-6, 2.0**-3, 2.0**-1


def constants(draw: Draw) -> Options:
    """The formats, sizes of the product, and the rank."""
    w, a = draw.one(_PAIRS)
    return {
        "w": w,
        "a": a,
        "dtype": draw.one(("bfloat16", "float32")),
        "rank": draw.one((1, 3, 8, 16, 17, 64, draw.randint(1, 256))),
        "n": draw.multiple(32, draw.limits.n),
        "k": draw.multiple(32, draw.limits.k),
    }


def rest(draw: Draw, fixed: Options) -> Options:
    del fixed
    return {
        "sizes": draw.sizes(draw.limits.groups),
        "past": draw.past(),
        "bias": draw.maybe(0.5),
        "adapters": draw.randint(1, 3),
        "seed": draw.data_seed(),
    }


def judge_linear(o: Options, place: Place) -> None:
    """The layer forward and backward, rows of no group being NaN. Adapters that are not active get none."""
    generator = place.generator(o["seed"])
    groups, n, k, rows, rank = len(o["sizes"]), o["n"], o["k"], sum(o["sizes"]), o["rank"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=place.device, generator=generator)

    weight = quantize(normal(groups, n, k) / math.sqrt(k), FORMAT_BY_NAME[o["w"]], kind="weight")
    bias = nn.Parameter(normal(groups, n)) if o["bias"] else None
    names = tuple(f"adapter{i}" for i in range(o["adapters"]))
    layer = LoraGroupedLinear(
        weight, bias=bias, activations=torch.bfloat16 if o["a"] == "BF16" else None, rank=rank, alpha=float(rank),
        adapters=names, dtype=DTYPES[o["dtype"]],
    )  # fmt: skip
    with torch.no_grad():
        for parameters, scale in ((layer.a, k), (layer.b, rank)):
            for parameter in parameters.values():
                parameter.copy_(normal(*parameter.shape) / math.sqrt(scale))
    layer.active = names[o["seed"] % len(names)]
    x, dy = (normal(rows + o["past"], columns).bfloat16() for columns in (k, n))
    x[rows:], dy[rows:] = math.nan, math.nan
    offs = place.put(torch.tensor(list(accumulate(o["sizes"])), dtype=torch.int32))
    with torch.enable_grad():
        x.requires_grad_()
        y = layer(x, offs)
        y.backward(dy)
    assert x.grad is not None
    a, b = layer.a[layer.active], layer.b[layer.active]
    got: dict[str, Any] = {"y": y.detach()[:rows], "x": x.grad[:rows], "a": a.grad, "b": b.grad}
    if bias is not None:
        got["bias"] = bias.grad
    of_y = _BF16 if o["a"] == "BF16" else _FP4 if o["w"] == "NVFP4" else _FP8  # rows with MXFP4 are FP8_BLOCK
    bounds = {"y": of_y, "x": _FP8 if o["w"] == "FP8_BLOCK" else _BF16, "a": _BF16, "b": _BF16, "bias": _BF16}
    wanted = _exact(o, x.detach()[:rows].double(), dy[:rows].double(), weight, a.detach(), b.detach(), bias)
    for name, t in got.items():
        values, squares = wanted[name]
        error = (t.double() - values).norm(dim=-1)
        place.judge.wrong(f"{name} is far", ~(error <= bounds[name] * squares.sum(-1).sqrt() + 2.0**-40).all())
    others = [p for name in names if name != layer.active for p in (layer.a[name], layer.b[name])]
    place.judge.wrong("an adapter that is not active has a gradient", any(p.grad is not None for p in others))


def _exact(
    o: Options, x: torch.Tensor, dy: torch.Tensor, weight: Any, a: torch.Tensor, b: torch.Tensor, bias: Any
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Values, and sums of squares of the terms of each; A and B in bfloat16, as they are multiplied, and scaling 1."""
    w = decoded_weights(weight)
    a, b = a.bfloat16().double(), b.bfloat16().double()
    found: dict[str, list[torch.Tensor]] = {}

    def add(name: str, values: torch.Tensor, squares: torch.Tensor) -> None:
        found.setdefault(name, []).append(values)
        found.setdefault(f"{name} squares", []).append(squares)

    for g, (start, end) in enumerate(spans(list(accumulate(o["sizes"])), sum(o["sizes"]))):
        rows, d = x[start:end], dy[start:end]
        t, dt = rows @ a[g].T, d @ b[g]
        shift = torch.zeros((), dtype=torch.float64, device=x.device) if bias is None else bias[g].detach().double()
        sizes = rows**2 @ (a[g] ** 2).T + t**2, d**2 @ b[g] ** 2 + dt**2
        add("y", rows @ w[g].T + t @ b[g].T + shift, rows**2 @ (w[g] ** 2).T + sizes[0] @ (b[g] ** 2).T + shift**2)
        add("x", d @ w[g] + dt @ a[g], d**2 @ w[g] ** 2 + sizes[1] @ a[g] ** 2)
        add("a", (dt.T @ rows)[None], (sizes[1].T @ rows**2)[None])
        add("b", (d.T @ t)[None], ((d**2).T @ sizes[0])[None])
        add("bias", d.sum(0)[None], (d**2).sum(0)[None])
    return {n: (torch.cat(found[n]), torch.cat(found[f"{n} squares"])) for n in ("y", "x", "a", "b", "bias")}
