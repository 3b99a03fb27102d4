"""Benchmarks: the paper's comparison, decode and dense sizes, the memory-bound kernels, the host's share."""

from padless.bench.chain import run_chain
from padless.bench.formats import run_formats
from padless.bench.layer import run_layer
from padless.bench.paper import BenchResult, run_paper
from padless.bench.report import report_file
from padless.bench.session import RunSettings
from padless.bench.sizes import run_decode, run_dense, run_host, run_quantize

__all__ = [
    "BenchResult",
    "RunSettings",
    "report_file",
    "run_chain",
    "run_decode",
    "run_dense",
    "run_formats",
    "run_host",
    "run_layer",
    "run_paper",
    "run_quantize",
]
