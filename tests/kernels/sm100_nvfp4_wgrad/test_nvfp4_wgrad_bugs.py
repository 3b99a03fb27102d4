"""Every planted bug of the NVFP4 weight-gradient kernel is found."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from padless.emulator.fake_driver import driver_of
from padless.kernels.sm100_nvfp4_wgrad import host
from padless.kernels.sm100_wgrad import Sm100WgradConfig
from padless.testing.bits import same_bits
from support.nvfp4_wgrad import launched, random_problem
from support.nvfp4_wgrad_bugs import BUGS, MAIN
from support.planted_bugs import Bug, assert_found, cases, gradient_before, holds, search
from support.weight_gradients import GuardedGradient

ARCH = "sm_100a"
# An empty group, two stages and a bit, one product; more than one tile along K. Two stages in the ring.
PROBLEM = random_problem((0, 576, 64), 64, 48, 144, exact=True)
STORED = Sm100WgradConfig(num_stages=2, out_dtype=torch.float32)


@cache
def right() -> torch.Tensor:
    return launched(driver_of(f"emulator:{ARCH}"), PROBLEM, STORED)


def detect(bug: Bug) -> tuple[int | None, list[str]]:
    """(number of seeds needed, kinds reported until then); None if it was not found."""
    wanted = right()
    onto, wanted = gradient_before(wanted) if bug.onto else (None, wanted)
    config = Sm100WgradConfig(2, torch.float32, bug.onto)

    def launch(driver: Any) -> Callable[[], bool]:
        guarded = GuardedGradient(tuple(wanted.shape), torch.float32, onto)
        host.prepare(driver, PROBLEM.dy, PROBLEM.x, PROBLEM.ends, guarded.out, config).launch(0)
        return lambda: holds(guarded.check) and same_bits(guarded.out, wanted)

    return search(bug, MAIN, config, launch, ARCH)


@pytest.mark.parametrize("bug", cases(BUGS))
def test_planted_bug_is_found(bug: Bug) -> None:
    assert_found(bug, detect)


@pytest.mark.slow
@pytest.mark.parametrize("onto", [False, True])
def test_without_a_bug_nothing_is_found(onto: bool) -> None:
    assert detect(Bug("none", onto=onto, seeds=1)) == (None, [])


def test_names_differ() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 24
