"""The tables of docs/timing_*.md are those of its records, and the records those of today's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import clock_examine
import clock_sm100
from clock_page import PAGES, code_of, model_digest, read_block, write_block
from padless.emulator.timing import B200, H200

REMEDY = "run tools/clock_examine.py --write and tools/clock_sm100.py --write"


@pytest.fixture(scope="module")
def examination() -> list[dict[str, Any]]:
    return [json.loads(line) for line in clock_examine.RECORD.read_text().splitlines()]


def test_tables_are_those_of_the_record(examination: list[dict[str, Any]]) -> None:
    (page,) = (row for row in examination if row["kind"] == "page")
    assert read_block("examination") == page["lines"], REMEDY
    assert read_block("sm100") == json.loads(clock_sm100.RECORD.read_text())["lines"], REMEDY


def test_records_are_of_todays_model(examination: list[dict[str, Any]]) -> None:
    session = examination[0]
    assert session["model"] == model_digest(*clock_examine.TOOLS), REMEDY
    for chip in (H200, B200):
        today = {name: vars(rate) for name, rate in chip.rates.items()}
        assert session["rates"][chip.name] == today, REMEDY
    assert json.loads(clock_sm100.RECORD.read_text())["model"] == model_digest(*clock_sm100.TOOLS), REMEDY


def test_record_tells_the_errors_that_the_page_shows(examination: list[dict[str, Any]]) -> None:
    """From the points, not from the tables."""
    shown = "\n".join(read_block("examination"))
    for name in (*clock_examine.FITTING, *clock_examine.TESTING):
        errors = [
            r["predicted_us"] / r["measured_us"] - 1 for r in examination if r["kind"] == "call" and r["set"] == name
        ]
        mean = sum(map(abs, errors)) / len(errors)
        kind = "fitted to" if name in clock_examine.FITTING else "test"
        assert f"| {name} ({kind}) | {len(errors)} | {mean:.1%} |" in shown


def test_a_changed_rate_or_line_changes_the_digest() -> None:
    source = (clock_examine.MEASURED.parents[1] / "src/padless/emulator/timing/chip.py").read_text()
    changed = source.replace("** (1 / 3)", "** (1 / 2)")
    assert source != changed
    assert code_of(changed) != code_of(source)
    assert code_of(source.replace('"""A whole call on a whole chip', '"""A call')) == code_of(source)
    assert code_of("# said\n" + source) == code_of(source)
    assert model_digest("clock_ladder.py") != model_digest("clock_b200.py")


def test_a_block_is_put_in_its_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n<!-- y:begin -->\nother\n<!-- y:end -->\n")
    write_block("x", ["", "new", "", "lines", ""], page)
    assert read_block("x", page) == ["new", "", "lines"]
    assert read_block("y", page) == ["other"]
    assert page.read_text().startswith("a\n<!-- x:begin -->\nnew\n")
    assert all(each.exists() for each in PAGES.values())
