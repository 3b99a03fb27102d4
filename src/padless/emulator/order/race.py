"""Happens-before tracking: vector clocks per lane, and shadow memory that says who touched each byte last.

Clocks. `Clocks.time` has three planes of one row per lane of the cluster and one column per lane plus one column per
asynchronous agent (an mbarrier that copies complete on, a thread's bulk groups, a warpgroup's wgmma groups, a tcgen05
pipe). Entry [0, l, c] is the latest event of column c that lane l is ordered after. Plane 1 counts only what is ordered
with a fence.proxy.async on the way: it is set to plane 0 by that fence and travels with plane 0 through every barrier.
Plane 2 is plane 0 plus the reads of the warp's own lanes before the last instruction that the warp executed
together: a warp issues in order, so those reads have been served, while its writes need bar.warp.sync to be ordered.
Plane 3 counts what a tcgen05.fence::before_thread_sync has published on the way, and plane 4, which does not travel,
what a tcgen05.fence::after_thread_sync of the lane itself has taken: the order that tensor-memory accesses need.

Shadow. Each granule of shared memory (each cell of tensor memory) remembers a stamp of its last write and up to eight
stamps of reads since: column, event number, and whether the access was through the async proxy. An access is ordered
after a stamp if the accessing lane's clock for that column has reached the event. An unfinished asynchronous write has
event number IN_FLIGHT, which no clock reaches. A stamp is checked whenever it is met, whatever order this run happened
to execute things in, so that most races show on any seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from padless.emulator.order.reports import Collector
from padless.emulator.order.unread import UnreadLoad
from padless.emulator.units.number_formats import Array


class Place(Protocol):
    """A lane at an instruction, as `state.site.Site` is."""

    instruction: Any
    warp: Any
    lane: int


PLANES = 5
BASE, PROXY, READS, BEFORE, TENSOR = range(PLANES)  # all but the last travel
IN_FLIGHT = 0xFFFFFFFF
ASYNC = 1 << 32
STRONG = 1 << 33
COLUMN_SHIFT = 34
READER_SLOTS = 8
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(COLUMN_SHIFT)


def pack(column: Any, event: Any, flags: int = 0) -> Any:
    """A stamp from its parts; scalars or arrays."""
    if isinstance(column, int) and isinstance(event, int):
        return np.uint64(column << COLUMN_SHIFT | event | flags)
    shifted = np.asarray(column).astype(np.uint64) << _SHIFT
    return shifted | np.asarray(event).astype(np.uint64) | np.uint64(flags)


class Clocks:
    """The vector clocks of one cluster."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.columns = lanes
        self.time = np.zeros((PLANES, lanes, lanes + 64), np.uint32)
        diagonal = np.arange(lanes)
        self.time[0, diagonal, diagonal] = 1
        self.time[2] = self.time[0]
        self._diagonals()

    def _diagonals(self) -> None:
        """Each lane's own event, in planes 0 and 2: views, in which a slice of rows is a slice."""
        step = self.time.shape[2] + 1
        self.now, self.now_read = (self.time[k].reshape(-1)[::step][: self.lanes] for k in (BASE, READS))

    def new_column(self) -> int:
        if self.columns == self.time.shape[2]:
            wider = np.zeros((PLANES, self.lanes, 2 * self.columns), np.uint32)
            wider[:, :, : self.columns] = self.time
            self.time = wider
            self._diagonals()
        self.columns += 1
        return self.columns - 1

    def join(self, rows: Any) -> Array:
        """What a release by these lanes publishes: all planes but the last, the greatest over the lanes."""
        return self.time[:TENSOR, rows].max(axis=1)

    def release(self, rows: Any) -> Array:
        """`join`, and a new event of each lane: what they do next is not published."""
        clock = self.join(rows)
        self.tick(rows)
        return clock

    def meet(self, rows: Any) -> Array:
        """What all of these lanes are ordered after: all five planes."""
        return self.time[:, rows].min(axis=1)

    def tick(self, rows: Any) -> None:
        """Start a new event of each lane. The fenced planes have not seen it: later writes need a later fence."""
        self.now[rows] += 1
        self.now_read[rows] = self.now[rows]

    def fence_before(self, rows: Any) -> None:
        """tcgen05.fence::before_thread_sync."""
        self.time[BEFORE, rows] = np.maximum(self.time[BEFORE, rows], self.time[BASE, rows])

    def fence_after(self, rows: Any) -> None:
        """tcgen05.fence::after_thread_sync."""
        self.time[TENSOR, rows] = np.maximum(self.time[TENSOR, rows], self.time[BEFORE, rows])

    def acquire(self, rows: Any, clock: Array) -> None:
        width = clock.shape[1]
        part = self.time[:TENSOR, rows, :width]
        self.time[:TENSOR, rows, :width] = np.maximum(part, clock[:, None, :])

    def observe(self, rows: Any, column: int, event: int) -> None:
        """These lanes now know that an asynchronous agent has reached an event."""
        self.time[:3, rows, column] = np.maximum(self.time[:3, rows, column], event)

    def order_reads(self, rows: Any) -> None:
        """The lanes have executed an instruction together: their earlier reads are done."""
        self.time[2, rows] = np.maximum(self.time[2, rows], self.time[0, rows]).max(axis=0)
        self.tick(rows)

    def fence_proxy(self, rows: Any) -> None:
        self.time[1, rows] = np.maximum(self.time[1, rows], self.time[0, rows])
        self.tick(rows)


