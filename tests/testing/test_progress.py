"""Progress: lines in a file or a pipe, a bar on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from padless.testing import progress as module
from padless.testing.progress import progress


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    return clock


def test_a_pipe_gets_a_line_every_fifteen_seconds(now: list[float]) -> None:
    text = io.StringIO()
    with progress(Console(file=text, width=80), "Training [bf16]", 100) as advance:
        for _ in range(8):
            now[0] += 4
            advance()
    assert text.getvalue() == "    16 s  Training [bf16]: 4 of 100\n    32 s  Training [bf16]: 8 of 100\n"


def test_what_is_short_says_nothing(now: list[float]) -> None:
    text = io.StringIO()
    with progress(Console(file=text), "x", 3) as advance:
        for _ in range(3):
            advance()
    assert text.getvalue() == ""


def test_a_terminal_has_a_bar() -> None:
    text = io.StringIO()
    with progress(Console(file=text, force_terminal=True, width=80), "x", 3) as advance:
        advance()
    assert "1/3" in text.getvalue()
