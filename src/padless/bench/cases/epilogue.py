"""The fused quantising epilogue against the same GEMM with separate kernels after it, FP8_BLOCK on one GPU.

Contenders of a point:

    gemm bf16                          the GEMM alone, writing bf16: what an epilogue may cost 8% over
    gemm bf16, quantize                and then quantize() of its result
    fused rows                         codes and scales along rows, in one launch
    fused rows and columns             both, in one launch
    gemm bf16, quantize both           and then quantize() of the result and of its transpose, which knows nothing of
                                       groups: the least that separate kernels have to do
    gemm bf16, silu * up, quantize     an expert's first projection in three steps; N is gate and up together
    fused swiglu rows                  the same in one launch

Every contender allocates its outputs, as a caller's layer does. Fused outputs are compared with quantize() of the
float32 GEMM: scales and codes that differ are counted, and more than one code in 10^5 counts as wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from padless.bench.group_sizes import Point
from padless.bench.measure import gpu_times
from padless.bench.problem import GroupedProblem
from padless.bench.report import table
from padless.bench.results import Record, ratios
from padless.bench.session import Session
from padless.formats import FP8_BLOCK
from padless.runtime.choices import BackendName
from padless.testing.timing import Call, Timer

GEMM = "gemm bf16"
# (fused, the same in separate kernels)
PAIRS = (
    ("fused rows", "gemm bf16, quantize"),
    ("fused rows and columns", "gemm bf16, quantize both"),
    ("fused swiglu rows", "gemm bf16, silu * up, quantize"),
)
_MOST_WRONG_CODES = 1e-5


def grid(name: str, seed: int) -> list[Point]:
    """M 8192 over the K that decides what an epilogue costs: 12 points; "full", 8 of decode and prefill sizes more."""
    points = [Point(8192, n, k, g) for k in (2048, 4096, 7168) for n in (4096, 7168) for g in (8, 32)]
    if name == "full":
        shapes = ((4096, 7168), (7168, 4096))
        points += [Point(m, n, k, g) for m in (1024, 32768) for g in (8, 32) for n, k in shapes]
    return points


def calls(problem: GroupedProblem, backend: BackendName | None = None) -> dict[str, Call]:
    """Every contender of a problem, by name."""
    from padless.compat.cudnn.calls import grouped_gemm_quant, grouped_gemm_swiglu_quant
    from padless.ops.grouped_gemm import grouped_gemm
    from padless.quantization.quantize import quantize

    a, b, offs = problem.a, problem.b, problem.offs
    options: dict[str, Any] = {
        "a_tensor": a,
        "b_tensor": b,
        "padded_offsets": offs,
        "d_format": FP8_BLOCK,
        "backend": backend,
    }

    def product() -> torch.Tensor:
        return grouped_gemm(a, b, offs, backend=backend)

    def quantize_both() -> Any:
        d = product()
        return quantize(d, FP8_BLOCK), quantize(d.t(), FP8_BLOCK)

    def swiglu() -> Any:
        gate, up = product().chunk(2, dim=1)
        return quantize(torch.nn.functional.silu(gate) * up, FP8_BLOCK)

    return {
        GEMM: product,
        "gemm bf16, quantize": lambda: quantize(product(), FP8_BLOCK),
        "fused rows": lambda: grouped_gemm_quant(**options, column_output=False),
        "gemm bf16, quantize both": quantize_both,
        "fused rows and columns": lambda: grouped_gemm_quant(**options),
        "gemm bf16, silu * up, quantize": swiglu,
        "fused swiglu rows": lambda: grouped_gemm_swiglu_quant(**options, gate_up="concatenated", column_output=False),
    }


def compare(problem: GroupedProblem, backend: BackendName | None = None) -> Record:
    """Codes and scales of "fused rows" that are not those of quantize() of the float32 GEMM, and how many there are."""
    from padless.ops.grouped_gemm import grouped_gemm
    from padless.quantization.quantize import quantize

    fused = calls(problem, backend)["fused rows"]().row
    valid = sum(problem.sizes)
    d = grouped_gemm(problem.a, problem.b, problem.offs, out_dtype=torch.float32, backend=backend)
    apart = quantize(d, FP8_BLOCK)
    codes = fused.data[:valid].view(torch.uint8) != apart.data[:valid].view(torch.uint8)
    scales = fused.scale[:valid] != apart.scale[:valid]
    return {"codes": codes.numel(), "wrong_codes": int(codes.sum()), "wrong_scales": int(scales.sum())}


def measure(problem: GroupedProblem, timer: Timer, backend: BackendName | None = None) -> Record:
    """One point's record: times, what differs, and what a contender raised."""
    usable: dict[str, Call] = {}
    errors: dict[str, str] = {}
    for name, call in calls(problem, backend).items():
        try:
            call()
            usable[name] = call
        except ValueError as error:  # no fused kernel here: the others are measured all the same
            errors[name] = str(error)
    record: Record = {"gpu": {}, "errors": errors, "wrong": {}}
    if "fused rows" in usable:
        record["equality"] = compare(problem, backend)
        if record["equality"]["wrong_codes"] > _MOST_WRONG_CODES * record["equality"]["codes"]:
            record["wrong"]["fused rows"] = f"differs from quantize: {record['equality']}"
            del usable["fused rows"]
    return record | gpu_times(usable, timer)


def measure_at(session: Session, point: Point) -> Record:
    """Every contender at a point."""
    return measure(session.grouped(point), session.timer)


def tables(records: table.Records, sessions: table.Sessions, width: int) -> Sequence[table.Table]:
    """A line a point: microseconds of the GEMM, and of each fused call with its cost over the GEMM and its gain."""
    columns = [*table.axes("M", "N", "K", "groups", width=6), table.time(GEMM, width=6)]
    for fused, separate in PAIRS:
        columns += [
            table.time(fused, width=7),
            cost(fused, "over gemm", width=7),
            table.ratio("apart", separate, fused, 2, unit="x", width=7),
        ]
    title = "Fused quantising epilogue: GPU time (us), over the GEMM, and times as fast as apart"
    return [table.table_of(title, columns, table.by_point(records), 1)]


def cost(fused: str, heading: str, **style: Any) -> table.Column:
    """Cost of a fused call over the GEMM, in percent."""

    def percents(part: table.Records) -> list[float]:
        return [100 * (value - 1) for value in ratios(part, "gpu", fused, GEMM)]

    return table.Column(heading, percents, 1, "%", sign="+", **style)
