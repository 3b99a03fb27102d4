"""Time that the host adds to a grouped GEMM. It writes no record: three numbers of one problem."""

from __future__ import annotations

from typing import Any

from padless.bench.group_sizes import Point, group_sizes
from padless.bench.problem import make_grouped
from padless.testing import machine
from padless.testing.timing import REPEATS, Timer, capture, host_us_per_call

HOST_POINT = Point(8192, 3072, 8192, 32)


def run_host(point: Point = HOST_POINT, *, seed: int = 0, repeats: int = REPEATS) -> dict[str, float]:
    """Time that the host adds to a grouped GEMM whose `out` is given: microseconds.

    host_us: Python time of an eager call. kernel_us: GPU time of an eager call. graph_us: GPU time of a graph replay.
    """
    from padless.ops.grouped_gemm import grouped_gemm

    machine.require_gpu("padless bench host")
    problem = make_grouped(point, group_sizes(point, seed), seed, "cuda")
    out = problem.empty_out()

    def call() -> Any:
        return grouped_gemm(problem.a, problem.b, problem.offs, out=out)

    graph = capture(call)
    timings = Timer(repeats=repeats).gpu({"kernel": call, "graph": graph.replay})
    return {
        "host_us": host_us_per_call(call),
        "kernel_us": timings["kernel"].median_us,
        "graph_us": timings["graph"].median_us,
    }
