"""Packages that are not installed, as modules with the names that padless imports of them."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest


def put(patch: pytest.MonkeyPatch, contents: dict[str, dict[str, Any]]) -> None:
    """Puts modules and the packages above them into sys.modules. contents: module -> its names."""
    parts = [name.split(".") for name in contents]
    for name in sorted({".".join(part[:i]) for part in parts for i in range(1, len(part) + 1)}):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__dict__.update(contents.get(name, {}))
        patch.setitem(sys.modules, name, module)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
