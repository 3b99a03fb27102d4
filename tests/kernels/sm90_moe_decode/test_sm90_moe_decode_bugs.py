"""Every planted bug of the decoding layer's kernel is found, by three launches one after the other on one scratch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from support.emulator_variants import Variant
from support.moe_decode_bugs import BUGS, IMPATIENT, MAIN, Held
from support.moe_decode_cases import (
    Output,
    Tokens,
    draw_tokens,
    draw_weights,
    is_ready,
    launch,
    scratch,
    several_launches,
)
from support.planted_bugs import Bug, assert_found, cases

HIDDEN = 256
WEIGHTS = draw_weights(3, 256, HIDDEN, seed=1)
SEEDS = (
    10,
    0,
    34,
    44,
    2,
    22,
    57,
    45,
)  # schedules of one to three CTAs at once; where copies are late waiting takes long


@cache
def calls() -> list[tuple[Tokens, torch.Tensor]]:
    """Three calls of other sizes with what they give: a token of 0, experts named twice, ids that are no expert.

    Token 0 of the first has two slots that cancel in exactly this order, and are so large that any other order, or a
    rounding less, changes the bits of a bf16 sum.
    """
    sizes = [(3, 3, "any"), (1, 3, "distinct"), (2, 2, "any")]
    drawn = [draw_tokens(WEIGHTS, t, k, 3 + n, shared=n != 1, kind=kind) for n, (t, k, kind) in enumerate(sizes)]
    drawn[0].ids[:] = torch.tensor([[2, 2, 1], [3, 0, -1], [1, 0, 2]])
    drawn[0].weights[0] = torch.tensor([1234567.9, -1234567.9, 0.7])
    return [(tokens, several_launches(WEIGHTS, tokens)) for tokens in drawn]


def detect(bug: Bug) -> tuple[int | None, list[str]]:
    """(number of seeds needed, kinds reported until then); None if it was not found."""
    driver: Any = Variant("sm_90a", MAIN, bug.edits, IMPATIENT, bug.nth)
    kinds: list[str] = []
    for tried, seed in enumerate(SEEDS[: bug.seeds]):
        output, memory, is_right = Output(3, 256), scratch(3 * 3 * HIDDEN), True
        for n, (tokens, want) in enumerate(calls()):
            with driver.configured(seed=seed, raise_on_reports=False, num_sms=3, machine=Held):
                launch(driver, WEIGHTS, tokens, output.poisoned(len(tokens.ids)), memory)
            kinds += [report.kind for report in driver.last_result.reports]
            is_right = is_right and output.is_right(want) and is_ready(memory, n + 1)
            if bug.kinds & set(kinds) or (not bug.kinds and (kinds or not is_right)):
                return tried + 1, kinds
    return None, kinds


@pytest.mark.parametrize("bug", cases(BUGS))
def test_planted_bug_is_found(bug: Bug) -> None:
    assert_found(bug, detect)


@pytest.mark.slow
def test_without_a_bug_nothing_is_found() -> None:
    assert detect(Bug("none", seeds=len(SEEDS))) == (None, [])


def test_names_differ() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 25
