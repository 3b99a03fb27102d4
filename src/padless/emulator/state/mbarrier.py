"""The mbarrier object: phase, pending arrivals, transaction count; the clocks that travel through it; waits for it."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from padless.emulator.order.memory_order import CLUSTER, CTA, reads_of
from padless.emulator.order.race import BASE, BEFORE, TENSOR, merge
from padless.emulator.ptx.ast import Instruction
from padless.emulator.state.site import Site
from padless.emulator.state.warp import Cta, Fragment, Wait, Warp
from padless.emulator.units.number_formats import Array

TX_LIMIT = (1 << 20) - 1


class Mbarrier:
    """One 8-byte barrier at `offset` in the shared memory of `cta` (PTX ISA, "mbarrier")."""

    def __init__(self, cta: Cta, offset: int, count: int, instruction: Instruction) -> None:
        self.cta = cta
        self.offset = offset
        self.expected = count
        self.pending = count
        self.tx = 0
        self.phase = 0  # completed phases; the parity of the current phase is phase & 1
        self.instruction = instruction
        self.column = -1  # of the copies that complete here
        self.clock: Any = None  # released by the arrivals so far
        self.wide: Any = None  # released by other CTAs at cluster scope, for those who acquire at that scope
        self.done_clock: Any = None  # what a wait on the last completed phase acquires
        self.done_wide: Any = None
        self.init_stamp: tuple[int, int] = (0, 0)
        self.init_fenced = False
        self.published = False  # by a fence and a relaxed cluster barrier, which order nothing else
        self.waited_phase = -1  # the latest phase that somebody has seen complete
        # the latest phase in which another CTA's asynchronous work arrived; of a commit its pipe and number there
        self.foreign: tuple[int, Site | None, Any, int] = (-1, None, None, 0)
        self.valid = True
        self.last_arrival: Instruction | None = None

    @property
    def name(self) -> str:
        return f"mbarrier {self.cta.symbol_at(self.offset)} of CTA {self.cta.index}"

    def state(self) -> str:
        text = f"phase {self.phase} (parity {self.phase & 1}), {self.pending} of {self.expected} arrivals pending"
        return text + (f", {self.tx} bytes outstanding" if self.tx else "")

    def is_fresh(self, instruction: Instruction, count: int) -> bool:
        """This instruction has made it with this count, and nothing has come since."""
        untouched = self.phase == self.tx == 0 and self.pending == self.expected == count
        return untouched and self.instruction is instruction

    def idle(self, row: int, clocks: Any) -> bool:
        """Nothing of a phase has come yet, and the lane with this row knows that the last one is over."""
        if self.tx or self.pending != self.expected:
            return False
        if clocks is None:
            return True
        known = clocks.time[BASE, row]
        return bool(known[self.init_stamp[0]] >= self.init_stamp[1] and known[self.column] >= self.phase)

    def complete(self, parity: int) -> bool:
        return self.phase & 1 != parity

    def _maybe_flip(self, site: Site) -> None:
        """End the phase if nothing is pending. Two phases ending with no wait in between hide one from the
        waiters: they test a parity, and it is back where it was (PTX ISA, "Phase of the mbarrier object")."""
        if self.pending == 0 and self.tx == 0:
            if self.phase >= 1 and self.waited_phase < self.phase - 1 and self.cta.checks:
                message = f"ends phase {self.phase} of {self.name}, but nobody has waited for phase {self.phase - 1}"
                site.report("mbarrier", message, key="overrun")
            self.phase += 1
            self.pending = self.expected
            self.done_clock, self.done_wide = copy(self.clock), copy(self.wide)
        self.cta.launch.progress += 1

    def arrive(self, count: int, clock: Any, site: Site, wide: Any = None) -> None:
        """`count` arrivals that release `clock`, and `wide` to those who acquire at cluster scope."""
        if count > self.pending:
            message = f"{count} more arrivals on {self.name}, which expects {self.expected} a phase: {self.state()}"
            site.report("mbarrier", message)
            count = self.pending
            if count == 0:
                return
        self.last_arrival = site.instruction
        self.pending -= count
        if clock is not None:
            self.clock = merge(self.clock, clock)
        if wide is not None:
            self.wide = merge(self.wide, wide)
        self._maybe_flip(site)

    def arrive_from_outside(self, site: Site, pipe: Any = None, number: int = 0) -> None:
        """An asynchronous arrival is about to happen; remember it if it comes from another CTA. pipe: that of a
        tcgen05.commit, of which this is the commit of that number."""
        if site.warp.cta is not self.cta:
            self.foreign = (self.phase, site, pipe, number)
            if self.cta.exited:
                site.report("exit", f"signals {self.name} after that CTA has exited")

    def expect(self, size: int, site: Site) -> None:
        self.tx += size
        if abs(self.tx) > TX_LIMIT:
            site.report("mbarrier", f"the transaction count of {self.name} overflows: {self.tx}")

    def complete_tx(self, size: int, site: Site, clock: Any = None) -> None:
        """`clock`: what is known to have happened before the operation that is over now, besides that itself."""
        if clock is not None:
            self.clock = merge(self.clock, clock)
        self.expect(-size, site)
        self._maybe_flip(site)


def find_mbarrier(
    site: Site, address: int, remote: bool = True, asynchronous: bool = False, later: bool = False
) -> Mbarrier | None:
    """The barrier at an address, checked to be initialised, published and alive.

    `asynchronous`: it is the async proxy that will use it, `later`: whoever will, does so after the instruction. The
    barrier's own CTA must then have seen the end of that before it exits, and not the thread that asked for it.
    """
    cta, offset = site.locate(address)
    bar: Mbarrier | None = cta.mbarriers.get(offset)
    if bar is None or not bar.valid:
        what = "was invalidated" if bar is not None else "was never initialised"
        site.report("mbarrier", f"the mbarrier {cta.symbol_at(offset)} of CTA {cta.index} {what}")
        return None
    outside = cta is not site.warp.cta
    if outside:
        if not remote:
            site.report("mbarrier", f"waits on {bar.name}, which is in another CTA")
            return None
        if cta.exited:
            site.report("exit", f"signals {bar.name} after that CTA has exited")
    clocks = site.warp.clocks
    if clocks is not None:
        if outside and not asynchronous and not later:
            # It must not exit before this use of its shared memory; a wait for the phase has seen that.
            cta.remote[site.row, offset] = (int(clocks.time[0, site.row, site.row]), site, bar, bar.phase)
        column, event = bar.init_stamp
        if not bar.published and clocks.time[0, site.row, column] < event:
            message = f"{bar.name} is used, but nothing orders its initialisation before"
            site.report("mbarrier", message, bar.instruction)
        elif (asynchronous or outside) and not bar.init_fenced and clocks.time[1, site.row, column] < event:
            site.report(
                "mbarrier" if outside else "mbarrier-init",
                f"{bar.name} is used by {'another CTA' if outside else 'the async proxy'} with no fence.mbarrier_init "
                "or fence.proxy.async after its initialisation",
                bar.instruction,
            )
    return bar


@dataclass(eq=False)
class MbarrierWait(Wait):
    """try_wait on one or more barriers, one per group of lanes."""

    groups: list[tuple[Mbarrier, int, Array]]
    out: int
    by_parity: bool
    acquire: bool
    scope: int

    def done(self, bar: Mbarrier, value: int) -> bool:
        return bar.complete(value) if self.by_parity else bar.phase > value

    def ready(self) -> bool:
        return all(self.done(bar, value) for bar, value, _ in self.groups)

    def finish(self, fragment: Fragment) -> Wait | None:
        for bar, _, lanes in self.groups:
            self.succeed(fragment.warp, bar, lanes)
        return None

    def give_up(self, fragment: Fragment) -> bool:
        for bar, value, lanes in self.groups:
            if self.done(bar, value):
                self.succeed(fragment.warp, bar, lanes)
            else:
                fragment.warp.v[self.out][lanes] = False
        return True

    def succeed(self, w: Warp, bar: Mbarrier, lanes: Array) -> None:
        """The wait is over: the lanes acquire what the phase's arrivals released and its copies wrote."""
        w.v[self.out][lanes] = True
        bar.waited_phase = max(bar.waited_phase, bar.phase - 1)
        clocks = w.clocks
        if clocks is None or bar.phase == 0:
            return
        rows: Any = w.rows if len(lanes) == 32 else w.first_row + lanes
        if not self.acquire:
            self._see(w, bar, rows)
            return
        if bar.done_clock is not None:
            clocks.acquire(rows, bar.done_clock)
        if bar.done_wide is not None:
            if self.scope >= CLUSTER:
                clocks.acquire(rows, bar.done_wide)
            else:
                clocks.postpone(rows, CLUSTER, bar.done_wide)
        clocks.observe(rows, bar.column, bar.phase)

    def _see(self, w: Warp, bar: Mbarrier, rows: Any) -> None:
        """A relaxed wait acquires nothing before the next fence."""
        copied = np.zeros((TENSOR, w.clocks.columns), np.uint32)
        copied[:BEFORE, bar.column] = bar.phase
        w.clocks.postpone(rows, CTA, merge(copied, bar.done_clock) if bar.done_clock is not None else copied)
        if bar.done_clock is not None:
            w.clocks.acquire(rows, reads_of(bar.done_clock, w.clocks.lanes))
        if bar.done_wide is not None:
            w.clocks.postpone(rows, CLUSTER, bar.done_wide)

    def describe(self) -> str:
        texts = []
        for bar, value, _ in self.groups:
            kind = f"parity {value}" if self.by_parity else f"phase {value}"
            last = bar.last_arrival
            after = f"; last arrival at {last.source or last.line}" if last else ""
            texts.append(f"waits for {kind} of {bar.name}, which is in {bar.state()}{after}")
        return "; ".join(texts)
