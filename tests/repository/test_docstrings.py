"""Docstrings: a noun or a verb comes first, not a question."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from support.ragged import ROOT

QUESTIONS = {"how", "that", "what", "whatever", "when", "where", "which", "who", "whoever", "whose", "why"}
# "Whether .." is the usual beginning for a function that returns a bool, and for nothing else.
MODULES_TOO = QUESTIONS | {"whether", "if"}
EMULATOR = ROOT / "src" / "padless" / "emulator"


def questions(path: Path, text: str, *, members: bool = True) -> list[str]:
    """Places of docstrings of a file that begin with a question; members: of functions and classes too."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) or not (doc := ast.get_docstring(node)):
            continue
        is_module = isinstance(node, ast.Module)
        first = doc.split(maxsplit=1)[0].strip(".,:'s").lower()
        if first in (MODULES_TOO if is_module else QUESTIONS) and (is_module or members):
            line = 1 if isinstance(node, ast.Module) else node.lineno
            found.append(f"{path.relative_to(ROOT)}:{line}: {doc.splitlines()[0]}")
    return found


def python_files() -> list[Path]:
    folders = ("src", "tools", "tests", "docs/learn")
    if not (ROOT / ".git").exists():
        return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name.endswith(".py")]
    return [path for path in paths if path.is_file()]


def test_docstrings_begin_with_a_noun_or_a_verb():
    """Of modules, and of the functions and classes of package and tools; those of the emulator are left as they are."""
    found = []
    for path in python_files():
        if EMULATOR not in path.parents:
            found += questions(path, path.read_text(), members=ROOT / "tests" not in path.parents)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('"""What a call does."""', 1),
        ('"""Whether it can."""\ndef f():\n    """Whether it can."""', 1),
        ('"""Checks."""\nclass C:\n    """Which one.\n\n    More."""\n    def f(self):\n        """How."""', 2),
        ('"""Whatsoever, however."""\ndef f():\n    """Returns what it was."""', 0),
    ],
)
def test_a_question_is_seen(text, count):
    assert len(questions(ROOT / "x.py", text)) == count
