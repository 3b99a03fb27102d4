"""What an access to global memory is checked for: bounds, alignment, order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from padless.emulator.order.global_race import GlobalShadow, parts_of, stamps_of
from padless.emulator.order.grid_dependency import EARLY, KIND
from padless.emulator.ptx.ast import Instruction
from padless.emulator.state.memory import Allocation, DeviceMemory
from padless.emulator.state.site import Site
from padless.emulator.state.spaces import VIEWS
from padless.emulator.state.strong_access import check_weak, synchronise
from padless.emulator.state.warp import Warp
from padless.emulator.units.number_formats import Array


def check_grids(
    w: Warp, lanes: Any, instruction: Instruction, where: Array | None = None, through_l1: bool = False
) -> None:
    """In a programmatic launch: lanes access global memory, at the addresses `where`. What is ready can be read past L1,
    where a line of an earlier launch may be left."""
    grids = w.cta.cluster.grids
    if grids is None:
        return
    lanes = np.asarray(lanes, np.intp)
    early = grids.early(w.first_row, lanes)
    if early is None:
        return
    if where is not None:
        find = w.launch.memory.find
        early[early] = [
            not ((found := find(x)) and (found.constant or (found.ready and not through_l1)))
            for x in where[early].tolist()
        ]
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


MOST_BYTES = 1 << 28  # of an array whose weak accesses are followed


def check_order(w: Warp, found: Allocation, lanes: Array, where: Array, a: Any, equal: Callable[[Array], bool]) -> None:
    """A MemoryAccess to one array: what it comes after, what it acquires and releases, and what is remembered of it.
    equal: as of `MemoryAccess.equals`."""
    launch = w.launch
    if a.strong:
        synchronise(w, lanes, launch.words, where, a)
    elif launch.words:
        check_weak(w, lanes, where, a)
    shadow = launch.shadows.get(found.address)
    if shadow is None:
        if a.strong or not (a.writes or found.followed) or found.size > MOST_BYTES:
            return
        granule = launch.program.global_granule
        shadow = launch.shadows[found.address] = GlobalShadow(found.address, found.size, granule.bit_length() - 1)
    rows = w.first_row + lanes
    cells = shadow.cells(where, a.bytes)
    if conflict := shadow.conflict(w.clocks, rows, cells, a.writes):
        twice = conflict[2] == "written" and launch.program.instructions[conflict[4]].opcode == "st"
        kind = "race-equal" if twice and equal(conflict[5]) else "race"
        report_conflict(Site(w, a.instruction, int(lanes[conflict[0]])), found, *conflict[1:5], kind)
    if a.strong:
        return
    stamps = stamps_of(w.cta.cluster.number, rows, w.clocks.now[rows])
    if a.writes:
        shadow.remember_write(cells, stamps, a.instruction.index)
    else:
        shadow.remember_read(w.cta.cluster.number + w.index, cells, stamps, a.instruction.index)


def check_copy(site: Site, addresses: Array, granule: int) -> None:
    """An asynchronous copy reads pieces of global memory: they were written before, if they were."""
    w = site.warp
    if w.clocks is None or not w.launch.shadows or not len(addresses):
        return
    where, rows = addresses.astype(np.int64), np.array([site.row])
    for found, inside in by_allocation(w.launch.memory, where, granule, lambda at: None):
        shadow = w.launch.shadows.get(found.address)
        if shadow is None:
            continue
        cells = shadow.cells(where[inside], granule).reshape(1, -1)
        if conflict := shadow.conflict(w.clocks, rows, cells, False):
            report_conflict(site, found, *conflict[1:5])


def report_conflict(
    site: Site, found: Allocation, address: int, did: str, stamp: int, instruction: int, kind: str = "race"
) -> None:
    """An access to global memory that an earlier one, which left this stamp, has to be ordered before and is not."""
    launch = site.warp.launch
    number, row, _ = parts_of(stamp)
    rank, thread = divmod(row, site.warp.cta.rows)
    who = f"warp {thread // 32} lane {thread % 32} of CTA {launch.cta_position(number, rank)}"
    where = f"byte {address - found.address} of {found.name or hex(found.address)}"
    message = f"global memory at {where} was {did} by {who}, and nothing orders this access after it"
    site.report(kind, message, launch.program.instructions[instruction])


def global_pieces(a: Any, w: Warp, lanes: Array, where: Array) -> Iterator[tuple[Any, Array, Array]]:
    """A MemoryAccess by the allocations that it touches: view, element indices, lanes. It is checked and ordered; lanes
    out of bounds are reported and left out."""
    check_grids(w, lanes, a.instruction, where, not a.strong)
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
        view, index = found.view(VIEWS[a.view]), (at - found.address) // a.size
        if w.clocks is not None:
            check_order(w, found, took, at, a, a.equals(w, view, index, took))
        yield view, index, took
        w.launch.progress += a.writes
