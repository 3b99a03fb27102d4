"""Progress of a long run: a bar on a terminal, lines where the output is a file or a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_S = 15.0  # between two lines


@contextmanager
def progress(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields what to call when one of ``total`` is done."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)
        return
    begin = shown = time.monotonic()
    done = 0

    def advance() -> None:
        nonlocal shown, done
        done += 1
        if (now := time.monotonic()) - shown >= LINE_S:
            shown = now
            console.print(f"{now - begin:6.0f} s  {what}: {done} of {total}", highlight=False, markup=False)

    yield advance
