"""Limits of the tree: how much lies at the root of the package and in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.ragged import ROOT

PACKAGE = ROOT / "src" / "padless"
MOST_MODULES, MOST_FOLDERS, MOST_FILES = 10, 16, 16


def over_the_limits(package: Path) -> list[str]:
    """Sentences about what is too much; folders of the emulator may have more files."""
    files = [p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts and p.suffix != ".pyc"]
    modules = [p for p in files if p.parent == package and p.suffix == ".py"]
    folders = {p.relative_to(package).parts[0] for p in files if p.parent != package}
    found = []
    if len(modules) > MOST_MODULES:
        found.append(f"{len(modules)} modules at the root, {MOST_MODULES} are allowed")
    if len(folders) > MOST_FOLDERS:
        found.append(f"{len(folders)} folders at the root, {MOST_FOLDERS} are allowed")
    for folder in sorted({p.parent for p in files}):
        inside = sum(p.parent == folder for p in files)
        name = folder.relative_to(package)
        if inside > MOST_FILES and name.parts[:1] != ("emulator",):
            found.append(f"{name} has {inside} files, {MOST_FILES} are allowed")
    return found


def test_the_package_stays_within_its_limits():
    assert over_the_limits(PACKAGE) == []


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([f"m{i}.py" for i in range(11)], "11 modules at the root, 10 are allowed"),
        ([f"f{i}/x.cu" for i in range(17)], "17 folders at the root, 16 are allowed"),
        ([f"a/b/{i}.cuh" for i in range(17)], "a/b has 17 files, 16 are allowed"),
        ([f"emulator/b/{i}.py" for i in range(17)] + [f"a/{i}.py" for i in range(16)], None),
    ],
)
def test_what_is_too_much_is_seen(tmp_path, names, found):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert over_the_limits(tmp_path) == ([found] if found else [])
