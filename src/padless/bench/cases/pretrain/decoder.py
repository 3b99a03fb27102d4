"""A decoder of Qwen3-MoE's structure (arXiv 2505.09388) whose experts may be those of any contender.

In bfloat16: RMSNorm, grouped-query attention with normalized heads and rotary positions, RMSNorm, a softmax router,
gated experts; residuals around both halves. What is no expert is one function of tensors for all layers, so that
inductor compiles it once. Experts may lie on several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from padless.bench.cases.pretrain.exchange import ExchangedExperts
from padless.bench.cases.train.contenders import BF16, KEPT, TorchExperts
from padless.distributed import ExpertParallel
from padless.nn import Experts
from padless.nn.experts import local
from padless.testing.timing import Call

FP8, OWN_BF16 = "padless fp8", "padless bf16"
# Options of padless' experts by contender, on one GPU and over ranks.
OWN: dict[str, dict[str, Any]] = {FP8: {}, FP8 + KEPT: {"keep_codes": True}}
OWN_OVER_RANKS: dict[str, dict[str, Any]] = {FP8: {}, OWN_BF16: {"recipe": "bf16"}}
CONTENDERS = (BF16, *OWN)
OVER_RANKS = (BF16, *OWN_OVER_RANKS)
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


class Passes:
    """Parts that the layers of a model share: compiled passes, the turns of positions, and drawn experts.

    drawn: a seed by which every token's experts are drawn, as many of them from all for each position of a microbatch;
    None for those that the router chooses. ep: of the exchange, whose ranks have other tokens.
    """

    def __init__(
        self, size: DecoderSize, *, device: str, compiled: bool, ep: ExpertParallel | None, drawn: int | None
    ) -> None:
        self.size, self.ep = size, ep
        made: Callable[[Callable[..., Any]], Callable[..., Any]] = (
            partial(torch.compile, dynamic=False) if compiled else lambda function: function
        )
        self.attend, self.scores, self.scores_of, self.head = (
            made(function) for function in (attend, scores, scores_of, head_loss)
        )
        kind = TorchExperts if ep is None else ExchangedExperts
        self.torch_experts: TorchExperts = kind(size.experts, size.top_k, compiled=compiled)
        self._device, self._drawn = device, drawn
        self._turns: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._index: dict[tuple[int, int], torch.Tensor] = {}

    def turns(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (length, width) of rotary positions."""
        if length not in self._turns:
            frequencies = _THETA ** (-torch.arange(0, self.size.width, 2, dtype=torch.float64) / self.size.width)
            angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies).repeat(1, 2)
            self._turns[length] = angles.cos().bfloat16().to(self._device), angles.sin().bfloat16().to(self._device)
        return self._turns[length]

    def index(self, layer: int, tokens: int) -> torch.Tensor | None:
        """Drawn experts (T, k) of a layer, int64, of this rank's tokens; None where the router chooses."""
        if self._drawn is None:
            return None
        if (layer, tokens) not in self._index:
            rank, ranks = (0, 1) if self.ep is None else (self.ep.rank, self.ep.num_ranks)
            generator = torch.Generator(self._device).manual_seed(1000 * self._drawn + layer)
            chances = torch.rand((ranks, tokens, self.size.experts), generator=generator, device=self._device)
            self._index[layer, tokens] = chances[rank].topk(self.size.top_k, dim=-1).indices
        return self._index[layer, tokens]


