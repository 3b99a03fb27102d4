"""First measurements on Blackwell: dense MXFP8 against torch, and the NVFP4 grouped GEMM competition by its own rules.

Dense: M = N = K of 2048 to 16384, both contenders on the same codes and the same 32x4x4 scales.

Competition (GPU MODE's NVFP4 grouped GEMM): a shape is a list of problems. The clock stands around CALLS calls, each
with its own operands, after L2 has been overwritten once; the mean time of a call is one repeat, and repeats go on
until the standard error of their mean is below 0.1%, or a time limit. Here also, against kernels that remember what
they have seen: operands are cloned and put in another order before every repeat, and every call's output is checked. A
call on tensors that were never seen describes them to the device first; "new tensors" is the mean of such calls, and
the plain name that of the same calls made again, in another order.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

import torch

from padless.bench.cases.formats import COMPETITION
from padless.bench.measure import gpu_times
from padless.bench.peers import Contender, returning
from padless.bench.report import table
from padless.bench.results import Record
from padless.bench.session import Session
from padless.formats import NVFP4, BlockScaledTensor
from padless.testing import machine
from padless.testing.judge import SampledReference, check, describe, float64_rows, outside, values_of
from padless.testing.operands import in_layout, make_operands
from padless.testing.timing import FLUSH_BYTES, Timer

DENSE_SIZES = (2048, 4096, 8192, 16384)
OWN, TORCH = "padless", "torch._scaled_mm"
NEW = "padless, new tensors"
CALLS = 15
TOLERANCE = 1e-3  # |out - expected| <= TOLERANCE + TOLERANCE |expected|
_RELATIVE_ERROR = 1e-3
_FEWEST_REPEATS, _MOST_REPEATS = 3, 100
_FEWEST_SECONDS, _MOST_TIMED_SECONDS, _MOST_SECONDS = 0.1, 10.0, 120.0
_SEED_STEP = 42
_CHECKED_ROWS = 64


@dataclass(frozen=True)
class BlackwellPoint:
    """case "dense": M = N = K. Case "A" to "D": a shape of the competition, M all its rows."""

    case: str
    M: int
    N: int
    K: int


def grid(name: str = "full", seed: int = 0) -> list[BlackwellPoint]:
    """The dense sizes, then the competition's shapes."""
    shapes = [BlackwellPoint(name, sum(sizes), n, k) for name, (sizes, n, k) in COMPETITION.items()]
    return [*(BlackwellPoint("dense", size, size, size) for size in DENSE_SIZES), *shapes]


# -------------------------------------------------------------------------------------------------- dense


def dense_contenders(size: tuple[int, int, int], seed: int, device: str) -> tuple[list[Contender], SampledReference]:
    """padless and torch on one product of (M, N, K); some rows in float64."""
    from padless.ops.grouped_gemm import gemm

    m, n, k = size
    operands = make_operands("MXFP8", "MXFP8", [m], n, k, seed=seed, device=device)
    reference = float64_rows(operands.a, operands.b, [m], rows=_CHECKED_ROWS)
    assert isinstance(operands.a, BlockScaledTensor)
    a, b = in_layout(operands.a, "blocked"), in_layout(operands.b[0], "blocked")
    out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=device)

    def by_torch() -> torch.Tensor:
        return torch._scaled_mm(a.data, b.data.t(), scale_a=a.scale, scale_b=b.scale, out_dtype=torch.bfloat16)

    return [Contender(OWN, lambda: gemm(a, b, out=out), lambda: out), returning(TORCH, by_torch)], reference


def measure_dense_mxfp8(point: BlackwellPoint, seed: int, timer: Timer, device: str = "cuda") -> Record:
    """Record of one dense product: checks and GPU times. A torch that cannot is `missing`, which is no failure."""
    contenders, reference = dense_contenders((point.M, point.N, point.K), seed, device)
    right, record = check(contenders, reference, {})
    missing = {name: record["errors"].pop(name) for name in (TORCH,) if name in record["errors"]}
    times = gpu_times({contender.name: contender.call for contender in right}, timer)
    return record | {"flops": 2 * point.M * point.N * point.K, "missing": missing, **times}


# -------------------------------------------------------------------------------------------- competition


@dataclass(frozen=True)
class Dataset:
    """One call's list of problems, and the float64 products that its outputs are compared with."""

    a: list[BlockScaledTensor]
    b: list[BlockScaledTensor]
    expected: list[torch.Tensor]


def make_dataset(sizes: Sequence[int], n: int, k: int, seed: int, device: str) -> Dataset:
    """Codes of 0, 0.5, 1 and 1.5 with either sign and scales of 1 and 2, as the competition draws them.

    Sums of them are exact in float32 in any order, so the outputs can be checked by the competition's tolerance.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    a: list[BlockScaledTensor] = []
    b: list[BlockScaledTensor] = []
    expected = []
    for m in sizes:
        pair = []
        for rows in (m, n):
            codes = torch.randint(0, 255, (rows, k // 2), generator=generator, device=device) & 0xBB
            scale = torch.randint(1, 3, (rows, k // 16), generator=generator, device=device).float()
            data = codes.to(torch.uint8).view(NVFP4.data_dtype)
            pair.append(BlockScaledTensor(data, scale.to(torch.float8_e4m3fn), NVFP4))
        for side, plain in zip((a, b), pair, strict=True):
            side.append(in_layout(plain, "blocked"))
        expected.append(values_of(pair[0]) @ values_of(pair[1]).t())
    return Dataset(a, b, expected)


def wrong_elements(outputs: Sequence[torch.Tensor], dataset: Dataset) -> int:
    """Elements further from the expected ones than the competition allows; NaN is."""
    pairs = zip(outputs, dataset.expected, strict=True)
    return sum(outside(out, expected, TOLERANCE) for out, expected in pairs)


# Microseconds that these calls take together.
CallsClock = Callable[[Sequence[Callable[[], Any]]], float]


def cuda_clock() -> CallsClock:
    """CUDA events around all calls, after L2 has been overwritten once."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def clock(calls: Sequence[Callable[[], Any]]) -> float:
        torch.cuda.synchronize()
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in calls:
            call()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * start.elapsed_time(end)

    return clock


