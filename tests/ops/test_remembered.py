"""Launches remembered by what they depend on: every fact tells two calls apart, and old ones make room."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from padless.ops import remembered
from padless.ops.remembered import facts_of, known_launch, remember_launch


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_LAUNCHES", {})


def launch(stream: int) -> None:
    """Stands in for a packed launch."""


def test_a_launch_is_found_by_the_same_facts_alone() -> None:
    memory = torch.zeros(64)
    a, out = memory[:16].view(4, 4), memory[32:48].view(4, 4)
    facts = facts_of(("call", None), out, a)
    assert facts is not None
    remember_launch(facts, launch)  # type: ignore[arg-type]
    assert known_launch(facts_of(("call", None), memory[32:48].view(4, 4), a)) is launch
    others: list[tuple[Any, ...]] = [
        (("call", 1), out, a),
        (("call", None), a, out),
        (("call", None), out, a.t()),
        (("call", None), out, memory[:16].view(2, 8)),
        (("call", None), out, a.view(torch.int32)),
        (("call", None), out, memory[1:17].view(4, 4)),
        (("call", None), out, a, a),
        (("call", None), out, torch.empty(4, 4, device="meta")),
    ]
    for settings, *tensors in others:
        assert known_launch(facts_of(settings, *tensors)) is None


def test_what_is_no_tensor_is_not_looked_up() -> None:
    assert facts_of(("call",), torch.zeros(1), None) is None
    assert known_launch(None) is None


def test_old_launches_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_MOST_LAUNCHES", 2)
    for number in range(3):
        remember_launch((number,), launch)  # type: ignore[arg-type]
    assert known_launch((0,)) is None
    assert known_launch((2,)) is launch
