"""Tables of records on the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from padless.bench.report.table import Records, Table
from padless.bench.results import failures

_PIPE_WIDTH = 100
_SHOWN_FAILURES = 10


def wide_console() -> Console:
    """The terminal; or, where the output goes to a file or a pipe, something wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_WIDTH)


def rich_table(table: Table) -> RichTable:
    """The table as rich draws it."""
    style: dict[str, Any] = {}
    if table.between:  # a dozen columns fit into 100 characters
        style = {"box": box.SIMPLE_HEAD, "padding": (0, 0, 0, table.between - 1), "show_edge": False}
    shown = RichTable(title=table.title, caption=table.caption or None, **style)
    for column in table.columns:
        shown.add_column(column.heading, justify="left" if column.left else "right", max_width=column.width)
    for row in table.rows:
        shown.add_row(*row)
    return shown


def show(console: Console, *shown: Table | str) -> None:
    """Prints tables, and sentences between them."""
    for one in shown:
        if isinstance(one, Table):
            console.print(rich_table(one))
        else:
            console.print(one, highlight=False, markup=False)


def show_failures(console: Console, records: Records) -> None:
    """Prints failures, if there are any."""
    found = failures(records)
    for line in found[:_SHOWN_FAILURES]:
        console.print(line, style="red", markup=False)
    if len(found) > _SHOWN_FAILURES:
        console.print(f"and {len(found) - _SHOWN_FAILURES} more", style="red")
