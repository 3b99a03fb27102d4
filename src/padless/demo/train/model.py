"""A byte-level decoder whose feed-forward blocks are Mixtures of Experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from padless.demo.train.text import NUM_BYTES
from padless.distributed import ExpertParallel
from padless.nn import Experts, Recipe

BALANCE = 0.01  # weight of the loss that keeps experts equally busy (Switch Transformer, arXiv 2101.03961, eq. 4)


@dataclass(frozen=True)
class ModelSize:
    """Sizes of the model and of a batch.

    length: bytes of a sequence; batch: sequences of a step.
    """

    layers: int
    hidden: int
    heads: int
    experts: int
    top_k: int
    intermediate: int
    length: int
    batch: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.length * self.batch

    @property
    def expert_share(self) -> float:
        """Fraction of a step's multiplications that the experts do."""
        experts = self.top_k * 3 * self.hidden * self.intermediate
        attention = 4 * self.hidden**2 + self.length * self.hidden
        return self.layers * experts / (self.layers * (experts + attention) + self.hidden * NUM_BYTES)


class Model(nn.Module):
    """(batch, length) bytes to (batch, length, 256) logits. Parameters are float32, products bfloat16 or FP8.

    ep: spreads the experts of all layers over ranks, each of which has a part of a batch; what a seed draws is the same.
    rows: what experts are given, and attention is computed in, bfloat16 or float32.
    """

    adam_eps = 1e-8

    def __init__(
        self, size: ModelSize, recipe: Recipe, ep: ExpertParallel | None = None, rows: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(NUM_BYTES, size.hidden)
        self.position = nn.Parameter(0.02 * torch.randn(size.length, size.hidden))
        self.blocks = nn.ModuleList(Block(size, recipe, ep, rows) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.head = nn.Linear(size.hidden, NUM_BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and the mean over layers of how unequally the experts are used (1 is equally)."""
        x = self.embedding(ids) + self.position[: ids.shape[1]]
        imbalance = x.new_zeros(())
        for block in self.blocks:
            x, uneven = block(x)
            imbalance = imbalance + uneven / self.size.layers
        logits: torch.Tensor = self.head(self.norm(x))
        return logits, imbalance

    def loss(self, ids: torch.Tensor, following: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and its cross entropy alone (nats a byte)."""
        logits, imbalance = self(ids)
        entropy = functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten())
        return entropy + BALANCE * imbalance, entropy.detach()


class Block(nn.Module):
    """Causal attention, then a Mixture of Experts, each next to a residual stream."""

    def __init__(self, size: ModelSize, recipe: Recipe, ep: ExpertParallel | None, rows: torch.dtype) -> None:
        super().__init__()
        self.rows = rows
        self.heads, self.top_k = size.heads, size.top_k
        self.attention_norm = nn.RMSNorm(size.hidden)
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=False)
        self.project = nn.Linear(size.hidden, size.hidden, bias=False)
        self.experts_norm = nn.RMSNorm(size.hidden)
        self.router = nn.Linear(size.hidden, size.experts, bias=False)
        self.experts = Experts(size.hidden, size.intermediate, size.experts, recipe=recipe, ep=ep)
        with torch.no_grad():
            for weight, fan_in in ((self.experts.w13, size.hidden), (self.experts.w2, size.intermediate)):
                every = torch.empty(size.experts, *weight.shape[1:]).normal_(std=fan_in**-0.5)
                weight.copy_(every if ep is None else every[list(ep.local_experts)])
            for layer in (self.qkv, self.project, self.router):
                layer.weight.normal_(std=size.hidden**-0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self._attend(self.attention_norm(x))
        hidden = self.experts_norm(x).flatten(0, 1)
        probabilities = self.router(hidden.float()).softmax(-1)
        weights, index = probabilities.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = self.experts(hidden.to(self.rows), index, weights)
        return x + out.to(x.dtype).view_as(x), _imbalance(probabilities, index, self.experts.ep)

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.rows == torch.bfloat16):
            q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            out: torch.Tensor = self.project(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return out.to(x.dtype)


def _imbalance(probabilities: torch.Tensor, index: torch.Tensor, ep: ExpertParallel | None) -> torch.Tensor:
    """Experts times the sum over experts of (share of choices) times (mean probability).

    Choices are those of all ranks of ep, so that the mean over ranks is what one process with all tokens has.
    """
    experts = probabilities.shape[-1]
    chosen = torch.zeros(experts, device=index.device).scatter_add_(
        0, index.flatten(), torch.ones(index.numel(), device=index.device)
    )
    if ep is not None:
        dist.all_reduce(chosen, group=ep.group)
    share = chosen / chosen.sum()
    return experts * (share * probabilities.mean(0)).sum()
