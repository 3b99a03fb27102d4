"""The "symm" backend in real processes on CPUs: kernels in Triton's interpreter, buffers in files that all map.

A program to be started with TRITON_INTERPRET=1: ranks, then names of cases of `ep_cases`; it prints one JSON object.
What one rank stores the others see at once and in the order in which it was stored (x86), so what is tested here is
the protocol: who waits for whom, over many calls with no other synchronization.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from padless.distributed import expert_parallel
from padless.distributed.placement import Placement
from padless.distributed.settings import Settings
from padless.distributed.symm import SymmBackend
from padless.distributed.symm_state import NUM_COUNTERS, NUM_STATUS, State, layout_of
from padless.testing.ranks import Rank, raise_first, run_ranks
from support import ep_cases
from support.interpreter import accept_one_element


@contextmanager
def shared_symm(folder: str, polls: int = 10_000_000) -> Iterator[None]:
    """Makes ExpertParallel(backend="symm") work on the CPU with buffers in `folder`."""
    made = 0

    def choose(backend: str, group: Any, device: torch.device, s: Settings, placement: Placement) -> Any:
        nonlocal made
        made += 1
        layout = layout_of(s)
        path = os.path.join(folder, f"{made}-{{}}")
        if s.rank == 0:
            for r in range(s.num_ranks):
                with open(path.format(r), "wb") as f:
                    f.truncate(layout.size)
        dist.barrier(group)
        buffers = [
            torch.from_file(path.format(r), shared=True, size=layout.size, dtype=torch.uint8)
            for r in range(s.num_ranks)
        ]
        state = State(
            layout,
            buffers[s.rank],
            torch.tensor([b.data_ptr() for b in buffers]),
            torch.zeros(NUM_COUNTERS, dtype=torch.int32),
            torch.zeros(NUM_STATUS, dtype=torch.int64),
            buffers,
        )
        return SymmBackend(state, s, placement, polls)

    with (
        mock.patch.object(expert_parallel, "choose_backend", choose),
        mock.patch.object(expert_parallel, "BACKENDS", ("symm", "auto")),
    ):
        yield


def run_shared(rank: Rank, folder: str, names: list[str]) -> dict[str, str | None]:
    accept_one_element()
    with shared_symm(folder):
        return ep_cases.run_all(rank, names)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as shared:
        found = run_ranks(run_shared, int(sys.argv[1]), shared, sys.argv[2:], cuda=False, backend="symm", timeout_s=400)
    json.dump(raise_first(found)[0], sys.stdout)
