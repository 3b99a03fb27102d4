"""The points of `padless bench chain` and the operands of a chain of calls."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch

from padless.bench.group_sizes import DecodePoint, Point, decode_sizes
from padless.bench.problem import GroupedProblem, make_grouped, sample_reference
from padless.formats import FP8_BLOCK, ceil_div, round_up
from padless.testing.judge import SampledReference

WEIGHT_BYTES = 300 * 10**6  # of all layers together: several times what L2 holds
LEAST_LAYERS = 2
LEAST_CALLS = 8

GROUPS = (8, 32, 128)
ROWS = (1, 16, 64)
SHAPES = ((2048, 2048), (4096, 4096), (7168, 2048), (2048, 7168))
QUICK_POINTS = (
    DecodePoint(8, 1, 2048, 2048),
    DecodePoint(8, 64, 7168, 2048),
    DecodePoint(32, 16, 2048, 2048),
    DecodePoint(32, 1, 4096, 4096),
    DecodePoint(128, 16, 2048, 7168),
    DecodePoint(128, 64, 2048, 2048),
)


def grid(*, full: bool) -> list[DecodePoint]:
    """36 points of decoding (full), or six that touch every value of every axis."""
    if not full:
        return list(QUICK_POINTS)
    return [DecodePoint(groups, rows, n, k) for groups, (n, k), rows in itertools.product(GROUPS, SHAPES, ROWS)]


def layers_of(point: DecodePoint) -> int:
    """The fewest layers, at least two, whose weights (codes and scales) are WEIGHT_BYTES together."""
    scales = 4 * ceil_div(point.N, 128) * ceil_div(point.K, 128)
    return max(LEAST_LAYERS, ceil_div(WEIGHT_BYTES, point.groups * (point.N * point.K + scales)))


def calls_of(layers: int) -> int:
    """Calls of a chain: the smallest multiple of `layers` that is at least LEAST_CALLS."""
    return round_up(LEAST_CALLS, layers)


# --- operands ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChainProblem:
    """Operands of a chain: call i takes layer i modulo the number of layers.

    layers: of one shape and the same group sizes, with separate activations and weights.
    second: the second projections of an expert MLP, (groups, K, N / 2) weights; their activations are not used.
    """

    layers: list[GroupedProblem]
    second: list[GroupedProblem]
    calls: int

    @property
    def order(self) -> list[int]:
        """The layer of every call."""
        return [call % len(self.layers) for call in range(self.calls)]

    def references(self) -> tuple[SampledReference, SampledReference]:
        """float64 products of sampled rows, of all calls' outputs on top of each other: of "padless" and of "mlp"."""
        first = [sample_reference(layer) for layer in self.layers]
        pairs = zip(self.layers, self.second, first, strict=True)
        mlp = [_mlp_reference(layer, second, product) for layer, second, product in pairs]
        return self._stacked(first), self._stacked(mlp)

    def _stacked(self, of_layers: list[SampledReference]) -> SampledReference:
        rows = self.layers[0].point.M
        parts = [of_layers[layer] for layer in self.order]
        return SampledReference(
            torch.cat([part.rows + call * rows for call, part in enumerate(parts)]),
            torch.cat([part.values for part in parts]),
        )


def make_chain(point: DecodePoint, seed: int, device: str | torch.device) -> ChainProblem:
    """Layers of standard normal operands, quantised; the group sizes are those of `padless bench decode`."""
    sizes = decode_sizes(point, seed)
    shape = Point(sum(sizes), point.N, point.K, point.groups)
    count = layers_of(point)
    seeds = [2 * (1000 * seed + layer) for layer in range(count)]
    layers = [make_grouped(shape, sizes, layer_seed, device) for layer_seed in seeds]
    second = [second_projection(layer, layer_seed + 1) for layer, layer_seed in zip(layers, seeds, strict=True)]
    return ChainProblem(layers, second, calls_of(count))


def second_projection(layer: GroupedProblem, seed: int | None) -> GroupedProblem:
    """Weights (groups, K, N / 2) behind a SwiGLU of the layer's (groups, N, K); seed None: uninitialised memory."""
    p = layer.point
    return make_grouped(Point(p.M, p.K, p.N // 2, p.groups), layer.sizes, seed, layer.device)


def _mlp_reference(layer: GroupedProblem, second: GroupedProblem, product: SampledReference) -> SampledReference:
    """Sampled rows of the MLP in float64 from the first product's, with the quantisation between the projections."""
    from padless.quantization.quantize import quantize

    gate, up = product.values.chunk(2, dim=1)
    hidden = torch.zeros(second.point.M, second.point.K, dtype=torch.float32, device=layer.device)
    hidden[product.rows] = (torch.nn.functional.silu(gate) * up).to(torch.float32)
    # The rows that are sampled depend on the sizes alone, so they are the same ones.
    return sample_reference(replace(second, a=quantize(hidden, FP8_BLOCK, scale_major="mn")))
