"""The check of ``padless verify`` for the Mixture-of-Experts layer as a whole.

Inputs are random, with ids that are no expert among them and NaN in what must not be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from padless.formats import FORMAT_BY_NAME, FP8_BLOCK, MXFP4, MXFP8, NVFP4, BlockScaledFormat, BlockScaledTensor
from padless.moe import Activation, moe, twins
from padless.moe.layer import Projection
from padless.quantization.quantize import dequantize, quantize
from padless.testing.bits import differing
from padless.testing.guarded import POISON
from padless.verify.checks import Check
from padless.verify.fuzz.place import Place
from padless.verify.tiles import pairs_of

DEVICE = "cuda"


def draw_ids(tokens: int, top_k: int, experts: int, seed: int) -> torch.Tensor:
    """(T, k) int64 ids on the CPU, some of them no expert."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, experts, (tokens, top_k), generator=generator)
    chance = torch.rand(ids.shape, generator=generator)
    ids[chance < 0.03] = experts
    ids[chance > 0.98] = -1
    return ids


def same_bits(name: str, got: torch.Tensor, want: torch.Tensor) -> int:
    """The number of elements. Raises AssertionError unless all bits are equal, but those of NaN."""
    got = got.cpu()
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    wrong = differing(got, want, any_nan=True)
    assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} differ"
    return got.numel()


# --- the layer -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A layer's weights, tokens and options."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w13: BlockScaledTensor
    w2: BlockScaledTensor
    options: dict[str, Any]

    def run(self, **more: Any) -> torch.Tensor:
        return moe(self.x, self.ids, self.weights, self.w13, self.w2, **(self.options | more))

    def only(self, tokens: torch.Tensor) -> Layer:
        return replace(self, x=self.x[tokens], ids=self.ids[tokens], weights=self.weights[tokens])

    def to(self, device: str) -> Layer:
        def moved(t: Any) -> Any:
            if isinstance(t, BlockScaledTensor):
                scale = None if t.global_scale is None else t.global_scale.to(device)
                return BlockScaledTensor(t.data.to(device), t.scale.to(device), t.format, scale, t.scale_layout)
            return t.to(device) if isinstance(t, torch.Tensor) else t

        options = {name: moved(value) for name, value in self.options.items()}
        x, ids, weights, w13, w2 = map(moved, (self.x, self.ids, self.weights, self.w13, self.w2))
        return Layer(x, ids, weights, w13, w2, options)


