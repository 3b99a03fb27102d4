"""Checks of the "symm" backend that need GPUs: large problems, graphs, delays, memory, a dead rank, two groups."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from padless.distributed import ExpertParallel
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.moe.layer import moe
from padless.quantization.quantize import quantize
from padless.testing.ranks import Rank

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
POOL = 8  # problems that take turns


class _Problems:
    """Problems of one size on this rank, and what an object makes of each: rows, offs, prob and sums of doubled rows.

    experts: about as many, a multiple of the ranks.
    """

    def __init__(
        self, rank: Rank, tokens: int, hidden: int, top_k: int, experts: int, count: int = POOL, **options: Any
    ) -> None:
        experts = rank.size * max(experts // rank.size, 1)
        generator = torch.Generator(device=rank.device).manual_seed(100 + rank.rank)
        self.inputs: list[Inputs] = []
        for _ in range(count):
            x = torch.randn((tokens, hidden), generator=generator, device=rank.device).to(torch.bfloat16)
            scores = torch.rand((tokens, experts), generator=generator, device=rank.device)
            weights, ids = scores.topk(top_k, dim=1)
            self.inputs.append((x, ids, weights))
        given: dict[str, Any] = {
            "fmt": torch.bfloat16,
            "backend": rank.backend,
            "device": rank.device,
            "timeout": 20.0,
        } | options
        self.ep = ExpertParallel(None, experts, hidden, top_k, tokens, **given)

    def layer(self, inputs: Inputs) -> torch.Tensor:
        rows, plan = self.ep.dispatch(*inputs)
        assert isinstance(rows, torch.Tensor)
        return self.ep.combine(rows * 2, plan, weighted=True)


def _differences(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return (got.view(torch.int16) != want.view(torch.int16)).sum()


def check_large(rank: Rank, tokens: int, hidden: int, top_k: int, experts: int) -> str:
    """Every byte of a dispatch in FP8_BLOCK and of a combine equals the collective backend's."""
    one = _Problems(rank, tokens, hidden, top_k, experts, 1, fmt=FP8_BLOCK)
    two = _Problems(rank, tokens, hidden, top_k, experts, 1, fmt=FP8_BLOCK, backend="collective")
    (rows, plan), (want, expected) = (p.ep.dispatch(*one.inputs[0]) for p in (one, two))
    assert isinstance(rows, BlockScaledTensor)
    assert isinstance(want, BlockScaledTensor)
    used = int(plan.offs[-1])
    assert torch.equal(plan.offs, expected.offs), "offs"
    assert torch.equal(plan.prob[:used], expected.prob[:used]), "prob"
    assert torch.equal(rows.data[:used].view(torch.uint8), want.data[:used].view(torch.uint8)), "codes"
    assert torch.equal(rows.scale[:used], want.scale[:used]), "scales"
    y = torch.randn((plan.prob.shape[0], hidden), device=rank.device).to(torch.bfloat16)
    for weighted in (False, True):
        got, sums = (p.ep.combine(y, its, weighted=weighted) for p, its in ((one, plan), (two, expected)))
        assert int(_differences(got, sums)) == 0, f"sums, weighted={weighted}"
    one.ep.check()
    return f"{tokens} tokens a rank, {used} rows here: all bytes equal"


