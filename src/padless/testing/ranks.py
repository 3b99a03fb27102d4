"""Processes that form a torch.distributed group, with an end: what hangs is killed."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# NVLink multicast is a resource of the whole host, and these processes may be killed.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


@dataclass(frozen=True)
class Rank:
    """Where a function of `run_ranks` runs. backend: of expert parallelism, "symm" or "collective"."""

    rank: int
    size: int
    device: torch.device
    backend: str


def run_ranks(
    function: Callable[..., Any], size: int, *arguments: Any, cuda: bool, backend: str, timeout_s: float
) -> list[Any]:
    """What function(Rank, *arguments) returned on each of `size` ranks of a new group: NCCL with a GPU each, or gloo.

    function and arguments are pickled, as are results. A result of a rank that raised is the traceback as a string in a
    `RankError`; so is that of one that was killed, timeout_s after the start.
    """
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_run,
                args=(function, rank, size, folder, cuda, backend, timeout_s, arguments),
                daemon=True,
            )
            for rank in range(size)
        ]
        for p in processes:
            p.start()
        deadline = time.monotonic() + timeout_s
        for p in processes:
            p.join(max(deadline - time.monotonic(), 0.1))
        results: list[Any] = []
        for rank, p in enumerate(processes):
            path = Path(folder, f"{rank}.pickle")
            if path.exists():
                results.append(pickle.loads(path.read_bytes()))
            elif p.is_alive():
                results.append(RankError(f"no result within {timeout_s} s, killed"))
            else:
                results.append(RankError(f"ended with exit code {p.exitcode} and no result"))
            if p.is_alive():
                p.kill()
                p.join(10)
        return results


class RankError(Exception):
    """A rank that has no result, and why."""


def raise_first(results: list[Any]) -> list[Any]:
    """The results; raises AssertionError where a rank has none."""
    for rank, result in enumerate(results):
        if isinstance(result, RankError):
            raise AssertionError(f"rank {rank}: {result}")
    return results


def _run(
    function: Callable[..., Any],
    rank: int,
    size: int,
    folder: str,
    cuda: bool,
    backend: str,
    timeout_s: float,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    result: Any
    try:
        device = torch.device("cuda", rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if cuda else None,
        )
        result = function(Rank(rank, size, device, backend), *arguments)
    except BaseException:
        result = RankError(traceback.format_exc())
    path = Path(folder, f"{rank}.pickle")
    path.with_suffix(".part").write_bytes(pickle.dumps(result))
    path.with_suffix(".part").rename(path)
    # Neither torch's nor NCCL's end waits here for a rank that is dead.
    os._exit(1 if isinstance(result, RankError) else 0)
