"""``padless verify --ranks``: expert parallelism in separate processes, on GPUs, or gloo where there are too few."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from padless.arguments import check_integer
from padless.moe.checks import MAX_TOP_K
from padless.runtime.choices import Exchange
from padless.testing.ranks import Rank, RankError, RankPool
from padless.verify.ranks import exchange, layers, stress
from padless.verify.run import Record, about_the_machine, write_records

SECONDS = 240.0  # of a check, its processes' start and kernels' compilation included


def run_each(rank: Rank, *checks: Callable[[exchange.Ranks], None]) -> None:
    """Makes checks one after the other, and ends with the other ranks."""
    ranks = exchange.Ranks(rank)
    for check in checks:
        check(ranks)
    together(rank)


def run_small(rank: Rank) -> str:
    """Formats, sizes, gradients and invariance, against loops."""
    e = exchange
    run_each(rank, e.check_formats, e.check_sizes, e.check_gradients, e.check_invariance)
    return f"{len(exchange.FORMATS)} formats, sizes, gradients, invariance"


def run_layers(rank: Rank) -> str:
    """Layers against one process: sums of slots in every format, training in every recipe, FSDP2 on meshes."""
    run_each(rank, layers.check_slots, layers.check_slot_gradients, layers.check_training, layers.check_meshes)
    return f"sums of slots in {len(layers.FORWARD)} formats, {len(layers.RECIPES)} recipes, {layers.shapes(rank.size)}"


def run_stress(rank: Rank) -> str:
    """Checks that need GPUs and one start of the processes."""
    s = stress
    checks: list[tuple[Callable[..., str], tuple[int, ...]]] = [
        (s.check_large, (4096, 7168, 8, 64)),
        (s.check_large, (16, 7168, 8, 64)),
        (s.check_host, (1000,)),
        (s.check_graphs, (1000, 256)),
        (s.check_graphs, (1000, 16)),
        (s.check_delays, (10_000, 64)),  # received in one launch
        (s.check_delays, (3_000, 600)),  # sorted on a second stream
        (s.check_delays, (500, 9_000)),  # sums have one half
        (s.check_two_groups, (200, 600)),
        (s.check_two_groups, (100, 9_000)),
        (s.check_two_layers, (1000, 16)),
        (s.check_two_layers, (200, 600)),
    ]
    done: list[str] = []
    for check, arguments in checks:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        try:
            done.append(f"{name}: {check(rank, *arguments)}")
        except Exception as error:  # the ranks may be at odds now, so nothing follows
            raise AssertionError(f"{'; '.join(done)}; then {name} failed") from error
    together(rank)
    return "; ".join(done)


def together(rank: Rank) -> None:
    """Ends when all ranks are here: none may go while another reads its memory."""
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def dead_rank(rank: Rank) -> str:
    return stress.check_dead_rank(rank, 3.0)


def run_verify_ranks(
    ranks: int, out: Path | None = None, *, checks: list[str] | None = None, console: Console | None = None
) -> int:
    """Runs the checks on `ranks` ranks and records them like `run_verify`; 0 when all passed, else 1.

    The ranks are processes of their own, which are killed when a check takes too long. checks: names of
    them; all when None. Raises ValueError.
    """
    check_integer("ranks", ranks, 2, MAX_TOP_K)  # a check sends every token to as many experts as there are ranks
    console = console or Console()
    cuda = torch.cuda.device_count() >= ranks
    jobs: dict[str, tuple[Callable[[Rank], str], Exchange, int]] = {
        "expert parallelism, collective": (run_small, "collective", 0),
        "expert parallelism, symm": (run_small, "symm", 0),
        "layers over ranks, collective": (run_layers, "collective", 0),
        "layers over ranks, symm": (run_layers, "symm", 0),
        "expert parallelism, symm, large and long": (run_stress, "symm", 0),
        "expert parallelism, a dead rank": (dead_rank, "symm", 1),
    }
    unknown = [name for name in checks or () if name not in jobs]
    if unknown:
        raise ValueError(f"checks has {unknown[0]!r}; allowed with ranks are {', '.join(map(repr, jobs))}")
    if checks:
        jobs = {name: job for name, job in jobs.items() if name in checks}
    if not cuda:
        console.print(f"{ranks} GPUs are not here: gloo on the CPU, and only what runs there")
        jobs = {name: job for name, job in jobs.items() if job[1] == "collective"}
    records = []
    pools: dict[str, RankPool] = {}
    for name, (function, backend, may_die) in jobs.items():
        start = time.perf_counter()
        if backend not in pools:
            for other in pools.values():
                other.end()
            pools[backend] = RankPool(ranks, cuda=cuda, backend=backend)
        results = pools[backend].call(function, timeout_s=SECONDS)
        seconds = round(time.perf_counter() - start, 2)
        detail, passed = judge(results, may_die)
        console.print(f"{'pass' if passed else 'FAIL'}  {name}: {detail} ({seconds} s)", markup=False)
        records.append(Record(name, passed, detail, seconds))
        if out is not None:
            write_records(
                out, records, about_the_machine() | {"ranks": str(ranks), "device": "cuda" if cuda else "cpu"}
            )
    for pool in pools.values():
        pool.end()
    failed = sum(not r.passed for r in records)
    console.print(f"{len(records) - failed} passed, {failed} failed")
    return 1 if failed else 0


def judge(results: list[Any], may_die: int) -> tuple[str, bool]:
    """(what to say, whether all is well) of the ranks' results; the last may_die ranks are to end without one."""
    for rank, result in enumerate(results[: len(results) - may_die]):
        if isinstance(result, RankError):
            return f"rank {rank}: {result}", False
    return str(results[0]), True
