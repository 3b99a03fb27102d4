"""What an access to global memory is checked for: bounds, alignment, order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from padless.emulator.order.grid_dependency import EARLY, KIND
from padless.emulator.ptx.ast import Instruction
from padless.emulator.state.memory import NUMPY
from padless.emulator.state.site import Site
from padless.emulator.state.strong_access import check_weak, synchronise
from padless.emulator.state.warp import Warp

Array = np.ndarray[Any, Any]


def check_grids(w: Warp, lanes: Any, instruction: Instruction, where: Array | None = None) -> None:
    """In a programmatic launch: lanes access global memory, at the addresses `where`; constants of the module are
    nobody's to write."""
    grids = w.cta.cluster.grids
    if grids is None:
        return
    lanes = np.asarray(lanes, np.intp)
    early = grids.early(w.first_row, lanes)
    if early is None:
        return
    if where is not None:
        find = w.launch.memory.find
        early[early] = [not ((found := find(x)) and found.constant) for x in where[early].tolist()]
    if early.any():
        Site(w, instruction, int(lanes[np.argmax(early)])).report(KIND, EARLY)


def global_index(a: Any, w: Warp, where: Array, lanes: Array) -> tuple[Any, Array, Array, Any]:
    """(view of the allocation, element indices, lanes, kept) of a MemoryAccess; lanes out of bounds are reported and not
    kept."""
    check_grids(w, lanes, a.instruction, where)
    low, high = int(where.min()), int(where.max())
    memory = w.launch.memory
    found = memory.find(low)
    inside: Any = None
    if found is None or high + a.bytes > found.end:
        inside = np.zeros(len(lanes), bool)
        owner = None
        for i, address in enumerate(where.tolist()):
            this = memory.find(address)
            if this is None or address + a.bytes > this.end:
                nearest = memory.find(address - 1) or this
                hint = f" (just past {nearest.name or hex(nearest.address)})" if nearest is not None else ""
                Site(w, a.instruction, int(lanes[i])).report(
                    "out-of-bounds",
                    f"global address {address:#x}, {a.bytes} bytes, is outside every registered array{hint}",
                )
            else:
                owner = owner or this
                inside[i] = this is owner
        if owner is None:
            return None, where[:0], lanes[:0], inside
        found, where, lanes = owner, where[inside], lanes[inside]
    if a.bytes > 1 and (where % min(a.bytes, 16)).any():
        message = f"misaligned global address {int(where[0]):#x}, {a.bytes} bytes"
        Site(w, a.instruction).fault(message, "misaligned")
    return found.view(NUMPY[a.view]), (where - found.address) // a.size, lanes, inside


def global_pieces(a: Any, w: Warp, where: Array, lanes: Array) -> Iterator[tuple[Any, Array, Array]]:
    """An access by the allocations that it touches, usually one: view, element indices, lanes."""
    everyone = len(lanes)
    while len(lanes):
        view, index, took, inside = global_index(a, w, where, lanes)
        if view is not None:
            if w.clocks is not None and (a.strong or w.launch.words):
                at = where if inside is None else where[inside]
                if a.strong:
                    synchronise(w, took, w.launch.words, at, a)
                else:
                    check_weak(w, took, at, a)
            yield view, index, took
        if inside is None or view is None:
            break
        left = ~inside & np.array([w.launch.memory.find(x) is not None for x in where.tolist()])
        lanes, where = lanes[left], where[left]
        if len(lanes) == everyone:
            break
