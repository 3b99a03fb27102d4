"""Circles of imports: none among the modules of the package, at module level, inside a function or for types."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter

from support.ragged import ROOT

PACKAGE = ROOT / "src" / "padless"
# Imports for types alone that close a circle: the public signature of `moe` names the exchange that calls it back.
ALLOWED = {
    ("padless.moe.layer", "padless.distributed.expert_parallel"),
    ("padless.distributed.layer", "padless.distributed.expert_parallel"),
}


def sources() -> dict[str, str]:
    """The text of every module by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


@cache
def imported(text: str) -> frozenset[str]:
    """Dotted names that a module imports anywhere, also for types alone."""
    return frozenset(_imported(ast.parse(text)))


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
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
        # The package itself loads its modules when a name of theirs is asked for.
        allowed = {target for user, target in ALLOWED if user == module}
        graph[module] = names & texts.keys() - {module, PACKAGE.name} - allowed
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circle() -> None:
    assert circle(sources()) == []


def test_what_is_allowed_is_needed_and_for_types_alone() -> None:
    texts = sources()
    for user, target in ALLOWED:
        line = f"    from {target} import "
        (at,) = (i for i, text in enumerate(texts[user].splitlines()) if text.startswith(line))
        assert texts[user].splitlines()[at - 1] == "if TYPE_CHECKING:"


def test_a_planted_circle_is_seen() -> None:
    texts, module, user = sources(), "padless.ops.outputs", "padless.ops.grouped_gemm"
    late = "\n\ndef _late():\n    from padless.ops.grouped_gemm import grouped_gemm\n"
    assert {module, user} <= set(circle(texts | {module: texts[module] + late}))
    for_types = late.replace("def _late():", "if TYPE_CHECKING:")
    assert {module, user} <= set(circle(texts | {module: texts[module] + for_types}))
