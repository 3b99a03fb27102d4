"""Bugs planted in the FP8 kernel with swapped operands are seen, by the emulator's reports or by wrong rows."""

from __future__ import annotations

import re

import pytest
import torch

from padless.emulator.errors import LaunchError
from padless.kernels.sm90_fp8_swapped.config import Sm90Fp8SwappedConfig
from padless.runtime import jit
from support.sm90_fp8_swapped_cases import DRIVER, SMALL, assert_same_bits, multiply, random_problem

FOLDER = "sm90_fp8_swapped/"
FILES = ("load", "scales", "multiply", "store", "order", "storage")
BUGS = {
    "products before their scales": (r"shared\.scaled\[stage\]\), pipe", "shared.full[stage]), pipe"),
    "scales before the stage is full": (r"mbarrier_wait\(shared_address\(&shared\.full\[stage\]\)[^;]*;", ""),
    "stage filled before it is empty": (r"mbarrier_wait\(shared_address\(&shared\.empty\[stage\]\)[^;]*;", ""),
    "stage never released": (r"if \(ARE_KEPT && w == m64s - 1\) release_stage\(shared, stage, lane\);", ""),
    "stage released before its products": (
        r"(?s)wgmma_wait_group<0>\(\);(.*?)(constexpr bool ARE_KEPT[^;]*;\s+if \(ARE_KEPT[^;]*;)",
        r"\2 wgmma_wait_group<0>();\1",
    ),
    "products not waited for": (r"wgmma_wait_group<0>\(\);", ""),
    "no fence before the products": (r"wgmma_fence\(\);", ""),
    "staging memory not waited for": (r"if \(issuer\) cp_async_bulk_wait_group_read_all\(\);", ""),
    "stored without a proxy fence": (r"fence_proxy_async_shared\(\);", ""),
    "two places of scales exchanged": (r"token / 8 % 2 \* 2 \+ token % 2", "token % 2 * 2 + token / 8 % 2"),
    "scales of the row at a multiple of 4": (r"\(tile\.row & 3\) \+ lane", "lane"),
    "the other warpgroup's scale block": (r"return warpgroup;", "return 1 - warpgroup;"),
    "tile not cut at the group's end": (r"rows < end - tile\.row \? rows : end - tile\.row", "rows"),
    "an eight too few": (r"\(end - start \+ 7\) / 8", "(end - start) / 8"),
    "weights 8 further not exchanged with tokens": (r"2 \* warp \+ lane / 8 % 2", "2 * warp + lane / 16 % 2"),
}  # fmt: skip


QUICK = ("products before their scales", "tile not cut at the group's end")


@pytest.mark.parametrize("bug", [bug if bug in QUICK else pytest.param(bug, marks=pytest.mark.slow) for bug in BUGS])
def test_a_planted_bug_is_seen(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    sources, count = dict(jit.sources()), 0
    for file in FILES:
        name = f"{FOLDER}{file}.cuh"
        sources[name], found = re.subn(*BUGS[bug], sources[name])
        count += found
    assert count == 1, f"the kernel has {count} places like {BUGS[bug][0]!r}: plant another fault"
    monkeypatch.setattr(jit, "sources", lambda: sources)
    problem = random_problem((5, 66), 264, 416)
    # A number of its own, so that the kernel is compiled.
    config = Sm90Fp8SwappedConfig(block_m=64, step_m=16, num_stages=2, raster_m=9 + list(BUGS).index(bug))
    with pytest.raises((LaunchError, AssertionError)):
        assert_same_bits(multiply(problem, config, driver=type(DRIVER)(), num_sms=1), right())


def right() -> torch.Tensor:
    if not _RIGHT:
        _RIGHT.append(multiply(random_problem((5, 66), 264, 416), SMALL))
    return _RIGHT[0]


_RIGHT: list[torch.Tensor] = []


def test_the_kernel_without_them_is_right() -> None:
    config = Sm90Fp8SwappedConfig(block_m=64, step_m=16, num_stages=2)
    assert_same_bits(multiply(random_problem((5, 66), 264, 416), config, num_sms=1), right())
