"""Problems of the expert-parallel benchmark, and the contender made of NCCL's all_to_all; runs on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from padless.distributed import ExpertParallel
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.moe.activation import Activation
from padless.moe.combining import combine
from padless.moe.layer import Projection
from padless.quantization.quantize import quantize
from padless.testing.ranks import Rank


@dataclass(frozen=True)
class EpPoint:
    """tokens: of a rank, T. intermediate: I of every expert. experts: of all ranks."""

    model: str
    ranks: int
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int


# Name, H, I, experts of all ranks, k.
MODELS = (("DeepSeek-V3", 7168, 2048, 256, 8), ("Qwen3-30B", 2048, 768, 128, 8), ("Qwen3-235B", 4096, 1536, 128, 8))


def points(ranks: int, *, full: bool) -> list[EpPoint]:
    """Experts of DeepSeek-V3 over all ranks; with `full` more sizes, and other models."""
    sizes, models = ((1, 16, 128, 1024, 4096, 8192), MODELS) if full else ((16, 128, 4096), MODELS[:1])
    return [EpPoint(name, ranks, t, h, i, e, k) for name, h, i, e, k in models for t in sizes]


class EpProblem:
    """Tokens, ids, weights and experts of this rank, of random numbers; ids are distinct and uniform.

    capacity: rows that a rank has room for, a quarter more than its share; a dispatch says where that is too few.
    """

    def __init__(self, rank: Rank, point: EpPoint, seed: int, programs: int | None = None) -> None:
        p, device = point, rank.device
        self.rank, self.point = rank, point
        generator = torch.Generator(device=device).manual_seed(1000 * seed + rank.rank)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, device=device) * scale).to(torch.bfloat16)

        self.x = normal(p.tokens, p.hidden)
        scores = torch.rand((p.tokens, p.experts), generator=generator, device=device)
        self.weights, self.ids = scores.topk(p.top_k, dim=1)
        local = p.experts // rank.size
        w13 = normal(local, 2 * p.intermediate, p.hidden, scale=p.hidden**-0.5)
        w2 = normal(local, p.hidden, p.intermediate, scale=p.intermediate**-0.5)
        self.w13, self.w2 = (quantize(w, FP8_BLOCK, kind="weight") for w in (w13, w2))
        self.capacity = min(p.tokens * p.top_k * 5 // 4 + 1024, rank.size * p.tokens * min(p.top_k, local))
        self.ep = self.exchange(programs=programs)

    def exchange(self, **options: Any) -> ExpertParallel:
        """An exchange of this problem's sizes over the ranks."""
        p = self.point
        given = {"backend": self.rank.backend, "capacity": self.capacity, "timeout": 20.0} | options
        return ExpertParallel(None, p.experts, p.hidden, p.top_k, p.tokens, device=self.x.device, **given)

    def products(self, rows: BlockScaledTensor | torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """Both projections of this rank's experts."""
        hidden = Projection(self.w13, None, None).activated(rows, offs, Activation(), FP8_BLOCK, None)
        return Projection(self.w2, None, None).product(hidden, offs)

    def link_rows(self) -> int:
        """Rows that other ranks pull from this one in a dispatch: a token once for each other rank that it goes to."""
        ranks = self.ids // (self.point.experts // self.rank.size)
        others = [(ranks == r).any(dim=1).sum() for r in range(self.rank.size) if r != self.rank.rank]
        return int(torch.stack(others).sum())

    def link_slots(self) -> int:
        """Rows of slots that come back to this rank over the link in a combine of slots."""
        return int((self.ids // (self.point.experts // self.rank.size) != self.rank.rank).sum())


class NcclExchange:
    """all_to_all of bfloat16 rows, k times, with the passes around it: sort, gather, permute and quantize, and back.

    What torch alone offers, with padless' quantizer, gather and sum for the passes: their speed is not the question. The
    sizes are read on the host, as all_to_all_single takes them.
    """

    def __init__(self, problem: EpProblem) -> None:
        self.p = problem

    def dispatch(self) -> tuple[BlockScaledTensor, torch.Tensor]:
        """(rows in FP8_BLOCK by expert, offs)."""
        p, q = self.p, self.p.point
        size, local = p.rank.size, q.experts // p.rank.size
        flat = p.ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=q.experts)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        both = torch.stack([counts.view(size, local).sum(1), received.view(size, local).sum(1)]).tolist()
        self.sends, self.receives = both
        rows = torch.empty((sum(self.receives), q.hidden), dtype=torch.bfloat16, device=p.x.device)
        dist.all_to_all_single(rows, p.x[order // q.top_k], self.receives, self.sends)
        experts = torch.arange(local, device=p.x.device).repeat(size)
        by_source = torch.repeat_interleave(experts, received, output_size=rows.shape[0])
        self.permutation = torch.argsort(by_source, stable=True)
        self.order = order
        offs = received.view(size, local).sum(0).cumsum(0).to(torch.int32)
        return quantize(rows, FP8_BLOCK, rows=self.permutation), offs

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """(T, H) of y, rows by expert."""
        p, q = self.p, self.p.point
        by_source = torch.empty_like(y)
        by_source[self.permutation] = y
        back = torch.empty((q.tokens * q.top_k, q.hidden), dtype=torch.bfloat16, device=y.device)
        dist.all_to_all_single(back, by_source, self.sends, self.receives)
        inverse = torch.empty_like(self.order, dtype=torch.int32)
        inverse[self.order] = torch.arange(len(self.order), dtype=torch.int32, device=y.device)
        return combine(back, inverse.view(q.tokens, q.top_k), p.weights)

    def layer(self) -> torch.Tensor:
        rows, offs = self.dispatch()
        return self.combine(self.p.products(rows, offs))
