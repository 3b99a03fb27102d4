"""Layers of ten models at a few tokens: several with separate weights, so that no call finds its weights in L2."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from padless.bench.cases.problems.layer import PLAIN_SWIGLU, LayerPoint, LayerProblem, make_layer
from padless.bench.group_sizes import Point
from padless.bench.problem import GroupedProblem
from padless.formats import FORMAT_BY_NAME, FP8_BLOCK, BlockScaledTensor, ceil_div
from padless.moe.activation import Activation
from padless.ops.grouped_gemm import group_offsets
from padless.quantization.quantize import quantize

# (E, k, H, I, format of the weights). Of DeepSeek-V3's 256 and Kimi-K2's 384 experts those on one of eight GPUs.
MODELS: dict[str, tuple[int, int, int, int, str]] = {
    "Qwen3-30B": (128, 8, 2048, 768, "FP8_BLOCK"),
    "Qwen3-235B": (128, 8, 4096, 1536, "FP8_BLOCK"),
    "Qwen3-Next": (512, 10, 2048, 512, "FP8_BLOCK"),
    "Qwen3.5-35B": (256, 8, 2048, 512, "FP8_BLOCK"),
    "DeepSeek-V3 / 8": (32, 8, 7168, 2048, "FP8_BLOCK"),
    "Kimi-K2 / 8": (48, 8, 7168, 2048, "FP8_BLOCK"),
    "GLM-4.5-Air": (128, 8, 4096, 1408, "FP8_BLOCK"),
    "OLMoE": (64, 8, 2048, 1024, "FP8_BLOCK"),
    "Mixtral": (8, 2, 4096, 14336, "FP8_BLOCK"),
    "gpt-oss-120b": (128, 4, 2880, 2880, "MXFP4"),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64)
GPT_OSS = Activation("swiglu", "alternating", 1.702, 7.0, 1.0)
# Weights that one token reads in all layers, at least: four times what an H200's L2 holds.
STREAMED_BYTES = 4 * 60 * 2**20
FEWEST_LAYERS = 4


@dataclass(frozen=True)
class DecodingPoint(LayerPoint):
    """A layer and a number of tokens. format: of the weights. layers: how many of them, each with its own weights."""

    format: str
    layers: int


def layers_of(top_k: int, hidden: int, intermediate: int, format: str) -> int:
    """As many layers as read STREAMED_BYTES for one token."""
    bits = 8 * FORMAT_BY_NAME[format].data_dtype.itemsize // FORMAT_BY_NAME[format].codes_per_byte
    return max(FEWEST_LAYERS, ceil_div(8 * STREAMED_BYTES, top_k * 3 * hidden * intermediate * bits))


def grid() -> list[DecodingPoint]:
    """Every model at every number of tokens."""
    return [
        DecodingPoint(name, tokens, experts, top_k, hidden, width, format, layers_of(top_k, hidden, width, format))
        for name, (experts, top_k, hidden, width, format) in MODELS.items()
        for tokens in TOKENS
    ]


@dataclass
class Stack:
    """Layers of one shape with separate weights and tokens."""

    point: DecodingPoint
    layers: list[LayerProblem]

    @property
    def hit(self) -> float:
        """Experts that have a token, a layer."""
        return sum(size > 0 for layer in self.layers for size in layer.sizes) / len(self.layers)

    @property
    def bytes(self) -> int:
        """Of codes and scales of the weights of experts that have a token, a layer."""
        weights = (part for w in (self.layers[0].w13, self.layers[0].w2) for part in (w.data, w.scale))
        return round(self.hit * sum(part.nbytes for part in weights) / self.point.experts)

    @cached_property
    def products(self) -> list[tuple[GroupedProblem, GroupedProblem]]:
        """The two products of every layer on random rows, as many for each expert as the layer gives it."""
        return [
            (_product(layer, layer.w13, 2 * index), _product(layer, layer.w2, 2 * index + 1))
            for index, layer in enumerate(self.layers)
        ]

    def with_tokens(self, tokens: int, seed: int) -> Stack:
        """The same weights with so many other tokens."""
        layers = [layer.with_tokens(tokens, seed + index) for index, layer in enumerate(self.layers)]
        return Stack(replace(self.point, tokens=tokens), layers)


def make_stack(point: DecodingPoint, seed: int, device: str | torch.device) -> Stack:
    """Layers of random values."""
    format, is_fp8 = FORMAT_BY_NAME[point.format], point.format == FP8_BLOCK.name
    activation = PLAIN_SWIGLU if is_fp8 else GPT_OSS
    sizes = (point.model, point.tokens, point.experts, point.top_k, point.hidden, point.intermediate)
    return Stack(
        point,
        [
            make_layer(LayerPoint(*sizes), seed + index, device, format, activation, biases=not is_fp8)
            for index in range(point.layers)
        ],
    )


def _product(layer: LayerProblem, w: BlockScaledTensor, seed: int) -> GroupedProblem:
    experts, n = w.data.shape[:2]
    k = w.data.shape[2] * w.format.codes_per_byte
    device = layer.x.device
    generator = torch.Generator(device).manual_seed(seed)
    rows = torch.randn(layer.point.slots, k, dtype=torch.bfloat16, device=device, generator=generator)
    a = quantize(rows, FP8_BLOCK, kind="activation", scale_major="mn")
    offs = group_offsets(torch.tensor(layer.sizes, device=device))
    point = Point(layer.point.slots, n, k, experts)
    return GroupedProblem(point, layer.sizes, a, w, offs, seed, None if w.format is FP8_BLOCK else rows)
