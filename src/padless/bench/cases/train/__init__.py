"""A layer's training step, forward and backward, in padless' recipes against torch's bf16, on one GPU.

Contenders of a point; all begin with tokens, expert ids and weights and a gradient of the layer's output, and end with
the gradients of the tokens, the weights of the experts' sums and both weight matrices:

    torch bf16             index, torch._grouped_mm, silu * up * weight compiled by inductor, torch._grouped_mm, sum
                           compiled too; torch's own backward of all of it
    torchao                the same around torchao's differentiable product in block-scaled FP8, where it and DeepGEMM
                           are there; it waits for the GPU, so it is timed as called, with its waits
    padless <recipe>       padless.nn.Experts, the weights quantized anew in every step
    padless <recipe>, codes kept
                           the same in a later microbatch of a step, which finds the weights' codes

and alone: each recipe's forward pass, and the FP8 products of the forward pass next to those of the input's gradient.
Everything is replayed from CUDA graphs, so that the host's part is in no time of the GPU; it has its own column,
and so has that of `padless.nn.graphed`, whose forward and backward pass are a CUDA graph each: under autograd, and
the two passes alone with their inputs in place.
Bytes that the forward pass keeps for the backward pass are those of the device's allocator.

Outputs and gradients are compared with float64 before anything is timed, and those of the last timed step again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from padless.bench.cases.train.contenders import BF16, Maker, Step, makers, products
from padless.bench.cases.train.problem import TrainPoint, TrainProblem, make_problem, points
from padless.bench.peers.torchao import TorchAo
from padless.bench.report import table
from padless.bench.results import Fields, Record, finite, time_us
from padless.bench.session import Session
from padless.testing import machine
from padless.testing.judge import describe, row_errors, worst
from padless.testing.timing import Call, Timer, host_us_per_call

# Largest relative error of a row: gradients that went through five products of e4m3 operands, or bfloat16 roundings.
TOLERANCE, BF16_TOLERANCE = 0.2, 0.03
_COMPILE_S = 150  # for all kernels of torchao's products together: nvcc takes 25 s for each of DeepGEMM's


# --- measuring -------------------------------------------------------------------------------------------


def _as_it_is(call: Call) -> Call:
    return call


class Graphs:
    """Captures calls in CUDA graphs that share their memory: each writes its results anew when it is replayed."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Call) -> Call:
        """The call's replay; it ran before."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            call()
        return graph.replay


def _host_us(step: Step) -> float | None:
    """Microseconds of Python of a step, None without a GPU, and where the step waits for it."""
    return host_us_per_call(step.call, calls=20) if step.device.type == "cuda" and not step.waits else None


def _graphed_host_us(step: Step) -> tuple[float | None, float | None]:
    """The same of the step in two CUDA graphs, under autograd and without; None where there is no such.

    Raises ValueError where it is wrong.
    """
    if step.graphed is None or step.device.type != "cuda":
        return None, None
    replayed = step.graphed()
    replayed.call()
    if wrong := complaint(step, errors_of(step.problem, replayed)):
        raise ValueError(wrong)
    assert replayed.passes is not None
    return host_us_per_call(replayed.call, calls=20), host_us_per_call(replayed.passes, calls=20)


def errors_of(problem: TrainProblem, step: Step) -> dict[str, float]:
    """The largest relative error of a row of each result of the last call."""
    expected = problem.expected
    return {name: worst(row_errors(problem.rows_of(name, t), expected[name])) for name, t in step.results().items()}


def complaint(step: Step, found: dict[str, float]) -> str:
    """Says what is wrong with these errors, or ""."""
    allowed = BF16_TOLERANCE if step.is_bf16 else TOLERANCE
    wrong = [f"{name} {error:.3g}" for name, error in found.items() if not error <= allowed]
    return f"is wrong: relative error of a row: {', '.join(wrong)}; allowed {allowed}" if wrong else ""


def saved_bytes(step: Step) -> int | None:
    """Bytes that the forward pass keeps for the backward pass besides inputs, weights and codes; None without a GPU."""
    if step.device.type != "cuda":
        return None
    step.forget()
    step.forward()  # codes of weights are made
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(step.device)
    out = step.forward()
    kept = torch.cuda.memory_allocated(step.device) - before - out.untyped_storage().nbytes()
    del out
    return kept


def measure_train(
    problem: TrainProblem, timer: Timer, makers: Sequence[Maker], graphs: Callable[[Call], Call] = _as_it_is
) -> Record:
    """One point's record: checks, bytes kept, and microseconds of every step that is right and of the parts.

    graphs: makes of a call what replays it.
    """
    right: list[Step] = []
    record: Record = {"row_error": {}, "wrong": {}, "errors": {}, "saved_bytes_per_row": {}, "host_us": {}}
    graphed_us = record["graphed_host_us"] = {}
    passes_us = record["passes_host_us"] = {}
    for maker in makers:
        try:
            step = maker.make(problem)
            step.call()
            found = errors_of(problem, step)
        except Exception as error:
            record["errors"][maker.name] = describe(error)
            continue
        record["row_error"][step.name] = {name: finite(error) for name, error in found.items()}
        if wrong := complaint(step, found):
            record["wrong"][step.name] = wrong
            continue
        kept = saved_bytes(step)
        record["saved_bytes_per_row"][step.name] = None if kept is None else kept / problem.point.slots
        record["host_us"][step.name] = _host_us(step)
        step.forget()
        try:
            graphed_us[step.name], passes_us[step.name] = _graphed_host_us(step)
        except Exception as error:
            record["errors"][step.name] = f"in two CUDA graphs: {describe(error)}"
        step.forget()
        right.append(step)
    parts = products(problem)
    timed = {f"product: {name}": part.call for name, part in parts.items()}
    replays: dict[str, Call] = {}
    for step in right:
        try:
            if step.is_whole and not step.waits:
                timed[f"forward: {step.name}"] = graphs(step.forward_alone)
            replays[step.name] = step.call if step.waits else graphs(step.call)
        except Exception as error:
            record["errors"][step.name] = f"in a CUDA graph: {describe(error)}"
    times = timer.gpu(replays | timed)
    for step in right:
        if step.name in replays:
            replays[step.name]()
            if wrong := complaint(step, errors_of(problem, step)):
                record["wrong"][step.name] = f"after timing it {wrong}"
    return record | {
        "flops": 3 * problem.point.flops,
        "product_flops": {name: part.flops for name, part in parts.items()},
        "sizes": problem.sizes,
        "gpu": {name: timing.as_dict() for name, timing in times.items()},
        "clocks": machine.clocks(),
    }


def grid(name: str, seed: int) -> list[Any]:
    """Seven points ("full") or three."""
    return points(full=name == "full")


def products_of(point: TrainPoint) -> list[tuple[int, int, int, int]]:
    """(rows, G, N, K) of both products of the forward pass."""
    hidden, intermediate = point.hidden, point.intermediate
    sizes = ((2 * intermediate, hidden), (hidden, intermediate))
    return [(point.slots, point.experts, n, k) for n, k in sizes]


def start(session: Session) -> Callable[[Any], Record]:
    """Every contender at a point; torchao at those of DeepSeek-V3's experts, where its kernels compile in time."""
    peers = [peer for peer in session.peers if isinstance(peer, TorchAo)]
    wanted = {point: products_of(point) for point in points(full=False) if point.model.startswith("DeepSeek-V3")}
    ready = [peer.compile_ahead(chain(*wanted.values()), _COMPILE_S) for peer in peers]

    def measure(point: Any) -> Record:
        problem = make_problem(point, session.settings.seed, "cuda")
        asked = wanted.get(replace(point, every_recipe=False), [])
        there = [peer for peer, done in zip(peers, ready, strict=True) if asked and done.issuperset(asked)]
        contenders = makers(compiled=True, every_recipe=point.every_recipe, peers=there)
        record = measure_train(problem, session.timer, contenders, Graphs())
        if asked and len(there) < len(peers):
            record["errors"]["torchao"] = f"its kernels did not compile within {_COMPILE_S} s"
        del problem
        torch.cuda.empty_cache()
        return record

    return measure


