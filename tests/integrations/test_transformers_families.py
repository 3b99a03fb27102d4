"""The table of families in docs/transformers_families.md is what tiny models of them do."""

from __future__ import annotations

import pytest
import transformers

from transformers_families import BEGIN, END, PAGE, families, row, table

PART = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
ROWS = {line.split("|")[1].strip(): line for line in PART.splitlines() if line.startswith("| ")}
ROWS.pop("family", None)
OTHER = not PART.startswith(f"transformers {transformers.__version__} ")
pytestmark = pytest.mark.skipif(OTHER, reason="the table is of another version of transformers")


def test_the_table_lists_every_family() -> None:
    assert list(ROWS) == families()
    assert "WRONG" not in PART
    assert table([*ROWS.values()]) == PART


@pytest.mark.parametrize("family", ["mistral_large4", "nemotron_h"])
def test_some_families(family: str) -> None:
    """One whose names differ in files, one without a gate."""
    assert row(family) == ROWS[family]


@pytest.mark.slow
@pytest.mark.parametrize("family", ROWS)
def test_a_family(family: str) -> None:
    assert row(family) == ROWS[family]
