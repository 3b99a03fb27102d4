"""Every planted bug of the kernel of gradients through FP4 weights is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from padless.kernels.sm90_fp4_dgrad import host
from padless.testing.bits import same_bits
from padless.testing.guarded import GuardedOutput
from support.bf16_problems import Shape
from support.fp4_dgrad_bugs import BUGS, MAIN, MXFP4, NVFP4
from support.fp4_dgrad_problems import Problem, random_problem
from support.planted_bugs import Bug, assert_found, cases, holds, search

# An empty group, one of two tiles, one of half a tile, rows past the last group; three steps of N, of which the last is
# short; two tiles of columns, of which the second has some for one warpgroup alone.
SHAPE = Shape((0, 130, 33), 3, 136, 352)


def problem_of(bug: Bug) -> Problem:
    format = (bug.config or NVFP4).format
    problem = random_problem(format, SHAPE, scales="largest" if format == "MXFP4" else "", globals_each=True)
    if format == "NVFP4":  # sign bits mean nothing
        problem.weights.scale.view(torch.uint8)[:, ::2] |= 0x80
    return problem.blocked()


def detect(bug: Bug) -> tuple[int | None, list[str]]:
    """(number of seeds needed, kinds reported until then); None if it was not found."""
    problem, config = problem_of(bug), bug.config or NVFP4
    wanted = problem.wanted()

    def launch(driver: Any) -> Callable[[], bool]:
        guarded = GuardedOutput(problem.dy.shape[0], SHAPE.k, torch.bfloat16)
        host.prepare(driver, problem.dy, problem.weights, problem.offs, guarded.out, config).launch(0)
        last = problem.last
        return lambda: holds(lambda: guarded.check(last)) and same_bits(guarded.out[:last], wanted)

    return search(bug, MAIN, config, launch)


@pytest.mark.parametrize("bug", cases(BUGS))
def test_planted_bug_is_found(bug: Bug) -> None:
    assert_found(bug, detect)


@pytest.mark.parametrize("config", [NVFP4, pytest.param(MXFP4, marks=pytest.mark.slow)], ids=["NVFP4", "MXFP4"])
def test_without_a_bug_nothing_is_found(config: Any) -> None:
    assert detect(Bug("none", config=config, seeds=2)) == (None, [])


def test_names_differ() -> None:
    assert len({(bug.name, bug.config) for bug in BUGS}) == len(BUGS) >= 15
