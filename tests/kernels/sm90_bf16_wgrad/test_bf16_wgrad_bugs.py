"""Every planted bug of the bf16 weight-gradient kernel is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from padless.emulator import KINDS
from padless.kernels.sm90_bf16_wgrad import host
from padless.reference.bf16 import grouped_gemm_wgrad_rows_reference
from padless.verify.bf16.problems import RowsShape, poisoned, random_rows
from padless.verify.problems.wgrad import GuardedGradient, same_bits
from support.bf16_wgrad_bugs import BUGS, MAIN, Bug
from support.emulator_variants import Variant

# An empty group, one of two blocks and a bit, one of one and a bit, one of part of a block; several tiles to a CTA.
SHAPE = RowsShape((0, 130, 80, 33), 3, 72, 264)


def detect(bug: Bug) -> tuple[int | None, list[str]]:
    """(number of seeds needed, kinds reported until then); None if it was not found."""
    rows = poisoned(random_rows(SHAPE))
    dtype = bug.config.out_dtype
    wanted = grouped_gemm_wgrad_rows_reference(rows.dy, rows.x, rows.offs, out_dtype=dtype, accumulation="tensor_core")
    onto = None
    if bug.onto:
        onto = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)) * wanted.abs().mean()
        onto[0].view(torch.int32).fill_(0x7FABCDEF)  # a NaN that an addition would not keep
        wanted = torch.cat([onto[:1], onto[1:] + wanted[1:]])
    driver = Variant("sm_90a", MAIN, bug.edits, replace(bug.config, accumulate=bug.onto), bug.nth)
    kinds: list[str] = []
    for seed in range(bug.seeds):
        guarded = GuardedGradient(tuple(wanted.shape), dtype, "cpu", onto)
        # Bits tell of arithmetic; where a report must, what the products are does not matter.
        arithmetic = "fast" if bug.kinds else "truncate"
        with driver.configured(seed=seed, raise_on_reports=False, num_sms=1, arithmetic=arithmetic):
            host.prepare(driver, rows.dy, rows.x, rows.offs, guarded.out, bug.onto, bug.config).launch(0)
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


@pytest.mark.parametrize("onto", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_without_a_bug_nothing_is_found(onto: bool) -> None:
    assert detect(Bug("none", (), (), onto=onto, seeds=1)) == (None, [])


def test_names_differ() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 38
