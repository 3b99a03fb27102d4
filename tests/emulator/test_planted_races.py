"""Planted races: a sceptic would ask whether a report that the right kernel has too counts as found."""

from __future__ import annotations

import json
from typing import Any

import planted_races
from planted_races import page, planted, verdict


def row(case: str, fault: bool, **reports: int) -> dict[str, Any]:
    reports = {kind.replace("_", "-"): n for kind, n in reports.items()}
    return {"case": case, "chip": "H200", "planted": fault, "ran": True, "reports": reports, "why": "", "seconds": 0.1}


def test_only_what_the_right_kernel_is_not_told_counts_as_found() -> None:
    rows = [
        row("test_a[FAILURE=False]", False, uninitialised_shared=2),
        row("test_b[FAILURE=False]", False, tolerated=3),
    ]
    assert [verdict(r, rows) for r in rows] == ["reported", "silent"]
    for case, reports, wanted in (
        ("test_a[FAILURE=True]", {"uninitialised_shared": 5}, "missed"),
        ("test_a[FAILURE=True]", {"uninitialised_shared": 5, "race": 1}, "found"),
        ("test_b[FAILURE=True]", {"tolerated": 1}, "missed"),
        ("test_b[FAILURE=True]", {"deadlock": 1}, "found"),
    ):
        assert verdict(row(case, True, **reports), rows) == wanted
    assert verdict({**rows[0], "ran": False}, rows) == "not run"


def test_which_cases_have_a_fault() -> None:
    assert planted("test_a", {"FAILURE": True})
    assert not planted("test_a", {"FAILURE": False, "KIND": "x"})
    assert not planted("test_a", {"MISSING_BAR": "none"})
    assert planted("test_a", {"MISSING_BAR": "0"})
    assert not planted("test_a", {"MISSING_BAR": True, "OVERLAP": False})
    assert planted("test_deadlock_two_partitions", {})
    assert not planted("test_deadlock_exempt_when_tma_signals", {})


def test_the_page_is_that_of_the_record() -> None:
    record = json.loads(planted_races.RECORD.read_text())
    assert planted_races.RECORD.with_suffix(".md").read_text() == page(record)
