"""Mixture-of-Experts layers of known models with random weights, tokens and uneven routing, and their float64 result."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from padless.formats import FP8_BLOCK, BlockScaledFormat, BlockScaledTensor, ceil_div
from padless.moe.activation import Activation
from padless.quantization.quantize import quantize
from padless.testing.judge import values_of


@dataclass(frozen=True)
class LayerPoint:
    """One layer and a number of tokens.

    model: a name for tables. tokens: T. experts: E. top_k: k. hidden: H. intermediate: I.
    """

    model: str
    tokens: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def slots(self) -> int:
        """Rows that are multiplied."""
        return self.tokens * self.top_k

    @property
    def flops(self) -> int:
        """Of the three products."""
        return 6 * self.slots * self.hidden * self.intermediate


# (E, k, H, I); of DeepSeek-V3's 256 experts 32, as on one of eight GPUs.
MODELS: dict[str, tuple[int, int, int, int]] = {
    "Qwen3-30B": (128, 8, 2048, 768),
    "Qwen3-235B": (128, 8, 4096, 1536),
    "DeepSeek-V3 / 8": (32, 8, 7168, 2048),
    "gpt-oss-120b sizes": (128, 4, 2880, 2880),
    "Mixtral": (8, 2, 4096, 14336),
}
TOKENS = (16, 64, 256, 2048, 8192)
DECODE_TOKENS = 256  # up to here calls are timed as CUDA graphs
_UNEVENNESS = 0.5  # spread of the experts' popularity, in units of the tokens' own preferences
_CHECKED_TOKENS = 6
PLAIN_SWIGLU = Activation()
_STANDING_OUT = 0.25


def grid(*, full: bool) -> list[LayerPoint]:
    """Five models at five numbers of tokens, and 16384 of the two smallest; quick: three numbers of two models."""
    models = list(MODELS) if full else ["Qwen3-30B", "DeepSeek-V3 / 8"]
    tokens = TOKENS if full else (64, 2048, 8192)
    points = [LayerPoint(name, t, *MODELS[name]) for name in models for t in tokens]
    if full:
        points += [LayerPoint(name, 16384, *MODELS[name]) for name in ("Qwen3-30B", "Qwen3-235B")]
    return points


@dataclass
class LayerProblem:
    """Tokens x (T, H) bfloat16, ids (T, k) int64, weights (T, k) float32, w13 (E, 2 I, H) and w2 (E, H, I).

    logits: (T, E) bfloat16, of whose k largest ids and weights (their softmax) are. bias13, bias2: (E, 2 I) and (E, H)
    float32, or None. activation: between the products.
    """

    point: LayerPoint
    x: torch.Tensor
    logits: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w13_bf16: torch.Tensor
    w2_bf16: torch.Tensor
    w13: BlockScaledTensor
    w2: BlockScaledTensor
    activation: Activation = PLAIN_SWIGLU
    bias13: torch.Tensor | None = None
    bias2: torch.Tensor | None = None

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each expert."""
        return torch.bincount(self.ids.flatten().cpu(), minlength=self.point.experts).tolist()

    @property
    def bytes(self) -> int:
        """Bytes that the two products read and write at least, in FP8."""
        p = self.point
        weights = sum(size > 0 for size in self.sizes) * 3 * p.hidden * p.intermediate
        rows = p.slots * (p.hidden + 2 * p.intermediate + 2 * p.hidden)
        return weights + rows

    def pass_bytes(self) -> dict[str, int]:
        """Bytes that each pass around the products reads and writes at least."""
        p = self.point
        row = p.hidden + 4 * ceil_div(p.hidden, 128)
        return {
            "route": p.slots * (8 + 4 + 4) + 4 * p.experts,
            "gather_quantize": 2 * p.tokens * p.hidden + p.slots * (row + 4),
            "combine": p.slots * (2 * p.hidden + 4 + 4) + 2 * p.tokens * p.hidden,
        }

    def checked_tokens(self) -> torch.Tensor:
        """A few tokens from the first to the last."""
        count = min(_CHECKED_TOKENS, self.point.tokens)
        return torch.linspace(0, self.point.tokens - 1, count).round().long()

    def expected(self, tokens: torch.Tensor, *, quantized: bool) -> torch.Tensor:
        """(len(tokens), H) float64 on the CPU, of the quantized or the bfloat16 weights; activations as they are."""
        ids, weights = self.ids.cpu(), self.weights.cpu()
        result = []
        for t in tokens.tolist():
            total = torch.zeros(self.point.hidden, dtype=torch.float64)
            for e, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
                first, second = (
                    (values_of(self.w13[e]), values_of(self.w2[e]))
                    if quantized
                    else (self.w13_bf16[e].double(), self.w2_bf16[e].double())
                )
                h = first @ self.x[t].double()
                y = second @ self.activated(h if self.bias13 is None else h + self.bias13[e].double())
                total += weight * (y if self.bias2 is None else y + self.bias2[e].double()).cpu()
            result.append(total)
        return torch.stack(result)

    def activated(self, h: torch.Tensor) -> torch.Tensor:
        """The activation of h (.., 2 I) in h's dtype, by torch: (.., I)."""
        act = self.activation
        gate, up = h.chunk(2, dim=-1) if act.gate_up == "concatenated" else (h[..., 0::2], h[..., 1::2])
        if act.is_plain_swiglu:
            return torch.nn.functional.silu(gate) * up
        if act.limit is not None:
            gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
        return gate * torch.sigmoid(act.alpha * gate) * (up + act.up_offset)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `padless.moe.moe` without the layer's operands."""
        act = self.activation
        named = {"gate_up": act.gate_up, "alpha": act.alpha, "limit": act.limit, "up_offset": act.up_offset}
        activations = None if self.w13.format is FP8_BLOCK else torch.bfloat16
        return named | {"bias13": self.bias13, "bias2": self.bias2, "activations": activations}

    def with_tokens(self, tokens: int, seed: int) -> LayerProblem:
        """The same weights and biases with other tokens, so many."""
        point = replace(self.point, tokens=tokens)
        x, logits, ids, weights = _tokens(point, _generator(point, seed, self.x.device))
        return replace(self, point=point, x=x, logits=logits, ids=ids, weights=weights)


