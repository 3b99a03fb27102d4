"""Two tenants that train their own adapters on one model, in one batch: the rows of its gradients differ by 2^20.

Sequences of a batch are the tenants' in turns. The first tenant reads text and adds its loss up over the bytes of a
global batch, `SUMMED` = 2^20 of them, as trainers do that count every byte alike; it also trains the shared model. The
second reads the same text with its letters turned by 13, and takes the mean; all it has of its own is a map of what the
experts read in each block, so that it learns from nothing but the experts' input gradients. Adam does not see the size
of a gradient, so neither tenant's training depends on the unit of its loss, as long as a product keeps small rows.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from padless.demo.train.model import BALANCE, Model, ModelSize
from padless.demo.train.text import NUM_BYTES
from padless.nn import Experts, Recipe

TENANTS = 2
SUMMED = 2.0**20


class Tenants(Model):
    """`padless.demo.train.model.Model` with an adapter a tenant before the experts of every block."""

    alphabets: torch.Tensor
    adam_eps = 1e-20  # far below a gradient of the second tenant once both are clipped together

    def __init__(self, size: ModelSize, recipe: Recipe) -> None:
        super().__init__(size, recipe)
        for block in self.blocks:
            assert isinstance(block.experts, Experts)
            block.experts = AdaptedExperts(block.experts, size)
        turned = torch.arange(NUM_BYTES)
        for first in b"aA":
            turned[first : first + 26] = turned[first : first + 26].roll(13)
        self.register_buffer("alphabets", torch.stack([torch.arange(NUM_BYTES), turned]))

    def loss(self, ids: torch.Tensor, following: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss: SUMMED times the first tenant's, and the second's; the mean of both in nats a byte."""
        tenant = torch.arange(ids.shape[0], device=ids.device)[:, None] % TENANTS
        ids, following = self.alphabets[tenant, ids], self.alphabets[tenant, following]
        logits, imbalance = self(ids)
        entropy = functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten(), reduction="none")
        first, second = entropy.view(-1, TENANTS, ids.shape[1]).mean((0, 2))
        return SUMMED * first + second + BALANCE * imbalance, ((first + second) / TENANTS).detach()


class AdaptedExperts(nn.Module):
    """Experts that read x + x @ maps[tenant of x], (T, H), the sequences' tenants in turns."""

    def __init__(self, experts: Experts, size: ModelSize) -> None:
        super().__init__()
        self.experts, self.length, self.ep = experts, size.length, experts.ep
        self.maps = nn.Parameter(torch.zeros(TENANTS, size.hidden, size.hidden))

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        by_tenant = x.view(-1, TENANTS, self.length, x.shape[1]).transpose(0, 1)
        mapped = by_tenant.flatten(1, 2).bmm(self.maps.to(x.dtype)).view(by_tenant.shape)
        out: torch.Tensor = self.experts(x + mapped.transpose(0, 1).reshape(x.shape), index, weights)
        return out
