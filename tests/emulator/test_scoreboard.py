"""The scoreboard's verdicts. A sceptic would ask whether a wrong program can count as right: each verdict is planted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import scoreboard
from scoreboard import Row, judge, listed, page, programs
from support.ragged import ROOT

LESSON = f"import runpy, sys\nsys.path.insert(0, {str(ROOT / 'docs/learn')!r})\nsys.argv = ['x', MORE]\n"
LESSON += f"try:\n    runpy.run_path({str(ROOT / 'docs/learn/tma_program.py')!r}, run_name='__main__')\n"
LESSON += "except SystemExit:\n    pass\n"
PLANTED = {
    "right": (LESSON.replace("MORE", ""), "right", {}),
    "reported": (LESSON.replace("MORE", "'--break', 'no-proxy-fence'"), "right", {"missing-proxy-fence": 1}),
    "wrong": (LESSON.replace("MORE", "") + "assert 1 == 2, 'they differ'\n", "wrong", {}),
    "refused": (
        LESSON.replace("MORE", "") + "from cuda.bindings import driver\ndriver.cuGraphCreate(0)\n",
        "refused",
        {},
    ),
    "crash": (LESSON.replace("MORE", "") + "import os\nos._exit(139)\n", "crash", {}),
    "absent": ("import no_such_package\n", "absent", {}),
    "time": (LESSON.replace("MORE", "") + "while True:\n    pass\n", "time", {}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_verdict(name: str, tmp_path: Path) -> None:
    text, verdict, reports = PLANTED[name]
    (tmp_path / "program.py").write_text(text)
    ((family, found, chip, command),) = listed({"others": {"folder": ".", "H200": ["program.py"]}}, tmp_path)
    row = judge(family, found, chip, command, 3.0 if name == "time" else 60.0, tmp_path)
    assert row is not None
    assert (row.family, row.program, row.chip) == ("others", "program.py", "H200")
    assert (row.verdict, row.reports) == (verdict, reports)
    assert bool(row.why) == (verdict != "right")


def test_a_program_without_a_launch_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('needs another GPU')\n")
    families = {"others": {"folder": ".", "discover": ".", "chips": ["B200"]}}
    ((family, name, chip, command),) = listed(families, tmp_path)
    assert judge(family, name, chip, command, 60.0, tmp_path) is None


def test_files_and_their_tests_are_programs(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def test_one():\n    pass\ndef test_two():\n    pass\n")
    (tmp_path / "b.py").write_text("def test_one():\n    pass\ntest_one()\n")
    (tmp_path / "conftest.py").write_text("")
    found = dict(programs(tmp_path))
    assert list(found) == ["a.py::test_one", "a.py::test_two", "b.py"]
    assert found["b.py"] == [str(tmp_path / "b.py")]
    assert found["a.py::test_two"][1:] == ["--case", f"{tmp_path / 'a.py'}::test_two"]


def test_the_page_is_that_of_the_record_and_counts_it() -> None:
    record = json.loads(scoreboard.RECORD.read_text())
    assert scoreboard.RECORD.with_suffix(".md").read_text() == page(record)
    rows = [Row(**row) for row in record["rows"]]
    assert f"{len(rows)} programs: {sum(row.verdict == 'right' for row in rows)} right" in page(record)
    worse = {**record, "rows": [{**record["rows"][0], "verdict": "wrong", "why": "x"}, *record["rows"][1:]]}
    assert page(worse) != page(record)
    assert len({(row.family, row.program, row.chip) for row in rows}) == len(rows)


def test_a_test_of_pytests_and_a_compiled_program_have_their_commands(tmp_path: Path) -> None:
    families = {
        "a": {"folder": "f", "both": ["x.py::test_it"]},
        "b": {"folder": "g", "nvcc": True, "B200": ["48 --m=1"]},
    }
    found = list(listed(families, tmp_path))
    assert [(family, name, chip) for family, name, chip, _ in found] == [
        ("a", "x.py::test_it", "H200"), ("a", "x.py::test_it", "B200"), ("b", "48", "B200"),
    ]  # fmt: skip
    assert found[0][3][-3:] == [str(Path(scoreboard.__file__)), "--case", str(tmp_path / "f" / "x.py::test_it")]
    assert found[2][3][1:] == [str(tmp_path / "g" / "48"), "--m=1"]
