"""Comparisons of padless with its peers: columns, tables and sentences of what a record file holds of them."""

from __future__ import annotations

from collections.abc import Sequence

from measured_markdown import listed
from padless.bench.report.table import Column, Records, Table, axes, by_axes, table_of
from padless.bench.results import COMPARISONS, COPY, READ, Record, ratios

# What a column is called; a comparison that is not here keeps its title of COMPARISONS.
HEADINGS = {
    "pad_then_deepgemm": "pad + DeepGEMM",
    "deepgemm_on_padded": "DeepGEMM (padded)",
    "pad_then_padless": "pad + padless",
    "tma_adaptive_kernel": "paper's GEMM",
    "tma_adaptive": "paper's call",
    "deepgemm_masked": "DeepGEMM masked",
    "deepgemm": "DeepGEMM",
    "cublaslt_block": "cuBLASLt",
    "torch_rowwise": "torch (row scales)",
    "torch_bf16": "torch bf16",
    "mslk": "MSLK",
    "floor": "of floor",
    COPY: "of a copy",
    READ: "of a read",
}
# Limits: their ratios are shares of what is possible, not how many times faster padless is.
LIMITS = ("floor", COPY, READ)


def comparison_heading(title: str, numerator: str, denominator: str) -> str:
    """A comparison's name in a column or a sentence."""
    return HEADINGS.get(numerator, title.removesuffix(f" / {denominator}"))


def of_all(count: int, total: int) -> str:
    """Such as "all 576", "515 of 576" or "none of 576"."""
    return f"all {total}" if count == total else f"{count or 'none'} of {total}"


def comparison_columns(records: Records) -> list[Column]:
    """A column for every comparison that at least one record allows; the heading of one that not every record allows
    says how many do.
    """
    found = []
    for title, clock, top, bottom in COMPARISONS:

        def values(part: Records, clock: str = clock, top: str = top, bottom: str = bottom) -> list[float]:
            return ratios(part, clock, top, bottom)

        points = len(values(records))
        heading = comparison_heading(title, top, bottom)
        if points:
            heading += "" if points == len(records) else f" ({of_all(points, len(records))})"
            found.append(Column(heading, values, unit="" if top in LIMITS else "x"))
    return found


def comparison_table(records: Records, names: Sequence[str], columns: Sequence[Column]) -> Table:
    """A row for each value of the axes, the averages over its records; then the averages and the least of all."""
    shown = [*axes(*names), *columns]
    table = table_of("", shown, by_axes(records, names))
    blank = [""] * (len(names) - 1)
    for label, average in ((f"all {len(records)}", None), ("least", min)):
        cells = [column.cell(records, average, 3) if column.totals else "" for column in columns]
        table.rows.append([label, *blank, *cells])
    return table


def won_sentence(records: Sequence[Record]) -> str:
    """On how many points padless took less time than each contender, those of the same count together."""
    by_count: dict[str, list[str]] = {}
    for title, clock, numerator, denominator in COMPARISONS:
        values = ratios(records, clock, numerator, denominator)
        if values and numerator not in LIMITS:
            count = of_all(sum(value > 1 for value in values), len(values))
            by_count.setdefault(count, []).append(comparison_heading(title, numerator, denominator))
    parts = [f"on {count} points than {listed(names)}" for count, names in by_count.items()]
    return f"Faster {'; '.join(parts)}." if parts else ""
