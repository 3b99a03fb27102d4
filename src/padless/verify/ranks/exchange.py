"""Checks of expert parallelism that all ranks of a group run together, against loops (`padless.testing.exchange`)."""

from __future__ import annotations

from typing import Any

import torch

from padless.distributed import ExpertParallel
from padless.distributed.functions import gradients_of_rows
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, NVFP4
from padless.quantization.quantize import dequantize, quantize
from padless.testing import exchange as reference
from padless.testing.exchange import Problem, draw
from padless.testing.ranks import Rank

FORMATS = (
    (FP8_BLOCK, None),
    (FP8_BLOCK, "k"),
    (MXFP8, None),
    (MXFP4, None),
    (NVFP4, None),
    (torch.bfloat16, None),
    (torch.float32, None),
)
GRADIENTS = ((torch.bfloat16, None), (torch.bfloat16, FP8_BLOCK), (torch.float32, FP8_BLOCK))


class Ranks:
    """This process's rank, device and backend, and what it makes of a problem."""

    def __init__(self, rank: Rank, timeout: float = 20.0) -> None:
        self.rank, self.size, self.device, self.backend = rank.rank, rank.size, rank.device, rank.backend
        self.timeout = timeout

    def make(self, p: Problem, **options: Any) -> ExpertParallel:
        experts, (_, hidden) = len(p.expert_map), p.tokens[0].shape
        most = options.pop("max_tokens", max(*(len(t) for t in p.tokens), 1))
        given = {"expert_map": p.expert_map, "backend": self.backend, "device": self.device, "timeout": self.timeout}
        return ExpertParallel(None, experts, hidden, p.ids[0].shape[1], most, **{**given, **options})

    def own(self, p: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, ids and weights of this rank."""
        r = self.rank
        return p.tokens[r].to(self.device), p.ids[r].to(self.device), p.weights[r].to(self.device)

    def counts(self, first: int, others: int) -> list[int]:
        """Tokens of each rank: those of rank 0, and fewer on every further one."""
        return [first, *(max(others - r, 0) for r in range(self.size - 1))]


def outputs_of(p: Problem, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Random rows for a combine, of every rank."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [len(reference.slots_of(p, r)) for r in range(p.num_ranks)]
    return [torch.randn((n, p.tokens[0].shape[1]), generator=generator).to(dtype) for n in sizes]


def check_exchange(ranks: Ranks, p: Problem, ep: ExpertParallel, fmt: Any, major: Any, seed: int) -> None:
    """Dispatch and both combines of a problem against the loops, bit for bit."""
    scale = torch.tensor(0.01) if fmt == NVFP4 else None
    rows, plan = ep.dispatch(*ranks.own(p), global_scale=None if scale is None else scale.to(ranks.device))
    r = ranks.rank
    want = reference.rows_of(p, r, fmt, scale_major=major, global_scale=scale)
    assert plan.offs.tolist() == reference.offs_of(p, r), "offs"
    assert plan.offs.dtype == torch.int32
    assert int(plan.overflow) == 0
    reference.assert_rows(rows, want, f"{fmt}")
    prob = reference.prob_of(p, r)
    assert torch.equal(plan.prob[: len(prob)].cpu(), prob), "prob"
    partial = ep.settings.partial
    outputs = outputs_of(p, partial, seed)
    mine = torch.full((plan.prob.shape[0], p.tokens[0].shape[1]), float("nan"), dtype=partial)
    mine[: len(outputs[r])] = outputs[r]
    for weighted in (False, True):
        got = ep.combine(mine.to(ranks.device), plan, weighted=weighted)
        expected = reference.combined(p, outputs, partial, weighted=weighted)[r]
        assert got.dtype == partial
        assert torch.equal(reference.bits(got), reference.bits(expected)), f"{fmt} weighted={weighted}"


def check_formats(ranks: Ranks) -> None:
    """Every format, uneven T, ids -1, ids that occur twice; three calls of one object."""
    for fmt, major in FORMATS:
        p = draw(ranks.counts(7, 5), 2 * ranks.size, 160, 3, 1)
        ep = ranks.make(p, fmt=fmt, scale_major=major)
        for seed in range(3):
            p = draw(ranks.counts(7 - seed, 5 + seed), 2 * ranks.size, 160, 3, seed)
            check_exchange(ranks, p, ep, fmt, major, seed)
        ep.check()


def check_sizes(ranks: Ranks) -> None:
    """No tokens on one rank and on all, k = 1, k = E, all tokens to one rank and to one expert, uneven experts."""
    n = ranks.size
    uneven = [r for r in range(n) for _ in range(r + 1)]
    for counts, experts, top_k, expert_map in (
        ([0] + [6] * (n - 1), 2 * n, 2, None),
        ([4] * (n - 1) + [0], 2 * n, 1, None),
        ([0] * n, n, 2, None),
        ([5] * n, n, n, None),
        ([5] * n, len(uneven), 2, uneven),
        ([3] * n, 3 * n, 2, [e % n for e in range(3 * n)]),
    ):
        p = draw(counts, experts, 64, top_k, 3, expert_map=expert_map)
        check_exchange(ranks, p, ranks.make(p, max_tokens=7), FP8_BLOCK, None, 1)
    for chosen in (0, 2 * n - 1, -1):
        p = draw([5] * n, 2 * n, 64, 3, 4)
        p.ids = [torch.full_like(ids, chosen) for ids in p.ids]
        capacity = n * 5 * 3  # an id that occurs three times is three rows
        check_exchange(ranks, p, ranks.make(p, capacity=capacity), FP8_BLOCK, None, 1)


def check_gradients(ranks: Ranks) -> None:
    """Gradients to the rows of all ranks by a plan, as they are and through FP8_BLOCK, bit for bit, of any size."""
    for dtype, fmt in GRADIENTS:
        p = draw(ranks.counts(7, 5), 2 * ranks.size, 160, 3, 6)
        ep = ranks.make(p, fmt=dtype, gradient_fmt=fmt)
        _, plan = ep.dispatch(*ranks.own(p))
        for seed, size in enumerate((1.0, 2.0**-48, 1.0)):
            generator = torch.Generator().manual_seed(seed)
            douts = [torch.randn(t.shape, generator=generator).to(dtype) for t in p.tokens]
            decoded = [(d if fmt is None else dequantize(quantize(d, fmt), dtype)) * size for d in douts]
            want = reference.rows_of(Problem(decoded, p.ids, p.weights, p.expert_map), ranks.rank, dtype)
            got = gradients_of_rows(ep, douts[ranks.rank].to(ranks.device) * size, plan)
            reference.assert_rows(got, want, f"gradients of {size} in {fmt or dtype}")
        ep.check()


def check_invariance(ranks: Ranks) -> None:
    """A token's bits alone, among others, in another place, and with another T on other ranks."""
    p = draw(ranks.counts(9, 7), 2 * ranks.size, 96, 2, 5, distinct=True)
    ep = ranks.make(p, fmt=torch.bfloat16, max_tokens=9)

    def through(q: Problem) -> torch.Tensor:
        rows, plan = ep.dispatch(*ranks.own(q))
        assert isinstance(rows, torch.Tensor)
        return ep.combine((rows * 1.7).to(torch.bfloat16), plan, weighted=True)

    def part(chosen: list[torch.Tensor]) -> Problem:
        parts = [[t[c] for t, c in zip(ts, chosen, strict=True)] for ts in (p.tokens, p.ids, p.weights)]
        return Problem(parts[0], parts[1], parts[2], p.expert_map)

    full = through(p)
    order = [torch.randperm(len(t), generator=torch.Generator().manual_seed(1)) for t in p.tokens]
    assert torch.equal(through(part(order)), full[order[ranks.rank].to(full.device)])
    got = through(part([torch.arange(1 if r == 0 else 0) for r in range(ranks.size)]))
    assert torch.equal(got, full[: len(got)])
