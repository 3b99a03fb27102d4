"""Prints how many files and lines of Python every folder has: of src/padless, and tests and tools as a whole.

Nothing is allowed or refused here: sizes are for readers of a change.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/padless")
SHORT = 60  # lines: a file below might be read with its neighbours


def counted(root: Path) -> dict[Path, int]:
    """Lines of every Python file that git does not ignore, by its path from the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "*.py"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    found = (
        listed.stdout.split("\0") if listed.returncode == 0 else [str(p.relative_to(root)) for p in root.rglob("*.py")]
    )
    return {
        Path(name): len((root / name).read_text().splitlines()) for name in sorted(found) if (root / name).is_file()
    }


def folder_of(file: Path) -> str:
    """The row of a file: its folder of src/padless, or the first folder of the tree."""
    if file.is_relative_to(PACKAGE):
        parts = file.relative_to(PACKAGE).parts
        return parts[0] if len(parts) > 1 else "(root of the package)"
    return file.parts[0] if len(file.parts) > 1 else "(root)"


def table(lines: dict[Path, int]) -> list[str]:
    """Rows of files and lines, largest first: the package's folders with their sum, then the rest of the tree."""
    files, sums = Counter[str](), Counter[str]()
    for file, count in lines.items():
        files[folder_of(file)] += 1
        sums[folder_of(file)] += count
    inside = {folder_of(file) for file in lines if file.is_relative_to(PACKAGE)}
    own = {file: count for file, count in lines.items() if file.is_relative_to(PACKAGE)}
    short = sum(count < SHORT for count in own.values())
    rows = [(name, files[name], sums[name]) for name, _ in sums.most_common() if name in inside]
    rows.append((f"src/padless ({short} files below {SHORT} lines)", len(own), sum(own.values())))
    rows += [(name, files[name], sums[name]) for name, _ in sums.most_common() if name not in inside]
    return [f"  {name:<44}{number:>5} files{count:>8} lines" for name, number, count in rows]


def main(root: Path = ROOT) -> int:
    """Prints the table."""
    print("\n".join(["Python:", *table(counted(root))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
