"""Measurements of the demo, and the tables that show them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from padless.demo.formats import FormatTable, in_time, print_formats
from padless.demo.layer import PADDED_TO, TOP_K, Product, activation_bytes, outlier_ratio, padded_rows

BAR_WIDTH = 40


@dataclass(frozen=True)
class DemoResult:
    """Measurements of a run.

    source: where the data is from; data: a word for it. sizes: rows per expert. twins: the products again,
    with normal random data. formats: products again in every format. layer_error, bf16_layer_error: (T,),
    whole layer, per token, padless and bf16. picture: where it is drawn, None for nowhere.
    """

    source: str
    data: str
    device: torch.device
    sizes: list[int]
    products: list[Product]
    twins: list[Product]
    formats: list[FormatTable]
    layer_error: torch.Tensor
    bf16_layer_error: torch.Tensor
    picture: Path | None
    seconds: float

    @property
    def worst_arithmetic(self) -> float:
        """The worst row of all products, twins and formats; NaN if any of them holds one."""
        products = [*self.products, *self.twins, *(p for table in self.formats for p in table.products.values() if p)]
        return float(torch.cat([product.errors.arithmetic for product in products]).max())


def print_report(console: Console, result: DemoResult) -> None:
    """Everything in `result` but the picture."""
    on_gpu = result.device.type == "cuda"
    where = torch.cuda.get_device_name(result.device) if on_gpu else "the CPU, with the reference backend"
    console.print(f"\n[bold]{result.source}.[/]")
    console.print(f"A top-{TOP_K} router with seeded random weights. Runs on {where}.\n")
    _print_groups(console, result.sizes)
    _print_memory(console, result)
    for product, twin in zip(result.products, result.twins, strict=True):
        _print_errors(console, product, twin, result)
    for table in result.formats:
        print_formats(console, table, "GPU" if on_gpu else "reference")
    _print_summary(console, result)


def _print_groups(console: Console, sizes: list[int]) -> None:
    table = _table("Rows of every expert")
    for heading, justify in (("expert", "right"), ("rows", "right"), ("", "left"), ("padding", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    longest = padded_rows([max(sizes)]) or 1
    row, padding = "#-" if console.options.ascii_only else "█░"
    for g, size in enumerate(sizes):
        padded = padded_rows([size])
        full = round(BAR_WIDTH * size / longest)
        hatched = round(BAR_WIDTH * padded / longest) - full
        bar = f"[cyan]{row * full}[/][red]{padding * hatched}[/]"
        table.add_row(str(g), f"{size:,}", bar, f"+{padded - size}" if padded > size else "none")
    console.print(table, "")


def _print_memory(console: Console, result: DemoResult) -> None:
    rows, padded = sum(result.sizes), padded_rows(result.sizes)
    shapes = [product.gemm.w.shape for product in result.products]
    ragged_mb, padded_mb = (sum(activation_bytes(m, k, n) for _, n, k in shapes) / 1e6 for m in (rows, padded))
    console.print(
        f"[bold]Memory[/] of activations, scales and results: {ragged_mb:.1f} MB for {rows:,} rows. "
        f"Padded to {PADDED_TO}: {padded_mb:.1f} MB for {padded:,} rows, "
        f"[bold]{padded / rows - 1:.1%} more[/], and a pass over the activations to copy them there.\n"
    )


def _print_errors(console: Console, product: Product, twin: Product, result: DemoResult) -> None:
    num_groups, n, k = product.gemm.w.shape
    m = product.gemm.x.shape[0]
    table = _table(f"{product.name.capitalize()}, ({m:,}, {k}) x {num_groups} of ({n}, {k}): error of a row in %")
    for heading in ("expert", "rows"):
        table.add_column(heading, justify="right")
    columns = []
    for data, errors in ((result.data, product.errors), ("random", twin.errors)):
        for heading, column, statistic in (
            ("vs bf16", errors.against_bf16, torch.median),
            ("worst row", errors.against_bf16, torch.max),
            ("vs float64", errors.against_exact, torch.median),
        ):
            table.add_column(f"{data}\n{heading}", justify="right", style="dim" if data == "random" else "")
            columns.append([_percent(statistic(rows)) if len(rows) else "-" for rows in column.split(result.sizes)])
    for g, cells in enumerate(zip(*columns, strict=True)):
        table.add_row(str(g), f"{result.sizes[g]:,}", *cells)
    console.print(table)
    real_ratio, random_ratio = outlier_ratio(product.gemm.x), outlier_ratio(twin.gemm.x)
    console.print(
        f"  [dim]bf16 itself is {_percent(product.errors.bf16.median())}% from float64. "
        f"Largest over rms of 128 activations: {real_ratio:.1f} {result.data}, {random_ratio:.1f} random. "
        "All but the worst row are medians.[/]\n"
    )


def _print_summary(console: Console, result: DemoResult) -> None:
    fp8, bf16 = (
        f"{_percent(error.median())}% per token in the median, {_percent(error.max())}% at worst"
        for error in (result.layer_error, result.bf16_layer_error)
    )
    console.print(
        "[bold]The whole layer[/], un-permuted and gated, against float64 with nothing quantized: "
        f"{fp8} (in bf16: {bf16})."
    )
    console.print(
        "[bold]Arithmetic[/]: every row of all products, in every format, is within "
        f"{_percent(result.worst_arithmetic)}% of the float64 product of the same codes. "
        "The rest of the errors above is the formats' own."
    )
    parts = [f"{product.name} {in_time(product.gemm.gemm_seconds)}" for product in result.products]
    quantizing = sum(product.gemm.quantize_seconds for product in result.products)
    console.print(
        f"[bold]Time[/]: {', '.join(parts)}, quantizing the activations {in_time(quantizing)}; "
        f"{result.seconds:.1f} s in all."
    )


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)


def _percent(value: torch.Tensor | float) -> str:
    return f"{100 * float(value):.2f}"
