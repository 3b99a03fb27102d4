"""Every planted bug of the MXFP8 weight-gradient kernel is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from padless.emulator.fake_driver import driver_of
from padless.kernels.sm100_mxfp8_wgrad import host
from padless.kernels.sm100_mxfp8_wgrad.config import Mxfp8WgradConfig
from padless.testing.bits import same_bits
from support.mxfp8_wgrad import Columns, launched, random_columns
from support.mxfp8_wgrad_bugs import BUGS, MAIN, PAIR
from support.planted_bugs import Bug, assert_found, cases, gradient_before, holds, search
from support.weight_gradients import GuardedGradient

ARCH = "sm_100a"
# An empty group, three stages and a bit, part of a block; more than one tile along K. Two stages in the ring.
PROBLEM = random_columns((0, 390, 33), 40, 48, 144)
# Of a pair: features in both of its halves along N and along K.
PAIRS = random_columns((0, 390, 33), 40, 144, 160)
STORED = Mxfp8WgradConfig(num_stages=2, out_dtype=torch.float32)


def problem_of(config: Mxfp8WgradConfig) -> Columns:
    return PAIRS if config.cta_group == 2 else PROBLEM


@cache
def right(config: Mxfp8WgradConfig) -> torch.Tensor:
    """A pair's from single CTAs."""
    return launched(driver_of(f"emulator:{ARCH}"), problem_of(config), STORED)


def detect(bug: Bug) -> tuple[int | None, list[str]]:
    """(number of seeds needed, kinds reported until then); None if it was not found."""
    usual = bug.config or STORED
    problem, wanted = problem_of(usual), right(usual)
    onto, wanted = gradient_before(wanted) if bug.onto else (None, wanted)
    config = replace(usual, accumulate=bug.onto)

    def launch(driver: Any) -> Callable[[], bool]:
        guarded = GuardedGradient(tuple(wanted.shape), torch.float32, onto)
        host.prepare(driver, problem.dy, problem.x, problem.offs, guarded.out, config).launch(0)
        return lambda: holds(guarded.check) and same_bits(guarded.out, wanted)

    return search(bug, MAIN, config, launch, ARCH)


@pytest.mark.parametrize("bug", cases(BUGS))
def test_planted_bug_is_found(bug: Bug) -> None:
    assert_found(bug, detect)


@pytest.mark.parametrize("onto", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("config", [STORED, pytest.param(PAIR, marks=pytest.mark.slow)], ids=["CTA", "pair"])
def test_without_a_bug_nothing_is_found(config: Mxfp8WgradConfig, onto: bool) -> None:
    assert detect(Bug("none", config=config, onto=onto, seeds=1)) == (None, [])


def test_names_differ() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 58
