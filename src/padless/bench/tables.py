"""Earlier names of what `padless.bench.report` has, for benchmarks that are no `Case` yet."""

from rich.table import Table as RichTable

from padless.bench.report.table import Table, caption, number
from padless.bench.report.terminal import rich_table
from padless.bench.report.terminal import show_failures as print_failures

__all__ = ["caption", "narrow_table", "number", "print_failures"]


def narrow_table(title: str, between: int = 2) -> RichTable:
    """A table with only `between` (1 or 2) spaces between its columns."""
    return rich_table(Table(title, [], between=between))