# --- showing ---------------------------------------------------------------------------------------------


def rate(record: Record, name: str) -> float | None:
    """10^12 operations a second of a product alone."""
    us = time_us(record, "gpu", f"product: {name}")
    return None if not us else record["product_flops"][name] / us * 1e-6


def tables(records: table.Records, sessions: table.Sessions, width: int) -> Sequence[table.Table]:
    """A line a point and contender: the step, times as fast as bf16, the forward pass, bytes kept; and the products."""
    names = list(dict.fromkeys(name for r in records for name in r["gpu"] if ":" not in name))
    lines = [[Fields(record, contender=name)] for record in records for name in names if name in record["gpu"]]
    steps = [
        *_point_columns(),
        table.Column("contender", text=lambda part: str(part[0]["contender"]), left=True, width=24),
        table.Column("us", text=lambda part: table.number(_us(part, "{}"), 0), width=8),
        table.Column("bf16 /", text=_against_bf16, width=7),
        table.Column("forward", text=lambda part: table.number(_us(part, "forward: {}"), 0), width=8),
        table.Column("kept B", text=_kept, width=8),
        table.Column("host us", text=partial(_host, "host_us"), width=8),
        table.Column("graphed", text=partial(_host, "graphed_host_us"), width=8),
        table.Column("passes", text=partial(_host, "passes_host_us"), width=7),
    ]
    parts = [*_point_columns(), *(table.Column(name, text=partial(_rate_text, name), width=12) for name in PRODUCTS)]
    return [
        table.table_of("A training step of an expert layer: GPU time (us), bytes kept a row, Python", steps, lines, 1),
        table.table_of("FP8 products alone (TFLOP/s)", parts, table.by_point(records), 1),
    ]


PRODUCTS = ("forward 13", "dgrad 13", "forward 2", "dgrad 2")


def _point_columns() -> list[table.Column]:
    def field(name: str) -> Callable[[table.Records], str]:
        return lambda part: str(part[0]["point"][name])

    return [
        table.Column("model", text=field("model"), left=True, width=18),
        table.Column("T", text=field("tokens")),
        table.Column("k", text=field("top_k")),
        table.Column("E", text=field("experts")),
    ]


def _us(part: table.Records, pattern: str) -> float | None:
    return time_us(part[0], "gpu", pattern.format(part[0]["contender"]))


def _against_bf16(part: table.Records) -> str:
    base, own = time_us(part[0], "gpu", BF16), _us(part, "{}")
    return "" if not base or not own else f"{base / own:.2f}x"


def _kept(part: table.Records) -> str:
    return table.number(part[0]["saved_bytes_per_row"].get(part[0]["contender"]), 0)


def _host(kind: str, part: table.Records) -> str:
    return table.number(part[0].get(kind, {}).get(part[0]["contender"]), 0)


def _rate_text(name: str, part: table.Records) -> str:
    return table.number(rate(part[0], name), 0)
