"""Options that several commands have, and calls of what a command does, imported when it is called."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

OutDir = Annotated[Path, typer.Option("--out", help="Folder for what is written.")]
DEFAULT_OUT = Path("padless-out")


def check_folder(option: str, folder: Path) -> None:
    """Raises ValueError, before anything is computed, where a folder neither is nor can be made, or is read-only."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"{option} is {str(folder)!r}, and {str(there)!r} is no folder that can be written to")


def load(module: str, name: str) -> Any:
    """module.name, with a missing third-party package as a ValueError that says which."""
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ValueError(f"this command needs {error.name}, which is not installed here") from None


def call(module: str, name: str, **arguments: Any) -> None:
    """Call module.name; what it returns, if an integer, is the exit code."""
    function: Callable[..., Any] = load(module, name)
    result = function(**arguments)
    if isinstance(result, int) and result:
        raise typer.Exit(result)
