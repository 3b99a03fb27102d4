"""Training steps of known models' expert layers with random values and uneven routing, and their float64 results."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from padless.bench.cases.problems.layer import MODELS, LayerPoint, make_layer

_CHECKED_TOKENS, _CHECKED_ROWS = 6, 16


@dataclass(frozen=True)
class TrainPoint(LayerPoint):
    """A layer and a number of tokens. every_recipe: all recipes take part, not the usual ones alone."""

    every_recipe: bool = False


def points(*, full: bool) -> list[TrainPoint]:
    """DeepSeek-V3's experts as on 32 and 8 GPUs, and Qwen3-30B's; full: every recipe, few rows, and two more models."""
    experts, top_k, hidden, intermediate = MODELS["DeepSeek-V3 / 8"]
    found = [
        TrainPoint("DeepSeek-V3 / 32", 8192, 8, 4, hidden, intermediate, full),
        TrainPoint("DeepSeek-V3 / 8", 4096, experts, top_k, hidden, intermediate, full),
        TrainPoint("Qwen3-30B", 8192, *MODELS["Qwen3-30B"], full),
    ]
    if full:
        found += [
            TrainPoint("DeepSeek-V3 / 8", 1024, experts, top_k, hidden, intermediate, full),
            TrainPoint("Qwen3-30B", 4096, *MODELS["Qwen3-30B"], full),
            TrainPoint("Qwen3-235B", 4096, *MODELS["Qwen3-235B"], full),
            TrainPoint("gpt-oss-120b sizes", 4096, *MODELS["gpt-oss-120b sizes"], full),
        ]
    return found


@dataclass
class TrainProblem:
    """x, dout (T, H), w13 (E, 2 I, H), w2 (E, H, I) in bfloat16, ids (T, k) int64, prob (T, k) float32."""

    point: TrainPoint
    x: torch.Tensor
    ids: torch.Tensor
    prob: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    dout: torch.Tensor
    tokens: torch.Tensor = field(init=False)
    rows: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        p, device = self.point, self.x.device
        self.tokens = torch.linspace(0, p.tokens - 1, min(_CHECKED_TOKENS, p.tokens)).round().long().to(device)
        smallest = min(p.hidden, 2 * p.intermediate)
        self.rows = torch.linspace(0, smallest - 1, min(_CHECKED_ROWS, smallest)).round().long().to(device)

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each expert."""
        return torch.bincount(self.ids.flatten(), minlength=self.point.experts).tolist()

    @cached_property
    def checked_expert(self) -> int:
        """The expert with the fewest tokens, but some: its weights' gradients are compared."""
        return min((e for e in range(self.point.experts) if self.sizes[e] > 0), key=lambda e: self.sizes[e])

    def rows_of(self, name: str, result: torch.Tensor) -> torch.Tensor:
        """The rows of a result that are compared; of prob, whose rows are few numbers each, one row of all of them."""
        if name in ("w13", "w2"):
            return result[self.checked_expert][self.rows]
        return result[self.tokens].reshape(1, -1) if name == "prob" else result[self.tokens]

    @cached_property
    def expected(self) -> dict[str, torch.Tensor]:
        """float64 rows of out, x, prob, w13 and w2: expert by expert by torch's own autograd."""
        x = self.x[self.tokens].double().requires_grad_()
        prob = self.prob[self.tokens].double().requires_grad_()
        out = torch.zeros_like(x)
        ids = self.ids[self.tokens]
        for e in ids.unique().tolist():
            token, slot = torch.nonzero(ids == e, as_tuple=True)
            y = self._expert(x[token], self.w13[e].double(), self.w2[e].double())
            out = out.index_add(0, token, y * prob[token, slot, None])
        out.backward(self.dout[self.tokens].double())
        e = self.checked_expert
        token, slot = torch.nonzero(self.ids == e, as_tuple=True)
        w13, w2 = self.w13[e].double().requires_grad_(), self.w2[e].double().requires_grad_()
        y = self._expert(self.x[token].double(), w13, w2) * self.prob[token, slot, None].double()
        y.backward(self.dout[token].double())
        assert x.grad is not None
        assert prob.grad is not None
        assert w13.grad is not None
        assert w2.grad is not None
        found = {"out": out.detach(), "x": x.grad, "prob": prob.grad.reshape(1, -1)}
        return found | {"w13": w13.grad[self.rows], "w2": w2.grad[self.rows]}

    @staticmethod
    def _expert(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ w13.T).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up) @ w2.T


def make_problem(point: TrainPoint, seed: int, device: str) -> TrainProblem:
    """Values of `layer_problem.make_layer`, and a normal gradient of the output."""
    made = make_layer(point, seed, device)
    generator = torch.Generator(device).manual_seed(seed)
    dout = torch.randn(made.x.shape, generator=generator, device=device, dtype=torch.bfloat16)
    return TrainProblem(point, made.x, made.ids, made.weights, made.w13_bf16, made.w2_bf16, dout)
