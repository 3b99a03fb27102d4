"""The page about a run of the tests: parts put together, and what it does not pass over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tests_record
from support.ragged import ROOT

MACHINE = {"cores": 64, "GPUs": ["NVIDIA H200"] * 4, "python": "3.12", "torch": "2", "triton": "3", "numpy": "2"}


def part(**more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "tree": "a" * 40, "changed files": 0, "started": "2031-02-03T04:05:06Z", "wall seconds": 12.5,
        "options": ["-m", "not gpu"], "machine": MACHINE, "collected": 0, "left out": 0,
        "failed": {}, "skipped": {}, "not reached": [], "passed": {},
    }  # fmt: skip
    return {**base, **more}


FIRST = part(
    passed={"tests/a/test_x.py::one": 1.5, "tests/a/test_x.py::two[p|q]": 40.0, "tests/b/test_y.py::flaky": 0.1},
    skipped={"tests/b/test_y.py::gpu": "needs a GPU", "tests/b/test_y.py::moon": "needs a moon"},
)
FIRST["not reached"] = ["tests/b/test_y.py::late", "tests/b/test_y.py::never"]
SECOND = part(
    passed={"tests/b/test_y.py::gpu": 2.0, "tests/b/test_y.py::late": 3.0},
    failed={"tests/b/test_y.py::flaky": "assert 1 == 2"},
)


def test_parts_make_one_run() -> None:
    found = tests_record.combined([FIRST, SECOND])
    assert (found["tests"], found["passed"]) == (7, 4)
    assert list(found["failed"]) == ["tests/b/test_y.py::flaky"], "passing once is not enough"
    assert found["skipped"] == {"needs a moon": 1}
    assert found["not reached"] == ["tests/b/test_y.py::never"]
    assert found["seconds"] == 46.5
    assert found["folders"] == {"tests/a": [2, 41.5], "tests/b": [2, 5.0]}
    assert next(iter(found["slowest"])) == "tests/a/test_x.py::two[p|q]"


def test_the_page_says_all_of_it() -> None:
    text = tests_record.page(tests_record.combined([FIRST, SECOND]))
    assert "7 tests, 4 passed, 1 failed, 1 skipped, 1 not reached; 46 seconds" in text
    assert "| `pytest -m not gpu` | 12 | 64 cores, 4 NVIDIA H200; python 3.12, torch 2, triton 3, numpy 2 |" in text
    assert "| 1 | needs a moon |" in text
    assert "## Failed\n\n- `tests/b/test_y.py::flaky`" in text
    assert "## Not reached\n\n- `tests/b/test_y.py::never`" in text
    assert "two[p/q]" in text
    whole = tests_record.page(tests_record.combined([part(passed={"tests/a/test_x.py::one": 1.0})]))
    assert "##" not in whole.replace("# Every", "")


@pytest.mark.parametrize("other", [{"tree": "b" * 40}, {"changed files": 1}], ids=["another commit", "changed files"])
def test_parts_of_other_files_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="all must be of one commit"):
        tests_record.combined([FIRST, part(**other)])


def test_what_a_later_commit_mends_stays_listed() -> None:
    record = tests_record.combined([FIRST, SECOND])
    later = part(tree="c" * 40, passed={"tests/b/test_y.py::flaky": 1.0, "tests/b/test_y.py::gpu": 1.0})
    record["mended"] = tests_record.mended(record["failed"], [later])
    assert record["mended"] == {"tests/b/test_y.py::flaky": "c" * 40}
    assert "- `tests/b/test_y.py::flaky`; passes in tree `cccccccccccc`\n" in tests_record.page(record)
    again = part(tree="d" * 40, failed={"tests/b/test_y.py::flaky": "assert 1 == 2"})
    assert not tests_record.mended(record["failed"], [later, again]), "passing once is not enough"


def run(tmp_path: Path, *more: str, **changed: Any) -> subprocess.CompletedProcess[str]:
    (tmp_path / "tests.json").write_text(json.dumps(part(**changed)))
    command = [
        sys.executable,
        str(ROOT / "tools/tests_record.py"),
        str(tmp_path),
        "--out",
        str(tmp_path / "page"),
        *more,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_ends_with_1_unless_all_ran_and_passed(tmp_path: Path) -> None:
    assert run(tmp_path, passed={"tests/a/test_x.py::one": 1.0}).returncode == 0
    assert json.loads((tmp_path / "page.json").read_text())["passed"] == 1
    assert (tmp_path / "page.md").read_text().startswith("# Every test once")
    assert run(tmp_path, failed={"tests/a/test_x.py::one": "no"}).returncode == 1
    (tmp_path / "later").mkdir()
    (tmp_path / "later/tests.json").write_text(json.dumps(part(tree="c" * 40, passed={"tests/a/test_x.py::one": 1.0})))
    later = ("--later", str(tmp_path / "later"))
    assert run(tmp_path, *later, failed={"tests/a/test_x.py::one": "no"}).returncode == 0
    assert run(tmp_path, *later, failed={"tests/a/test_x.py::two": "no"}).returncode == 1
    missing = {"not reached": ["tests/a/test_x.py::one"]}
    assert run(tmp_path, **missing).returncode == 1
    wrong = run(tmp_path, "--commit", "no-such-commit", passed={"tests/a/test_x.py::one": 1.0})
    assert "this repository has none of that name" in wrong.stderr
