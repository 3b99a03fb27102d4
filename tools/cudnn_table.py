"""The table of docs/emulator_foreign.md that compares cuDNN's kernel with padless's, from the newest record.

`python tools/cudnn_table.py --write` writes it anew.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = Path("docs/emulator_foreign.md")
BEGIN, END = "<!-- cudnn:begin -->\n", "<!-- cudnn:end -->"


def newest() -> Path:
    """The record to write from."""
    return max((ROOT / "docs/measured").glob("*-cudnn-emulator.json"))


def table(record: dict[str, Any]) -> str:
    """A sentence and a row for every case."""
    cases, packages = record["cases"], record["about"]["packages"]
    same = sum(not c["error"] and any(c["bytes"].values()) and not any(c["differing"].values()) for c in cases)
    total = sum(sum(c["bytes"].values()) for c in cases)
    by = ", ".join(f"{name} {version}" for name, version in packages.items())
    heads = ("call", "operands", "D", "M x N x K, groups", "bytes that differ", "cuDNN's options", "cluster", "reports")
    rows = [
        f"{same} of {len(cases)} calls give the same bytes in every output, {total:,} bytes in all ({by}; "
        f"{record['about']['date']}).",
        "",
        f"| {' | '.join(heads)} |",
        "|" + "---|" * len(heads),
    ]
    for c in cases:
        m, n, k, groups = c["shape"]
        differing = c["error"] or f"{sum(c['differing'].values())} of {sum(c['bytes'].values()):,}"
        reports = ", ".join(c["reports"]) or "none"
        cluster = " x ".join(map(str, c["cluster"][:2]))
        where = f"| {c['case']} | {c['format']} | {c['d']} | {m} x {n} x {k}, {groups} "
        rows.append(f"{where}| {differing} | {c['options']} | {cluster} | {reports} |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """The page with the table of the newest record."""
    path = newest()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    link = f"[Record](measured/{path.name}): "
    return before + BEGIN + link + table(json.loads(path.read_text())) + END + after


if __name__ == "__main__":
    page = (ROOT / PAGE).read_text()
    if sys.argv[1:] == ["--write"]:
        (ROOT / PAGE).write_text(with_table(page))
    else:
        print(with_table(page))
