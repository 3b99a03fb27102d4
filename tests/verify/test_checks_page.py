"""docs/verify_checks.md is true: a row for every check, whose file is there, and a planted bug that a test has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from padless.verify.run import jobs_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "verify_checks.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")][
    1:
]
TESTS = sorted(set(re.findall(r"`(tests/[^`]*)`", PAGE)))


def missing(test: str) -> list[str]:
    """What of a test's file, function and parameter is not there."""
    path, name, parameter = re.fullmatch(r"([^:]*)::(\w+)(?:\[(.*)\])?", test).groups()  # type: ignore[union-attr]
    text = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
    wanted = [f"def {name}("] + ([parameter] if parameter else [])
    return [part for part in wanted if part not in text]


def test_there_is_a_row_for_every_check() -> None:
    every = [name for arch in ("sm_90a", "sm_100a") for name in jobs_of(arch, None, True)[0]]
    assert sorted(row[0] for row in ROWS) == sorted(set(every))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_a_file_and_a_planted_bug(row: list[str]) -> None:
    assert (ROOT / "src" / "padless" / "verify" / row[1].strip("`")).is_file()
    assert row[2]
    assert "`tests/" in row[3]


@pytest.mark.parametrize("test", TESTS)
def test_the_planted_bug_is_there(test: str) -> None:
    assert missing(test) == []


def test_a_bug_that_is_not_there_is_seen() -> None:
    assert missing(TESTS[0].split("::")[0] + "::test_of_nothing[no such bug]") == [
        "def test_of_nothing(",
        "no such bug",
    ]
    assert missing("tests/verify/test_of_nothing.py::test_a") == ["def test_a("]
