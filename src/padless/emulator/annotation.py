"""Reports as GitHub's workflow commands, which mark the lines of a pull request: `::error file=..,line=..::..`."""

from __future__ import annotations

import re
from pathlib import Path

from padless.emulator.order.reports import Report
from padless.emulator.order.tolerated import TOLERATED


def annotation(report: Report, ptx: str) -> str:
    """The command for a report: at its line of source where there is one in this folder, else at its line of `ptx`.

    Of an inlined function the innermost line in this folder is taken.
    """
    file, line = here(ptx) or ptx, report.ptx_line
    for name, number in re.findall(r"([^\s()]+):(\d+)", report.source):
        if found := here(name):
            file, line = found, int(number)
            break
    level = "warning" if report.kind == TOLERATED else "error"
    where = ",".join(f"{key}={escaped(str(value), ',:')}" for key, value in (
        ("file", file), ("line", line), ("title", report.kind)))  # fmt: skip
    return f"::{level} {where}::{escaped(str(report))}"


def here(name: str) -> str:
    """The file's path from this folder; "" for one that is not in it."""
    path = Path(name).resolve()
    inside = path.is_relative_to(Path.cwd()) and path.is_file()
    return str(path.relative_to(Path.cwd())) if inside else ""


def escaped(text: str, more: str = "") -> str:
    """As workflow commands want it; ``more``: characters that a property cannot have."""
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text
