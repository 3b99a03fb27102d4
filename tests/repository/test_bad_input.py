"""Bad inputs get what docs/bad_input.md says of them."""

from __future__ import annotations

import pytest

from support.bad_input import LINES, Bad, rows, table
from support.ragged import ROOT

PAGE = (ROOT / "docs" / "bad_input.md").read_text()


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.call}, {line.what}")
def test_a_bad_input_gets_its_sentence(line: Bad) -> None:
    """One sentence, which the page has word for word."""
    sentence = line.sentence()
    assert "\n" not in sentence
    assert rows([line])[0] in PAGE.splitlines()


def test_the_page_has_the_table_and_nothing_else() -> None:
    written = PAGE.split("<!-- table:begin -->\n")[1].split("<!-- table:end -->")[0]
    assert written == table(), "write it again: python tests/support/bad_input.py --write"


def test_a_line_that_nothing_refuses_is_seen() -> None:
    with pytest.raises(AssertionError, match="not refused"):
        Bad("grouped_gemm", "nothing", lambda: None).sentence()
    assert len({(line.call, line.what) for line in LINES}) == len(LINES)