class Layer(nn.Module):
    """Parameters of a layer, of experts those of this rank, and every contender's experts over the same two weights."""

    def __init__(self, number: int, passes: Passes, device: str) -> None:
        super().__init__()

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device))

        s, ep = passes.size, passes.ep
        here = s.experts if ep is None else len(ep.local_experts)
        self.attention_norm, self.experts_norm = weight(s.hidden), weight(s.hidden)
        self.q_norm, self.k_norm = weight(s.width), weight(s.width)
        self.qkv = weight((s.heads + 2 * s.groups) * s.width, s.hidden)
        self.project = weight(s.hidden, s.heads * s.width)
        self.router = weight(s.experts, s.hidden)
        self.w13, self.w2 = weight(here, 2 * s.intermediate, s.hidden), weight(here, s.hidden, s.intermediate)
        own = {}
        for name, options in (OWN if ep is None else OWN_OVER_RANKS).items():
            experts = Experts(s.hidden, s.intermediate, s.experts, device="meta", ep=ep, **options)
            experts.w13, experts.w2 = self.w13, self.w2
            own[name] = experts
        self._own = tuple(own.items())  # in a tuple: no submodules, whose parameters would be counted twice
        self._passes, self._number = passes, number

    def forward(self, x: torch.Tensor, contender: str) -> torch.Tensor:
        """x (B, L, H) through the layer with a contender's experts."""
        x, y = self.attention(x)
        weights, index = self.route(y)
        return x + self.experts(contender, y.flatten(0, 1), index, weights).view_as(x)

    def attention(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream after attention, and its norm, which router and experts are given."""
        parameters = (self.attention_norm, self.qkv, self.q_norm, self.k_norm, self.project, self.experts_norm)
        turns, groups = self._passes.turns(x.shape[1]), self._passes.size.groups
        found: tuple[torch.Tensor, torch.Tensor] = self._passes.attend(x, *parameters, *turns, groups)
        return found

    def route(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 weights (T, k) that add up to 1, and int64 experts (T, k)."""
        y = y.flatten(0, 1)
        index = self.drawn(len(y))
        if index is not None:
            return self._passes.scores_of(y, self.router, index), index
        found: tuple[torch.Tensor, torch.Tensor] = self._passes.scores(y, self.router, self._passes.size.top_k)
        return found

    def drawn(self, tokens: int) -> torch.Tensor | None:
        """`Passes.index` of this layer."""
        return self._passes.index(self._number, tokens)

    def experts(self, contender: str, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x (T, H), index and weights (T, k) through a contender's experts: (T, H)."""
        if contender == BF16:
            return self._passes.torch_experts(x, index, weights, self.w13, self.w2)
        out: torch.Tensor = dict(self._own)[contender](x, index, weights)
        return out

    def forget(self) -> None:
        """Frees kept codes."""
        for _, experts in self._own:
            experts.forget_codes()


class Decoder(nn.Module):
    """compiled: whether what is no expert, and the passes of torch's experts, go through inductor.

    ep, drawn: as of `Passes`. With ep the model is this rank's, for data parallelism of all that is no expert.
    """

    def __init__(
        self,
        size: DecoderSize,
        *,
        device: str,
        compiled: bool,
        ep: ExpertParallel | None = None,
        drawn: int | None = None,
    ) -> None:
        super().__init__()
        self.size, self.ep = size, ep
        self._passes = Passes(size, device=device, compiled=compiled, ep=ep, drawn=drawn)
        shape = (size.vocab, size.hidden)
        self.embedding, self.head = (
            nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device)) for _ in range(2)
        )
        self.norm = nn.Parameter(torch.empty(size.hidden, dtype=torch.bfloat16, device=device))
        self.layers = nn.ModuleList(Layer(number, self._passes, device) for number in range(size.layers))

    def _layers(self) -> Sequence[Layer]:
        return cast(Sequence[Layer], self.layers)

    def weights_of_experts(self) -> list[nn.Parameter]:
        """Those of all layers, of which a rank has its own alone."""
        return [weight for layer in self._layers() for weight in (layer.w13, layer.w2)]

    def reset(self, seed: int) -> None:
        """Draws all parameters: norms 1, matrices normal with deviation 0.02. Ranks draw all and keep their part."""
        generator = torch.Generator(self.embedding.device).manual_seed(seed)
        experts = {id(weight) for weight in self.weights_of_experts()}
        with torch.no_grad():
            for parameter in self.parameters():
                own = local(parameter)  # of a DTensor, which has the whole shape
                if parameter.dim() == 1:
                    own.fill_(1)
                    continue
                shape = (self.size.experts, *own.shape[1:]) if id(parameter) in experts else parameter.shape
                whole = torch.empty(shape, dtype=own.dtype, device=own.device).normal_(std=0.02, generator=generator)
                own.copy_(whole if self.ep is None else whole.chunk(self.ep.num_ranks)[self.ep.rank])
        for layer in self._layers():
            layer.forget()

    def forward(self, batch: torch.Tensor, contender: str) -> torch.Tensor:
        """Mean cross entropy of (B, L + 1) tokens, each but the first predicted from those before it."""
        x = functional.embedding(batch[:, :-1], self.embedding)
        for layer in self._layers():
            x = layer(x, contender)
        loss: torch.Tensor = self._passes.head(x, self.norm, self.head, batch[:, 1:])
        return loss

    def parts(self, batch: torch.Tensor, contenders: Sequence[str]) -> dict[str, Call]:
        """Forward and backward passes of parts alone, of the first layer and a batch, with random gradients.

        Kept codes are those of a later microbatch. With ep of the experts alone, on random rows.
        """
        layer, size = self._layers()[0], self.size
        shape = (batch.shape[0], batch.shape[1] - 1, size.hidden)
        generator = torch.Generator(batch.device).manual_seed(1)

        def drawn() -> torch.Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=batch.device, generator=generator)

        x, dout = drawn().requires_grad_(), drawn()
        index = None if self.ep is None else layer.drawn(x[..., 0].numel())
        if index is None:  # under autograd, as in a step: inductor would compile another function without
            y = layer.attention(x)[1].detach().requires_grad_()
            weights, index = layer.route(y)
        else:  # what is no expert lies in parts on all ranks
            y, weights = x, torch.rand(index.shape, device=batch.device, generator=generator)
        rows, weights = y.detach().flatten(0, 1).requires_grad_(), weights.detach().requires_grad_()

        def backward(outs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
            torch.autograd.backward(list(outs), list(grads))
            for leaf in (x, y, rows, weights, *layer.parameters(), self.norm, self.head):
                leaf.grad = None

        dweights = torch.randn(weights.shape, device=batch.device, generator=generator)

        def experts(name: str) -> None:
            backward([layer.experts(name, rows, index, weights)], [dout.flatten(0, 1)])

        of_experts: dict[str, Call] = {f"experts: {name}": partial(experts, name) for name in contenders}
        if self.ep is not None:
            return of_experts
        return {
            "attention": lambda: backward(layer.attention(x), [dout, dout]),
            "router": lambda: backward([layer.route(y)[0]], [dweights]),
            "head and loss": lambda: backward([self._passes.head(x, self.norm, self.head, batch[:, 1:])], [None]),
            **of_experts,
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


def scores_of(y: torch.Tensor, router: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The softmaxed scores of given experts, made to add up to 1."""
    weights = functional.linear(y, router).float().softmax(-1).gather(-1, index)
    return weights / weights.sum(-1, keepdim=True)


def head_loss(x: torch.Tensor, norm: torch.Tensor, head: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the tokens that follow."""
    logits = functional.linear(functional.rms_norm(x, (x.shape[-1],), norm, _EPS), head)
    return functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten())
