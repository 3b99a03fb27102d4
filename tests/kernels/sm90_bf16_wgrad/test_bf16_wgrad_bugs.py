"""Every planted bug of the bf16 weight-gradient kernel is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from padless.kernels.sm90_bf16_wgrad import host
from padless.reference.bf16 import grouped_gemm_wgrad_rows_reference
from padless.testing.bits import same_bits
from padless.testing.gradients import poisoned_rows
from support.bf16_problems import Shape, random_rows
from support.bf16_wgrad_bugs import BUGS, MAIN, STORED
from support.planted_bugs import Bug, assert_found, cases, gradient_before, holds, search
from support.weight_gradients import GuardedGradient

# An empty group, one of two blocks and a bit, one of one and a bit, one of part of a block; several tiles to a CTA.
SHAPE = Shape((0, 130, 80, 33), 3, 72, 264)


def detect(bug: Bug) -> tuple[int | None, list[str]]:
    """(number of seeds needed, kinds reported until then); None if it was not found."""
    rows = poisoned_rows(random_rows(SHAPE))
    config = bug.config or STORED
    dtype = config.out_dtype
    wanted = grouped_gemm_wgrad_rows_reference(rows.dy, rows.x, rows.offs, out_dtype=dtype, accumulation="tensor_core")
    onto, wanted = gradient_before(wanted) if bug.onto else (None, wanted)

    def launch(driver: Any) -> Callable[[], bool]:
        guarded = GuardedGradient(tuple(wanted.shape), dtype, onto)
        host.prepare(driver, rows.dy, rows.x, rows.offs, guarded.out, bug.onto, config).launch(0)
        return lambda: holds(guarded.check) and same_bits(guarded.out, wanted)

    return search(bug, MAIN, replace(config, accumulate=bug.onto), launch)


@pytest.mark.parametrize("bug", cases(BUGS))
def test_planted_bug_is_found(bug: Bug) -> None:
    assert_found(bug, detect)


@pytest.mark.parametrize("onto", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_without_a_bug_nothing_is_found(onto: bool) -> None:
    assert detect(Bug("none", onto=onto, seeds=1)) == (None, [])


def test_names_differ() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 38
