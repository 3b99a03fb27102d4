"""Layers of few tokens in one launch: the bits of their passes, whatever ran before on the same memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import torch

from padless import moe
from padless.formats import FORMAT_BY_NAME, MXFP4, BlockScaledTensor
from padless.layouts import to_blocked
from padless.moe.activation import Activation
from padless.moe.decode import moe_in_one_launch
from padless.quantization.quantize import quantize
from padless.verify.fuzz.case import Change, judge_case, turned, whole
from padless.verify.fuzz.layers import draw_ids
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options
from padless.verify.fuzz.whole_layer import Layer

_FP8 = {"w": "FP8_BLOCK", "a": "FP8_BLOCK", "kind": "swiglu", "limit": None, "bias13": False, "bias2": False}
_FP4 = {"w": "MXFP4", "a": "BF16", "kind": "swiglu", "gate_up": "alternating", "most": 8}


def constants(draw: Draw) -> Options:
    """Weights' format and what the kernel is compiled for."""
    if draw.maybe(0.7):
        return _FP8 | {"most": draw.one((8, 16)), "gate_up": draw.one(("concatenated", "interleaved"))}
    return _FP4 | {"limit": draw.one((None, 7.0))}


def rest(draw: Draw, fixed: Options) -> Options:
    cuda, fp8 = draw.backend == "cuda", fixed["w"] == "FP8_BLOCK"
    of = 128 if fp8 else 32
    few = draw.one((1, 1, 2, 4)) if cuda else draw.one((1, 2))
    experts = draw.one((1, 3, 8, 32, 128, 513, 1024) if cuda else (1, 2, 4))
    found: Options = {
        "tokens": min(few if draw.maybe(0.6) else draw.randint(1, fixed["most"]), fixed["most"] if cuda else 3),
        "top_k": draw.one((1, 2, 4, 8, 10, 16) if cuda else (1, 2, 3)),
        "experts": experts,
        "h": draw.multiple(of, (1024 if experts <= 128 else 256) if cuda else of),
        "i": draw.multiple(of, (512 if experts <= 128 else 256) if cuda else of),
        "id_dtype": draw.one(("int32", "int64")),
        "weights": draw.one(tuple(DTYPES)),
        "shared": draw.maybe(0.3),
        "same": draw.maybe(0.15),
        "beside": cuda and draw.maybe(0.3),
        "experts_seed": draw.data_seed(),
        "seed": draw.data_seed(),
        "properties": ["changes", "replay"] if cuda else [draw.one(("changes", "changes", "replay"))],
    }
    return found if fp8 else found | {"bias13": draw.maybe(0.5), "bias2": draw.maybe(0.5)}


def lines(arch: str) -> Iterator[Options]:
    """Fixed problems: both formats, one token to the most, many experts and one, rings of every depth."""
    one: Options = {"id_dtype": "int64", "weights": "float32", "shared": False, "same": False, "beside": True}
    properties = ["changes", "repeats", "replay"]
    # tokens, top_k, experts, H, I
    shapes8 = ((1, 8, 16, 4096, 256), (2, 3, 3, 128, 640), (5, 16, 1024, 128, 128), (8, 16, 4, 640, 1024))
    shapes4 = ((1, 8, 32, 1440, 96), (2, 4, 4, 2880, 1440), (3, 1, 1024, 96, 64), (8, 4, 8, 320, 1056))
    fp8: list[Options] = [_FP8 | {"most": 8, "gate_up": order} for order in ("concatenated", "interleaved")]
    fp4: list[Options] = [
        _FP4 | {"limit": x, "bias13": bias, "bias2": bias} for x, bias in ((None, False), (7.0, True))
    ]
    every = [*itertools.product(fp8, shapes8), *itertools.product(fp4, shapes4)]
    for seed, (kind, shape) in enumerate(every):
        sizes = dict(zip(("tokens", "top_k", "experts", "h", "i"), shape, strict=True))
        drawn = {"experts_seed": seed, "seed": 100 * seed, "shared": seed % 2 == 1, "properties": properties}
        yield kind | one | sizes | drawn | {"weights": [*DTYPES][seed % 3]}
    wide = {"tokens": 16, "top_k": 4, "experts": 32, "h": 512, "i": 384, "experts_seed": 16, "seed": 1600}
    yield fp8[0] | one | wide | {"most": 16, "id_dtype": "int32", "properties": properties}
    yield fp8[1] | one | wide | {"most": 16, "same": True, "shared": True, "properties": properties}


