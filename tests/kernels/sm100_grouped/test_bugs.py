"""Every planted bug of the real grouped Blackwell kernel is found."""

from __future__ import annotations

import pytest

from support.planted_bugs import assert_found, cases
from support.sm100_grouped_bugs import BUGS, Bug, detect


@pytest.mark.parametrize("bug", cases(BUGS))
def test_planted_bug_is_found(bug: Bug) -> None:
    assert_found(bug, detect)


def test_there_are_enough_bugs() -> None:
    assert len({b.name for b in BUGS}) == len(BUGS) >= 65
    assert sum(b.quick for b in BUGS) >= 8


def test_a_kernel_without_a_bug_is_not_blamed() -> None:
    for bug in (b for b in BUGS if b.name in ("padding of scales not cleared", "odd CTA takes the even one's rows")):
        clean = Bug("nothing changed", config=bug.config, fmt=bug.fmt, sizes=(20, 0, 9), seeds=1)
        assert detect(clean) == (None, [])