def merge(one: Array | None, two: Array) -> Array:
    """The later of two published clocks; columns may have been added in between."""
    if one is None:
        return two.copy()
    if one.shape[1] < two.shape[1]:
        one, two = two.copy(), one
    width = two.shape[1]
    np.maximum(one[:, :width], two, out=one[:, :width])
    return one


class Shadow:
    """Stamps of one memory: shared memory of a CTA by granule of `scale` bytes, or tensor memory by cell."""

    CELL_BYTES = 8 + 4 + 1 + 12 * READER_SLOTS  # of the arrays below

    def __init__(
        self, size: int, clocks: Clocks, collector: Collector, instructions: list[Any], what: str, scale: int = 1
    ) -> None:
        self.written = np.zeros(size, np.uint64)
        self.write_site = np.full(size, -1, np.int32)
        self.reader_slots = np.zeros(size, np.uint8)
        self.read = np.zeros((READER_SLOTS, size), np.uint64)
        self.read_site = np.zeros((READER_SLOTS, size), np.int32)
        self.clocks = clocks
        self.collector = collector
        self.instructions = instructions
        self.what = what
        self.scale = scale
        self.late: frozenset[int] = frozenset()  # Program.late, of shared memory
        self.unread: dict[tuple[int, int, int], UnreadLoad] = {}

    def forget(self, cells: Any) -> None:
        """Nothing has touched these cells."""
        self.written[cells] = 0
        self._forget_reads(cells)

    # ---- ordinary accesses, one row of cells per lane
    def access(
        self, warp: Any, lanes: Array, cells: Array, instruction: Any, write: bool, strong: bool = False,
        equal: Callable[[Array], bool] = lambda picked: False,
    ) -> None:  # fmt: skip
        """`cells` has one row per lane. Checks against earlier stamps, then leaves its own. equal: whether some of the
        lanes store what is there."""
        rows = warp.first_row + lanes
        time = self.clocks.time
        stamps = self.written[cells]
        who = instruction, warp, lanes, strong, equal
        self._check_rows(stamps, rows, time[BASE], self.write_site, cells, "written", *who)
        stamp = pack(rows, self.clocks.now[rows], STRONG if strong else 0)[:, None]
        if write:
            for stale, sites in self._reads(cells):
                self._check_rows(stale, rows, time[READS], sites, cells, "read", *who)
            self._remember_write(cells, stamp, instruction)
            return
        if not stamps.all():
            self._report_uninitialised(instruction, warp, int(lanes[np.argmin(stamps.min(axis=1))]))
        self._remember_read((warp.cta.rank * 5 + warp.index) % 4, cells, stamp, instruction)
        if instruction.index in self.late:
            key = warp.first_row, instruction.index, int(cells.flat[0])
            self.unread[key] = load = UnreadLoad(instruction, np.unique(cells))
            warp.unread.setdefault(instruction.index, []).append(load)

    def _report_uninitialised(self, instruction: Any, warp: Any, lane: int) -> None:
        kind = "uninitialised-" + ("shared" if self.what == "shared memory" else "tensor-memory")
        self.collector.add(kind, f"reads {self.what} that nothing has written", instruction, warp, lane)

    def _reads(self, cells: Any) -> list[tuple[Array, Array]]:
        """Stamps of the reads since the last write, and the instructions that read, by slot."""
        slots = int(np.bitwise_or.reduce(self.reader_slots[cells], axis=None))
        return [(self.read[k][cells], self.read_site[k]) for k in range(READER_SLOTS) if slots >> k & 1]

    def _remember_write(self, cells: Any, stamp: Any, instruction: Any) -> None:
        self.written[cells] = stamp
        self.write_site[cells] = instruction.index
        if self.reader_slots[cells].any():
            self._forget_reads(cells)

    def _forget_reads(self, cells: Any) -> None:
        self.reader_slots[cells] = 0
        self.read[:, cells] = 0

    def _remember_read(self, slot: int, cells: Any, stamp: Any, instruction: Any) -> None:
        self.read[slot][cells] = stamp
        self.read_site[slot][cells] = instruction.index
        self.reader_slots[cells] |= np.uint8(1 << slot)

    def _check_rows(
        self, stamps: Array, rows: Array, time: Array, sites: Array, cells: Array, did: str, instruction: Any,
        warp: Any, lanes: Array, strong: bool, equal: Callable[[Array], bool],
    ) -> None:  # fmt: skip
        first = stamps.flat[0]
        if (stamps == first).all():
            if first == 0:
                return
            column, event = int(first) >> COLUMN_SHIFT, int(first) & IN_FLIGHT
            bad = time[rows, column] < event
            if not bad.any():
                return
            bad = np.broadcast_to(bad[:, None], stamps.shape)
        else:
            bad = time[rows[:, None], (stamps >> _SHIFT).astype(np.intp)] < (stamps & _LOW)
        if strong:
            bad = bad & (stamps & np.uint64(STRONG) == 0)
        if not bad.any():
            return
        row, column = np.argwhere(bad)[0]
        cell = int(cells[row, column])
        stamp, site = int(stamps[row, column]), int(sites[cell])
        twice = did == "written" and site >= 0 and self.instructions[site].opcode == instruction.opcode
        kind = "race-equal" if twice and equal(np.flatnonzero(bad.any(axis=1))) else "race"
        self.conflict(stamp, site, cell, did, kind, instruction, warp, int(lanes[row]))

    def conflict(
        self, stamp: int, site: int, cell: int, did: str, kind: str, instruction: Any, warp: Any, lane: int
    ) -> None:
        """Report an access to a cell whose stamp, left by the instruction number `site`, nothing orders before it."""
        who = self.describe(stamp)
        where = f"{self.what} at {self.position(cell)}"
        if stamp & IN_FLIGHT == IN_FLIGHT:
            message = f"{where} is being {did} by an unfinished {who}"
        elif kind in ("race", "race-equal"):
            message = f"{where} was {did} by {who}, and nothing orders this access after it"
        else:
            message = f"{where} was {did} by {who} with no {FENCE_OF[kind]} in between"
        other = self.instructions[site] if site >= 0 else None
        self.collector.add(kind, message, instruction, warp, lane, other)

    def position(self, cell: int) -> str:
        if self.what == "shared memory":
            return f"byte {cell * self.scale}"
        return f"lane {cell // 512}, column {cell % 512}"

    def describe(self, stamp: int) -> str:
        column = stamp >> COLUMN_SHIFT
        if column < self.clocks.lanes:
            return f"warp {column // 32} lane {column % 32} of the cluster"
        return "asynchronous operation"

    # ---- bulk accesses, ordered by one clock of five planes
    def bulk(
        self, cells: Any, clock: Array, stamp: Any, site: Place, write: bool, generic_plane: int = PROXY, own: int = 0
    ) -> None:
        """An asynchronous access to `cells` (slice or index array) by an operation issued under `clock` (five planes).

        Stamps of the generic proxy must be reached in `generic_plane`, those of the async proxy there too if that is
        TENSOR, else in BASE. `own` is a stamp to overlook: that of the same operation's other accesses.
        """
        async_plane = TENSOR if generic_plane == TENSOR else BASE
        stamps = self.written[cells]
        self._check_bulk(stamps, cells, clock, self.write_site, site, "written", (generic_plane, async_plane))
        if write:
            planes = (READS if generic_plane != TENSOR else TENSOR), async_plane
            for stale, sites in self._reads(cells):
                self._check_bulk(stale, cells, clock, sites, site, "read", planes, own)
            self._remember_write(cells, stamp, site.instruction)
            if self.unread and generic_plane == PROXY:
                self._overwrite_unread(cells, clock[BASE], site)
            return
        if not stamps.all():
            self._report_uninitialised(site.instruction, site.warp, site.lane)
        self._remember_read(4 + (int(stamp) >> COLUMN_SHIFT) % 4, cells, stamp, site.instruction)

    def _check_bulk(
        self, stamps: Array, cells: Any, clock: Array, sites: Array, site: Place, did: str, planes: tuple[int, int],
        own: int = 0,
    ) -> None:  # fmt: skip
        flat = stamps.reshape(-1)
        if flat.size == 0:
            return
        first = flat[0]
        kinds = flat[:1] if (flat == first).all() else np.unique(flat)
        kinds = kinds[(kinds != 0) & (kinds != np.uint64(own))]
        if kinds.size == 0:
            return
        generic_plane, async_plane = planes
        columns = (kinds >> _SHIFT).astype(np.intp)
        inside = np.minimum(columns, clock.shape[1] - 1)
        events = kinds & _LOW
        is_async = (kinds & np.uint64(ASYNC)) != 0
        known = np.where(columns < clock.shape[1], clock[BASE][inside], 0)
        reached = np.where(is_async, clock[async_plane][inside], clock[generic_plane][inside])
        reached = np.where(columns < clock.shape[1], reached, 0)
        bad = reached < events
        if not bad.any():
            return
        worst = np.flatnonzero(bad)
        # An access that nothing orders at all is the graver finding.
        pick = next((i for i in worst if known[i] < events[i]), worst[0])
        position = int(np.flatnonzero(flat == kinds[pick])[0])
        whole = isinstance(cells, slice)
        cell = cells.start + position if whole else int(np.asarray(cells).reshape(-1)[position])
        kind = "race"
        if known[pick] >= events[pick]:
            kind = "missing-tcgen05-fence" if TENSOR in planes else "missing-proxy-fence"
        self.conflict(int(kinds[pick]), int(sites[cell]), cell, did, kind, site.instruction, site.warp, site.lane)

    def _overwrite_unread(self, cells: Any, clock: Array, site: Place) -> None:
        """An asynchronous write, ordered after these events, to cells that loads may have read which are not over."""
        for key, load in list(self.unread.items()):
            if load.overwrite(cells, clock, site, key[0]):
                del self.unread[key]

    def restamp(self, cells: Any, old: Any, new: Any) -> None:
        """An asynchronous write has finished: its cells, unless overwritten meanwhile, get their event number."""
        part = self.written[cells]
        self.written[cells] = np.where(part == old, new, part)


FENCE_OF = {"missing-proxy-fence": "fence.proxy.async on the way", "missing-tcgen05-fence": "tcgen05.fence on the way"}
