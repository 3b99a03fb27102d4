"""Every planted bug of Hopper's bf16 kernel is found; the same problems on the kernel as it is give no report."""

from __future__ import annotations

import pytest

from padless.emulator import KINDS
from padless.emulator.fake_driver import EmulatedDriver
from padless.kernels.sm90_bf16.host import KERNEL
from support.emulator_bugs_bf16 import BUGS, Bug, config_of, run
from support.emulator_variants import Variant


def check_found(bug: Bug) -> None:
    driver = Variant("sm_90a", KERNEL, bug.edits, config_of(bug), bug.nth)
    seen: set[str] = set()
    for seed in range(4):
        right, kinds = run(bug, driver, config_of(bug), seed)
        seen |= set(kinds)
        if seen & bug.kinds if bug.kinds else not right:
            return
    pytest.fail(f"{bug.name}: not found on 4 seeds; reports seen: {sorted(seen) or 'none'}")


@pytest.mark.parametrize("bug", [b for b in BUGS if b.quick], ids=lambda b: b.name)
def test_planted_bug_is_found(bug: Bug) -> None:
    check_found(bug)


@pytest.mark.slow
@pytest.mark.parametrize("bug", [b for b in BUGS if not b.quick], ids=lambda b: b.name)
def test_every_planted_bug_is_found(bug: Bug) -> None:
    check_found(bug)


@pytest.mark.parametrize("blocked", [False, True])
def test_the_kernel_as_it_is_gives_no_report(blocked: bool) -> None:
    bug = next(b for b in BUGS if b.blocked == blocked)
    right, kinds = run(bug, EmulatedDriver(), config_of(bug), 3)
    assert right
    assert kinds == []


def test_the_kinds_exist() -> None:
    assert {kind for bug in BUGS for kind in bug.kinds} <= set(KINDS)
    assert len({bug.name for bug in BUGS}) == len(BUGS)
