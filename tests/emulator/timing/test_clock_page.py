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


# What docs/timing.md sums up, by rows of the tables: mean error, 9 of 10 within, largest.
SUMMED_UP = {
    "hardware units of an H200": "all (test)",
    "the paper's grid of 576": "paper (test)",
    "161 of decoding": "decode (test)",
    "published main loops of a B200": "the others (test)",
    "DeepGEMM's kernel on an H200": "groups padded to 128 rows, 128 x 192 x 2 (test)",
}


def test_the_short_table_has_the_figures_of_the_long_ones() -> None:
    page = (PAGES["examination"].parent / "timing.md").read_text()
    tables = [line.strip("| ").split(" | ") for name in ("examination", "deepgemm") for line in read_block(name)]
    for said, name in SUMMED_UP.items():
        ((_, _, mean, _, most, largest, _),) = (cells for cells in tables if cells[0] == name)
        (line,) = (line for line in page.splitlines() if line.startswith("| ") and said in line)
        assert line.endswith(f"| {mean} | {most} | {largest} |")
    formats = [cells for cells in tables if len(cells) == 7 and " x " in cells[0] and cells[1] == "18"]
    assert len(formats) == 7
    columns = [sorted(float(cells[n].rstrip("%")) for cells in formats) for n in (2, 4, 5)]
    spans = " | ".join(f"{column[0]}% to {column[-1]}%" for column in columns)
    assert f"| other formats on an H200, prefill | {spans} |" in page
    (pairs,) = (line for line in read_block("examination") if line.startswith("Order of two tiles"))
    assert pairs.partition("right in ")[2].partition(" pairs")[0] in page
