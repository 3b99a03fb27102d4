"""The page that says which paths have one set of bits names tests that exist, run on a CPU and compare bits."""

from __future__ import annotations

import ast
import re

import pytest

from support.ragged import ROOT

PAGE = (ROOT / "docs/one_set_of_bits.md").read_text()
LINES = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `([^`|]+)::(\w+)` \|$", PAGE, re.MULTILINE)


def function_of(path: str, name: str) -> ast.FunctionDef:
    tree = ast.parse((ROOT / path).read_text())
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


def test_all_lines_are_read() -> None:
    table = PAGE.partition("| path | with |")[2].partition("\n\n")[0]
    assert len(LINES) == table.count("\n") - 1 > 10


@pytest.mark.parametrize(("path", "test"), sorted({(path, test) for _, _, path, test in LINES}))
def test_a_line_names_a_test_that_runs_without_a_gpu(path: str, test: str) -> None:
    marks = [ast.unparse(mark) for mark in function_of(path, test).decorator_list]
    assert not any(mark.startswith("pytest.mark.gpu") or "skip" in mark for mark in marks), marks


@pytest.mark.parametrize("version", sorted({line[1].split(",")[0] for line in LINES}))
def test_versions_are_those_that_tests_run_with(version: str) -> None:
    """A pin of CI's environment, or the version that a stand-in was read in."""
    name, number = version.split(" ")
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    stands_in = ROOT / f"tests/support/{name.lower()}_seam.py"
    if stands_in.exists():
        assert f"{name} {number}" in stands_in.read_text().partition('"""\n')[0]
        assert all("stand-in" in line[1] for line in LINES if line[1].startswith(version))
    else:
        assert f"{name}=={number}" in pinned
