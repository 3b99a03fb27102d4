"""Packages in the place of vLLM and SGLang that hold the names padless' plug-ins import, read from their source.

Each name is an empty class; any of them can be left out, as another version would. The few that a plug-in calls when an
engine starts, `CALLED`, do what the engine's do.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support import stand_in_modules

INTEGRATIONS = Path(__file__).parents[2] / "src/padless/integrations"
Name = tuple[str, str]  # module, attribute


class Door(NamedTuple):
    """versions: (served, too old, too new). asked: what the engine calls where the user named padless."""

    package: str
    versions: tuple[str, str, str]
    called: dict[Name, Callable[[dict[str, Any]], Any]]
    asked: Callable[[dict[str, Any]], Any]

    @property
    def plugin(self) -> str:
        return f"padless.integrations.{self.package}"


class _Empty(type):
    """Has every attribute: members of enumerations are taken while padless' modules are imported."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return (cls.__name__, name)


def names(package: str) -> list[Name]:
    """What padless.integrations.<package> imports of the engine, but for vLLM's exchange, which no engine imports."""
    files = [path for path in (INTEGRATIONS / package).glob("*.py") if path.name != "exchange.py"]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    return sorted(
        {
            (node.module or "", alias.name)
            for node in nodes
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package
            for alias in node.names
        }
    )


@contextmanager
def installed(door: Door, version: str | None = None, without: Name | str | None = None) -> Iterator[dict[str, Any]]:
    """The package in sys.modules, with a registry that `called` fills.

    without: a name, or a module with all below it, that this version does not have.
    """
    registry: dict[str, Any] = {}
    contents: dict[str, dict[str, Any]] = {door.package: {"__version__": version or door.versions[0]}}
    for module, name in names(door.package):
        if without == module or (isinstance(without, str) and module.startswith(without + ".")):
            contents.setdefault(module.rpartition(".")[0], {})
            continue
        held = contents.setdefault(module, {})
        if without != (module, name):
            called = door.called.get((module, name))
            held[name] = called(registry) if called else _Empty(name, (), {})
    with pytest.MonkeyPatch.context() as patch:
        forget(door, patch)
        stand_in_modules.put(patch, contents)
        yield registry
        for module in [module for module in sys.modules if module.startswith(door.plugin)]:
            del sys.modules[module]


def forget(door: Door, patch: pytest.MonkeyPatch) -> None:
    """Neither the engine nor padless' plug-in is imported, until the patch is undone."""
    for module in [m for m in sys.modules if m.split(".")[0] == door.package or m.startswith(door.plugin)]:
        patch.delitem(sys.modules, module)


def start(door: Door) -> None:
    """What the engine does in each of its processes."""
    importlib.import_module(door.plugin).register()


# --- vLLM ------------------------------------------------------------------------------------------------

_QUANTIZATION = "vllm.model_executor.layers.quantization"


def _register_quantization_config(registry: dict[str, Any]) -> Any:
    return lambda name: lambda cls: registry.setdefault(name, cls)


VLLM = Door(
    package="vllm",
    versions=("0.33.0", "0.25.0", "0.34.0"),
    called={(_QUANTIZATION, "register_quantization_config"): _register_quantization_config},
    asked=lambda registry: registry["padless"].from_config({"quant_method": "neither"}),
)

# --- SGLang ----------------------------------------------------------------------------------------------

_RUNNER = "sglang.srt.layers.moe.moe_runner"
_HOOKS = "sglang.srt.plugins.hook_registry"


def _hook_registry(registry: dict[str, Any]) -> Any:
    hooks = registry.setdefault("hooks", {})
    return type("HookRegistry", (), {"register": staticmethod(lambda target, hook, kind: hooks.update({target: hook}))})


SGLANG = Door(
    package="sglang",
    versions=("0.5.23", "0.5.22.post1", "0.6.0"),
    called={
        (_RUNNER, "register_moe_runner_core"): lambda registry: registry.__setitem__,
        ("sglang.srt.arg_groups.choices", "add_moe_runner_backend_choices"): lambda registry: (
            registry.setdefault("choices", []).extend
        ),
        (_HOOKS, "HookRegistry"): _hook_registry,
    },
    asked=lambda registry: registry["padless"](None),
)
DOORS = {"vllm": VLLM, "sglang": SGLANG}
