"""How .sync and .aligned instructions bring lanes together."""

from __future__ import annotations

from typing import Any

import numpy as np

from .warp import Fragment, Wait, gather

_BIT = np.uint32(1) << np.arange(32, dtype=np.uint32)
_ALL = np.ones(32, bool)


def gather_members(fragment: Fragment, m: Any, slot: int, again: Any, instruction: Any) -> Wait | None:
    """Wait until all live lanes of the membermask (a register, the same in all lanes) are here."""
    if fragment.full:
        return None
    lanes = np.flatnonzero(fragment.mask)
    members = int(fragment.warp.v[slot][lanes[0]])
    needed = (np.uint32(members) & _BIT) != 0
    if not needed[lanes].all():
        fragment.warp.cta.machine.report(
            "divergence", f"lane {int(lanes[~needed[lanes]][0])} is not in membermask {members:#010x}", instruction,
            fragment.warp, int(lanes[0]),
        )  # fmt: skip
    return gather(fragment, needed, again)


def gather_warp(fragment: Fragment, again: Any) -> Wait | None:
    """Wait until all live lanes of the warp are here (.aligned)."""
    if fragment.full:
        return None
    return gather(fragment, _ALL, again)