def make_layer(
    point: LayerPoint,
    seed: int,
    device: str | torch.device,
    format: BlockScaledFormat = FP8_BLOCK,
    activation: Activation = PLAIN_SWIGLU,
    *,
    biases: bool = False,
) -> LayerProblem:
    """Random values; an expert's popularity and a token's preferences are normal, so that experts get uneven shares.

    format: of the weights. biases: whether there are some.
    """
    generator = _generator(point, seed, device)
    p = point
    x, logits, ids, weights = _tokens(point, generator)
    w13 = _normal(generator, p.experts, 2 * p.intermediate, p.hidden).div_(p.hidden**0.5)
    w2 = _normal(generator, p.experts, p.hidden, p.intermediate).div_(p.intermediate**0.5)
    sizes = ((p.experts, 2 * p.intermediate), (p.experts, p.hidden))
    bias13, bias2 = (_normal(generator, *size).float() if biases else None for size in sizes)
    codes13, codes2 = (quantize(w, format, kind="weight") for w in (w13, w2))
    return LayerProblem(p, x, logits, ids, weights, w13, w2, codes13, codes2, activation, bias13, bias2)


def _generator(point: LayerPoint, seed: int, device: str | torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(random.Random(f"{seed}:{point!r}").getrandbits(31))


def _normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)


def _tokens(p: LayerPoint, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, logits, ids, weights) of a `LayerProblem`."""
    x = _normal(generator, p.tokens, p.hidden)
    popularity = _UNEVENNESS * _normal(generator, p.experts, dtype=torch.float32)
    logits = popularity + _normal(generator, p.tokens, p.experts, dtype=torch.float32)
    ids = logits.topk(p.top_k, dim=1).indices
    # The chosen stand out, so that nothing depends on a rounding of the logits.
    logits = logits.scatter_add(1, ids, torch.full_like(logits, _STANDING_OUT)).to(torch.bfloat16)
    return x, logits, ids, logits.gather(1, ids).float().softmax(dim=1)
