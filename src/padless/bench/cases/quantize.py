"""The memory-bound kernels, quantising and padding, against a device-to-device copy of the same run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from padless.bench.group_sizes import Point, group_sizes
from padless.bench.measure import gpu_times
from padless.bench.pad import pad_bytes, pad_groups, unpad_rows
from padless.bench.problem import make_grouped
from padless.bench.report.table import Records, Sessions, Table, labels, number
from padless.bench.results import Record
from padless.bench.session import Session
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, NVFP4, ceil_div
from padless.testing.timing import Call

# Rows x K of the memory-bound kernels: the paper's smallest and largest activations and two between.
QUANTIZE_SHAPES = ((8192, 3072), (8192, 8192), (32768, 7168), (65536, 8192))
_PADDED_GROUPS = 32
_WEIGHT_GROUPS = 8


def grid(name: str, seed: int) -> list[Point]:
    """Four sizes ("full") or one."""
    shapes = QUANTIZE_SHAPES if name == "full" else QUANTIZE_SHAPES[1:2]
    return [Point(m, k, k, _PADDED_GROUPS) for m, k in shapes]


def measure_at(session: Session, point: Point) -> Record:
    """Every kernel at a size."""
    calls, moved = memory_bound_calls(point, session.settings.seed)
    rate = {"bytes": moved, "copy_gb_per_s": session.ceilings.copy_bytes_per_s / 1e9}
    return rate | gpu_times(calls, session.timer)


def tables(records: Records, sessions: Sessions, width: int) -> Sequence[Table]:
    """A line for each kernel and size."""
    headings = labels("kernel", "M", "K", "us", "spread", "GB/s", "of a copy")
    rows = []
    for record in records:
        for name, timing in record["gpu"].items():
            rate = record["bytes"][name] / timing["us"] * 1e-3
            spread, share = f"{timing['spread_percent']:.1f}%", f"{100 * rate / record['copy_gb_per_s']:.0f}%"
            size = (str(record["point"][axis]) for axis in ("M", "K"))
            rows.append([name, *size, number(timing["us"], 1), spread, number(rate, 0), share])
    return [Table("Memory-bound kernels", headings, rows)]


def memory_bound_calls(point: Point, seed: int, device: str = "cuda") -> tuple[dict[str, Call], dict[str, int]]:
    """The kernels at one size: calls, and the fewest bytes each must move."""
    from padless.bench.cases.problems.train_quantizers import training_calls
    from padless.quantization.quantize import quantize

    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(point.M, point.K, dtype=torch.bfloat16, device=device, generator=generator)
    shape = (_WEIGHT_GROUPS, point.K, point.K)
    w = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
    problem = make_grouped(Point(point.M, 128, point.K, point.groups), group_sizes(point, seed), seed, device)
    rows = problem.padded_rows
    mn_major, row_major = problem.empty_padded(row_major=False), problem.empty_padded(row_major=True)
    a_row_major = problem.a_row_major
    padded_out = torch.zeros(rows, point.K, dtype=torch.bfloat16, device=device)
    out = torch.empty(point.M, point.K, dtype=torch.bfloat16, device=device)
    calls: dict[str, Call] = {
        "quantize activations, MN-major": lambda: quantize(x, FP8_BLOCK, scale_major="mn"),
        "quantize activations, row-major": lambda: quantize(x, FP8_BLOCK, scale_major="k"),
        "quantize weights": lambda: quantize(w, FP8_BLOCK, kind="weight"),
        "pad, MN-major": lambda: pad_groups(problem.a, problem.offs, rows=rows, out=mn_major),
        "pad, row-major": lambda: pad_groups(a_row_major, problem.offs, rows=rows, out=row_major),
        "unpad bf16": lambda: unpad_rows(padded_out, problem.offs, out),
    }
    k_blocks = ceil_div(point.K, 128)
    activations = point.M * (2 * point.K + point.K + 4 * k_blocks)
    padding = pad_bytes(point.M, rows, point.K)
    moved = {
        "quantize activations, MN-major": activations,
        "quantize activations, row-major": activations,
        "quantize weights": _WEIGHT_GROUPS * (3 * point.K * point.K + 4 * k_blocks * k_blocks),
        "pad, MN-major": padding,
        "pad, row-major": padding,
        "unpad bf16": 2 * 2 * point.M * point.K,
    }
    for format in (MXFP8, MXFP4, NVFP4):
        # NVFP4's global scale is known, as in a layer that has seen its activations before.
        known = torch.full((1,), 0.01, device=device)
        options: dict[str, Any] = {"global_scale": known} if format.has_global_scale else {}
        for layout in ("plain", "blocked"):
            name = f"quantize {format.name}, {layout} scales"
            calls[name] = partial(quantize, x, format, scale_layout=layout, **options)
            moved[name] = point.M * (2 * point.K + point.K // format.codes_per_byte + ceil_div(point.K, format.block_k))
    of_training = training_calls(x, w, problem.offs, generator)
    return calls | of_training[0], moved | of_training[1]
