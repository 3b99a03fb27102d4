"""Markdown paragraphs and tables of benchmark records: text only, knows no file and no section of the README.

A line never begins with a plus that Markdown would take for a list, and the columns of a table are aligned in its
source: the README is read as a file too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from padless.bench.results import COMPARISONS, COPY, READ, Record, failures, ratios, tflops
from padless.testing.timing import geomean

WIDTH = 118
_GLUE = "\0"  # stands for a space at which no line may end
_SHOWN_FAILURE = 160  # characters

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


@dataclass(frozen=True)
class Column:
    """A column of a table: one number of each record that has it.

    average: what a row shows of its records' numbers. totals: whether the rows over all records have it too.
    """

    heading: str
    values: Callable[[Sequence[Record]], list[float]]
    unit: str = ""
    digits: int = 2
    average: Callable[[Sequence[float]], float] = geomean
    totals: bool = True

    def cell(self, values: Sequence[float], show: Callable[[Sequence[float]], float], digits: int) -> str:
        return f"{show(values):.{digits}f}{self.unit}" if values else "-"


SAVED = Column(
    "saved", lambda records: [r["memory_saving_percent"] for r in records], "%", 1, fmean, totals=False
)
TFLOPS = Column(
    "TFLOP/s",
    lambda records: [rate for r in records if (rate := tflops(r)) is not None],
    digits=0,
    totals=False,
)


def comparison_columns(records: Sequence[Record]) -> list[Column]:
    """A column for every comparison that at least one record allows; the heading of one that not every record allows
    says how many do.
    """
    found = []
    for title, clock, numerator, denominator in COMPARISONS:

        def values(
            part: Sequence[Record], clock: str = clock, top: str = numerator, bottom: str = denominator
        ) -> list[float]:
            return ratios(part, clock, top, bottom)

        points = len(values(records))
        heading = _heading(title, numerator, denominator)
        if points:
            heading += "" if points == len(records) else f" ({of_all(points, len(records))})"
            found.append(Column(heading, values, "" if numerator in LIMITS else "x"))
    return found


def _heading(title: str, numerator: str, denominator: str) -> str:
    return HEADINGS.get(numerator, title.removesuffix(f" / {denominator}"))


def comparison_table(records: Sequence[Record], axes: Sequence[str], columns: Sequence[Column]) -> str:
    """A row for each value of the axes, the averages over its records; then the averages and the least of all."""
    rows = []
    for key in sorted({tuple(r["point"][axis] for axis in axes) for r in records}):
        part = [r for r in records if tuple(r["point"][axis] for axis in axes) == key]
        cells = [column.cell(column.values(part), column.average, column.digits) for column in columns]
        rows.append([*map(str, key), *cells])
    blank = [""] * (len(axes) - 1)
    for label, least in ((f"all {len(records)}", False), ("least", True)):
        cells = [
            column.cell(column.values(records), min if least else column.average, 3) if column.totals else ""
            for column in columns
        ]
        rows.append([label, *blank, *cells])
    return table([*axes, *(column.heading for column in columns)], rows)


def won_sentence(records: Sequence[Record]) -> str:
    """On how many points padless took less time than each contender, those of the same count together."""
    by_count: dict[str, list[str]] = {}
    for title, clock, numerator, denominator in COMPARISONS:
        values = ratios(records, clock, numerator, denominator)
        if values and numerator not in LIMITS:
            count = of_all(sum(value > 1 for value in values), len(values))
            by_count.setdefault(count, []).append(_heading(title, numerator, denominator))
    parts = [f"on {count} points than {listed(names)}" for count, names in by_count.items()]
    return f"Faster {'; '.join(parts)}." if parts else ""


def failure_sentence(records: Sequence[Record]) -> str:
    """How much is wrong in the records and the first of it; nothing where all went well."""
    found = failures(records)
    if not found:
        return ""
    first = textwrap.shorten(found[0].replace("|", "/"), _SHOWN_FAILURE, placeholder=" ...")
    return f"**{len(found)} went wrong**, the first: {first}."


def of_all(count: int, total: int) -> str:
    """Such as "all 576", "515 of 576" or "none of 576"."""
    return f"all {total}" if count == total else f"{count or 'none'} of {total}"


def listed(names: Sequence[str]) -> str:
    """Such as "a", "a and b" or "a, b and c"."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def span(values: Sequence[float], spec: str = "") -> str:
    """Least to most of the values, "2 to 5", or the one there is; "-" of nothing."""
    if not values:
        return "-"
    ends = dict.fromkeys(format(value, spec) for value in (min(values), max(values)))
    return " to ".join(ends)


def paragraph(*sentences: str, first: str = "", rest: str = "") -> str:
    """Sentences as wrapped lines; empty ones are left out. first, rest: what the lines begin with."""
    text = " ".join(sentence for sentence in sentences if sentence).replace(" + ", f"{_GLUE}+ ")
    lines = textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace(_GLUE, " ")


def bullets(items: Sequence[str]) -> str:
    """A Markdown list."""
    return "\n".join(paragraph(item, first="- ", rest="  ") for item in items)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column to the left and the others to the right."""
    widths = [max(3, *(len(row[i]) for row in (header, *rows))) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(line(cells) for cells in (header, rule, *rows))
