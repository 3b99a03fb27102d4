"""Circles of imports: none among the modules of the package, at module level or inside a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter

from support.ragged import ROOT

PACKAGE = ROOT / "src" / "padless"


def sources() -> dict[str, str]:
    """The text of every module by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


@cache
def imported(text: str) -> frozenset[str]:
    """Dotted names that a module imports anywhere, but not for types alone."""
    return frozenset(_imported(ast.parse(text)))


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not isinstance(node, ast.expr):
            yield from _imported(node)


def circle(texts: Mapping[str, str]) -> list[str]:
    """Modules of which each imports the next, and the last the first; empty where there is none."""
    graph: dict[str, set[str]] = {}
    for module, text in texts.items():
        names = {name if name in texts else name.rpartition(".")[0] for name in imported(text)}
        graph[module] = names & texts.keys() - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circle_at_module_level_or_in_functions() -> None:
    assert circle(sources()) == []


def test_a_planted_circle_is_seen() -> None:
    texts, module, user = sources(), "padless.ops.outputs", "padless.ops.grouped_gemm"
    late = "\n\ndef _late():\n    from padless.ops.grouped_gemm import grouped_gemm\n"
    assert {module, user} <= set(circle(texts | {module: texts[module] + late}))
    for_types = late.replace("def _late():", "if TYPE_CHECKING:")
    assert circle(texts | {module: texts[module] + for_types}) == []