def enough(means_us: Sequence[float], seconds: float) -> bool:
    """True when the competition stops repeating after these means of a repeat, ``seconds`` after it began."""
    if len(means_us) >= _MOST_REPEATS or seconds >= _MOST_SECONDS:
        return True
    if sum(means_us) * CALLS * 1e-6 >= _MOST_TIMED_SECONDS:
        return True
    if len(means_us) < _FEWEST_REPEATS or seconds < _FEWEST_SECONDS:
        return False
    error = statistics.stdev(means_us) / math.sqrt(len(means_us))
    return error < _RELATIVE_ERROR * statistics.fmean(means_us)


def measure_competition(
    point: BlackwellPoint, seed: int, clock: CallsClock, device: str = "cuda", calls: int = CALLS
) -> Record:
    """Record of one shape: the mean time of a call by the competition's rules, outputs of every call checked."""
    from padless.ops.grouped_gemm_list import forget, grouped_gemm_list

    sizes, *_ = COMPETITION[point.case]
    sets = [make_dataset(sizes, point.N, point.K, seed + _SEED_STEP * i, device) for i in range(calls)]
    order = random.Random(seed)
    means: dict[str, list[float]] = {NEW: [], OWN: []}
    record: Record = {"flops": 2 * point.M * point.N * point.K, "wrong": {}, "errors": {}, "missing": {}}
    began = monotonic()
    try:
        while not enough(means[OWN], monotonic() - began) and not record["wrong"]:
            order.shuffle(sets)
            fresh = [Dataset([t.clone() for t in d.a], [t.clone() for t in d.b], d.expected) for d in sets]
            outs = [[torch.empty(e.shape, dtype=torch.float16, device=device) for e in d.expected] for d in fresh]
            if not means[OWN]:  # compiled and loaded outside the clock
                grouped_gemm_list(fresh[0].a, fresh[0].b, out=outs[0])
            forget()  # a clone may lie where an earlier one was
            for name in means:
                places = list(range(calls))
                order.shuffle(places)
                for out in outs:
                    for d in out:
                        d.fill_(float("nan"))
                jobs = [partial(grouped_gemm_list, fresh[i].a, fresh[i].b, out=outs[i]) for i in places]
                means[name].append(clock(jobs) / calls)
                bad = sum(wrong_elements(out, dataset) for out, dataset in zip(outs, fresh, strict=True))
                if bad:
                    text = f"is wrong: {bad} elements are outside the competition's tolerance"
                    record["wrong"][name] = text
    except Exception as error:
        record["errors"][OWN] = describe(error)
    right = not record["wrong"] and not record["errors"]
    return record | {
        "gpu": {name: _mean(values) for name, values in means.items()} if right else {},
        "clocks": machine.clocks(),
    }


def _mean(means_us: Sequence[float]) -> Record:
    mean = statistics.fmean(means_us)
    spread = 100 * statistics.stdev(means_us) / mean if len(means_us) > 1 else 0.0
    samples = [round(value, 3) for value in means_us]
    return {"us": round(mean, 3), "spread_percent": round(spread, 2), "samples_us": samples}


# ------------------------------------------------------------------------------------------------- a run


def start(session: Session) -> Callable[[BlackwellPoint], Record]:
    """A dense product or a shape of the competition."""
    clock, seed = cuda_clock(), session.settings.seed

    def measure(point: BlackwellPoint) -> Record:
        if point.case == "dense":
            return measure_dense_mxfp8(point, seed, session.timer)
        return measure_competition(point, seed, clock)

    return measure


def tables(records: table.Records, sessions: table.Sessions, width: int) -> Sequence[table.Table | str]:
    """Both tables, and what is missing."""
    dense = [record for record in records if record["point"]["case"] == "dense"]
    shapes = [record for record in records if record["point"]["case"] != "dense"]
    columns = [table.Column("M = N = K", text=lambda part: str(part[0]["point"]["M"]))]
    columns += [table.Column(name, partial(table.rates, name=name), 0) for name in (OWN, TORCH)]
    columns.append(table.ratio("padless / torch", TORCH, OWN))
    title = "Dense MXFP8, bf16 output: TFLOPS (GPU time)"
    repeats = table.Column("repeats", text=lambda part: str(len(part[0]["gpu"].get(OWN, {}).get("samples_us", ()))))
    case = table.Column("shape", text=lambda part: str(part[0]["point"]["case"]))
    timed = [table.time(name, digits=2) for name in (OWN, NEW)]
    found = table.table_of(
        "GPU MODE's NVFP4 grouped GEMM: us a call",
        [case, *table.axes("M", "N", "K"), *timed, repeats],
        table.by_point(shapes),
    )
    if all(len(table.times(shapes, name)) == len(COMPETITION) for name in (OWN, NEW)):
        found.rows.append(["geomean", "", "", "", *(column.cell(shapes) for column in timed), ""])
    missing = {item for record in records for item in record["missing"].items()}
    return [
        table.table_of(title, columns, table.by_point(dense)),
        found,
        *(f"{name} does not run here: {text}" for name, text in missing),
    ]
