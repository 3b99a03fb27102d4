"""Mixture-of-Experts layers of known models with random weights, tokens and uneven routing, and their float64 result."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property

import torch

from padless.formats import FP8_BLOCK, BlockScaledTensor, ceil_div
from padless.quantization.quantize import dequantize, quantize


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
    """Tokens x (T, H) bfloat16, ids (T, k) int64, weights (T, k) float32, w13 (E, 2 I, H) and w2 (E, H, I)."""

    point: LayerPoint
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w13_bf16: torch.Tensor
    w2_bf16: torch.Tensor
    w13: BlockScaledTensor
    w2: BlockScaledTensor

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
                    (_values(self.w13, e), _values(self.w2, e))
                    if quantized
                    else (self.w13_bf16[e].double(), self.w2_bf16[e].double())
                )
                gate, up = (first @ self.x[t].double()).chunk(2)
                total += weight * (second @ (torch.nn.functional.silu(gate) * up)).cpu()
            result.append(total)
        return torch.stack(result)


def _values(w: BlockScaledTensor, expert: int) -> torch.Tensor:
    one = BlockScaledTensor(w.data[expert : expert + 1], w.scale[expert : expert + 1], w.format)
    return dequantize(one)[0].double()


def make_layer(point: LayerPoint, seed: int, device: str) -> LayerProblem:
    """Random values; an expert's popularity and a token's preferences are normal, so that experts get uneven shares."""
    generator = torch.Generator(device).manual_seed(random.Random(f"{seed}:{point!r}").getrandbits(31))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    p = point
    popularity = _UNEVENNESS * torch.randn(p.experts, generator=generator, device=device)
    logits = popularity + torch.randn((p.tokens, p.experts), generator=generator, device=device)
    chosen, ids = logits.topk(p.top_k, dim=1)
    w13 = normal(p.experts, 2 * p.intermediate, p.hidden) / p.hidden**0.5
    w2 = normal(p.experts, p.hidden, p.intermediate) / p.intermediate**0.5
    return LayerProblem(
        p,
        normal(p.tokens, p.hidden),
        ids,
        chosen.softmax(dim=1),
        w13,
        w2,
        quantize(w13, FP8_BLOCK, kind="weight"),
        quantize(w2, FP8_BLOCK, kind="weight"),
    )
