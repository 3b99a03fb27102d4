"""Fuzz checks of the Mixture-of-Experts layer: the bits of its passes, float64, tokens in other company, gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from padless import moe
from padless.compat.cudnn.calls import grouped_gemm_quant
from padless.formats import FORMAT_BY_NAME, MXFP4_REPACKED, BlockScaledTensor
from padless.layouts import from_repacked, plain_scale
from padless.moe import twins
from padless.moe.activation import Activation
from padless.ops.grouped_gemm import grouped_gemm
from padless.quantization.quantize import quantize
from padless.testing.operands import moved
from padless.verify.fuzz import exact
from padless.verify.fuzz.activations import exact_activation
from padless.verify.fuzz.case import Change, judge_case, turned, whole
from padless.verify.fuzz.layers import EDGES, draw_ids, routing_of
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options
from padless.verify.fuzz.products import arch_of
from padless.verify.tiles import pairs_of

# Largest error of a token over its norm, or the root of the mean square of all tokens' norms where that is more, by
# quantizing activations twice, to e4m3 or e2m1. A token three times as large as the others has three times their error.
_BOUNDS = {"FP8_BLOCK": 0.1, "MXFP8": 0.12, "NVFP4": 0.4, "MXFP4": 0.6, "BF16": 0.02}
# Of random problems, of few tokens and columns; of one slot, the error of which is averaged with no other.
_FEW_TOKENS, _FEW_SLOTS = 4.0, 1.5
# Norm of the error of a gradient over its norm: as in the forward pass, activations and gradients are rounded to e4m3.
_GRADIENT_BOUND = 0.08
_LAYERS = (
    ("FP8_BLOCK", "FP8_BLOCK"), ("MXFP8", "MXFP8"), ("NVFP4", "NVFP4"), ("MXFP4", "MXFP4"), ("MXFP4", "FP8_BLOCK"),
    ("MXFP4", "BF16"), ("MXFP4_REPACKED", "BF16"), ("NVFP4", "BF16"),
)  # fmt: skip
_PLAIN: Options = {"kind": "swiglu", "gate_up": "concatenated", "limit": None, "bias13": False, "bias2": False}
_BIASED: Options = {"bias13": True, "bias2": True}
GPT_OSS: Options = {"gate_up": "alternating", "limit": 7.0} | _BIASED
# Weights, activations, (tokens, k, experts, H, I), other options.
_CASES: tuple[tuple[str, str, tuple[int, ...], Options], ...] = (
    ("FP8_BLOCK", "FP8_BLOCK", (37, 4, 9, 384, 256), {}),
    ("FP8_BLOCK", "FP8_BLOCK", (300, 6, 16, 640, 384), _BIASED),
    ("FP8_BLOCK", "FP8_BLOCK", (90, 2, 5, 272, 128), {"kind": "relu2"}),
    ("MXFP8", "MXFP8", (70, 4, 9, 384, 256), {}),
    ("NVFP4", "NVFP4", (70, 4, 9, 384, 256), {}),
    ("MXFP4", "FP8_BLOCK", (70, 4, 9, 384, 256), GPT_OSS),
    ("MXFP4", "BF16", (70, 4, 9, 384, 256), GPT_OSS),
    ("MXFP4", "BF16", (21, 3, 5, 256, 128), {}),
    ("MXFP4_REPACKED", "BF16", (70, 4, 9, 384, 256), GPT_OSS),
    ("MXFP4", "MXFP4", (70, 4, 9, 384, 256), {}),
)


def layer_constants(draw: Draw) -> Options:
    """Weights' format, what activations are quantized to, and the activation."""
    pairs = pairs_of(arch_of(draw), "grouped_gemm")
    w, a = draw.one([(w, a) for w, a in _LAYERS if (a, w) in pairs])
    plain = draw.maybe(0.6)
    kind = "swiglu" if plain else draw.one(("swiglu", "geglu", "relu2"))
    return {
        "w": w,
        "a": a,
        "dtype": "bfloat16" if a == "BF16" else draw.one(tuple(DTYPES)),
        "weights": "float32",
        "top_k": draw.one((1, 2, 8)),
        "id_dtype": draw.one(("int32", "int64")),
        "kind": kind,
        "gate_up": draw.one(("concatenated", "interleaved")) if plain else "alternating",
        "limit": draw.one((None, 7.0)) if kind == "swiglu" and not plain else None,
        "bias13": draw.maybe(0.3),
        "bias2": draw.maybe(0.3),
        "shared": draw.maybe(0.3),
    }


def layer_rest(draw: Draw, fixed: Options) -> Options:
    del fixed
    cuda = draw.backend == "cuda"
    return {
        "tokens": draw.one((0, 1, 2, 17, draw.randint(1, 200 if cuda else 12))),
        "experts": draw.one((1, 2, 8, 16) if cuda else (1, 2, 4)),
        "h": draw.multiple(64, 512 if cuda else 64),
        "i": draw.multiple(64, 256 if cuda else 64),
        "same": draw.maybe(0.1),
        "slack": _FEW_TOKENS,
        "gradients": False,
        "experts_seed": draw.data_seed(),
        "seed": draw.data_seed(),
        "properties": ["near", "change" if draw.backend.startswith("emulator") else "changes"],
    }