@dataclass(frozen=True)
class Tokens:
    """Operands of a call: x (T, H), ids and weights (T, k), shared (T, H) or None. passes: made of several calls."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor | None
    passes: bool = False

    def part(self, of: Callable[[torch.Tensor], torch.Tensor]) -> Tokens:
        """The same of some tokens, or of all in another order, on 16-byte boundaries as the kernel reads them."""
        shared = None if self.shared is None else of(self.shared).clone()
        return Tokens(of(self.x).clone(), of(self.ids).clone(), of(self.weights).clone(), shared)


class Decode:
    """The layer of a problem's options, whose experts are those of all problems with its ``experts_seed``."""

    def __init__(self, o: Options, place: Place) -> None:
        self.o, self.place = o, place
        generator = place.generator(o["experts_seed"])

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=place.device, generator=generator)

        experts, h, i = o["experts"], o["h"], o["i"]
        w13 = _weight(o, normal(experts, 2 * i, h) / math.sqrt(h))
        w2 = _weight(o, normal(experts, h, i) / math.sqrt(i))
        bias13 = normal(experts, 2 * i) if o["bias13"] else None
        bias2 = normal(experts, h) if o["bias2"] else None
        act = Activation("swiglu", o["gate_up"], 1.702 if o["limit"] else 1.0, o["limit"], 1.0 if o["limit"] else 0.0)
        self.layer = Layer(o, place, w13, w2, bias13, bias2, act)
        generator = place.generator(o["seed"] + 1)
        shape = (o["tokens"], o["top_k"])
        weights = torch.rand(shape, device=place.device, generator=generator).to(DTYPES[o["weights"]])
        x, shared = (normal(o["tokens"], h).bfloat16() for _ in range(2))
        self.operands = Tokens(x, draw_ids(o, place), weights, shared if o["shared"] else None)

    def run(self, operands: Tokens) -> torch.Tensor:
        if operands.passes:
            return self.layer.passes(operands.x, operands.ids, operands.weights, operands.shared)
        if self.o["beside"] and self.place.device.type == "cuda":
            self._occupy()
        torch.full_like(operands.x, math.nan)  # the memory that the result is likely to be given
        return self._call(operands)

    def make(self, out: torch.Tensor) -> None:
        out.copy_(self._call(self.operands))

    def made(self, fresh: torch.Tensor) -> torch.Tensor:
        """By the passes: a replay and another call may be wrong in the same way."""
        return self.run(replace(self.operands, passes=True))

    def changes(self) -> Iterator[Change]:
        """One token is last: then the same memory has held other tokens, and fewer."""
        t, last = self.operands, self.o["tokens"] - 1
        yield "the passes one by one", partial(self.run, replace(t, passes=True)), whole, whole
        yield "tokens in reverse", partial(self.run, t.part(turned)), turned, whole
        its = itemgetter(slice(last, None))
        yield "a token alone", partial(self.run, t.part(its)), whole, its
        yield "the same after other tokens", partial(self.run, t), whole, whole

    def _call(self, t: Tokens) -> torch.Tensor:
        a, act = self.layer, self.layer.activation
        if not self.place.has_kernels:
            return moe.moe(
                t.x, t.ids, t.weights, a.w13, a.w2, gate_up=act.gate_up, alpha=act.alpha, limit=act.limit,
                up_offset=act.up_offset, bias13=a.bias13, bias2=a.bias2, shared=t.shared,
                activations=a.format or torch.bfloat16, backend=self.place.backend,
            )  # fmt: skip
        out = moe_in_one_launch(
            t.x, t.ids, t.weights, a.w13, a.w2, activation=act, format=a.format, bias13=a.bias13, bias2=a.bias2,
            shared=t.shared, out_dtype=torch.bfloat16, backend=self.place.backend, only_if_faster=False,
        )  # fmt: skip
        if out is None:
            raise ValueError("these operands take several launches")
        return out

    def _occupy(self) -> None:
        """Products on another stream, so that not all CTAs of what follows are resident at first."""
        with torch.cuda.stream(torch.cuda.Stream(self.place.device)):
            busy = torch.zeros((1 << 12, 1 << 10), device=self.place.device)
            for _ in range(4):
                busy @ busy.t()


def _weight(o: Options, values: torch.Tensor) -> BlockScaledTensor:
    """Quantized; scales of MXFP4 in tiles, as the kernel reads them."""
    found = quantize(values, FORMAT_BY_NAME[o["w"]], kind="weight")
    if found.format != MXFP4 or found.scale_layout == "blocked":
        return found
    return BlockScaledTensor(found.data, to_blocked(found.scale), MXFP4, None, "blocked")


judge_decode = partial(judge_case, Decode)
