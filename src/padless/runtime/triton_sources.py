"""Hashes of what Triton compiles, from this package's own text: neither Triton nor torch is imported for them."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

_PACKAGE = Path(__file__).parents[1]


class _Module(NamedTuple):
    """Names at the top of a module: statements that give them values, and full names of those that are imported."""

    statements: dict[str, list[ast.stmt]]
    imports: dict[str, str]


@lru_cache(maxsize=1)
def own_digests() -> dict[str, str]:
    """`triton_digests` of this package as it is installed."""
    files = _PACKAGE.rglob("*.py")
    return triton_digests({file.relative_to(_PACKAGE).as_posix(): file.read_text("utf-8") for file in files})


def triton_digests(texts: Mapping[str, str]) -> dict[str, str]:
    """A hash of each module that has functions for Triton, by the module's path without "triton": "moe/route".

    It is of these functions and of what they use of this package, directly or through another: functions, constants and
    what constants are made of. Comments, docstrings, layout and all other code are not in it.

    texts: of modules, by their path under ``padless/``.
    """
    package, digests = _Package(texts), {}
    for path in sorted(path for path, text in texts.items() if "@triton.jit" in text):
        if code := package.code_for_triton(_dotted(path)):
            name = path.removesuffix(".py").replace("/triton/", "/")
            digests[name] = hashlib.sha256("\n".join(sorted(code)).encode()).hexdigest()[:12]
    return digests


class _Package:
    """Modules by their full names, each parsed once it is needed."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = {_dotted(path): text for path, text in texts.items()}
        self._modules: dict[str, _Module] = {}
        self._known: dict[str, tuple[str, list[str]]] = {}

    def code_for_triton(self, module: str) -> set[str]:
        """Of a module's functions for Triton, and of all that they use; empty where it has none."""
        names = self._module(module).statements.items()
        waiting = [f"{module}.{name}" for name, statements in names if any(map(_is_for_triton, statements))]
        used = dict[str, str]()
        while waiting:
            if (full_name := waiting.pop()) not in used:
                used[full_name], uses = self._code_of(full_name)
                waiting += uses
        return set(used.values())

    def _code_of(self, full_name: str) -> tuple[str, list[str]]:
        """(the code behind a full name, what that uses). Of a module none; of another package's the name is all."""
        module, _, name = full_name.rpartition(".")
        if full_name in self._texts:
            return "", []
        if module not in self._texts:
            return full_name, []
        if full_name not in self._known:
            statements, imports = self._module(module)
            if name in imports:
                return "", [imports[name]]
            uses = [use for statement in statements[name] for use in _uses(statement, module, self._module(module))]
            self._known[full_name] = repr([_form(statement) for statement in statements[name]]), uses
        return self._known[full_name]

    def _module(self, module: str) -> _Module:
        if module not in self._modules:
            self._modules[module] = found = _Module({}, {})
            for statement in ast.parse(self._texts[module]).body:
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    start = f"{statement.module}." if isinstance(statement, ast.ImportFrom) else ""
                    found.imports.update({a.asname or a.name: start + a.name for a in statement.names})
                for name in _bound(statement):
                    found.statements.setdefault(name, []).append(statement)
        return self._modules[module]


def _dotted(path: str) -> str:
    return f"padless.{path.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")


def _is_for_triton(statement: ast.stmt) -> bool:
    decorators = statement.decorator_list if isinstance(statement, ast.FunctionDef) else []
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in decorators)


def _bound(statement: ast.stmt) -> set[str]:
    """Names that a statement gives a value."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _uses(statement: ast.stmt, module: str, of: _Module) -> Iterator[str]:
    """Full names of what a statement of a module uses that is not its own."""
    nodes = list(ast.walk(statement))
    own = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    imports = {name: full_name for name, full_name in of.imports.items() if name not in own}
    for node in nodes:
        if isinstance(node, ast.Name):
            if node.id in imports:
                yield imports[node.id]
            elif node.id in of.statements and node.id not in own:
                yield f"{module}.{node.id}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imports:
            yield f"{imports[node.value.id]}.{node.attr}"


def _form(node: Any) -> Any:
    """A syntax tree as tuples, the same in every version of Python: fields that hold something, and no docstrings."""
    if isinstance(node, ast.AST):
        fields = ((name, _form(value)) for name, value in ast.iter_fields(node))
        return type(node).__name__, *(field for field in fields if field[1] not in (None, []))
    if isinstance(node, list):
        return [_form(item) for item in node if not _is_docstring(item)]
    return node


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
