"""Layers of few tokens in one launch: the bits of their passes, call after call and in replayed graphs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from padless import moe
from padless.formats import FORMAT_BY_NAME, MXFP4, BlockScaledTensor
from padless.layouts import to_blocked
from padless.moe.activation import Activation
from padless.moe.decode import moe_in_one_launch
from padless.quantization.quantize import quantize
from padless.verify.fuzz.layers import draw_ids
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options
from padless.verify.fuzz.whole_layer import Layer

CALLS = 3  # with other tokens and ids, on one scratch


def constants(draw: Draw) -> Options:
    """Weights' format and what the kernel is compiled for."""
    w = draw.one(("FP8_BLOCK", "FP8_BLOCK", "MXFP4"))
    return {
        "w": w,
        "a": "FP8_BLOCK" if w == "FP8_BLOCK" else "BF16",
        "most": draw.one((8, 16) if w == "FP8_BLOCK" else (8,)),
        "kind": "swiglu",
        "gate_up": draw.one(("concatenated", "interleaved")) if w == "FP8_BLOCK" else "alternating",
    }


def rest(draw: Draw, fixed: Options) -> Options:
    cuda, fp8 = draw.backend == "cuda", fixed["w"] == "FP8_BLOCK"
    of = 128 if fp8 else 32
    few = draw.one((1, 1, 2, 4)) if cuda else draw.one((1, 2))
    return {
        "tokens": min(few if draw.maybe(0.6) else draw.randint(1, fixed["most"]), fixed["most"] if cuda else 3),
        "top_k": draw.one((1, 2, 4, 8, 10, 16) if cuda else (1, 2, 3)),
        "experts": draw.one((1, 3, 8, 32, 128, 513) if cuda else (1, 2, 4)),
        "h": draw.multiple(of, 1024 if cuda else of),
        "i": draw.multiple(of, 512 if cuda else of),
        "id_dtype": draw.one(("int32", "int64")),
        "weights": draw.one(tuple(DTYPES)),
        "bias13": not fp8 and draw.maybe(0.5),
        "bias2": not fp8 and draw.maybe(0.5),
        "limit": None if fp8 or draw.maybe(0.5) else 7.0,
        "shared": draw.maybe(0.3),
        "same": draw.maybe(0.15),
        "beside": cuda and draw.maybe(0.3),
        "seed": draw.data_seed(),
    }


@dataclass(frozen=True)
class _Tokens:
    """Operands of a call: x (T, H), ids and weights (T, k), shared (T, H) or None."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor | None

    def tensors(self) -> list[torch.Tensor]:
        return [t for t in vars(self).values() if t is not None]


def _tokens(o: Options, place: Place, number: int) -> _Tokens:
    """Of call ``number``; every third id of some is no expert."""
    generator = place.generator(o["seed"] + number)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=place.device, generator=generator).bfloat16()

    ids = draw_ids(o | {"seed": o["seed"] + number}, place)
    shape = (o["tokens"], o["top_k"])
    weights = torch.rand(shape, device=place.device, generator=generator).to(DTYPES[o["weights"]])
    return _Tokens(normal(o["tokens"], o["h"]), ids, weights, normal(o["tokens"], o["h"]) if o["shared"] else None)


def _weight(o: Options, values: torch.Tensor) -> BlockScaledTensor:
    """Quantized; scales of MXFP4 in tiles, as the kernel reads them."""
    found = quantize(values, FORMAT_BY_NAME[o["w"]], kind="weight")
    if found.format != MXFP4 or found.scale_layout == "blocked":
        return found
    return BlockScaledTensor(found.data, to_blocked(found.scale), MXFP4, None, "blocked")


def judge_decode(o: Options, place: Place) -> None:
    """Several calls, then a graph whose operands change, beside another stream's kernels: each has the passes' bits."""
    generator = place.generator(o["seed"])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=place.device, generator=generator)

    experts, h, i = o["experts"], o["h"], o["i"]
    w13 = _weight(o, normal(experts, 2 * i, h) / math.sqrt(h))
    w2 = _weight(o, normal(experts, h, i) / math.sqrt(i))
    biases = [normal(experts, n) if o[name] else None for name, n in (("bias13", 2 * i), ("bias2", h))]
    act = Activation("swiglu", o["gate_up"], 1.702 if o["limit"] else 1.0, o["limit"], 1.0 if o["limit"] else 0.0)
    layer = Layer(o | {"dtype": "bfloat16"}, place, w13, w2, biases[0], biases[1], act)

    def call(t: _Tokens) -> torch.Tensor:
        if not place.has_kernels:
            return moe.moe(
                t.x, t.ids, t.weights, w13, w2, gate_up=act.gate_up, alpha=act.alpha, limit=act.limit,
                up_offset=act.up_offset, bias13=biases[0], bias2=biases[1], shared=t.shared,
                activations=layer.format or torch.bfloat16, backend=place.backend,
            )  # fmt: skip
        out = moe_in_one_launch(
            t.x, t.ids, t.weights, w13, w2, activation=act, format=layer.format, bias13=biases[0], bias2=biases[1],
            shared=t.shared, out_dtype=torch.bfloat16, backend=place.backend, only_if_faster=False,
        )  # fmt: skip
        if out is None:
            raise ValueError("these operands take several launches")
        return out

    def passes(t: _Tokens) -> torch.Tensor:
        return layer.passes(t.x, t.ids, t.weights, t.shared)

    calls = [_tokens(o, place, number) for number in range(CALLS)]
    for t in calls[: CALLS if place.device.type == "cuda" else 2]:
        place.judge.same("the passes one by one", call(t), lambda t=t: passes(t))  # type: ignore[misc]
    if place.device.type != "cuda":
        return
    first, second = calls[0], calls[1]
    want, out = passes(second), torch.full_like(first.x, torch.nan)
    side = torch.cuda.Stream(place.device)
    busy: Any = torch.randn(1 << 12, 1 << 10, device=place.device) if o["beside"] else None
    if busy is not None:
        with torch.cuda.stream(side):
            for _ in range(4):
                busy @ busy.t()
    place.replayed(
        lambda: out.copy_(call(first)), [*first.tensors(), out], [*second.tensors(), torch.full_like(out, torch.nan)]
    )
    place.judge.same("a replay with other tokens", out, want)
