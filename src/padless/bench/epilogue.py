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
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from padless.bench import tables
from padless.bench.group_sizes import Point, group_sizes
from padless.bench.paper import BenchResult
from padless.bench.problem import GroupedProblem, make_grouped
from padless.bench.results import Record, time_us
from padless.bench.session import DEFAULT_OUT_DIR, DEFAULT_SETTINGS, RunSettings, open_session, run_points
from padless.formats import FP8_BLOCK
from padless.testing import machine
from padless.testing.timing import Call, Timer

GEMM = "gemm bf16"
# (fused, the same in separate kernels)
PAIRS = (
    ("fused rows", "gemm bf16, quantize"),
    ("fused rows and columns", "gemm bf16, quantize both"),
    ("fused swiglu rows", "gemm bf16, silu * up, quantize"),
)
_MOST_WRONG_CODES = 1e-5


def grid(*, full: bool) -> list[Point]:
    """M 8192 over the K that decides what an epilogue costs: 12 points; full, 8 of decode and prefill sizes more."""
    points = [Point(8192, n, k, g) for k in (2048, 4096, 7168) for n in (4096, 7168) for g in (8, 32)]
    if full:
        shapes = ((4096, 7168), (7168, 4096))
        points += [Point(m, n, k, g) for m in (1024, 32768) for g in (8, 32) for n, k in shapes]
    return points


def calls(problem: GroupedProblem, backend: str | None = None) -> dict[str, Call]:
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
        "fused swiglu rows": lambda: grouped_gemm_swiglu_quant(
            **options, gate_up="concatenated", column_output=False
        ),
    }


def compare(problem: GroupedProblem, backend: str | None = None) -> Record:
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


def measure(problem: GroupedProblem, timer: Timer, backend: str | None = None) -> Record:
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
    record["gpu"] = {name: timing.as_dict() for name, timing in timer.gpu(usable).items()}
    return record


def run_epilogue(
    points: Sequence[Point],
    out_dir: str | Path = DEFAULT_OUT_DIR,
    settings: RunSettings = DEFAULT_SETTINGS,
) -> BenchResult:
    """Measures every contender at every point, prints a table and writes epilogue.jsonl."""
    session = open_session("epilogue", out_dir, (), settings)

    def one(point: Point) -> Record:
        sizes = group_sizes(point, settings.seed)
        problem = make_grouped(point, sizes, settings.seed, "cuda")
        return measure(problem, session.timer) | {"clocks": machine.clocks()}

    records = run_points(session, "epilogue", list(points), one)
    print_epilogue(session.console, records)
    return BenchResult(records, session.file.path)


def print_epilogue(console: Console, records: Sequence[Record]) -> None:
    """A line a point: microseconds of the GEMM, and of each fused call with its cost over the GEMM and its gain."""
    table = tables.narrow_table(
        "Fused quantising epilogue: GPU time (us), over the GEMM, and times as fast as apart", 1
    )
    for heading in ("M", "N", "K", "groups", GEMM):
        table.add_column(heading, justify="right", max_width=6)
    for fused, _ in PAIRS:
        for heading in (fused, "over gemm", "apart"):
            table.add_column(heading, justify="right", max_width=7)
    for record in records:
        gemm = time_us(record, "gpu", GEMM)
        cells = [str(record["point"][axis]) for axis in ("M", "N", "K", "groups")] + [_cell(gemm, "{:.1f}")]
        for fused, separate in PAIRS:
            own, other = (time_us(record, "gpu", name) for name in (fused, separate))
            cells += [
                _cell(own, "{:.1f}"),
                _cell(own / gemm - 1 if own and gemm else None, "{:+.1%}"),
                _cell(other / own if own and other else None, "{:.2f}x"),
            ]
        table.add_row(*cells)
    console.print(table)
    tables.print_failures(console, records)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
