"""Every planted bug of the Blackwell kernels is found. That the unmodified ones give no report is in their own tests."""

from __future__ import annotations

import pytest
import torch

from padless.kernels.sm100_dense.host import KERNEL as DENSE
from support.emulator_bugs_sm100 import BUGS, Bug
from support.emulator_variants import Variant
from support.planted_bugs import assert_found
from support.sm100_dense import exact_case, launch, nan_padded

# Enough for the quick run: one of each sort, the ones that are the easiest to write.
QUICK = (
    "commit to the even CTA alone",
    "no fence after the wait for sums",
    "no fence before columns are given back",
    "common columns not waited for",
    "cut tile from the other half's operands",
    "accumulators overlap by more than is waited for",
    "SF id off by one",
    "rows of atoms of B exchanged",
    "loads signal their own CTA",
    "pair not in step at the end",
    "buffer written while it is stored",
)


def detect(bug: Bug) -> tuple[int | None, list[str]]:
    """(number of seeds needed, kinds reported until then); None if it was not found."""
    case = nan_padded(exact_case(*bug.problem))
    driver = Variant("sm_100a", DENSE, bug.edits, bug.config, bug.nth)
    kinds: list[str] = []
    for seed in range(bug.seeds):
        out = torch.full(case.exact.shape, torch.nan)
        result = launch(driver, case, out, bug.config, seed=seed, num_sms=bug.config.cta_group * bug.workers)
        kinds += [r.kind for r in result.reports]
        wrong = not torch.equal(out.double(), case.exact)
        if bug.kinds & set(kinds) if bug.kinds else wrong:
            return seed + 1, kinds
    return None, kinds


@pytest.mark.parametrize("bug", [b for b in BUGS if b.name in QUICK], ids=lambda b: b.name)
def test_planted_bug_of_the_dense_kernel_is_found(bug: Bug) -> None:
    assert_found(bug, detect)


@pytest.mark.slow
@pytest.mark.parametrize("bug", [b for b in BUGS if b.name not in QUICK], ids=lambda b: b.name)
def test_every_planted_bug_of_the_dense_kernel_is_found(bug: Bug) -> None:
    assert_found(bug, detect)


def test_there_are_enough_bugs() -> None:
    assert len({b.name for b in BUGS}) == len(BUGS) >= 50
    assert set(QUICK) <= {b.name for b in BUGS}
