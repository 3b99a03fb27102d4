"""Versions: the package's own, and those of installed packages."""

from __future__ import annotations

from importlib import metadata

__version__ = "0.1.0"


def package_version(name: str) -> str | None:
    """The installed version of a package; None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
