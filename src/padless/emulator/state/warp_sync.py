"""How .sync and .aligned instructions bring lanes together."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from padless.emulator.ptx.ast import Instruction
from padless.emulator.state.site import Site, rows_of
from padless.emulator.state.warp import Fragment, Wait, gather

_BIT = np.uint32(1) << np.arange(32, dtype=np.uint32)
_ALL = np.ones(32, bool)


def gather_members(f: Fragment, m: Any, slot: int, again: Any, instruction: Instruction) -> Wait | None:
    """Wait until all live lanes of the membermask (a register, the same in all lanes) are here."""
    if f.full:
        together(f)
        return None
    lanes = np.flatnonzero(f.mask)
    members = int(f.warp.v[slot][lanes[0]])
    needed = (np.uint32(members) & _BIT) != 0
    if not needed[lanes].all():
        stranger = int(lanes[~needed[lanes]][0])
        message = f"lane {stranger} is not in membermask {members:#010x}"
        Site(f.warp, instruction, int(lanes[0])).report("divergence", message)
    wait = gather(f, needed, again)
    if wait is None:
        together(f)
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
    w = fragment.warp
    if w.clocks is not None:
        w.clocks.order_reads(rows_of(w, fragment.active))
