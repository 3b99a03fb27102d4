"""Expert parallelism written out in loops, from its definition: what every backend must equal, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import padless
from padless.formats import BlockScaledFormat
from padless.runtime.choices import ScaleMajor


@dataclass
class Problem:
    """Tokens, ids and weights of every rank. expert_map: the rank of every expert."""

    tokens: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    expert_map: list[int]

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)


def draw(
    counts: list[int],
    num_experts: int,
    hidden: int,
    top_k: int,
    seed: int,
    *,
    expert_map: list[int] | None = None,
    distinct: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    """counts: tokens of each rank. Without distinct some ids are -1 and some occur twice."""
    generator = torch.Generator().manual_seed(seed)
    ranks = len(counts)
    tokens, ids, weights = [], [], []
    for count in counts:
        x = torch.randn((count, hidden), generator=generator)
        tokens.append((x * 2.0 ** torch.randint(-6, 6, (count, 1), generator=generator)).to(dtype))
        if distinct:
            chosen = torch.rand((count, num_experts), generator=generator).argsort(dim=1)[:, :top_k]
        else:
            chosen = torch.randint(0, num_experts, (count, top_k), generator=generator)
            chosen[torch.rand(chosen.shape, generator=generator) < 0.1] = -1
        ids.append(chosen)
        weights.append(torch.rand((count, top_k), generator=generator) + 0.1)
    return Problem(tokens, ids, weights, expert_map or [e * ranks // num_experts for e in range(num_experts)])


def slots_of(p: Problem, rank: int) -> list[tuple[int, int, int, int]]:
    """(expert, source, token, slot) of every row of a rank, in the order of rows."""
    found = []
    for source, ids in enumerate(p.ids):
        for token, row in enumerate(ids.tolist()):
            for slot, expert in enumerate(row):
                if expert >= 0 and p.expert_map[expert] == rank:
                    found.append((expert, source, token, slot))
    return sorted(found)


def offs_of(p: Problem, rank: int) -> list[int]:
    experts = [e for e, r in enumerate(p.expert_map) if r == rank]
    slots = slots_of(p, rank)
    return [sum(slot[0] <= e for slot in slots) for e in experts]


def rows_of(
    p: Problem,
    rank: int,
    fmt: BlockScaledFormat | torch.dtype,
    *,
    scale_major: ScaleMajor | None = None,
    global_scale: torch.Tensor | None = None,
) -> padless.BlockScaledTensor | torch.Tensor:
    """The rows of a rank, from all tokens in one process."""
    slots = slots_of(p, rank)
    hidden = p.tokens[0].shape[1]
    x = torch.stack([p.tokens[s][t] for _, s, t, _ in slots]) if slots else torch.empty((0, hidden))
    if isinstance(fmt, torch.dtype):
        return x.to(fmt)
    return padless.quantize(x, fmt, scale_major=scale_major, global_scale=global_scale)


def prob_of(p: Problem, rank: int) -> torch.Tensor:
    return torch.tensor([float(p.weights[s][t, j]) for _, s, t, j in slots_of(p, rank)])


def combined(p: Problem, outputs: list[torch.Tensor], dtype: torch.dtype, *, weighted: bool) -> list[torch.Tensor]:
    """The sums of each rank's tokens, of every rank's rows."""
    out = [torch.zeros(t.shape, dtype=torch.float32) for t in p.tokens]
    for rank, rows in enumerate(outputs):
        row_of = {slot[1:]: i for i, slot in enumerate(slots_of(p, rank))}
        for source, ids in enumerate(p.ids):
            for token in range(ids.shape[0]):
                total = torch.zeros(rows.shape[1])
                for slot in range(ids.shape[1]):
                    if (source, token, slot) in row_of:
                        value = rows[row_of[source, token, slot]].to(torch.float32)
                        total = total + (value * p.weights[source][token, slot].float() if weighted else value)
                out[source][token] += total.to(dtype).to(torch.float32)
    return [o.to(dtype) for o in out]


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bytes of t, row-major, on the CPU."""
    out = torch.empty(t.shape, dtype=t.dtype)
    return out.copy_(t).view(torch.uint8)


def assert_rows(got: Any, want: Any, what: str) -> None:
    """The rows that want has are the first of got, bit for bit."""
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype
        assert torch.equal(bits(got[: len(want)]), bits(want)), f"{what}: rows"
        return
    rows = want.data.shape[0]
    assert got.format == want.format
    assert torch.equal(bits(got.data[:rows]), bits(want.data)), f"{what}: codes"
    if rows:
        assert torch.equal(bits(got.scale[:rows]), bits(want.scale)), f"{what}: scales"
