"""Counts lines of Python by wing, against the budgets of pyproject.toml.

    python tools/lines.py            prints the table; fails where a wing is more than ``tolerance`` over its budget

A wing is a list of globs of ``[tool.lines.wings]``; the first that fits a file has it. ``later`` are features beyond the
calls themselves: the last row is all of src without them, beside the goal for it.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Wing:
    """Lines of a part of the tree and what they may be."""

    name: str
    lines: int
    budget: int
    tolerance: float

    @property
    def is_over(self) -> bool:
        return self.lines > self.budget * (1 + self.tolerance)


def counted(root: Path) -> dict[str, int]:
    """Lines of every Python file of ``src``, by its path below ``src/padless``; ignored files are none."""
    package = root / "src" / "padless"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "*.py"],
        cwd=package,
        capture_output=True,
        text=True,
        check=False,
    )
    names = (
        listed.stdout.split("\0")
        if listed.returncode == 0
        else [str(p.relative_to(package)) for p in package.rglob("*.py")]
    )
    files = (package / name for name in sorted(names) if name)
    return {str(p.relative_to(package)): len(p.read_text().splitlines()) for p in files if p.is_file()}


def is_in(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatch(name, glob) for glob in globs)


def wings(lines: Mapping[str, int], settings: Mapping[str, Any]) -> list[Wing]:
    """The wings of ``settings`` in their order, then all without the later features. Raises ValueError for a file of
    no wing.
    """
    budgets, tolerance = settings["budgets"], settings["tolerance"]
    sums = dict.fromkeys(settings["wings"], 0)
    for name, count in lines.items():
        home = next((wing for wing, globs in settings["wings"].items() if is_in(name, globs)), None)
        if home is None:
            raise ValueError(f"{name} is in no wing; add it to [tool.lines.wings] of pyproject.toml")
        sums[home] += count
    sums["all without later features"] = sum(
        count for name, count in lines.items() if not is_in(name, settings["later"])
    )
    return [Wing(wing, count, budgets[wing], tolerance) for wing, count in sums.items()]


def main(root: Path = ROOT) -> int:
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["lines"]
    found = wings(counted(root), settings)
    print("lines of Python in src, and their budget")
    for wing in found:
        goal = f", goal {settings['goals'][wing.name]}" if wing.name in settings["goals"] else ""
        print(f"  {wing.name:<28}{wing.lines:>7} of {wing.budget}{goal}{'  OVER' if wing.is_over else ''}")
    over = [wing.name for wing in found if wing.is_over]
    if over:
        print(f"over budget by more than {settings['tolerance']:.0%}: {', '.join(over)}; cut, or raise the budget")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
