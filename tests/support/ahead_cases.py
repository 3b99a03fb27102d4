"""Problems of kernels that know their groups ahead of the wait: by the ends of the groups, or by ids of the rows.

And bugs planted in them: what of the sources they edit, and what must be reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from padless.emulator import KINDS
from padless.emulator.fake_driver import EmulatedDriver
from padless.kernels import ahead

FLAT = tuple((3, 0, 1, 7)[g % 4] for g in range(34))  # more groups than one warp sorts, none of many rows
SORTED = (*FLAT[:-1], 90)
GROUPS = {"few": (5, 0, 39, 1), "flat": FLAT, "sorted": SORTED}
PAST = 3  # rows of no group


def ids_of(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """(M, 1): every group's number as often as it has rows, and numbers of no group, in some order."""
    strays = torch.tensor([-1, len(sizes), 2**31 - 1 if dtype == torch.int32 else 2**40])
    ids = torch.cat([torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)), strays])
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))][:, None].to(dtype)


def readiness(sizes: tuple[int, ...]) -> list[ahead.Ready]:
    return [ahead.Ready(), *(ahead.Ready(ids_of(sizes, dtype)) for dtype in (torch.int32, torch.int64))]


# --- planted bugs ------------------------------------------------------------------------------------------

WAIT = "griddepcontrol_wait();"
LOAD_OF_END = "(ld_relaxed_gpu(reinterpret_cast<const uint32_t*>(offs) + g))"
EARLY, RING = "grid-dependency", "race mbarrier deadlock exit"


def check_found(kinds: set[str], driver: EmulatedDriver, run: Callable[[], tuple[bool, Any]]) -> None:
    """One of four seeds has a report of ``kinds``; without any, a wrong result. run: (right, the launch's result)."""
    assert kinds <= set(KINDS)
    seen: set[str] = set()
    for seed in range(4):
        with driver.configured(seed=seed, raise_on_reports=False, num_sms=2, arithmetic="fast"):
            right, result = run()
        seen |= {report.kind for report in result.reports}
        if seen & kinds or (not kinds and not right):
            return
    pytest.fail(f"not found; reports seen: {sorted(seen) or 'none'}")
