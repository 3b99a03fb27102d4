"""The atomics that instructions compile to: read, modify, write, lane after lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from padless.emulator.state.memory_access import PIECES, MemoryAccess, addresses
from padless.emulator.state.site import lanes_of
from padless.emulator.state.warp import Warp
from padless.emulator.units import number_formats
from padless.emulator.units.number_formats import Array

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, x: old + x,
    "min": min,
    "max": max,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "exch": lambda old, x: x,
    "inc": lambda old, x: type(old)(0) if old >= x else type(old)(old + 1),
    "dec": lambda old, x: x if old == 0 or old > x else type(old)(old - 1),
}


def packed(kind: str, operation: str) -> Callable[[Any, Any], Any]:
    """add, min or max of one or two 16-bit floating-point numbers in a word."""
    base = kind.removesuffix("x2")
    widen, narrow = (getattr(number_formats, f"{how}_{base}") for how in ("widen", "narrow"))
    storage = np.uint32 if kind.endswith("x2") else np.uint16
    function: dict[str, Any] = {"add": np.add, "min": np.fmin, "max": np.fmax}

    def apply(old: Any, x: Any) -> Any:
        values = (widen(np.array([v], storage).view(np.uint16)) for v in (old, x))
        return narrow(function[operation](*values)).view(storage)[0]

    return apply


def atomic(a: MemoryAccess, operation: str, kind: str, sources: list[list[int]]) -> Callable[..., None]:
    """`sources`: the slots of each operand, one per element of a vector. Every element is atomic by itself; the two
    halves of 128 bits are one."""
    function = OPERATIONS.get(operation)
    if kind in ("f16", "bf16", "f16x2", "bf16x2") and operation in ("add", "min", "max"):
        function = packed(kind, operation)
    a.strong = True

    def atom(w: Warp, v: Any, m: Any) -> None:
        lanes = lanes_of(m)
        if not len(lanes):
            return
        where = addresses(a, v, lanes)
        for lane, address in zip(lanes.tolist(), where.tolist(), strict=True):
            found = element(a, w, np.array([lane]), address)
            if found is None:
                continue
            view, index = found
            part = slice(index, index + len(a.slots))
            old = view[part].copy()
            if operation == "cas":
                if all(x == v[s][lane] for x, s in zip(old, sources[0], strict=True)):
                    view[part] = [v[s][lane] for s in sources[1]]
            elif function is not None:
                view[part] = [function(x, v[s][lane]) for x, s in zip(old, sources[0], strict=True)]
            for slot, x in zip(a.slots, old, strict=True):
                if slot >= 0:
                    v[slot][lane] = x
        w.launch.progress += 1

    return atom


def element(a: MemoryAccess, w: Warp, lane: Array, address: int) -> tuple[Array, int] | None:
    """(view, index) of what one lane's atomic changes, which is checked and ordered; None if it is out of bounds."""
    return next(((view, int(index[0])) for view, index, _ in PIECES[a.space](a, w, lane, np.array([address]))), None)
