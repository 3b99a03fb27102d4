"""Prefetches of weights into L2 by Hopper's FP8 kernel before offs are known (kernels/device/weights_prefetch.cuh).

A prefetch changes nothing, so a load takes its place here, and the emulator tells what is read. (A load would have to
wait for the kernels ahead; a prefetch need not.)
"""

from __future__ import annotations

import pytest

from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from support.emulator_bugs import BASE, CONSUMERS_STORE, MAIN, MEMORY
from support.emulator_cases import make_case, run_case
from support.emulator_variants import Edit, Variant

PREFETCH = "device/weights_prefetch.cuh"
LOAD: Edit = (MEMORY, "prefetch.global.L2 [%0];", "{ .reg .b32 x; ld.global.b32 x, [%0]; ld.global.b32 x, [%0 + 12]; }")
TOO_FAR: dict[str, Edit] = {
    "a row too many": (PREFETCH, "row < n", "row <= n"),
    "a line too many": (PREFETCH, "at < k)", "at < k + 128)"),
    "a group too many": (PREFETCH, "group >= num_groups", "group > num_groups"),
    "the group's bytes twice": (PREFETCH, "group * weights.group_bytes", "2 * group * weights.group_bytes"),
}


def kinds_of(config: Sm90Fp8Config, edits: tuple[Edit, ...], n: int, k: int, sms: int) -> set[str]:
    """Kinds of the emulator's reports of a launch of three groups; its result has to be right."""
    case = make_case((3, 0, 70), n, k, config.scales)
    driver = Variant("sm_90a", MAIN, edits, config)
    settings = {"raise_on_reports": False, "arithmetic": "fast", "ignore": ("grid-dependency",)}
    with driver.configured(seed=1, num_sms=sms, **settings):
        right, result = run_case(driver, case, config)
    assert result is not None
    assert right
    return {report.kind for report in result.reports}


@pytest.mark.parametrize("config", [BASE, CONSUMERS_STORE], ids=["128", "192"])
@pytest.mark.parametrize("k", [112, 272])
def test_only_weights_are_asked_for(config: Sm90Fp8Config, k: int) -> None:
    assert kinds_of(config, (LOAD,), n=200, k=k, sms=8) == set()


@pytest.mark.parametrize("bug", TOO_FAR.values(), ids=TOO_FAR.keys())
def test_what_is_past_their_end_is_reported(bug: Edit) -> None:
    k = 112 if "k" in bug[1] else 272
    assert "out-of-bounds" in kinds_of(BASE, (LOAD, bug), n=200, k=k, sms=8)
