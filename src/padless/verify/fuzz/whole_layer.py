"""The Mixture-of-Experts layer under judgement: beside its own passes, near float64, one token by itself."""

from __future__ import annotations

import math
from typing import Any

import torch

from padless import moe
from padless.compat.cudnn.calls import grouped_gemm_quant
from padless.formats import FORMAT_BY_NAME, BlockScaledTensor
from padless.layouts import plain_scale
from padless.moe.activation import Activation
from padless.ops.grouped_gemm import grouped_gemm
from padless.quantization.quantize import quantize
from padless.verify.fuzz import exact
from padless.verify.fuzz.layers import draw_ids, exact_activation, routing_of
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options
from padless.verify.fuzz.products import arch_of
from padless.verify.tiles import routes_of


def layer_constants(draw: Draw) -> Options:
    """Weights' format, what activations are quantized to, and the activation."""
    arch = arch_of(draw)
    pairs = {(r.a, r.b) for r in routes_of(arch, "grouped_gemm")}
    w, a = draw.one([(w, a) for w, a in _LAYERS if (a, w) in pairs])
    plain = draw.maybe(0.6)
    return {
        "w": w,
        "a": a,
        "dtype": "bfloat16" if a == "BF16" else draw.one(tuple(DTYPES)),
        "top_k": draw.one((1, 2, 8)),
        "id_dtype": draw.one(("int32", "int64")),
        "kind": "swiglu" if plain else draw.one(("swiglu", "geglu", "relu2")),
        "gate_up": draw.one(("concatenated", "interleaved")) if plain else "alternating",
        "bias13": draw.maybe(0.3),
        "bias2": draw.maybe(0.3),
        "shared": draw.maybe(0.3),
    }


_LAYERS = (
    ("FP8_BLOCK", "FP8_BLOCK"),
    ("MXFP8", "MXFP8"),
    ("NVFP4", "NVFP4"),
    ("MXFP4", "MXFP4"),
    ("MXFP4", "FP8_BLOCK"),
    ("MXFP4", "BF16"),
    ("NVFP4", "BF16"),
)


def layer_rest(draw: Draw, fixed: Options) -> Options:
    del fixed
    cuda = draw.backend == "cuda"
    return {
        "tokens": draw.one((0, 1, 2, 17, draw.randint(1, 200 if cuda else 12))),
        "experts": draw.one((1, 2, 8, 16) if cuda else (1, 2, 4)),
        "h": draw.multiple(64, 512 if cuda else 64),
        "i": draw.multiple(64, 256 if cuda else 64),
        "same": draw.maybe(0.1),
        "seed": draw.data_seed(),
    }


def judge_moe(o: Options, place: Place) -> None:
    """The layer beside its own passes, one call each, and near float64; one token by itself."""
    generator = place.generator(o["seed"] + 1)
    dtype, gated = DTYPES[o["dtype"]], o["kind"] != "relu2"

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=place.device, generator=generator)

    experts, h, i = o["experts"], o["h"], o["i"]
    x = normal(o["tokens"], h).to(dtype)
    weights = torch.rand((o["tokens"], o["top_k"]), device=place.device, generator=generator)
    ids = draw_ids(o, place)
    w = FORMAT_BY_NAME[o["w"]]
    n = 2 * i if gated else i
    w13 = quantize(normal(experts, n, h) / math.sqrt(h), w, kind="weight")
    w2 = quantize(normal(experts, h, i) / math.sqrt(i), w, kind="weight")
    bias13 = normal(experts, n) if o["bias13"] else None
    bias2 = normal(experts, h) if o["bias2"] else None
    shared = normal(o["tokens"], h).to(dtype) if o["shared"] else None
    activations: Any = torch.bfloat16 if o["a"] == "BF16" else FORMAT_BY_NAME[o["a"]]
    options: dict[str, Any] = {
        "activation": o["kind"],
        "gate_up": o["gate_up"],
        "bias13": bias13,
        "bias2": bias2,
        "activations": activations,
        "backend": place.backend,
    }
    got = moe.moe(x, ids, weights, w13, w2, shared=shared, **options)
    if o["tokens"] == 0:
        place.judge.wrong("shape", tuple(got.shape) != (0, h))
        return
    one = o["seed"] % o["tokens"]
    part = slice(one, one + 1)
    alone = moe.moe(
        x[part], ids[part], weights[part], w13, w2, shared=None if shared is None else shared[part], **options
    )
    place.judge.same("a token alone", alone[0], got[one])
    a = Layer(o, place, w13, w2, bias13, bias2)
    place.judge.same("the passes one by one", got, a.passes(x, ids, weights, shared))
    wanted = a.exact(x, ids, weights, shared)
    size = wanted.square().mean().sqrt() * math.sqrt(h) + 2.0**-20
    error = (got.double() - wanted).norm(dim=1)
    place.judge.wrong("float64 is far", ~(error <= 0.6 * size * 4).all())


class Layer:
    """The layer by its passes and in float64."""

    def __init__(
        self,
        o: Options,
        place: Place,
        w13: BlockScaledTensor,
        w2: BlockScaledTensor,
        bias13: torch.Tensor | None,
        bias2: torch.Tensor | None,
        activation: Activation | None = None,
    ) -> None:
        self.o, self.place = o, place
        self.w13, self.w2, self.bias13, self.bias2 = w13, w2, bias13, bias2
        self.activation = activation or Activation(o["kind"], o["gate_up"])
        self.format = None if o["a"] == "BF16" else FORMAT_BY_NAME[o["a"]]
        nvfp4 = o["a"] == "NVFP4"
        self.scale = torch.ones((), device=place.device) if nvfp4 else None

    def passes(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None
    ) -> torch.Tensor:
        offs, tokens, inverse = routing_of(ids, self.o["experts"])
        rows = x[tokens.long()]
        a: Any = rows if self.format is None else quantize(rows, self.format, global_scale=self.scale)
        product = self._product(a, self.w13, self.bias13, offs)
        hidden = moe.activate_quantize(product, self.activation, self.format, global_scale=self.scale)
        y = self._product(hidden, self.w2, self.bias2, offs)
        return moe.combine(y, inverse, weights, shared, out_dtype=x.dtype)

    def _product(self, a: Any, w: BlockScaledTensor, bias: torch.Tensor | None, offs: torch.Tensor) -> torch.Tensor:
        if bias is None:
            return grouped_gemm(a, w, offs, backend=self.place.backend)
        made = grouped_gemm_quant(
            a_tensor=a, b_tensor=w, padded_offsets=offs, bias_tensor=bias, return_amax=False, backend=self.place.backend
        )
        product: torch.Tensor = made["d_tensor"]
        return product

    def exact(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None
    ) -> torch.Tensor:
        w13, w2 = (decoded_weights(w) for w in (self.w13, self.w2))
        total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for e in range(self.o["experts"]):
            h = x.double() @ w13[e].t()
            h = h if self.bias13 is None else h + self.bias13[e].double()
            y = exact_activation(h, self.activation)[0] @ w2[e].t()
            y = y if self.bias2 is None else y + self.bias2[e].double()
            total += y * torch.where(ids == e, weights.double(), 0.0).sum(1, keepdim=True)
        return total if shared is None else total + shared.double()


def decoded_weights(w: BlockScaledTensor) -> torch.Tensor:
    """(E, N, K) float64 of weights' codes."""
    scale = exact.spread(exact.scales(plain_scale(w)), w.format, "weight", w.logical_shape)
    values = exact.decoded(w.data, w.format) * scale
    return values if w.global_scale is None else values * w.global_scale.double().view(-1, 1, 1)
