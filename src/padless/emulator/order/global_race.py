"""Shadow of global memory: who wrote each granule of an array last with a weak store, and who has read it since.

Strong accesses have a memory of their own (`state/strong_access.py`) and are checked here against weak ones. An array is
followed from the first weak store of the launch on, so operands that a launch only reads cost nothing. A stamp is the
number of a cluster, a lane's row in its clocks and that lane's event.
"""

from __future__ import annotations

import numpy as np

from padless.emulator.order.memory_order import OrderedClocks
from padless.emulator.order.race import BASE, READS
from padless.emulator.units.number_formats import Array

EVENT_BITS, ROW_BITS = 30, 14  # the rest are the cluster's number: 2^20 of them
_EVENT, _ROW = (np.uint64((1 << bits) - 1) for bits in (EVENT_BITS, ROW_BITS))
_ROW_SHIFT, _NUMBER_SHIFT = np.uint64(EVENT_BITS), np.uint64(EVENT_BITS + ROW_BITS)
READERS = 2  # stamps of reads that are kept


def stamps_of(number: int, rows: Array, events: Array) -> Array:
    """A stamp a lane."""
    stamps: Array = (np.uint64(number) << _NUMBER_SHIFT) | (rows.astype(np.uint64) << _ROW_SHIFT) | events
    return stamps


def parts_of(stamp: int) -> tuple[int, int, int]:
    """(number of the cluster, row, event) of a stamp."""
    return stamp >> (EVENT_BITS + ROW_BITS), stamp >> EVENT_BITS & (1 << ROW_BITS) - 1, stamp & (1 << EVENT_BITS) - 1


class GlobalShadow:
    """Stamps of one array of global memory, by granule of 1 << shift bytes."""

    def __init__(self, address: int, size: int, shift: int) -> None:
        self.base, self.shift = address >> shift, shift
        cells = (address + size - 1 >> shift) - self.base + 1
        self.written = np.zeros(cells, np.uint64)
        self.write_site = np.zeros(cells, np.int32)
        self.read = np.zeros((READERS, cells), np.uint64)
        self.read_site = np.zeros((READERS, cells), np.int32)
        self.any_read = False

    def cells(self, addresses: Array, size: int) -> Array:
        """Those of `size` bytes at each address, a row each."""
        first = ((addresses >> self.shift) - self.base)[:, None]
        count = -(-size >> self.shift)
        return first + np.arange(count) if count > 1 else first

    def conflict(
        self, clocks: OrderedClocks, rows: Array, cells: Array, write: bool
    ) -> tuple[int, int, str, int, int, Array] | None:
        """The first access before that nothing orders before this one, by lanes with these rows: (which lane, address,
        what it did, its stamp, its instruction, all lanes that it holds for)."""
        checks = [(self.written, self.write_site, BASE, "written")]
        if write and self.any_read:
            checks += [(self.read[k], self.read_site[k], READS, "read") for k in range(READERS)]
        for kept, sites, plane, did in checks:
            stamps = kept[cells]
            if not stamps.any():
                continue
            bad = unordered(clocks, rows, stamps, plane)
            if bad.any():
                lane, column = np.argwhere(bad)[0].tolist()
                cell = int(cells[lane, column])
                lanes = np.flatnonzero(bad.any(axis=1))
                return lane, cell + self.base << self.shift, did, int(stamps[lane, column]), int(sites[cell]), lanes
        return None

    def remember_write(self, cells: Array, stamps: Array, site: int) -> None:
        self.written[cells] = stamps[:, None]
        self.write_site[cells] = site
        if self.any_read:
            self.read[:, cells] = 0

    def remember_read(self, slot: int, cells: Array, stamps: Array, site: int) -> None:
        self.any_read = True
        self.read[slot % READERS][cells] = stamps[:, None]
        self.read_site[slot % READERS][cells] = site


def unordered(clocks: OrderedClocks, rows: Array, stamps: Array, plane: int) -> Array:
    """Of stamps (lanes, cells) those that the lanes with these rows do not come after."""
    own_number = np.uint64(clocks.others.number)
    number, events = stamps >> _NUMBER_SHIFT, stamps & _EVENT
    columns = (stamps >> _ROW_SHIFT & _ROW).astype(np.intp)
    is_own = number == own_number
    if is_own.all():
        found: Array = clocks.time[plane][rows[:, None], columns] < events
        return found
    found = clocks.time[plane][rows[:, None], np.where(is_own, columns, 0)] < events
    for other in np.unique(number[~is_own & (stamps != 0)]).tolist():
        theirs = number == np.uint64(other)
        needed = np.unique(columns[theirs])
        known = clocks.others.known(clocks.time[BASE, rows], other, needed)
        at = np.minimum(np.searchsorted(needed, columns), len(needed) - 1)
        found = np.where(theirs, known[np.arange(len(rows))[:, None], at] < events, found)
    return found & (stamps != 0)