def line_of(w: str, a: str, sizes: tuple[int, ...], seed: int, *properties: str, **others: Any) -> Options:
    one = _PLAIN | {"w": w, "a": a, "dtype": "bfloat16", "weights": "float32", "id_dtype": "int64", "same": False}
    one |= dict(zip(("tokens", "top_k", "experts", "h", "i"), sizes, strict=True))
    one |= {"shared": False, "slack": 1.0, "gradients": False, "experts_seed": seed, "seed": seed}
    return one | {"properties": [*properties]} | others


def cases_of(arch: str) -> Iterator[tuple[str, str, tuple[int, ...], Options]]:
    """Those whose pairs of formats have kernels on ``arch``."""
    pairs = pairs_of(arch, "grouped_gemm")
    return (case for case in _CASES if (case[1], case[0]) in pairs)


def lines(arch: str) -> Iterator[Options]:
    for seed, (w, a, sizes, options) in enumerate(cases_of(arch)):
        yield line_of(w, a, sizes, seed, "near", "bits", "changes", "replay", **options)


def edge_lines(arch: str) -> Iterator[Options]:
    """Every format of weights at every edge of ids; gradients of those that have them."""
    for w, a, _, options in cases_of(arch):
        gradients = {"slack": _FEW_SLOTS, "gradients": w == "FP8_BLOCK" and not options}
        for edge in EDGES:
            yield line_of(w, a, (0, 1, 1, 256, 128), 5, "near", "bits", "changes") | options | gradients | edge


