"""Exchanges among other parts of torch, and arguments that are wrong on one rank alone, in gloo processes."""

from __future__ import annotations

import pytest

from support import ep_cases, ep_composed


@pytest.fixture(scope="module")
def on_gloo() -> dict[str, str | None]:
    """The outcome of every case, from one start of two processes."""
    return ep_cases.run(names=list(ep_composed.CASES))


@pytest.mark.parametrize("name", ep_composed.CASES)
def test_two_processes(name: str, on_gloo: dict[str, str | None]) -> None:
    assert on_gloo[name] is None, on_gloo[name]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_other_numbers_of_processes(size: int) -> None:
    found = ep_cases.run(size, names=list(ep_composed.CASES))
    assert not any(found.values()), found
