"""What an access to global memory is checked for: bounds, alignment, order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from padless.emulator.order.grid_dependency import EARLY, KIND
from padless.emulator.ptx.ast import Instruction
from padless.emulator.state.memory import NUMPY, Allocation, DeviceMemory
from padless.emulator.state.site import Site
from padless.emulator.state.strong_access import check_weak, synchronise
from padless.emulator.state.warp import Warp
from padless.emulator.units.number_formats import Array


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


def by_allocation(
    memory: DeviceMemory, where: Array, size: int, outside: Callable[[int], None]
) -> Iterator[tuple[Allocation, Any]]:
    """`size` bytes at each address by the allocation that they lie in, usually one: (allocation, which of them).
    `outside` is called with the number of one that lies in none."""
    found = memory.find(int(where.min()))
    if found is not None and int(where.max()) + size <= found.end:
        yield found, slice(None)
        return
    left = np.ones(len(where), bool)
    while left.any():
        at = int(np.argmax(left))
        address = int(where[at])
        found = memory.find(address)
        if found is None or address + size > found.end:
            outside(at)
            left &= (where < address) | (where >= (memory.next_start(address) if found is None else found.end))
            continue
        inside = left & (where >= found.address) & (where + size <= found.end)
        yield found, inside
        left &= ~inside


def global_pieces(a: Any, w: Warp, lanes: Array, where: Array) -> Iterator[tuple[Any, Array, Array]]:
    """A MemoryAccess by the allocations that it touches: view, element indices, lanes. It is checked and ordered; lanes
    out of bounds are reported and left out."""
    check_grids(w, lanes, a.instruction, where)
    memory = w.launch.memory

    def outside(at: int) -> None:
        address = int(where[at])
        nearest = memory.find(address - 1) or memory.find(address)
        hint = f" (just past {nearest.name or hex(nearest.address)})" if nearest is not None else ""
        message = f"global address {address:#x}, {a.bytes} bytes, is outside every registered array{hint}"
        Site(w, a.instruction, int(lanes[at])).report("out-of-bounds", message)

    for found, inside in by_allocation(memory, where, a.bytes, outside):
        at, took = where[inside], lanes[inside]
        if a.bytes > 1 and (at % min(a.bytes, 16)).any():
            message = f"misaligned global address {int(at[0]):#x}, {a.bytes} bytes"
            Site(w, a.instruction).fault(message, "misaligned")
        if w.clocks is not None and a.strong:
            synchronise(w, took, w.launch.words, at, a)
        elif w.clocks is not None and w.launch.words:
            check_weak(w, took, at, a)
        yield found.view(NUMPY[a.view]), (at - found.address) // a.size, took
        w.launch.progress += a.writes