@dataclass(frozen=True)
class Tokens:
    """Operands of a call: x (T, H), ids and weights (T, k), shared (T, H) or None. passes: made of several calls."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor | None
    passes: bool = False

    def part(self, of: Callable[[torch.Tensor], torch.Tensor]) -> Tokens:
        """The same of some tokens, or of all in another order, on 16-byte boundaries as kernels read them."""
        shared = None if self.shared is None else of(self.shared).clone()
        return Tokens(of(self.x).clone(), of(self.ids).clone(), of(self.weights).clone(), shared)


class Layer:
    """`moe.moe` of a problem's options, whose experts are those of all problems with its ``experts_seed``."""

    any_nan = True

    def __init__(self, o: Options, place: Place) -> None:
        self.o, self.place = o, place
        generator = place.generator(o["experts_seed"])

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=place.device, generator=generator)

        tokens, experts, h, i = (o[name] for name in ("tokens", "experts", "h", "i"))
        limit, n = o["limit"], i if o["kind"] == "relu2" else 2 * i
        self.w13 = self.weight(normal(experts, n, h) / math.sqrt(h))
        self.w2 = self.weight(normal(experts, h, i) / math.sqrt(i))
        self.bias13 = normal(experts, n) * 0.3 if o["bias13"] else None
        self.bias2 = normal(experts, h) * 0.3 if o["bias2"] else None
        self.activation = Activation(o["kind"], o["gate_up"], *((1.702, limit, 1.0) if limit else ()))
        self.format = None if o["a"] == "BF16" else FORMAT_BY_NAME[o["a"]]
        generator = place.generator(o["seed"] + 1)
        weights = torch.rand((tokens, o["top_k"]), device=place.device, generator=generator)
        x, shared = (normal(tokens, h).to(DTYPES[o["dtype"]]) for _ in range(2))
        ids = draw_ids(o, place)
        self.operands = Tokens(x, ids, weights.to(DTYPES[o["weights"]]), shared if o["shared"] else None)

    def weight(self, values: torch.Tensor) -> BlockScaledTensor:
        return quantize(values, FORMAT_BY_NAME[self.o["w"]], kind="weight")

    def call(self, t: Tokens) -> torch.Tensor:
        act = self.activation
        return moe.moe(
            t.x, t.ids, t.weights, self.w13, self.w2, activation=act.kind, gate_up=act.gate_up, alpha=act.alpha,
            limit=act.limit, up_offset=act.up_offset, bias13=self.bias13, bias2=self.bias2, shared=t.shared,
            activations=self.format or torch.bfloat16, backend=self.place.backend,
        )  # fmt: skip

    def run(self, operands: Tokens) -> torch.Tensor:
        return self.passes(operands) if operands.passes else self.call(operands)

    def make(self, out: torch.Tensor) -> None:
        out.copy_(self.call(self.operands))

    def made(self, fresh: torch.Tensor) -> torch.Tensor:
        """By the passes: a replay and another call may be wrong in the same way."""
        return self.run(replace(self.operands, passes=True))

    def changes(self) -> Iterator[Change]:
        """The same with the same tokens is last: then the same memory has held others, and fewer."""
        t, tokens = self.operands, self.o["tokens"]
        if not tokens:
            return
        yield "the passes one by one", partial(self.run, replace(t, passes=True)), whole, whole
        yield "tokens in reverse", partial(self.run, t.part(turned)), turned, whole
        some = torch.randperm(tokens, generator=torch.Generator().manual_seed(self.o["seed"]))[: -(-tokens // 2)]
        for name, of in (("some tokens", self.place.put(some)), ("a token alone", slice(tokens - 1, None))):
            yield name, partial(self.run, t.part(itemgetter(of))), whole, itemgetter(of)
        yield "the same after other tokens", partial(self.run, t), whole, whole

    def reference(self) -> torch.Tensor:
        return self.passes(self.operands, by_twins=True)

    def passes(self, t: Tokens, *, by_twins: bool = False) -> torch.Tensor:
        """The layer made of several calls; by_twins: of the passes' definitions on the CPU, around the same products."""
        device = torch.device("cpu") if by_twins else self.place.device
        x, ids, weights, shared = (moved(part, device) for part in (t.x, t.ids, t.weights, t.shared))
        scale = torch.ones((), device=device) if self.o["a"] == "NVFP4" else None

        def quantized(values: torch.Tensor) -> Any:
            return values if self.format is None else quantize(values, self.format, global_scale=scale)

        offs, tokens, inverse = (twins.route if by_twins else routing_of)(ids, self.o["experts"])
        h = self._product(quantized(x[tokens.long()]), self.w13, self.bias13, offs)
        if not by_twins:
            hidden = moe.activate_quantize(h, self.activation, self.format, global_scale=scale)
            y = self._product(hidden, self.w2, self.bias2, offs)
            return moe.combine(y, inverse, weights, shared, out_dtype=x.dtype)
        hidden = quantized(twins.activated(h.cpu(), self.activation, in_bfloat16=self.format is None))
        y = self._product(hidden, self.w2, self.bias2, offs).cpu()
        y[int(offs[-1]) :] = math.nan
        return self.place.put(twins.combine(y, inverse, weights, shared, x.dtype))

    def _product(self, a: Any, w: BlockScaledTensor, bias: torch.Tensor | None, offs: torch.Tensor) -> torch.Tensor:
        a, offs = self.place.put(a), self.place.put(offs)
        if bias is None:
            return grouped_gemm(a, w, offs, backend=self.place.backend)
        made = grouped_gemm_quant(
            a_tensor=a, b_tensor=w, padded_offsets=offs, bias_tensor=bias, return_amax=False, backend=self.place.backend
        )
        product: torch.Tensor = made["d_tensor"]
        return product

    def near(self, out: torch.Tensor) -> None:
        judge, t = self.place.judge, self.operands
        judge.wrong(f"shape {tuple(out.shape)}", out.shape != t.x.shape)
        if not self.o["tokens"]:
            return
        wanted = self._exact(t.x.double(), t.weights.double(), t.shared)
        bound = self.o["slack"] * _BOUNDS[self.o["a"]]
        norms = wanted.norm(dim=1)
        size = norms.clamp(min=norms.square().mean().sqrt() + 2.0**-20)
        judge.wrong("a token is far from float64", ~((out.double() - wanted).norm(dim=1) <= bound * size).all())
        if self.o["gradients"]:
            self._near_gradients()

    def _near_gradients(self) -> None:
        """Of x, the weights and the shared expert's output, of which the last is that of the result."""
        t, judge = self.operands, self.place.judge
        dout, added = (t.x.roll(i, 1) for i in (1, 2))
        x, weights, shared = (part.clone().requires_grad_() for part in (t.x, t.weights, added))
        self.call(Tokens(x, t.ids, weights, shared)).backward(dout)
        exact_x, exact_weights = (part.double().requires_grad_() for part in (t.x, t.weights))
        self._exact(exact_x, exact_weights, None).backward(dout.double())
        for name, got, want in (("x", x.grad, exact_x.grad), ("top_k_weights", weights.grad, exact_weights.grad)):
            assert got is not None
            assert want is not None
            error = (got.double() - want).norm()
            judge.wrong(f"the gradient of {name} is far from float64", ~(error <= _GRADIENT_BOUND * want.norm()))
        assert shared.grad is not None
        judge.same("the gradient of shared", shared.grad, dout)

    def _exact(self, x: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
        """Float64 of the weights' codes; x and weights are float64."""
        w13, w2 = (decoded_weights(w) for w in (self.w13, self.w2))
        total = torch.zeros_like(x) if shared is None else shared.double()
        for e in range(self.o["experts"]):
            h = x @ w13[e].t()
            h = h if self.bias13 is None else h + self.bias13[e].double()
            y = exact_activation(h, self.activation)[0] @ w2[e].t()
            y = y if self.bias2 is None else y + self.bias2[e].double()
            total = total + y * torch.where(self.operands.ids == e, weights, 0.0).sum(1, keepdim=True)
        return total


judge_moe = partial(judge_case, Layer)


def decoded_weights(w: BlockScaledTensor) -> torch.Tensor:
    """(E, N, K) float64 of weights' codes."""
    w = from_repacked(w) if w.format == MXFP4_REPACKED else w
    scale = exact.spread(exact.scales(plain_scale(w)), w.format, "weight", w.logical_shape)
    values = exact.decoded(w.data, w.format) * scale
    return values if w.global_scale is None else values * w.global_scale.double().view(-1, 1, 1)
