"""Lessons of docs/learn: each kernel is right and gives no report, each break gives the report that it should."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys

import pytest

import lesson as runner
from support.ragged import ROOT

FOLDER = ROOT / "docs" / "learn"
NAMES = ("tma_copy", "wgmma_tile", "ring", "tcgen05_tile")
LESSONS = {name: importlib.import_module(name).LESSON for name in NAMES}
BREAKS = [(name, broken) for name, lesson in LESSONS.items() for broken in lesson.breaks]


def test_every_kernel_of_the_folder_is_a_lesson():
    assert {path.stem for path in FOLDER.glob("*.cu")} == set(NAMES)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NAMES)
def test_lesson_is_right_and_clean(name, seed):
    result, error = runner.run(LESSONS[name], seed=seed)
    result.raise_on_reports()
    assert error == 0


@pytest.mark.parametrize(("name", "broken"), BREAKS)
def test_break_is_found(name, broken):
    found = runner.kinds(*runner.run(LESSONS[name], broken))
    expected = LESSONS[name].breaks[broken]
    assert expected in found
    assert expected != runner.WRONG_VALUES or found == {expected}, "it breaks no rule"


@pytest.mark.parametrize("name", NAMES)
def test_kernel_script_and_text_name_the_same_breaks(name):
    lesson = LESSONS[name]
    assert runner.names_of_breaks(lesson.text) == list(lesson.breaks)
    text = (FOLDER / f"{name}.md").read_text()
    assert re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE) == list(lesson.breaks)
    assert len(text.split()) <= 700


def test_a_break_replaces_the_line_below_it_and_no_other():
    text = "a;\n  // break x: b;\n  // break y:\n  c;\n// break x:\nd;\ne;\n"
    assert runner.broken(text, "x") == "a;\n  // break x: b;\n  // break y:\nb;\n// break x:\n\ne;\n"
    assert runner.broken(text, "y") == text.replace("  c;\n", "\n")
    with pytest.raises(ValueError, match="name is 'z', the kernel can be broken by x, y"):
        runner.broken(text, "z")


def test_script_prints_the_report_and_says_so_by_its_exit_code():
    def script(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, FOLDER / "tma_copy.py", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )

    whole, broken = script(), script("--break", "no-proxy-fence")
    assert (whole.returncode, whole.stdout) == (0, "reports: 0, largest error: 0\n"), whole.stderr
    assert broken.returncode == 1
    assert re.match(r"missing-proxy-fence: .*tma_copy\.cu:\d+", broken.stdout)
    assert broken.stdout.endswith("\nreports: 1, largest error: 0\n")
    shown = (FOLDER / "README.md").read_text()
    places = re.findall(r"tma_copy\.cu:\d+", shown)
    assert len(places) == 2
    assert all(place in broken.stdout for place in places), "the report in docs/learn/README.md is another"
