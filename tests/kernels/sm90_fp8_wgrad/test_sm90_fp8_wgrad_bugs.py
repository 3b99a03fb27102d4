"""Every planted bug of the weight-gradient kernel is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from padless.kernels.sm90_fp8_wgrad import host
from padless.reference.wgrad import grouped_gemm_wgrad_reference
from padless.testing.bits import same_bits
from padless.testing.gradients import WgradShape, poisoned, random_operands
from support.planted_bugs import assert_found, cases, gradient_before, holds, search
from support.weight_gradients import GuardedGradient
from support.wgrad_bugs import BUGS, MAIN, Bug

# An empty group, one of a block and a bit, one of three blocks, one of part of a block; several tiles to a CTA.
SHAPE = WgradShape((0, 130, 300, 33), 3, 272, 144, (32, 128))


def detect(bug: Bug) -> tuple[int | None, list[str]]:
    """(number of seeds needed, kinds reported until then); None if it was not found."""
    dy, x = random_operands(SHAPE, bug.config.mode)
    dtype = bug.config.out_dtype
    wanted = grouped_gemm_wgrad_reference(dy, x, out_dtype=dtype, accumulation="tensor_core")
    onto, wanted = gradient_before(wanted) if bug.onto else (None, wanted)
    if bug.poisoned:
        dy, x = poisoned(dy), poisoned(x)

    def launch(driver: Any) -> Callable[[], bool]:
        guarded = GuardedGradient(tuple(wanted.shape), dtype, onto)
        host.prepare(driver, dy, x, guarded.out, bug.onto, bug.config).launch(0)
        return lambda: holds(guarded.check) and same_bits(guarded.out, wanted)

    return search(bug, MAIN, replace(bug.config, accumulate=bug.onto), launch)


@pytest.mark.parametrize("bug", cases(BUGS))
def test_planted_bug_is_found(bug: Bug) -> None:
    assert_found(bug, detect)


@pytest.mark.parametrize("bug", [b for b in BUGS if b.quick and not b.kinds][:1], ids=lambda b: b.name)
@pytest.mark.parametrize("onto", [False, True])
def test_without_a_bug_nothing_is_found(bug: Bug, onto: bool) -> None:
    innocent = Bug("none", config=bug.config, onto=onto, poisoned=True, seeds=2)
    assert detect(innocent) == (None, [])


def test_names_differ() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 35
