"""Collectives into weights: in a group of this process alone, and with another process that says what to write."""

from __future__ import annotations

import atexit
import random
import subprocess
import sys
import tempfile
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from padless.verify.fuzz.states.layers import Layer
from padless.verify.fuzz.states.sequence import Operation, table

_TIMEOUT = timedelta(seconds=60)
_SERVE = "import sys; from padless.verify.fuzz.states.peers import serve; serve(sys.argv[1])"


def _group(store: Any, rank: int, size: int) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, _TIMEOUT)


@cache
def _alone() -> Any:
    return _group(dist.HashStore(), 0, 1)


def collective_of_one(layer: Layer, r: random.Random) -> None:
    """A collective of a group of one process, which copies into the parameter."""
    parameter = layer.parameter(r)
    if parameter.dim() == 0 or not parameter.is_contiguous():
        return
    target = parameter if r.random() < 0.5 else parameter.detach()
    with torch.no_grad():
        values, group = layer.values(target.detach(), r), _alone()
        if r.random() < 0.5:
            group._allgather_base(target, values).wait()
        else:
            group.allgather([[target]], [values]).wait()
    layer.uncounted()


@cache
def _peer() -> tuple[subprocess.Popen[str], Any]:
    """Another process that takes part in collectives, and the group of both."""
    folder = Path(tempfile.mkdtemp())
    command = [sys.executable, "-c", _SERVE, str(folder / "store")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    atexit.register(process.kill)
    return process, _group(dist.FileStore(str(folder / "store"), 2), 0, 2)


def serve(store: str) -> None:
    """The other process: collectives by lines of (name, seed, elements, dtype), until there are no more."""
    torch.set_num_threads(1)
    group = _group(dist.FileStore(store, 2), 1, 2)
    for line in sys.stdin:
        name, seed, count, dtype = line.split()
        generator = torch.Generator().manual_seed(int(seed))
        values = (torch.randn(int(count), generator=generator) / 8).to(getattr(torch, dtype))
        _take_part(group, name, values, 1)


def _take_part(group: Any, name: str, t: torch.Tensor, rank: int) -> None:
    if name == "broadcast":
        options = dist.BroadcastOptions()
        options.rootRank = 1
        group.broadcast([t], options).wait()
    elif name == "all_reduce":
        group.allreduce([t]).wait()
    elif rank == 1:
        group.send([t], 0, 0).wait()
    else:
        group.recv([t], 1, 0).wait()


def collective_of_two(layer: Layer, r: random.Random) -> None:
    """broadcast, all_reduce or recv into a parameter, or into what was detached from it."""
    parameter = layer.parameter(r)
    if parameter.dim() == 0 or not parameter.is_contiguous():
        return
    process, group = _peer()
    assert process.stdin is not None
    name, seed = r.choice(("broadcast", "all_reduce", "recv")), r.randrange(1000)
    process.stdin.write(f"{name} {seed} {parameter.numel()} {str(parameter.dtype).removeprefix('torch.')}\n")
    process.stdin.flush()
    target = r.choice((lambda: parameter, parameter.detach, lambda: parameter.data))()
    with torch.no_grad():
        _take_part(group, name, target.view(-1) if name == "recv" else target, 0)
    layer.uncounted()


ALONE: dict[str, Operation] = table(collective_of_one, share=0.5, where="cpu")
PEERS: dict[str, Operation] = table(collective_of_two, share=12.0, where="cpu")
