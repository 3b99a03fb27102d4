"""Benchmarks beside the paper's grid: decode sizes, dense products, memory-bound kernels, host time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from padless.bench import tables
from padless.bench.group_sizes import (
    DENSE_SHAPES,
    DecodePoint,
    DenseShape,
    Point,
    decode_grid,
    decode_sizes,
    group_sizes,
)
from padless.bench.measure import measure_decode, measure_dense
from padless.bench.pad import pad_bytes, pad_groups, unpad_rows
from padless.bench.paper import BenchResult, resolve_peers
from padless.bench.peers import Peer
from padless.bench.problem import make_dense, make_grouped
from padless.bench.results import Record, sessions_of
from padless.bench.session import (
    DEFAULT_OUT_DIR,
    DEFAULT_SETTINGS,
    RunSettings,
    open_session,
    run_points,
)
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, NVFP4, ceil_div
from padless.testing import machine
from padless.testing.timing import REPEATS, Call, GpuTimer, capture, host_us_per_call

# Rows x K of the memory-bound kernels: the paper's smallest and largest activations and two between.
QUANTIZE_SHAPES = ((8192, 3072), (8192, 8192), (32768, 7168), (65536, 8192))
HOST_POINT = Point(8192, 3072, 8192, 32)
_PADDED_GROUPS = 32
_WEIGHT_GROUPS = 8


def run_decode(
    points: str | Sequence[DecodePoint] = "quick",
    peers: Sequence[Peer] | Sequence[str] | None = None,
    out_dir: str | Path = DEFAULT_OUT_DIR,
    settings: RunSettings = DEFAULT_SETTINGS,
) -> BenchResult:
    """Groups of few rows: padless against DeepGEMM's masked GEMM, MSLK, the memory floor, and a copy and a read of as
    many bytes.

    points: "quick" (12), "full" (180) or a list. Writes decode.jsonl; the other arguments are those of
        run_paper.
    """
    if isinstance(points, str) and points not in ("quick", "full"):
        raise ValueError(f"points must be 'quick', 'full' or a list of points, got {points!r}")
    grid = decode_grid(quick=points == "quick") if isinstance(points, str) else list(points)
    seed = settings.seed

    chosen = resolve_peers(peers, settings.peers_dir)
    session = open_session("decode", out_dir, chosen, settings, compile_ahead=grid)

    def measure(decode: DecodePoint) -> Record:
        sizes = decode_sizes(decode, seed)
        point = Point(sum(sizes), decode.N, decode.K, decode.groups)
        problem = make_grouped(point, sizes, seed, "cuda")
        record = measure_decode(problem, session.peers, session.timer)
        return record | {"floor_us": session.floor_us(point.flops, point.bytes)}

    records = run_points(session, "decode", grid, measure)
    tables.print_decode(session.console, records, sessions_of(session.file.records))
    return BenchResult(records, session.file.path)


def run_dense(
    shapes: Sequence[DenseShape] = DENSE_SHAPES,
    peers: Sequence[Peer] | Sequence[str] | None = None,
    out_dir: str | Path = DEFAULT_OUT_DIR,
    settings: RunSettings = DEFAULT_SETTINGS,
) -> BenchResult:
    """Dense products: padless against DeepGEMM and cuBLASLt with the same scales.

    Writes dense.jsonl; otherwise as run_paper.
    """
    session = open_session("dense", out_dir, resolve_peers(peers, settings.peers_dir), settings)
    seed = settings.seed

    def measure(shape: DenseShape) -> Record:
        point = Point(shape.M, shape.N, shape.K, 1)
        record = measure_dense(make_dense(shape, seed, "cuda"), session.peers, session.timer)
        floor = session.floor_us(point.flops, point.bytes)
        return record | {"bytes": point.bytes, "floor_us": floor}

    records = run_points(session, "dense", list(shapes), measure)
    tables.print_dense(session.console, records, sessions_of(session.file.records))
    return BenchResult(records, session.file.path)


def run_quantize(
    shapes: Sequence[tuple[int, int]] = QUANTIZE_SHAPES,
    out_dir: str | Path = DEFAULT_OUT_DIR,
    settings: RunSettings = DEFAULT_SETTINGS,
) -> BenchResult:
    """The memory-bound kernels, quantising and padding, against a device-to-device copy of this run.

    shapes: (M, K). Writes quantize.jsonl.
    """
    session = open_session("quantize", out_dir, (), settings)
    points = [Point(m, k, k, _PADDED_GROUPS) for m, k in shapes]

    def measure(point: Point) -> Record:
        calls, moved = memory_bound_calls(point, settings.seed)
        timings = session.timer.gpu(calls)
        return {
            "gpu": {name: timing.as_dict() for name, timing in timings.items()},
            "bytes": moved,
            "copy_gb_per_s": session.ceilings.copy_bytes_per_s / 1e9,
            "clocks": machine.clocks(),
        }

    records = run_points(session, "quantize", points, measure)
    tables.print_bandwidth(session.console, records)
    return BenchResult(records, session.file.path)


def memory_bound_calls(
    point: Point, seed: int, device: str = "cuda"
) -> tuple[dict[str, Call], dict[str, int]]:
    """The kernels of run_quantize at one size: calls, and the fewest bytes each must move."""
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
            moved[name] = point.M * (
                2 * point.K + point.K // format.codes_per_byte + ceil_div(point.K, format.block_k)
            )
    of_training = training_calls(x, w, problem.offs, generator)
    return calls | of_training[0], moved | of_training[1]


def training_calls(
    x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, generator: torch.Generator
) -> tuple[dict[str, Call], dict[str, int]]:
    """The quantizers of training on x (M, K), weights w and the groups of x: calls, and the fewest bytes each must move.

    Slack between groups is not counted. SwiGLU's backward is of M x K / 4 gradients, so that it moves about as much.
    """
    from padless.quantization.rows_columns import quantize_rows_columns
    from padless.quantization.swiglu_backward import swiglu_backward_quantize
    from padless.quantization.weight_both import quantize_weight_both

    m, k = x.shape
    hidden = k // 4
    dh = torch.randn(m, hidden, dtype=x.dtype, device=x.device, generator=generator)
    z = torch.randn(m, 2 * hidden, dtype=x.dtype, device=x.device, generator=generator)
    prob = torch.rand(m, device=x.device, generator=generator)
    row_scales, column_scales = 4 * m * ceil_div(k, 128), 4 * ceil_div(m, 128) * k
    square_scales = 4 * ceil_div(m, 128) * ceil_div(k, 128)
    calls: dict[str, Call] = {
        "rows and columns, 1x128": lambda: quantize_rows_columns(x, offs),
        "rows and columns, 128x128": lambda: quantize_rows_columns(x, offs, column_block=(128, 128)),
        "columns alone, 1x128": lambda: quantize_rows_columns(x, offs, rows=False),
        "weights and transposes": lambda: quantize_weight_both(w),
    }
    moved = {
        "rows and columns, 1x128": 4 * m * k + row_scales + column_scales,
        "rows and columns, 128x128": 4 * m * k + row_scales + square_scales,
        "columns alone, 1x128": 3 * m * k + column_scales,
        "weights and transposes": 4 * w.numel() + 8 * w.shape[0] * ceil_div(k, 128) ** 2,
    }
    for gate_up in ("concatenated", "interleaved"):
        name = f"swiglu backward, {gate_up}"
        calls[name] = partial(swiglu_backward_quantize, dh, z, offs, prob, gate_up=gate_up)
        scales = m * ceil_div(2 * hidden, 128) + ceil_div(m, 128) * 3 * hidden
        moved[name] = 11 * m * hidden + 8 * m + 4 * scales
    return calls, moved


def run_host(point: Point = HOST_POINT, *, seed: int = 0, repeats: int = REPEATS) -> dict[str, float]:
    """What the host adds to a grouped GEMM whose `out` is given: microseconds.

    host_us: Python time of an eager call. kernel_us: GPU time of an eager call. graph_us: GPU time of a graph
        replay.
    """
    from padless.ops.grouped_gemm import grouped_gemm

    machine.require_gpu("padless bench host")
    problem = make_grouped(point, group_sizes(point, seed), seed, "cuda")
    out = problem.empty_out()

    def call() -> Any:
        return grouped_gemm(problem.a, problem.b, problem.offs, out=out)

    graph = capture(call)
    timings = GpuTimer(repeats=repeats).gpu({"kernel": call, "graph": graph.replay})
    return {
        "host_us": host_us_per_call(call),
        "kernel_us": timings["kernel"].median_us,
        "graph_us": timings["graph"].median_us,
    }
