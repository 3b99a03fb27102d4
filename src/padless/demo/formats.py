"""The demo's formats side by side: one product of the layer in every pair of formats, its bytes, errors and time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from padless.demo.layer import Product, run_product
from padless.kernels.table import BF16, ROUTES, kernels_arch
from padless.runtime.driver import cuda_driver
from padless.testing.judge import spread_rows
from padless.testing.operands import bytes_of

PAIRS = (
    ("FP8_BLOCK", "FP8_BLOCK"),
    ("MXFP8", "MXFP8"),
    ("MXFP4", "MXFP4"),
    ("NVFP4", "NVFP4"),
    (BF16, "MXFP4"),
    (BF16, "NVFP4"),
)
# The reference multiplies block by block, so on the CPU each expert gets this many of its rows, evenly picked.
CPU_ROWS = 24


@dataclass(frozen=True)
class FormatTable:
    """One product in every pair of formats, by pair; None where it has no kernel here.

    sizes: the rows of each expert that were multiplied, out of ``all_rows``.
    """

    name: str
    sizes: list[int]
    all_rows: int
    products: dict[tuple[str, str], Product | None]


def compare_formats(name: str, x: torch.Tensor, w: torch.Tensor, sizes: list[int]) -> FormatTable:
    """x (M, K) times w (G, N, K), expert by expert, quantized in every pair of PAIRS that has a kernel here.

    On the CPU the reference stands in for the kernels of any GPU, on CPU_ROWS rows of each expert.
    """
    most = None if x.is_cuda else CPU_ROWS
    ends = itertools.accumulate(sizes)
    picked = [spread_rows(end - size, size, most) for end, size in zip(ends, sizes, strict=True)]
    few = [len(rows) for rows in picked]
    some = x[torch.cat(picked).to(x.device)]
    arch = kernels_arch(cuda_driver().arch) if x.is_cuda else None
    offered = {(p.a, p.b) for p in ROUTES if p.operation == "grouped_gemm" and arch in (None, p.arch)}
    products = {pair: run_product(name, some, w, few, pair) if pair in offered else None for pair in PAIRS}
    return FormatTable(name, few, x.shape[0], products)


def print_formats(console: Console, table: FormatTable, where: str) -> None:
    """One line for each pair: bytes, median error of each expert's rows in percent, time. where: a word for it."""
    rows = sum(table.sizes)
    some = f"{rows:,} of its {table.all_rows:,} rows" if rows < table.all_rows else f"all {rows:,} rows"
    printed = Table(
        title=f"{table.name.capitalize()} in every format, {some}: median error vs float64, % by expert",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    printed.add_column("\nformat", no_wrap=True)
    experts = [f"\n{g}" for g in range(len(table.sizes))]
    for heading in ("weights\nMB", "a row\nbytes", *experts, "all vs\nbf16", f"{where}\ntime"):
        printed.add_column(heading, justify="right", no_wrap=True)
    bf16 = None
    for (a, b), product in table.products.items():
        pair = a if a == b else f"{a} x {b}"
        if product is None:
            printed.add_row(pair, *["-"] * (len(table.sizes) + 3), "no kernel")
            continue
        gemm, errors, bf16 = product.gemm, product.errors, product.errors.bf16
        size = (f"{bytes_of(gemm.b) / 1e6:.2f}", f"{bytes_of(gemm.a) / rows:.0f}")
        medians = map(median_percent, errors.against_exact.split(table.sizes))
        printed.add_row(pair, *size, *medians, median_percent(errors.against_bf16), in_time(gemm.gemm_seconds))
    if bf16 is not None:
        printed.add_row("bf16", "", "", *map(median_percent, bf16.split(table.sizes)), "", "")
    console.print(printed, "")


def median_percent(errors: torch.Tensor) -> str:
    return f"{100 * float(errors.median()):.2f}" if len(errors) else "-"


def in_time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.0f} ms"
