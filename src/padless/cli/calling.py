"""Options that several commands have, and calls of what a command does, imported when it is called."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from padless.options import check_file, check_folder, check_picture

DEFAULT_OUT = Path("padless-out")


def _checked(check: Callable[[str, Path], None], option: str) -> Callable[[Path | None], Path | None]:
    """A callback of an option, which hands on what passes the check."""

    def callback(path: Path | None) -> Path | None:
        if path is not None:
            check(option, path)
        return path

    return callback


def folder_option(help: str) -> Any:
    """``--out``, a folder."""
    return typer.Option("--out", help=help, callback=_checked(check_folder, "--out"))


def file_option(help: str) -> Any:
    """``--out``, a file."""
    return typer.Option("--out", help=help, callback=_checked(check_file, "--out"))


def picture_option(name: str, help: str) -> Any:
    """A picture that is drawn."""
    return typer.Option(name, help=help, callback=_checked(check_picture, name))


OutDir = Annotated[Path, folder_option("Folder for what is written.")]


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
