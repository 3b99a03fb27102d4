"""Tables of the clock in the pages docs/timing_*.md, and whether they are those of today's model.

A tool that makes tables writes them into their page, between <!-- NAME:begin --> and <!-- NAME:end -->, and a record
with a digest of the model: its rates and its code, and the code of the tools that compare. A test holds page and record
together, and the record's digest beside today's.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "examination": ROOT / "docs" / "timing_errors.md",
    "deepgemm": ROOT / "docs" / "timing_deepgemm.md",
    "sm100": ROOT / "docs" / "timing_b200.md",
    "layers": ROOT / "docs" / "timing_b200.md",
    "models": ROOT / "docs" / "timing_b200_layers.md",
    "training": ROOT / "docs" / "timing_b200_training.md",
    "k96": ROOT / "docs" / "timing_b300.md",
}  # of each block
TIMING = ROOT / "src" / "padless" / "emulator" / "timing"
# Of a run, after it; kernel.py reckons with what runs say and is examined by its own tests.
SHOWN_ONLY = ("picture.py", "report.py", "trace.py", "diagnosis.py", "kernel.py", "__init__.py")


class Tables:
    """Lines that are printed as they come, and kept."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, *lines: str) -> None:
        for line in lines:
            print(line, flush=True)
            self.lines += line.split("\n")


def code_of(source: str) -> str:
    """A file's Python without comments, docstrings and the places of its lines."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return _dump(tree)


def _dump(node: Any) -> str:
    """A syntax tree in one line, as any version of Python writes it: what is empty is left out, since versions differ in
    which empty fields there are."""
    if isinstance(node, ast.AST):
        fields = [f"{name}={_dump(value)}" for name, value in ast.iter_fields(node) if value not in (None, [])]
        return f"{type(node).__name__}({', '.join(fields)})"
    return f"[{', '.join(map(_dump, node))}]" if isinstance(node, list) else repr(node)


def model_digest(*tools: str) -> str:
    """Of the clock's code and rates, and of these files of tools/."""
    paths = [path for path in sorted(TIMING.glob("*.py")) if path.name not in SHOWN_ONLY]
    paths += [ROOT / "tools" / name for name in tools]
    return hashlib.sha256("\n".join(code_of(path.read_text()) for path in paths).encode()).hexdigest()[:16]


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"


def read_block(name: str, page: Path | None = None) -> list[str]:
    """Lines between the marks of a block, in its page."""
    begin, end = _marks(name)
    return (page or PAGES[name]).read_text().split(begin)[1].split(end)[0].rstrip("\n").split("\n")


def write_block(name: str, lines: list[str], page: Path | None = None) -> None:
    """Lines put between the marks of a block, in its page, in place of what is there."""
    begin, end = _marks(name)
    page = page or PAGES[name]
    text = page.read_text()
    head, rest = text.split(begin)
    page.write_text(head + begin + "\n".join(lines).strip("\n") + "\n" + end + rest.split(end)[1])
