"""Checks of a command's options, made before anything is computed. All raise ValueError of one sentence."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PICTURES = (".pdf", ".png", ".svg")


def check_folder(option: str, folder: Path) -> None:
    """Raises ValueError, before anything is computed, where a folder neither is nor can be made, or is read-only."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"{option} is {str(folder)!r}, and {str(there)!r} is no folder that can be written to")


def check_file(option: str, file: Path) -> None:
    """Raises ValueError, before anything is computed, where a file cannot be written or is a folder."""
    if file.is_dir():
        raise ValueError(f"{option} is {str(file)!r}, a folder; it must be a file")
    if not file.exists():
        check_folder(option, file.parent)
    elif not os.access(file, os.W_OK):
        raise ValueError(f"{option} is {str(file)!r}, which cannot be written to")


def check_picture(option: str, file: Path) -> None:
    """Raises ValueError, before anything is computed, for what no picture can be written to."""
    check_file(option, file)
    if file.suffix not in PICTURES:
        raise ValueError(f"{option} is {str(file)!r}; its name must end in {', '.join(PICTURES)}")


def check_alone(option: str, given: object, others: Mapping[str, object]) -> None:
    """Raises ValueError where an option is given with another that it leaves nothing to do for.

    given, others: their values; None, False and an empty list are those of options that were left out.
    """
    for other, value in others.items():
        if given and value is not None and value is not False and value != []:
            raise ValueError(f"{option} and {other} exclude each other; leave one of them out")
