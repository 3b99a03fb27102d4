"""Checks of what leaves: every old way works, names the caller's line and what to write, and is on docs/stability.md."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import padless
from padless import deprecation
from padless.deprecation import LEAVING, Leaving, warn_of
from padless.epilogue import Epilogue
from support.ragged import ROOT

# For every old way a line that takes it, and what the same line says in the new one.
USES = {
    **{
        f"padless.{old}": (f"found = padless.{old}", f"found = padless.{new}")
        for old, new in [
            ("Bf16GemmConfig", "Sm90Bf16Config"),
            ("GemmConfig", "Sm90Fp8Config"),
            ("Mxfp8GemmConfig", "Sm100DenseConfig"),
        ]
    },
    **{
        f'Epilogue(activation="swiglu_{order}")': (
            f'found = dataclasses.replace(plain, activation="swiglu_{order}")',
            f'found = dataclasses.replace(plain, activation="swiglu", gate_up="{order}")',
        )
        for order in ("interleaved", "concatenated", "alternating")
    },
}
HEAD = "import dataclasses, padless\n\nplain = padless.Epilogue(amax=True)\n"


def run(file: Path, text: str) -> tuple[dict[str, Any], list[warnings.WarningMessage]]:
    """Names of a user's file at its end, and the warnings that it got."""
    file.write_text(text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = runpy.run_path(str(file), run_name="users_module")
    return found, [one for one in caught if "padless" in str(one.message)]


@pytest.mark.parametrize("old", LEAVING)
def test_an_old_way_does_what_the_new_one_does_and_names_the_users_line(old: str, tmp_path: Path) -> None:
    theirs, ours = USES[old]
    found, caught = run(tmp_path / "old.py", HEAD + theirs + "\n")
    new, version = LEAVING[old]
    assert {(Path(one.filename), one.lineno, one.category) for one in caught} == {
        (tmp_path / "old.py", 4, DeprecationWarning)
    }
    assert {str(one.message) for one in caught} == {f"{old} leaves in padless {version}; write {new}"}
    wanted, silent = run(tmp_path / "new.py", HEAD + ours + "\n")
    assert not silent
    assert found["found"] == wanted["found"]


def test_the_import_of_an_old_name_warns_wherever_it_is(tmp_path: Path) -> None:
    for name in ("first.py", "second.py"):
        _, caught = run(tmp_path / name, "\nfrom padless import GemmConfig\n")
        assert {(one.filename, one.lineno) for one in caught} == {(str(tmp_path / name), 2)}


def test_a_script_shows_the_sentence_as_python_is_set_up(tmp_path: Path) -> None:
    """Python shows deprecations of the program that is run, and none of modules that it imports."""
    script = tmp_path / "script.py"
    script.write_text("import padless\n\npadless.GemmConfig()\n")
    path = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, env=path)
    sentence = "padless.GemmConfig leaves in padless 0.2; write padless.Sm90Fp8Config"
    assert done.stderr == f"{script}:3: DeprecationWarning: {sentence}\n  padless.GemmConfig()\n"


def test_a_call_an_argument_and_a_value_can_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is found however many of padless' own calls are in between."""
    ways = ("padless.old_call", "call(rows=)", "call(kind=1)")
    monkeypatch.setattr(deprecation, "LEAVING", dict.fromkeys(ways, Leaving("something else", "9.9")))

    def inner(way: str) -> None:
        warn_of(way)

    monkeypatch.setitem(inner.__globals__, "__name__", "padless.some.module")
    monkeypatch.setattr(Epilogue, "inner", staticmethod(inner), raising=False)
    calls = "".join(f"padless.Epilogue.inner({way!r})\n" for way in ways)
    _, caught = run(tmp_path / "user.py", "import padless\n" + calls)
    assert [(one.filename, one.lineno) for one in caught] == [(str(tmp_path / "user.py"), line) for line in (2, 3, 4)]


def test_the_page_lists_what_leaves_and_when() -> None:
    page = (ROOT / "docs" / "stability.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| ([\d.]+) \|$", page, re.MULTILINE)
    assert {old: Leaving(new, version) for old, new, version in rows} == LEAVING
    here = tuple(map(int, padless.__version__.split(".")[:2]))
    for old, (_, version) in LEAVING.items():
        assert tuple(map(int, version.split("."))) > here, f"{old} was to have left"
    assert USES.keys() == LEAVING.keys()


def test_padless_itself_takes_no_old_way() -> None:
    """Values and names that leave are in no other file of the library, of its examples and of its pages."""
    words = {re.findall(r"swiglu_\w+|\w+GemmConfig|GemmConfig", old)[0] for old in LEAVING}
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.py"), *(ROOT / "docs").glob("*.md")]
    named = {path.name for path in files for word in words if re.search(rf"(?<!\w){word}\b", path.read_text())}
    assert named <= {"deprecation.py", "stability.md"}
