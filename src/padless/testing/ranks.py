"""Processes that form a torch.distributed group, with an end: what hangs is killed."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

from padless.runtime.choices import Exchange
from padless.testing.processes import end_with_parent, unheard_keyboard

GROUP_SECONDS = 60.0  # after which a collective call that others do not make is an error
# NVLink multicast is a resource of the whole host, and these processes may be killed.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


@dataclass(frozen=True)
class Rank:
    """The rank that runs a function of `run_ranks`. backend: of expert parallelism, "symm" or "collective"."""

    rank: int
    size: int
    device: torch.device
    backend: Exchange


class RankPool:
    """Ranks of a new group, NCCL with a GPU each, or gloo, that call one function after the other; a context manager."""

    def __init__(self, size: int, *, cuda: bool, backend: Exchange) -> None:
        self._size, self._cuda, self._backend = size, cuda, backend
        self._ranks: list[tuple[Any, Any]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> list[Any]:
        """The results of function(Rank, *arguments) by rank.

        function and arguments are pickled, as are results. The result of a rank that raised is a `RankError` with the
        traceback; so is that of one that ended or was killed, timeout_s after the call. Then all ranks are killed, and
        the next call starts others.
        """
        if not self._ranks:
            self._start()
        deadline = time.monotonic() + timeout_s
        results: list[Any] = []
        for _, pipe in self._ranks:
            with suppress(ConnectionError):  # of a rank that is dead, which is found out below
                pipe.send((function, arguments))
        for process, pipe in self._ranks:
            try:
                if pipe.poll(max(deadline - time.monotonic(), 0.1)):
                    results.append(pipe.recv())
                else:
                    results.append(RankError(f"no result within {timeout_s} s, killed"))
            except (EOFError, ConnectionError):
                process.join(5)
                results.append(RankError(f"ended with exit code {process.exitcode} and no result"))
        if any(isinstance(result, RankError) for result in results):
            self.end()
        return results

    def end(self) -> None:
        """Kills the ranks."""
        for process, pipe in self._ranks:
            process.kill()
            process.join(10)
            pipe.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            given = (rank, self._size, self._folder.name, self._cuda, self._backend, theirs)
            process = context.Process(target=_serve, args=given, daemon=True)
            with unheard_keyboard():
                process.start()
            theirs.close()
            self._ranks.append((process, ours))


def run_ranks(
    function: Callable[..., Any], size: int, *arguments: Any, cuda: bool, backend: Exchange, timeout_s: float
) -> list[Any]:
    """`RankPool.call` on separate ranks."""
    with RankPool(size, cuda=cuda, backend=backend) as pool:
        return pool.call(function, *arguments, timeout_s=timeout_s)


class RankError(Exception):
    """A rank that has no result, and why."""


def first_error(results: list[Any]) -> str | None:
    """The error of the first rank that has no result; None where all have one."""
    return next((str(result) for result in results if isinstance(result, RankError)), None)


def raise_first(results: list[Any]) -> list[Any]:
    """The results; raises AssertionError where a rank has none."""
    for rank, result in enumerate(results):
        if isinstance(result, RankError):
            raise AssertionError(f"rank {rank}: {result}")
    return results


def _serve(rank: int, size: int, folder: str, cuda: bool, backend: Exchange, pipe: Any) -> None:
    """A rank's process: calls what comes through the pipe until it is killed."""
    end_with_parent()
    torch.set_num_threads(1)
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    made = False
    while True:
        try:
            function, arguments = pipe.recv()
        except (EOFError, ConnectionError):  # the parent is gone
            os._exit(1)
        result: Any
        try:
            if not made:
                _make_group(rank, size, folder, device)
                made = True
            result = function(Rank(rank, size, device, backend), *arguments)
        except BaseException:
            result = RankError(traceback.format_exc())
        pipe.send(result)


def _make_group(rank: int, size: int, folder: str, device: torch.device) -> None:
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=GROUP_SECONDS),
        device_id=device if cuda else None,
    )
