"""Placement of experts on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import torch


@dataclass(frozen=True, eq=False)
class Placement:
    """The experts of every rank.

    rank_of: (E,) int32, the rank of every expert.
    local_index: (E,) int32, the place of an expert among this rank's, -1 for experts of other ranks. The experts of a
        rank are in ascending order.
    local_experts: the experts of this rank.
    """

    rank_of: torch.Tensor
    local_index: torch.Tensor
    local_experts: tuple[int, ...]

    def to(self, device: torch.device) -> Placement:
        return Placement(self.rank_of.to(device), self.local_index.to(device), self.local_experts)


def place(num_experts: int, num_ranks: int, rank: int, expert_map: Sequence[int] | None) -> Placement:
    """Runs of E / R experts on every rank, or the ranks that expert_map names, one for each expert.

    Raises ValueError where E is not a multiple of R and there is no map, and for a map that is not (E,) ranks or leaves
    a rank without an expert: the same error on every rank.
    """
    if expert_map is None:
        if num_experts % num_ranks != 0:
            raise ValueError(
                f"num_experts is {num_experts} and there are {num_ranks} ranks; it must be a multiple, or give "
                "expert_map, the rank of each expert"
            )
        expert_map = [e * num_ranks // num_experts for e in range(num_experts)]
    try:
        ranks = [index(r) for r in expert_map]
    except TypeError:
        ranks = []
    if len(ranks) != num_experts or any(not 0 <= r < num_ranks for r in ranks):
        raise ValueError(
            f"expert_map must be {num_experts} ranks from 0 to {num_ranks - 1}, one for each expert, got {expert_map}"
        )
    for empty in sorted(set(range(num_ranks)) - set(ranks)):
        raise ValueError(f"expert_map gives rank {empty} no expert; each rank must have at least one")
    local = tuple(e for e, r in enumerate(ranks) if r == rank)
    with torch.device("cpu"):  # and no other of a block around the call
        local_index = torch.full((num_experts,), -1, dtype=torch.int32)
        local_index[list(local)] = torch.arange(len(local), dtype=torch.int32)
        return Placement(torch.tensor(ranks, dtype=torch.int32), local_index, local)