def check_graphs(rank: Rank, replays: int, tokens: int) -> str:
    """A captured layer, replayed with tokens, ids and weights changed in place."""
    p = _Problems(rank, tokens, 1024, 4, 16)
    wanted = [p.layer(inputs) for inputs in p.inputs]
    static: Inputs = tuple(t.clone() for t in p.inputs[0])  # type: ignore[assignment]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # calls of one object follow one another
    with torch.cuda.stream(stream):
        p.layer(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        out = p.layer(static)
    wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
    for i in range(replays):
        for t, new in zip(static, p.inputs[i % POOL], strict=True):
            t.copy_(new)
        graph.replay()
        wrong += _differences(out, wanted[i % POOL])
    assert int(wrong) == 0, f"{int(wrong)} values differ over {replays} replays"
    p.ep.check()
    return f"{replays} replays of {tokens} tokens"


def check_delays(rank: Rank, calls: int, tokens: int = 64) -> str:
    """Calls one after the other, with random delays of host and device on every rank; no synchronization between."""
    p = _Problems(rank, tokens, 512, 4, 16)
    wanted = [p.layer(inputs) for inputs in p.inputs]
    late = random.Random(rank.rank)
    wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
    for i in range(calls):
        if late.random() < 0.1:
            torch.cuda._sleep(late.randrange(400_000))
        if late.random() < 0.05:
            time.sleep(late.random() * 1e-3)
        wrong += _differences(p.layer(p.inputs[i % POOL]), wanted[i % POOL])
        if i % 500 == 499:
            torch.cuda.synchronize()  # no more than so many calls ahead
    assert int(wrong) == 0, f"{int(wrong)} values differ over {calls} calls"
    p.ep.check()
    return f"{calls} calls of {tokens} tokens"


def check_host(rank: Rank, calls: int) -> str:
    """No synchronization with the host, and no memory that stays."""
    p = _Problems(rank, 128, 1024, 4, 16, 1)
    p.layer(p.inputs[0])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(calls):
            p.layer(p.inputs[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - before
    assert grown == 0, f"{grown} bytes more after {calls} calls"
    return f"{calls} calls"


def check_two_groups(rank: Rank, calls: int, tokens: int) -> str:
    """Two objects on two streams at once."""
    both = [_Problems(rank, tokens, 1024, 4, 16, 2) for _ in range(2)]
    return f"{_on_two_streams(rank, both, calls)}, {tokens} tokens"


class _Layer(_Problems):
    """`padless.moe.moe` over ranks, of experts in FP8."""

    def __init__(self, rank: Rank, tokens: int) -> None:
        hidden = intermediate = 512
        super().__init__(rank, tokens, hidden, 4, 16, 2, fmt=FP8_BLOCK)
        local = len(self.ep.local_experts)
        shapes = (local, 2 * intermediate, hidden), (local, hidden, intermediate)
        made = (torch.randn(shape, device=rank.device).to(torch.bfloat16) for shape in shapes)
        self.weights = [quantize(w, FP8_BLOCK, kind="weight") for w in made]

    def layer(self, inputs: Inputs) -> torch.Tensor:
        return moe(*inputs, *self.weights, activations=FP8_BLOCK, ep=self.ep)


def check_two_layers(rank: Rank, calls: int, tokens: int) -> str:
    """Two layers on two streams: what waits for a rank has to leave room for what that rank waits for."""
    return f"{_on_two_streams(rank, [_Layer(rank, tokens) for _ in range(2)], calls)}, {tokens} tokens"


def _on_two_streams(rank: Rank, both: Sequence[_Problems], calls: int) -> str:
    """Calls of both on two streams, in one order on even ranks and in the other on odd ones, delayed at random."""
    on_gpu = rank.device.type == "cuda"  # on a CPU one after the other, in the order that all ranks have
    wanted = [[p.layer(inputs) for inputs in p.inputs] for p in both]
    streams = [torch.cuda.Stream() if on_gpu else None for _ in both]
    wrong = torch.zeros(2, dtype=torch.int64, device=rank.device)
    late = random.Random(rank.rank)
    order = (1, 0) if on_gpu and rank.rank % 2 else (0, 1)
    _synchronize(rank)  # calls of one object follow one another
    for i in range(calls):
        for j in order:
            with torch.cuda.stream(streams[j]):
                if on_gpu and late.random() < 0.2:
                    torch.cuda._sleep(late.randrange(200_000))
                wrong[j] += _differences(both[j].layer(both[j].inputs[i % 2]), wanted[j][i % 2])
        if i % 100 == 99:
            _synchronize(rank)  # no more than so many calls ahead
    _synchronize(rank)
    for p in both:
        p.ep.check()
    assert wrong.tolist() == [0, 0], f"{wrong.tolist()} values differ"
    return f"{calls} calls of each"


def _synchronize(rank: Rank) -> None:
    if rank.device.type == "cuda":
        torch.cuda.synchronize(rank.device)


def check_dead_rank(rank: Rank, timeout: float) -> str:
    """The last rank dies; the others learn its number within the timeout."""
    p = _Problems(rank, 16, 512, 2, 8, 1, timeout=timeout)
    p.layer(p.inputs[0])
    torch.cuda.synchronize()
    if rank.rank == rank.size - 1:
        os._exit(0)
    start = time.monotonic()
    out = p.layer(p.inputs[0])
    torch.cuda.synchronize()
    seconds = time.monotonic() - start
    said = ""
    try:
        p.ep.check()
    except RuntimeError as error:
        said = str(error)
    assert f"rank {rank.size - 1} did not answer" in said, f"said {said!r} after {seconds:.1f} s"
    assert seconds < timeout + 5, f"{seconds} s"
    assert bool(out.isnan().all()), "sums without a rank are not NaN"
    return f"an error after {seconds:.1f} s"
