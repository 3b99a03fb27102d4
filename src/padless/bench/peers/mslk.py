"""MSLK (github.com/pytorch/MSLK): CUTLASS grouped GEMM with 1x128 / 128x128 scales, padding-free, built ahead of time.

Its scales are laid out group by group: the (rows, K / 128) scales of each group MN-major, one group after the
other; weights' scales (K / 128, N / 128) per group.
"""

from __future__ import annotations

from typing import Any

import torch

from padless.bench.peers import Contender, Peer, hopper_or_reason, look_in, returning
from padless.bench.problem import GroupedProblem

_OPERATOR = "f8f8bf16_groupwise_grouped"


class Mslk(Peer):
    """The adapter; `folder`/mslk is searched before the environment."""

    name = "mslk"
    licence = "BSD-3-Clause"
    compiles_at_run_time = False
    loading = "import mslk"

    def obstacle(self) -> str:
        return hopper_or_reason()

    def load(self) -> Any:
        look_in(self._folder, "mslk")
        import mslk

        getattr(torch.ops.mslk, _OPERATOR)  # raises where the library did not register it
        return mslk

    def grouped(self, problem: GroupedProblem) -> list[Contender]:
        scale = grouped_mn_major(problem.a.scale, problem.sizes)
        weight_scale = problem.b.scale.transpose(1, 2).contiguous()
        sizes = torch.tensor(problem.sizes, dtype=torch.int64, device=problem.device)
        operator = getattr(torch.ops.mslk, _OPERATOR)
        return [returning("mslk", lambda: operator(problem.a.data, problem.b.data, scale, weight_scale, sizes))]

    def decode(self, problem: GroupedProblem) -> list[Contender]:
        return self.grouped(problem)


def grouped_mn_major(scale: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """(M, k_blocks) scales as one buffer of that shape that holds, group after group, the transposed scales.

    Example: sizes (2, 1), scales of rows 0, 1, 2 = (a, b), (c, d), (e, f): the buffer is a c b d e f.
    """
    parts = [part.t().reshape(-1) for part in scale.split(sizes)]
    return torch.cat(parts).view(scale.shape)
