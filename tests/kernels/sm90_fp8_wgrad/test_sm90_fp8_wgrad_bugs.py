"""Every planted bug of the weight-gradient kernel is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from padless.emulator import KINDS
from padless.kernels.sm90_fp8_wgrad import host
from padless.reference.wgrad import grouped_gemm_wgrad_reference
from padless.verify.problems.wgrad import GuardedGradient, WgradShape, poisoned, random_operands, same_bits
from support.emulator_variants import Variant
from support.wgrad_bugs import BUGS, MAIN, Bug

# An empty group, one of a block and a bit, one of three blocks, one of part of a block; several tiles to a CTA.
SHAPE = WgradShape((0, 130, 300, 33), 3, 272, 144, (32, 128))


def detect(bug: Bug) -> tuple[int | None, list[str]]:
    """(number of seeds needed, kinds reported until then); None if it was not found."""
    dy, x = random_operands(SHAPE, bug.config.mode)
    dtype = bug.config.out_dtype
    wanted = grouped_gemm_wgrad_reference(dy, x, out_dtype=dtype, accumulation="tensor_core")
    onto = None
    if bug.onto:
        onto = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)) * wanted.abs().mean()
        onto[0].view(torch.int32).fill_(0x7FABCDEF)  # a NaN that an addition would not keep
        wanted = torch.cat([onto[:1], onto[1:] + wanted[1:]])
    if bug.poisoned:
        dy, x = poisoned(dy), poisoned(x)
    driver = Variant("sm_90a", MAIN, bug.edits, replace(bug.config, accumulate=bug.onto), bug.nth)
    kinds: list[str] = []
    for seed in range(bug.seeds):
        guarded = GuardedGradient(tuple(wanted.shape), dtype, "cpu", onto)
        # Bits tell of arithmetic; where a report must, what the products are does not matter.
        arithmetic = "fast" if bug.kinds else "truncate"
        with driver.configured(seed=seed, raise_on_reports=False, num_sms=1, arithmetic=arithmetic):
            host.prepare(driver, dy, x, guarded.out, bug.onto, bug.config).launch(0)
            result: Any = driver.last_result
        kinds += [report.kind for report in result.reports]
        if bug.kinds:
            found = bool(set(kinds) & set(bug.kinds))
        else:
            found = bool(kinds) or not right(guarded, wanted)
        if found:
            return seed + 1, kinds
    return None, kinds


def right(guarded: GuardedGradient, wanted: torch.Tensor) -> bool:
    try:
        guarded.check()
    except AssertionError:
        return False
    return same_bits(guarded.out, wanted)


@pytest.mark.parametrize("bug", [pytest.param(b, id=b.name, marks=() if b.quick else pytest.mark.slow) for b in BUGS])
def test_planted_bug_is_found(bug: Bug) -> None:
    seeds, kinds = detect(bug)
    assert seeds is not None, f"{bug.name}: not found; reports seen: {sorted(set(kinds)) or 'none'}"
    assert set(bug.kinds) <= set(KINDS)


@pytest.mark.parametrize("bug", [b for b in BUGS if b.quick and not b.kinds][:1], ids=lambda b: b.name)
@pytest.mark.parametrize("onto", [False, True])
def test_without_a_bug_nothing_is_found(bug: Bug, onto: bool) -> None:
    innocent = Bug("none", (), (), bug.config, onto=onto, poisoned=True, seeds=2)
    assert detect(innocent) == (None, [])


def test_names_differ() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 35
