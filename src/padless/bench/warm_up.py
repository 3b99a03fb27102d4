"""Compiling ahead, in parallel: kernels of padless and of peers that compile when they are first called.

The work is shared out over processes of `python -m padless.bench.warm_up_worker`, each of which calls every
contender once on uninitialised memory; what they compile stays in the libraries' caches on disk. Failures are
left to the measuring process to report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from padless.bench.group_sizes import DecodePoint, Point
from padless.testing.processes import cpus

_MAX_WORKERS = 16
_MEMORY_SHARE = 0.7
_LONGEST_S = 300.0
_MASKED_ROWS = 128  # rows a group takes in the masked layout


KINDS = ("paper", "decode", "chain")


def warm_up(
    kind: str, points: Sequence[Point] | Sequence[DecodePoint], folder: Path | None, names: Sequence[str], seed: int = 0
) -> None:
    """Compiles what `points` need; returns when all processes have ended. One point is not worth a process.

    kind: "paper", "decode" or "chain", which contenders to call. names: the peers that compile when called.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
    if len(points) < 2:
        return
    shares = share_out(points, _worker_count(points))
    job = {"kind": kind, "folder": None if folder is None else str(folder), "names": list(names), "seed": seed}
    workers = []
    for share in shares:
        worker = subprocess.Popen(
            [sys.executable, "-m", "padless.bench.warm_up_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        assert worker.stdin is not None
        worker.stdin.write(json.dumps(job | {"points": [asdict(point) for point in share]}))
        worker.stdin.close()
        workers.append(worker)
    for worker in workers:
        try:
            worker.wait(_LONGEST_S)
        except subprocess.TimeoutExpired:
            worker.kill()


def share_out(points: Sequence[Any], workers: int) -> list[list[Any]]:
    """Points for each worker: those with the same (N, K, groups) together, they mostly share kernels."""
    families: dict[tuple[int, int, int], list[Any]] = {}
    for point in points:
        families.setdefault((point.N, point.K, point.groups), []).append(point)
    shares: list[list[Any]] = [[] for _ in range(max(workers, 1))]
    for family in sorted(families.values(), key=len, reverse=True):
        min(shares, key=len).extend(family)
    return [share for share in shares if share]


def working_set_bytes(M: int, N: int, K: int, groups: int) -> int:
    """Rough device memory of a worker at a point: operands, padded copies, three results, CUDA context."""
    return 4 * M * K + groups * N * K + 8 * M * N + (1 << 30)


def _worker_count(points: Sequence[Point] | Sequence[DecodePoint]) -> int:
    """As many as there are cores, if their usual points fit in memory together: a worker that meets a larger one when
    memory is short leaves it to the measuring process."""
    sizes = []
    for point in points:
        rows = point.M if isinstance(point, Point) else point.groups * _MASKED_ROWS
        sizes.append(working_set_bytes(rows, point.N, point.K, point.groups))
    free, _ = torch.cuda.mem_get_info()
    usual = sum(sizes) // max(len(sizes), 1)
    return max(1, min(_MAX_WORKERS, cpus(), int(_MEMORY_SHARE * free) // max(usual, 1)))
