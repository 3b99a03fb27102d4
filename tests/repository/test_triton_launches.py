"""Triton's kernels are launched by `launches.launch`, or ask `driver.is_made` first: a recorder sees all of a call."""

from __future__ import annotations

import ast
from pathlib import Path

import padless

SOURCES = Path(padless.__file__).parent
# Calls that are never recorded: of benchmarks, and collective ones.
ELSEWHERE = ("bench", "distributed")


def unseen(text: str) -> list[int]:
    """Lines with a call of ``kernel[grid](..)`` in functions that do not ask `is_made`."""
    found = []
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        if any(isinstance(call.func, ast.Name) and call.func.id == "is_made" for call in calls):
            continue
        found += [call.lineno for call in calls if isinstance(call.func, ast.Subscript)]
    return found


def test_no_launch_is_unseen() -> None:
    files = [
        path
        for path in SOURCES.rglob("*.py")
        if "triton" in path.parts and path.relative_to(SOURCES).parts[0] not in ELSEWHERE
    ]
    assert len(files) >= 15
    found = {str(path): unseen(path.read_text()) for path in files}
    # One that is launched for the caller of `launch`, where something stands in for a kernel.
    assert {path: lines for path, lines in found.items() if lines and not path.endswith("launches.py")} == {}


def test_a_planted_launch_is_seen() -> None:
    text = "def f(x):\n    _kernel[(3,)](x, N=4)\n"
    assert unseen(text) == [2]
    assert unseen(text.replace("    _kernel", "    if is_made(None): _kernel")) == []
