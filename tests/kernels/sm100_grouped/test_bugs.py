"""Every planted bug of the real grouped Blackwell kernel is found."""

from __future__ import annotations

import pytest

from padless.emulator import KINDS
from support.sm100_grouped_bugs import BUGS, Bug, found


@pytest.mark.parametrize("bug", [pytest.param(b, id=b.name, marks=[] if b.quick else [pytest.mark.slow]) for b in BUGS])
def test_planted_bug_is_found(bug: Bug) -> None:
    was_found, kinds = found(bug)
    assert was_found, f"{bug.name}: not found on {bug.seeds} seeds; reports seen: {sorted(set(kinds)) or 'none'}"
    assert set(bug.kinds) <= set(KINDS)


def test_there_are_enough_bugs() -> None:
    assert len({b.name for b in BUGS}) == len(BUGS) >= 65
    assert sum(b.quick for b in BUGS) >= 8


def test_a_kernel_without_a_bug_is_not_blamed() -> None:
    for bug in (b for b in BUGS if b.name in ("padding of scales not cleared", "odd CTA takes the even one's rows")):
        clean = Bug(
            "nothing changed", (), (("sm100_grouped/scale_gather.cuh", "#pragma once", "#pragma once"),),
            bug.config, bug.fmt,
            sizes=(20, 0, 9), seeds=1,
        )  # fmt: skip
        assert found(clean) == (False, [])
