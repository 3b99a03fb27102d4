"""The page about mutants: made of its record, every survivor explained, and the tool that makes the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mutant_page
import mutants
from mutant_cases import CASES
from mutant_reasons import REASONS, reason_of


@pytest.fixture
def summary() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(mutant_page.SUMMARY.read_text())
    return found


def test_the_page_is_that_of_its_record(summary: dict[str, Any]) -> None:
    assert mutant_page.PAGE.read_text() == mutant_page.page(summary)
    assert summary["kernels"].keys() == CASES.keys()
    listed = sum(survivor["count"] for survivor in summary["survivors"])
    assert listed == sum(own["survivors"] for own in summary["kernels"].values())
    for own in summary["kernels"].values():
        assert own["mutants"] >= own["judged"] == own["survivors"] + sum(own["by"].values())
        assert own["tried once"] <= own["survivors"]


def test_every_survivor_has_a_reason_and_every_reason_a_survivor(summary: dict[str, Any]) -> None:
    assert {reason_of(survivor) for survivor in summary["survivors"]} == set(REASONS)
    unknown = {"instruction": "wgmma.commit_group", "change": "deleted", "source": "x.cuh:1", "count": 1}
    with pytest.raises(ValueError, match="nothing explains"):
        mutant_page.page({**summary, "survivors": [unknown]})


@pytest.mark.slow
def test_a_run_goes_on_where_another_ended_and_asks_a_second_problem(tmp_path: Path) -> None:
    record, name = tmp_path / "record.jsonl", "sm90_bf16_plain"
    mutants.run(record, [name], 1, 45)
    first = mutants.read(record)
    assert 0 < len(first) == len(record.read_text().splitlines()) - 1
    ((kernel, mutants_of_it),) = mutants.totals(record).items()
    assert kernel == (name, first[0]["digest"])
    assert mutants_of_it > len(first)
    assert all(v["killed_by"] or v["short"] for v in first)
    record.write_text(record.read_text() + '{"case": "half a li')
    mutants.run(record, [name], 1, 30)
    second = mutants.read(record)
    assert second[: len(first)] == first
    assert len({mutants.key_of(v) for v in second}) == len(second) > len(first)
