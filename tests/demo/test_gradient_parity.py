"""MXFP8 weight gradients of a model in training: as those in bfloat16, and every planted fault is outside the limits."""

from __future__ import annotations

import pytest

import gradient_parity


@pytest.mark.parametrize(
    ("steps", "every"), [(2, 2), pytest.param(120, 10, marks=pytest.mark.slow)], ids=["first steps", "a run"]
)
def test_the_limits_tell_mxfp8_from_every_fault(steps: int, every: int) -> None:
    found = gradient_parity.run(steps, every)
    assert gradient_parity.holds(found), {weight: (c.db, c.off) for (fault, weight), c in found.items() if not fault}
    assert [fault for fault in gradient_parity.FAULTS if gradient_parity.holds(found, fault)] == []
