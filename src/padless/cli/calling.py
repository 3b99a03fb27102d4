"""Options that several commands have, and calls of what a command does, imported when it is called."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from padless.options import check_folder

DEFAULT_OUT = Path("padless-out")


def path_option(option: str, check: Callable[[str, Path], None], help: str) -> Any:
    """An option whose path must pass the check before anything is computed."""

    def callback(path: Path | None) -> Path | None:
        if path is not None:
            check(option, path)
        return path

    return typer.Option(option, help=help, callback=callback)


OutDir = Annotated[Path, path_option("--out", check_folder, "Folder for what is written.")]


def load(module: str, name: str) -> Any:
    """module.name."""
    return getattr(importlib.import_module(module), name)


def call(module: str, name: str, **arguments: Any) -> None:
    """Call module.name; what it returns, if an integer, is the exit code."""
    function: Callable[..., Any] = load(module, name)
    result = function(**arguments)
    if isinstance(result, int) and result:
        raise typer.Exit(result)
