"""Settings of expert parallelism that all ranks share, and their comparison across ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from padless.distributed.row_format import RowFormat
from padless.formats import BlockScaledFormat
from padless.quantization.lifting import LIFT
from padless.runtime.choices import Sums


@dataclass(frozen=True)
class Settings:
    """Sizes and choices that a backend is made with.

    row_format: of dispatched rows. capacity: rows of a rank, or "exact". partial: dtype of a rank's sums, bfloat16, or
    float32 for float32 rows. timeout: seconds to wait for another rank. programs: of a kernel that moves rows; 0 is
    chosen by the device. gradient_format: that gradients of a combine's result travel in; None is as they are. sums:
    what a combine sends back of a token, a rank's sum or the row of each slot.
    """

    rank: int
    num_ranks: int
    num_experts: int
    hidden: int
    top_k: int
    max_tokens: int
    row_format: RowFormat
    capacity: int | str
    partial: torch.dtype
    timeout: float = 100.0
    programs: int = 0
    gradient_format: BlockScaledFormat | None = None
    sums: Sums = "ranks"

    def gradient_rows(self, x: torch.Tensor) -> RowFormat:
        """Format that x (T, H) travels in by the plan of an earlier dispatch."""
        return RowFormat(self.gradient_format or x.dtype, x.shape[1], "k", lift=LIFT if self.gradient_format else 1.0)

    @property
    def num_slots(self) -> int:
        """Slots of all ranks, each with max_tokens."""
        return self.num_ranks * self.max_tokens * self.top_k


def agree(
    group: dist.ProcessGroup, arguments: dict[str, object], problem: str | None, facts: dict[str, object]
) -> None:
    """Raises ValueError, the same on all ranks, where an argument differs between ranks, a rank has a problem, or a fact
    differs, in this order: one all_gather, at construction.
    """
    mine = {name: str(value) for name, value in arguments.items()}, problem, {n: str(v) for n, v in facts.items()}
    every: list[tuple[dict[str, str], str | None, dict[str, str]]] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    given, problems, found = zip(*every, strict=True)
    _compare(given)
    for rank, its in enumerate(problems):
        if its is not None:
            raise ValueError(its if len(set(problems)) == 1 else f"rank {rank}: {its}")
    _compare(found)


def _compare(every: Sequence[dict[str, str]]) -> None:
    for name, first in every[0].items():
        for rank, other in enumerate(every):
            if other[name] != first:
                raise ValueError(
                    f"{name} is {first} on rank 0 and {other[name]} on rank {rank}; it must be the same on all ranks"
                )
