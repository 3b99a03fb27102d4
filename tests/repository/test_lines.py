"""Budgets of lines: every file counts once, and what is over budget fails."""

from __future__ import annotations

import tomllib

import pytest

import lines as tool
from support.ragged import ROOT

SETTINGS = {
    "tolerance": 0.1,
    "wings": {"front": ["cli/*"], "rest": ["*"]},
    "later": ["rest/new*"],
    "budgets": {"front": 10, "rest": 20, "all without later features": 25},
}


def test_the_tree_is_within_its_budgets(capsys):
    assert tool.main() == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["lines"]
    assert all(wing in printed for wing in settings["budgets"])
    lines = tool.counted(ROOT)
    assert sum(wing.lines for wing in tool.wings(lines, settings)[:-1]) == sum(lines.values())
    assert lines["__init__.py"] == len((ROOT / "src/padless/__init__.py").read_text().splitlines())


@pytest.mark.parametrize(("rest", "over"), [(22, []), (23, ["rest"]), (0, [])])
def test_more_than_the_tolerance_over_is_seen(rest, over):
    found = tool.wings({"cli/a.py": 11, "rest/new.py": rest}, SETTINGS)
    assert [(wing.name, wing.lines) for wing in found] == [
        ("front", 11),
        ("rest", rest),
        ("all without later features", 11),
    ]
    assert [wing.name for wing in found if wing.is_over] == over


def test_a_file_of_no_wing_is_an_error():
    with pytest.raises(ValueError, match=r"rest/a.py is in no wing"):
        tool.wings({"rest/a.py": 1}, SETTINGS | {"wings": {"front": ["cli/*"]}})


def test_every_glob_names_files():
    """A part that has moved would be counted on the other side, unseen."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["lines"]
    lines = tool.counted(ROOT)
    globs = [*settings["later"], *(glob for wing in settings["wings"].values() for glob in wing)]
    assert [glob for glob in globs if not any(tool.is_in(name, [glob]) for name in lines)] == []
