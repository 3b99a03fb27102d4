"""The demo's formats side by side: one product of the layer in every pair of formats, its bytes, errors and time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from padless.demo.layer import per_expert, relative, timed
from padless.formats import FORMATS, BlockScaledTensor
from padless.kernels.table import BF16, ROUTES, kernels_arch
from padless.ops.grouped_gemm import group_offsets, grouped_gemm
from padless.quantization.quantize import dequantize, quantize

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

_BY_NAME = {format.name: format for format in FORMATS}


@dataclass(frozen=True)
class FormatRow:
    """One pair of formats.

    weight_bytes: codes and scales of all experts. row_bytes: of one row of activations.
    against_exact, against_bf16: (rows,) error of each row, against the float64 product of what was not quantized and
    against a bf16 matmul of it. arithmetic: against the float64 product of the same codes. Zero rows for a pair that
    has no kernel here; then seconds is 0.
    """

    a: str
    b: str
    weight_bytes: int
    row_bytes: float
    against_exact: torch.Tensor
    against_bf16: torch.Tensor
    arithmetic: torch.Tensor
    seconds: float


@dataclass(frozen=True)
class FormatTable:
    """One product in every pair. sizes: the rows of each expert that were multiplied, out of ``all_rows``."""

    name: str
    sizes: list[int]
    all_rows: int
    bf16: torch.Tensor
    rows: list[FormatRow]


def compare_formats(name: str, x: torch.Tensor, w: torch.Tensor, sizes: list[int]) -> FormatTable:
    """x (M, K) times w (G, N, K), expert by expert, quantized in every pair of PAIRS that has a kernel here.

    On the CPU the reference stands in for the kernels of any GPU, on CPU_ROWS rows of each expert.
    """
    picked, few = _pick(sizes, None if x.is_cuda else CPU_ROWS)
    all_rows, x = x.shape[0], x[picked.to(x.device)]
    exact = per_expert(x.double(), w.double(), few)
    bf16 = per_expert(x.bfloat16(), w.bfloat16(), few).double()
    offs = group_offsets(torch.tensor(few, device=x.device))
    arch = _arch(x.device)
    offered = {(p.a, p.b) for p in ROUTES if p.operation == "grouped_gemm" and arch in (None, p.arch)}
    rows = []
    for a_name, b_name in PAIRS:
        if (a_name, b_name) not in offered:
            nothing = torch.zeros(0, dtype=torch.float64)
            rows.append(FormatRow(a_name, b_name, 0, 0.0, nothing, nothing, nothing, 0.0))
            continue
        a = x.bfloat16() if a_name == BF16 else quantize(x, _BY_NAME[a_name], kind="activation")
        b = quantize(w, _BY_NAME[b_name], kind="weight")
        d, seconds = timed(lambda a=a, b=b: grouped_gemm(a, b, offs), x.device)  # type: ignore[misc]
        values = a if isinstance(a, torch.Tensor) else dequantize(a)
        same_codes = per_expert(values.double(), dequantize(b).double(), few)
        rows.append(
            FormatRow(
                a_name,
                b_name,
                _bytes(b),
                _bytes(a) / len(picked),
                relative(d, exact),
                relative(d, bf16),
                relative(d, same_codes),
                seconds,
            )
        )
    return FormatTable(name, few, all_rows, relative(bf16, exact), rows)


def _pick(sizes: list[int], most: int | None) -> tuple[torch.Tensor, list[int]]:
    """(rows, sizes): at most ``most`` rows of each expert, from its first to its last; all for None."""
    few = [size if most is None else min(size, most) for size in sizes]
    starts = [sum(sizes[:g]) for g in range(len(sizes))]
    parts = [
        torch.linspace(start, start + max(size - 1, 0), count).round().to(torch.int64)
        for start, size, count in zip(starts, sizes, few, strict=True)
    ]
    return torch.cat(parts), few


def _bytes(t: BlockScaledTensor | torch.Tensor) -> int:
    parts = (t,) if isinstance(t, torch.Tensor) else (t.data, t.scale, t.global_scale)
    return sum(part.nbytes for part in parts if part is not None)


def _arch(device: torch.device) -> str | None:
    """The architecture whose kernels run; None on the CPU, where the reference takes them all."""
    if device.type != "cuda":
        return None
    from padless.runtime.driver import cuda_driver

    return kernels_arch(cuda_driver().arch)


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
    for row in table.rows:
        pair = row.a if row.a == row.b else f"{row.a} x {row.b}"
        if not row.seconds:
            printed.add_row(pair, *["-"] * (len(table.sizes) + 3), "no kernel")
            continue
        errors = [_median(part) for part in row.against_exact.split(table.sizes)]
        size = (f"{row.weight_bytes / 1e6:.2f}", f"{row.row_bytes:.0f}")
        printed.add_row(pair, *size, *errors, _median(row.against_bf16), _time(row.seconds))
    printed.add_row("bf16", "", "", *map(_median, table.bf16.split(table.sizes)), "", "")
    console.print(printed, "")


def _median(errors: torch.Tensor) -> str:
    return f"{100 * float(errors.median()):.2f}" if len(errors) else "-"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.0f} ms"
