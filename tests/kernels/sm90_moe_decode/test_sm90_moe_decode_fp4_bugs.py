"""Every planted bug of the decoding layer's kernel of FP4 weights is found, by three launches in turn on one scratch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from padless.emulator.run.machine import Machine
from padless.kernels.sm90_moe_decode import config_fp4, host_fp4
from padless.kernels.sm90_moe_decode.config_fp4 import Fp4LayerShape
from padless.layouts import pack_fp4, unpack_fp4
from support.emulator_variants import Variant
from support.moe_decode_bugs import Held
from support.moe_decode_cases import Output, Tokens, draw_tokens, is_ready, scratch
from support.moe_decode_fp4_bugs import BUGS, IMPATIENT
from support.moe_decode_fp4_cases import Fp4Weights, Patient, draw_fp4_weights, launch, several_launches
from support.planted_bugs import Bug, assert_found, cases

H, HIDDEN = 416, 96  # of the first product a stage and more than half of the next


def weights_of_cancelling_columns() -> Fp4Weights:
    """Scales of the last expert have second factors, those of others do not."""
    weights = draw_fp4_weights(3, H, HIDDEN, seed=1, size=60.0)
    codes = unpack_fp4(weights.w13.data)
    codes[..., 2] = codes[..., 0]
    scales = weights.w13.scale.view(torch.uint8).clone()
    scales[:2] -= torch.where(scales[:2] < 255, 6, 0).to(torch.uint8)
    scale = scales.view(weights.w13.scale.dtype)
    return replace(weights, w13=replace(weights.w13, data=pack_fp4(codes), scale=scale))


WEIGHTS = weights_of_cancelling_columns()
SEEDS = (10, 44, 22, 57, 45, 2, 0, 34)  # schedules of three CTAs


@cache
def calls() -> list[tuple[Tokens, torch.Tensor]]:
    """Three calls of other sizes with what they give: a token of 0, experts named twice, ids that are no expert.

    Two large values of x cancel exactly, their weights being the same: what other products lose meanwhile depends on
    the order of the instructions.
    """
    sizes = [(3, 3, "any"), (1, 3, "distinct"), (2, 2, "any")]
    drawn = [draw_tokens(WEIGHTS, t, k, 3 + n, shared=n != 1, kind=kind) for n, (t, k, kind) in enumerate(sizes)]
    for tokens in drawn:
        tokens.x.mul_(2**-5)  # weights are large
        tokens.x[:, 0], tokens.x[:, 2] = 2.0**14, -(2.0**14)
    drawn[0].ids[:] = torch.tensor([[2, 2, 1], [3, 0, -1], [1, 0, 2]])
    return [(tokens, several_launches(WEIGHTS, tokens)) for tokens in drawn]


def detect(bug: Bug) -> tuple[int | None, list[str]]:
    """(number of seeds needed, kinds reported until then); None if it was not found.

    CTAs have a share each with every other seed, and take each other's with the rest.
    """
    drivers: list[tuple[Any, type[Machine]]] = [
        (Patient(bug.edits, IMPATIENT, bug.nth), Machine),
        (Variant("sm_90a", host_fp4.KERNEL, bug.edits, IMPATIENT, bug.nth), Held),
    ]
    kinds: list[str] = []
    for tried, seed in enumerate(SEEDS[: bug.seeds]):
        driver, machine = drivers[tried % 2]
        output, memory, is_right = Output(3, H), scratch(Fp4LayerShape(3, 3, 3, H, HIDDEN, 3).hidden_words), True
        for n, (tokens, want) in enumerate(calls()):
            with (
                driver.configured(seed=seed, raise_on_reports=False, num_sms=3, machine=machine),
                mock.patch.object(config_fp4, "MOST_STAGES", 2),  # so that stages are asked for while others are read
            ):
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
    assert detect(Bug("none", seeds=3)) == (None, [])


def test_names_differ() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS)
