"""Strong accesses: loads, stores and atomics that order what their lanes do, where they meet at an address."""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.order.race import merge
from padless.emulator.state.warp import Warp

Array = np.ndarray[Any, Any]


def synchronise(w: Warp, lanes: Array, space: Any, where: Array, opcode: str) -> None:
    """A release publishes the lane's clock at the address, an acquire takes it. `space`: what `where` counts in.

    Relaxed accesses are treated as both: the fences that make them so are executed next to them.
    """
    clocks = w.clocks
    published = w.cta.cluster.published
    for lane, address in zip(lanes.tolist(), where.tolist(), strict=True):
        key = space, address
        row = np.array([w.first_row + lane])
        if opcode not in ("st", "red") and key in published:
            clocks.acquire(row, published[key])
        if opcode != "ld":
            published[key] = merge(published.get(key), clocks.release(row))
