"""Layers of few tokens in one launch: the bits of their passes, whatever ran before on the same memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from padless.formats import FP8_BLOCK, MXFP4_REPACKED, BlockScaledTensor, round_up
from padless.kernels.sm90_moe_decode.choice import ByLogits, Given
from padless.layouts import to_blocked
from padless.moe.choosing import topk
from padless.moe.decode import moe_in_one_launch
from padless.moe.router import SCORINGS, Router
from padless.verify.fuzz.case import judge_case
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options
from padless.verify.fuzz.whole_layer import Layer, Tokens

_ALL: Options = {"kind": "swiglu", "dtype": "bfloat16"}
_FP8: Options = _ALL | {"w": "FP8_BLOCK", "a": "FP8_BLOCK", "limit": None, "bias13": False, "bias2": False}
_FP4: Options = _ALL | {"w": "MXFP4", "a": "BF16", "gate_up": "alternating", "most": 8}


def constants(draw: Draw) -> Options:
    """Weights' format and what the kernel is compiled for; router: its scoring, where logits are given and not ids."""
    router = {"router": draw.one((None, None, None, *SCORINGS))}
    if draw.maybe(0.7):
        return _FP8 | router | {"most": draw.one((8, 16)), "gate_up": draw.one(("concatenated", "interleaved"))}
    return _FP4 | router | {"w": draw.one(("MXFP4", "MXFP4_REPACKED")), "limit": draw.one((None, 7.0))}


def rest(draw: Draw, fixed: Options) -> Options:
    cuda, fp8 = draw.backend == "cuda", fixed["w"] == "FP8_BLOCK"
    of = 128 if fp8 else 64 if fixed["w"] == MXFP4_REPACKED.name else 32
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
    """Fixed problems: both formats, one token to the most, many experts and one, rings of every depth; then logits."""
    one: Options = {"id_dtype": "int64", "weights": "float32", "shared": False, "same": False, "beside": True}
    one["router"] = None
    properties = ["changes", "repeats", "replay"]
    # tokens, top_k, experts, H, I
    shapes8 = ((1, 8, 16, 4096, 256), (2, 3, 3, 128, 640), (5, 16, 1024, 128, 128), (8, 16, 4, 640, 1024))
    shapes4 = ((1, 8, 32, 1440, 96), (2, 4, 4, 2880, 1440), (3, 1, 1024, 96, 64), (8, 4, 8, 320, 1056))
    fp8: list[Options] = [_FP8 | {"most": 8, "gate_up": order} for order in ("concatenated", "interleaved")]
    fp4: list[Options] = [
        _FP4 | {"limit": x, "bias13": bias, "bias2": bias} for x, bias in ((None, False), (7.0, True))
    ]
    repacked = [(fp4[1] | {"w": "MXFP4_REPACKED"}, (*s, round_up(h, 64), round_up(i, 64))) for *s, h, i in shapes4]
    every = [*itertools.product(fp8, shapes8), *itertools.product(fp4, shapes4), *repacked]
    for seed, (kind, shape) in enumerate(every):
        sizes = dict(zip(("tokens", "top_k", "experts", "h", "i"), shape, strict=True))
        drawn = {"experts_seed": seed, "seed": 100 * seed, "shared": seed % 2 == 1, "properties": properties}
        yield kind | one | sizes | drawn | {"weights": [*DTYPES][seed % 3]}
    wide = {"tokens": 16, "top_k": 4, "experts": 32, "h": 512, "i": 384, "experts_seed": 16, "seed": 1600}
    yield fp8[0] | one | wide | {"most": 16, "id_dtype": "int32", "properties": properties}
    yield fp8[1] | one | wide | {"most": 16, "same": True, "shared": True, "properties": properties}
    for seed, (kind, shape) in enumerate(((fp8[1], (2, 10, 513, 256, 128)), (fp4[1], (3, 4, 32, 160, 96)))):
        sizes = dict(zip(("tokens", "top_k", "experts", "h", "i"), shape, strict=True))
        drawn = {"experts_seed": seed, "seed": seed, "properties": properties[::2], "router": SCORINGS[seed]}
        yield kind | one | sizes | drawn


class Decode(Layer):
    """The layer by one launch. With a router, weights of `Tokens` are its logits (T, E), and its ids are not used."""

    def __init__(self, o: Options, place: Place) -> None:
        super().__init__(o, place)
        self.rule = None
        if o["router"]:
            self.rule = Router(
                min(o["top_k"], o["experts"]), o["router"], renormalize=o["experts_seed"] % 3 > 0, scaling_factor=1.5
            )
            shape, generator = (o["tokens"], o["experts"]), place.generator(o["seed"] + 2)
            logits = torch.randn(shape, device=place.device, generator=generator) * 2
            self.operands = replace(self.operands, weights=logits.to(DTYPES[o["weights"]]))

    def weight(self, values: torch.Tensor) -> BlockScaledTensor:
        """Scales of MXFP4 in tiles, as the kernel reads them."""
        found = super().weight(values)
        if found.format == FP8_BLOCK or found.scale_layout == "blocked":
            return found
        return BlockScaledTensor(found.data, to_blocked(found.scale), found.format, None, "blocked")

    def run(self, operands: Tokens) -> torch.Tensor:
        if not operands.passes and self.o["beside"] and self.place.device.type == "cuda":
            self._occupy()
        torch.full_like(operands.x, math.nan)  # the memory that the result is likely to be given
        return super().run(operands)

    def given(self, t: Tokens) -> Tokens:
        """With ids and weights."""
        if self.rule is None:
            return t
        weights, ids = topk(t.weights, self.rule)
        return replace(t, ids=ids, weights=weights)

    def passes(self, t: Tokens, *, by_twins: bool = False) -> torch.Tensor:
        return super().passes(self.given(t), by_twins=by_twins)

    def call(self, t: Tokens) -> torch.Tensor:
        if not self.place.has_kernels:
            return super().call(self.given(t))
        choice = Given(t.ids, t.weights) if self.rule is None else ByLogits(t.weights, None, self.rule)
        out = moe_in_one_launch(
            t.x, choice, self.w13, self.w2, activation=self.activation, format=self.format,
            bias13=self.bias13, bias2=self.bias2, shared=t.shared, out_dtype=torch.bfloat16,
            backend=self.place.backend, only_if_faster=False,
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


judge_decode = partial(judge_case, Decode)
