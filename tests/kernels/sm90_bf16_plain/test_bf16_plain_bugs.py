"""Every planted bug of the plain bf16 kernel is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from padless.kernels.sm90_bf16_plain import host
from padless.reference.bf16 import grouped_gemm_plain_reference
from padless.testing.bits import same_bits
from padless.testing.guarded import GuardedOutput
from support.bf16_plain_bugs import BUGS, MAIN, N_MAJOR, STORED
from support.bf16_problems import Shape, random_plain
from support.planted_bugs import Bug, assert_found, cases, holds, search

# An empty group, one of two tiles, one that has no row for the second warpgroup, rows past the last group.
SHAPE = Shape((0, 130, 33), 3, 136, 216)
LAST = 163


def detect(bug: Bug) -> tuple[int | None, list[str]]:
    """(number of seeds needed, kinds reported until then); None if it was not found."""
    plain, config = random_plain(SHAPE), bug.config or STORED
    if config.n_major:
        plain = plain.n_major()
    wanted = grouped_gemm_plain_reference(
        plain.a, plain.b, plain.offs, out_dtype=torch.float32, accumulation="tensor_core"
    )[:LAST]

    def launch(driver: Any) -> Callable[[], bool]:
        guarded = GuardedOutput(plain.a.shape[0], SHAPE.n, torch.float32)
        host.prepare(driver, plain.a, plain.b, plain.offs, guarded.out, config).launch(0)
        return lambda: holds(lambda: guarded.check(LAST)) and same_bits(guarded.out[:LAST], wanted)

    return search(bug, MAIN, config, launch)


@pytest.mark.parametrize("bug", cases(BUGS))
def test_planted_bug_is_found(bug: Bug) -> None:
    assert_found(bug, detect)


@pytest.mark.parametrize("config", [STORED, pytest.param(N_MAJOR, marks=pytest.mark.slow)], ids=["K", "N"])
def test_without_a_bug_nothing_is_found(config: Any) -> None:
    assert detect(Bug("none", config=config, seeds=1)) == (None, [])


def test_names_differ() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 15
