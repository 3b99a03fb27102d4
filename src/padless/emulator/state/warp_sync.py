"""How .sync and .aligned instructions bring lanes together."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from padless.emulator.state.warp import Fragment, Wait, gather

_BIT = np.uint32(1) << np.arange(32, dtype=np.uint32)
_ALL = np.ones(32, bool)


def gather_members(fragment: Fragment, m: Any, slot: int, again: Any, instruction: Any) -> Wait | None:
    """Wait until all live lanes of the membermask (a register, the same in all lanes) are here."""
    if fragment.full:
        together(fragment)
        return None
    lanes = np.flatnonzero(fragment.mask)
    members = int(fragment.warp.v[slot][lanes[0]])
    needed = (np.uint32(members) & _BIT) != 0
    if not needed[lanes].all():
        fragment.warp.cta.machine.report(
            "divergence", f"lane {int(lanes[~needed[lanes]][0])} is not in membermask {members:#010x}", instruction,
            fragment.warp, int(lanes[0]),
        )  # fmt: skip
    wait = gather(fragment, needed, again)
    if wait is None:
        together(fragment)
    return wait


def whole_warp(function: Callable[[Fragment, Any], Wait | None]) -> Callable[[Fragment, Any], Wait | None]:
    """An .aligned instruction's function, which is called once all live lanes of the warp are here."""

    @wraps(function)
    def gathered(fragment: Fragment, m: Any) -> Wait | None:
        if not fragment.full:
            wait = gather(fragment, _ALL, gathered)
            if wait is not None:
                return wait
        together(fragment)
        return function(fragment, m)

    return gathered


def together(fragment: Fragment) -> None:
    """The lanes of the fragment execute one instruction at once."""
    clocks = fragment.warp.cta.cluster.clocks
    if clocks is not None:
        clocks.order_reads(
            fragment.warp.rows if fragment.full else fragment.warp.first_row + np.flatnonzero(fragment.mask)
        )
