"""Tables of records as Markdown, and the sentences around them.

A line never begins with a plus that Markdown would take for a list, and the columns of a table are aligned in its
source: the README is read as a file too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from padless.bench.report.table import Table
from padless.bench.results import Record, failures

WIDTH = 118
_GLUE = "\0"  # stands for a space at which no line may end
_SHOWN_FAILURE = 160  # characters


def failure_sentence(records: Sequence[Record]) -> str:
    """The number of failures in the records and the first of them; nothing where all went well."""
    found = failures(records)
    if not found:
        return ""
    first = textwrap.shorten(found[0].replace("|", "/"), _SHOWN_FAILURE, placeholder=" ...")
    return f"**{len(found)} went wrong**, the first: {first}."


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
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    return lines.replace(_GLUE, " ")


def bullets(items: Sequence[str]) -> str:
    """A Markdown list."""
    return "\n".join(paragraph(item, first="- ", rest="  ") for item in items)


def markdown(table: Table) -> str:
    """A table, the first column to the left and the others to the right."""
    header, rows = [column.heading for column in table.columns], table.rows
    widths = [max(3, *(len(row[i]) for row in (header, *rows))) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(line(cells) for cells in (header, rule, *rows))
