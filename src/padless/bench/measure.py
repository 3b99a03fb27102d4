"""One point, all contenders: check the results, time them, write it down as a record.

A contender that raises, or whose result is wrong, is named in the record and not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from padless.bench.group_sizes import memory_saving_percent
from padless.bench.pad import pad_groups, unpad_rows
from padless.bench.peers import Contender, Peer
from padless.bench.problem import GroupedProblem, sample_reference
from padless.bench.results import Record
from padless.bench.traffic import make_traffic, traffic_contenders
from padless.testing import machine
from padless.testing.bits import same_bits
from padless.testing.judge import check, describe
from padless.testing.timing import Call, Timer

Found = TypeVar("Found")


def own_contenders(problem: GroupedProblem) -> list[Contender]:
    """padless on the groups as they are; padding; the same GEMM on padded groups; padding and that GEMM together."""
    from padless.ops.grouped_gemm import grouped_gemm

    padded = problem.padded
    padded_out = problem.empty_out(problem.padded_rows)
    valid = problem.empty_out()
    buffers = problem.empty_padded(row_major=False)

    def pad() -> None:
        pad_groups(problem.a, problem.offs, rows=problem.padded_rows, out=buffers)

    def pad_then_gemm() -> None:
        pad()
        grouped_gemm(buffers.a, problem.b, buffers.offs, out=padded_out)

    def unpadded() -> torch.Tensor:
        return unpad_rows(padded_out, problem.offs, valid)

    return [
        own_contender(problem),
        Contender(
            "padless_on_padded",
            lambda: grouped_gemm(padded.a, problem.b, padded.offs, out=padded_out),
            unpadded,
            whole=False,
        ),
        Contender("pad", pad, whole=False),
        Contender("pad_then_padless", pad_then_gemm, unpadded),
    ]


def own_contender(problem: GroupedProblem, dense: bool = False) -> Contender:
    """padless on the groups as they are, or on a dense product."""
    from padless.ops.grouped_gemm import gemm, grouped_gemm

    out = problem.empty_out()
    call = (
        partial(gemm, problem.a, problem.b[0]) if dense else partial(grouped_gemm, problem.a, problem.b, problem.offs)
    )
    return Contender("padless", partial(call, out=out), lambda: out)


def gather(
    own: list[Found], peers: Sequence[Peer], contenders_of: Callable[[Peer], list[Found]]
) -> tuple[list[Found], dict[str, str]]:
    """Own contenders and those of every peer; peers that raise are reported by name."""
    contenders, errors = list(own), {}
    for peer in peers:
        try:
            contenders += contenders_of(peer)
        except Exception as error:
            errors[peer.name] = describe(error)
    return contenders, errors


def bitwise_identical(contenders: Sequence[Contender]) -> bool | None:
    """Whether padless and pad + padless gave the same bits in every valid row; None if one of them did not run."""
    known = {contender.name: contender.output for contender in contenders}
    outputs = [output() for name in ("padless", "pad_then_padless") if (output := known.get(name)) is not None]
    return same_bits(*outputs) if len(outputs) == 2 else None


def measure_grouped(problem: GroupedProblem, peers: Sequence[Peer], timer: Timer) -> Record:
    """Record of one point of the paper's grid: checks, GPU and end-to-end times of every contender."""
    contenders, errors = gather(own_contenders(problem), peers, lambda peer: peer.grouped(problem))
    contenders, record = check(contenders, sample_reference(problem), errors)
    same = bitwise_identical(contenders)
    if same is not None:
        record["bitwise_identical"] = same
    record |= {"padded_rows": problem.padded_rows, "memory_saving_percent": memory_saving_percent(problem.sizes)}
    return record | facts(problem) | timed(contenders, timer)


def measure_decode(problem: GroupedProblem, peers: Sequence[Peer], timer: Timer) -> Record:
    """Record of one decode point, with a copy and a read of as many bytes."""
    contenders, errors = gather([own_contender(problem)], peers, lambda peer: peer.decode(problem))
    contenders += traffic_contenders(make_traffic(problem.point.bytes, problem.seed or 0, problem.device))
    contenders, record = check(contenders, sample_reference(problem), errors)
    return record | facts(problem) | timed(contenders, timer)


def measure_dense(problem: GroupedProblem, peers: Sequence[Peer], timer: Timer) -> Record:
    """Record of one dense shape."""
    contenders, errors = gather([own_contender(problem, dense=True)], peers, lambda peer: peer.dense(problem))
    contenders, record = check(contenders, sample_reference(problem), errors)
    return record | facts(problem) | timed(contenders, timer)


def facts(problem: GroupedProblem) -> Record:
    """Group sizes, operations and the fewest bytes."""
    return {"sizes": problem.sizes, "flops": problem.point.flops, "bytes": problem.point.bytes}


def timed(contenders: Sequence[Contender], timer: Timer) -> Record:
    found = gpu_times({contender.name: contender.call for contender in contenders}, timer)
    whole = timer.end_to_end({c.name: c.call for c in contenders if c.whole})
    return found | {"end_to_end": {name: timing.as_dict() for name, timing in whole.items()}}


def gpu_times(calls: Mapping[str, Call], timer: Timer) -> Record:
    """GPU times by name, and the clocks right after."""
    times = timer.gpu(calls)
    return {"gpu": {name: timing.as_dict() for name, timing in times.items()}, "clocks": machine.clocks()}
