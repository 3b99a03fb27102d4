"""A decoder of Qwen3-MoE's structure (arXiv 2505.09388) whose experts may be those of any contender.

In bfloat16: RMSNorm, grouped-query attention with normalized heads and rotary positions, RMSNorm, a softmax router,
gated experts; residuals around both halves. What is no expert is one function of tensors for all layers, so that
inductor compiles it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from padless.bench.cases.train.contenders import BF16, KEPT, TorchExperts
from padless.nn import Experts
from padless.testing.timing import Call

FP8 = "padless fp8"
CONTENDERS = (BF16, FP8, FP8 + KEPT)
_THETA = 1e6
_EPS = 1e-6


@dataclass(frozen=True)
class DecoderSize:
    """Sizes of a decoder. heads: of queries; groups: heads of keys and values; width: of a head."""

    layers: int
    hidden: int
    heads: int
    groups: int
    width: int
    experts: int
    top_k: int
    intermediate: int
    vocab: int


class Layer(nn.Module):
    """Parameters of a layer, and every contender's experts over the same two weights."""

    def __init__(self, size: DecoderSize, device: str, torch_experts: TorchExperts) -> None:
        super().__init__()

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device))

        s = size
        self.attention_norm, self.experts_norm = weight(s.hidden), weight(s.hidden)
        self.q_norm, self.k_norm = weight(s.width), weight(s.width)
        self.qkv = weight((s.heads + 2 * s.groups) * s.width, s.hidden)
        self.project = weight(s.hidden, s.heads * s.width)
        self.router = weight(s.experts, s.hidden)
        self.w13, self.w2 = weight(s.experts, 2 * s.intermediate, s.hidden), weight(s.experts, s.hidden, s.intermediate)
        own = {}
        for name in (FP8, FP8 + KEPT):
            experts = Experts(s.hidden, s.intermediate, s.experts, device="meta", keep_codes=name != FP8)
            experts.w13, experts.w2 = self.w13, self.w2
            own[name] = experts
        self._own = tuple(own.items())  # in a tuple: no submodules, whose parameters would be counted twice
        self._torch = torch_experts

    def experts(self, contender: str, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x (T, H), index and weights (T, k) through a contender's experts: (T, H)."""
        if contender == BF16:
            return self._torch(x, index, weights, self.w13, self.w2)
        out: torch.Tensor = dict(self._own)[contender](x, index, weights)
        return out

    def forget(self) -> None:
        """Frees kept codes."""
        for _, experts in self._own:
            experts.forget_codes()


class Decoder(nn.Module):
    """compiled: whether what is no expert, and the passes of torch's experts, go through inductor."""

    def __init__(self, size: DecoderSize, *, device: str, compiled: bool) -> None:
        super().__init__()
        self.size = size
        made: Callable[[Callable[..., Any]], Callable[..., Any]] = (
            partial(torch.compile, dynamic=False) if compiled else lambda function: function
        )
        self._attend, self._scores, self._head = made(attend), made(scores), made(head_loss)
        torch_experts = TorchExperts(size.experts, size.top_k, compiled=compiled)
        shape = (size.vocab, size.hidden)
        self.embedding, self.head = (
            nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device)) for _ in range(2)
        )
        self.norm = nn.Parameter(torch.empty(size.hidden, dtype=torch.bfloat16, device=device))
        self.layers = nn.ModuleList(Layer(size, device, torch_experts) for _ in range(size.layers))
        self._turns: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _layers(self) -> Sequence[Layer]:
        return cast(Sequence[Layer], self.layers)

    def reset(self, seed: int) -> None:
        """Draws all parameters: norms 1, matrices normal with deviation 0.02."""
        generator = torch.Generator(self.embedding.device).manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1)
                else:
                    parameter.normal_(std=0.02, generator=generator)
        for layer in self._layers():
            layer.forget()

    def loss(self, batch: torch.Tensor, contender: str) -> torch.Tensor:
        """Mean cross entropy of (B, L + 1) tokens, each but the first predicted from those before it."""
        x = functional.embedding(batch[:, :-1], self.embedding)
        for layer in self._layers():
            x, y = self.attention(layer, x)
            weights, index = self.route(layer, y)
            x = x + layer.experts(contender, y.flatten(0, 1), index, weights).view_as(x)
        loss: torch.Tensor = self._head(x, self.norm, self.head, batch[:, 1:])
        return loss

    def attention(self, layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream after attention, and its norm, which router and experts are given."""
        cos, sin = self._rotary(x.shape[1])
        parameters = (layer.attention_norm, layer.qkv, layer.q_norm, layer.k_norm, layer.project, layer.experts_norm)
        found: tuple[torch.Tensor, torch.Tensor] = self._attend(x, *parameters, cos, sin, self.size.groups)
        return found

    def route(self, layer: Layer, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 weights (T, k) that add up to 1, and int64 experts (T, k)."""
        found: tuple[torch.Tensor, torch.Tensor] = self._scores(y.flatten(0, 1), layer.router, self.size.top_k)
        return found

    def _rotary(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        if length not in self._turns:
            frequencies = _THETA ** (-torch.arange(0, self.size.width, 2, dtype=torch.float64) / self.size.width)
            angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies).repeat(1, 2)
            device = self.embedding.device
            self._turns[length] = angles.cos().bfloat16().to(device), angles.sin().bfloat16().to(device)
        return self._turns[length]

    def parts(self, batch: torch.Tensor, contenders: Sequence[str]) -> dict[str, Call]:
        """Forward and backward passes of parts alone, of the first layer and a batch, with random gradients.

        Kept codes are those of a later microbatch.
        """
        layer, size = self._layers()[0], self.size
        shape = (batch.shape[0], batch.shape[1] - 1, size.hidden)
        generator = torch.Generator(batch.device).manual_seed(1)

        def drawn() -> torch.Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=batch.device, generator=generator)

        x, dout = drawn().requires_grad_(), drawn()
        with torch.no_grad():
            y = self.attention(layer, x)[1].detach()
            weights, index = self.route(layer, y)
        rows, weights = y.flatten(0, 1).requires_grad_(), weights.requires_grad_()
        y.requires_grad_()

        def backward(outs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
            torch.autograd.backward(list(outs), list(grads))
            for leaf in (x, y, rows, weights, *layer.parameters(), self.norm, self.head):
                leaf.grad = None

        dweights = torch.randn(weights.shape, device=batch.device, generator=generator)

        def experts(name: str) -> None:
            backward([layer.experts(name, rows, index, weights)], [dout.flatten(0, 1)])

        return {
            "attention": lambda: backward(self.attention(layer, x), [dout, dout]),
            "router": lambda: backward([self.route(layer, y)[0]], [dweights]),
            "head and loss": lambda: backward([self._head(x, self.norm, self.head, batch[:, 1:])], [None]),
            **{f"experts: {name}": partial(experts, name) for name in contenders},
        }


def attend(
    x: torch.Tensor,
    norm: torch.Tensor,
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    project: torch.Tensor,
    next_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    groups: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (B, L, H) with causal attention added, and its RMSNorm by next_norm."""
    batch, length, hidden = x.shape
    width = q_norm.shape[0]
    mixed = functional.linear(functional.rms_norm(x, (hidden,), norm, _EPS), qkv).view(batch, length, -1, width)
    q, k, v = mixed.split([mixed.shape[2] - 2 * groups, groups, groups], dim=2)
    q, k = (
        _turned(functional.rms_norm(t, (width,), w, _EPS), cos[:, None], sin[:, None])
        for t, w in ((q, q_norm), (k, k_norm))
    )
    repeats = q.shape[2] // groups  # written out, since not every fused attention takes groups
    k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    )
    x = x + functional.linear(out.transpose(1, 2).reshape(batch, length, -1), project)
    return x, functional.rms_norm(x, (hidden,), next_norm, _EPS)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def scores(y: torch.Tensor, router: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest k of softmaxed scores, made to add up to 1, and their experts."""
    weights, index = functional.linear(y, router).float().softmax(-1).topk(top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), index


def head_loss(x: torch.Tensor, norm: torch.Tensor, head: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the tokens that follow."""
    logits = functional.linear(functional.rms_norm(x, (x.shape[-1],), norm, _EPS), head)
    return functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten())