GPT_OSS = {"gate_up": "alternating", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
# (weights, activations, (tokens, k, experts, H, I), other options, whether with biases)
Case = tuple[BlockScaledFormat, Any, tuple[int, ...], dict[str, Any], bool]
CASES: tuple[Case, ...] = (
    (FP8_BLOCK, None, (37, 4, 9, 384, 256), {}, False),
    (FP8_BLOCK, None, (300, 6, 16, 640, 384), {}, True),
    (FP8_BLOCK, None, (90, 2, 5, 272, 128), {"activation": "relu2"}, False),
    (MXFP8, None, (70, 4, 9, 384, 256), {}, False),
    (NVFP4, None, (70, 4, 9, 384, 256), {}, False),
    (MXFP4, None, (70, 4, 9, 384, 256), GPT_OSS, True),
    (MXFP4, torch.bfloat16, (70, 4, 9, 384, 256), GPT_OSS, True),
    (MXFP4, torch.bfloat16, (21, 3, 5, 256, 128), {}, False),
    (MXFP4, MXFP4, (70, 4, 9, 384, 256), {}, False),
)
# Largest error of a token over the root of the mean square of all tokens: quantizing activations twice, to e4m3 or e2m1.
BOUNDS = {"FP8_BLOCK": 0.1, "MXFP8": 0.12, "NVFP4": 0.4, "MXFP4": 0.6, "BF16": 0.02}


def layers(arch: str) -> Iterator[Layer]:
    """The layers whose pairs of formats have kernels on ``arch``; on the CPU."""
    for seed, case in enumerate(CASES):
        if case in cases(arch):
            yield draw_layer(*case, seed)


def cases(arch: str) -> list[Case]:
    """Those of the cases whose pairs of formats have kernels on ``arch``."""
    pairs = pairs_of(arch, "grouped_gemm")
    return [case for case in CASES if (activations_of(*case[:2]), case[0].name) in pairs]


def activations_of(weights: BlockScaledFormat, activations: Any) -> str:
    """Name of the format of activations that moe() takes."""
    if activations is None:
        from padless.moe.layer import ACTIVATIONS as DEFAULTS

        return DEFAULTS[weights].name
    return "BF16" if activations is torch.bfloat16 else str(activations.name)


def draw_layer(
    format: BlockScaledFormat,
    activations: Any,
    sizes: tuple[int, ...],
    options: dict[str, Any],
    with_bias: bool,
    seed: int,
) -> Layer:
    """A random layer on the CPU; sizes: tokens, k, experts, H, I."""
    tokens, top_k, experts, h, i = sizes
    generator = torch.Generator().manual_seed(seed)
    n = i if options.get("activation") == "relu2" else 2 * i
    given: dict[str, Any] = {**options, "activations": activations}
    if with_bias:
        given["bias13"] = torch.randn(experts, n, generator=generator) * 0.3
        given["bias2"] = torch.randn(experts, h, generator=generator) * 0.3
    w13 = torch.randn(experts, n, h, generator=generator) / h**0.5
    w2 = torch.randn(experts, h, i, generator=generator) / i**0.5
    return Layer(
        torch.randn(tokens, h, generator=generator).bfloat16(),
        draw_ids(tokens, top_k, experts, seed),
        torch.rand(tokens, top_k, generator=generator),
        quantize(w13, format, kind="weight"),
        quantize(w2, format, kind="weight"),
        given,
    )


def check_layer(place: Place) -> None:
    """moe() is its passes' twins around the GPU's products, right, the same alone as among others, and replays."""
    for on_cpu in layers(place.arch):
        layer, name = on_cpu.to(str(place.device)), f"{on_cpu.w13.format.name} {on_cpu.options}"
        out = layer.run()
        place.judge.ask(partial(same_bits, f"moe() of {name}", out, composed(on_cpu, str(place.device))))
        limit = BOUNDS[activations_of(layer.w13.format, layer.options["activations"])]
        place.judge.ask(partial(judge_error, name, out, on_cpu, limit))
        tokens = layer.x.shape[0]
        for some in (torch.tensor([tokens // 3]), torch.randperm(tokens)[: tokens // 2]):
            picked = place.put(some)
            place.judge.same(f"some tokens of {name}", layer.only(picked).run(), out[picked])
        _check_replay(place, layer, name)


def judge_error(name: str, out: torch.Tensor, layer: Layer, limit: float) -> None:
    """Raises AssertionError where a token is further from float64 than ``limit``."""
    error = largest_error(out.cpu(), layer)
    assert error <= limit, f"moe() of {name}: a token is off by {error:.3f}, allowed {limit}"


def composed(layer: Layer, device: str) -> torch.Tensor:
    """The layer of twins on the CPU and the GPU's products."""
    o = layer.options
    act = Activation(
        o.get("activation", "swiglu"),
        o.get("gate_up", "concatenated"),
        o.get("alpha", 1.0),
        o.get("limit"),
        o.get("up_offset", 0.0),
    )
    format = FORMAT_BY_NAME.get(activations_of(layer.w13.format, o["activations"]))
    scale = torch.ones(()) if format == NVFP4 else None
    offs, tokens, inverse = twins.route(layer.ids, layer.w13.data.shape[0])
    there = layer.to(device)
    rows = layer.x[tokens.long()]
    a: Any = rows.to(device) if format is None else _moved(quantize(rows, format, global_scale=scale), device)
    first, second = (
        Projection(w, bias, None)
        for w, bias in ((there.w13, there.options.get("bias13")), (there.w2, there.options.get("bias2")))
    )
    ends = offs.to(device)
    h = first.product(a, ends).cpu()
    values = twins.activated(h, act, in_bfloat16=format is None)
    hidden = values.to(device) if format is None else _moved(quantize(values, format, global_scale=scale), device)
    y = second.product(hidden, ends).cpu()
    y[int(offs[-1]) :].view(POISON[2][0]).fill_(POISON[2][1])
    return twins.combine(y, inverse, layer.weights, None, layer.x.dtype)


def _moved(t: BlockScaledTensor, device: str) -> BlockScaledTensor:
    scale = None if t.global_scale is None else t.global_scale.to(device)
    # MN-major scales become row-major: the same numbers.
    return BlockScaledTensor(t.data.to(device), t.scale.contiguous().to(device), t.format, scale, t.scale_layout)


def largest_error(out: torch.Tensor, layer: Layer) -> float:
    """Of a token against float64 of the dequantized weights, over the root of the mean square of all tokens' norms."""
    o, experts = layer.options, layer.w13.data.shape[0]
    w13, w2 = dequantize(layer.w13).double(), dequantize(layer.w2).double()
    want = torch.zeros(layer.x.shape, dtype=torch.float64)
    for e in range(experts):
        token, slot = (layer.ids == e).nonzero(as_tuple=True)
        h = layer.x[token].double() @ w13[e].t()
        h = h if o.get("bias13") is None else h + o["bias13"][e].double()
        y = _exact_activation(h, o) @ w2[e].t()
        y = y if o.get("bias2") is None else y + o["bias2"][e].double()
        want.index_add_(0, token, y * layer.weights[token, slot, None].double())
    size = want.norm(dim=1).square().mean().sqrt()
    return float(((out.double() - want).norm(dim=1) / size).max())


def _exact_activation(h: torch.Tensor, o: dict[str, Any]) -> torch.Tensor:
    if o.get("activation") == "relu2":
        return h.clamp(min=0).square()
    gate, up = (h[:, 0::2], h[:, 1::2]) if o.get("gate_up") == "alternating" else h.chunk(2, dim=1)
    if o.get("limit") is not None:
        gate, up = gate.clamp(max=o["limit"]), up.clamp(-o["limit"], o["limit"])
    return gate * (gate * o.get("alpha", 1.0)).sigmoid() * (up + o.get("up_offset", 0.0))


def _check_replay(place: Place, layer: Layer, name: str) -> None:
    """Captured in a CUDA graph, replayed with other tokens, ids and weights in the same buffers; no call waits."""
    static = replace(layer, x=layer.x.clone(), ids=layer.ids.clone(), weights=layer.weights.clone())
    out = torch.empty_like(layer.x)
    order = torch.randperm(layer.x.shape[0], device=place.device)
    other = replace(layer.only(order), ids=layer.ids.flip(1))
    targets = (static.x, static.ids, static.weights)
    place.replayed(lambda: out.copy_(static.run()), targets, (other.x, other.ids, other.weights))
    place.judge.same(f"replay of {name}", out, other.run)


CHECK = Check(check_layer)
