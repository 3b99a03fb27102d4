"""Strong accesses: loads, stores and atomics that order what their lanes do, where they meet at an address.

In one cluster by the clocks of its lanes, between clusters by what the lanes of each know of others. A weak access to
such a word of global memory has to come after the strong ones before it, and so does a strong one of which either scope
does not reach the other's thread, and a strong store to a word that others have added to: what they added would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from padless.emulator.order.memory_order import CLUSTER, CTA, GPU
from padless.emulator.order.race import BASE, merge
from padless.emulator.ptx.ast import Instruction
from padless.emulator.state.site import Site
from padless.emulator.state.warp import Warp

Array = np.ndarray[Any, Any]


# Words that are told apart; those that come later count as one, which orders too much rather than too little.
MOST_WORDS = 1 << 14
REST = -1


class Visit(NamedTuple):
    """A strong access of a lane: how many had written, its event, whether it acquired, wrote and added, its scope, and
    where it is."""

    turn: int
    event: int
    acquired: bool
    wrote: bool
    added: bool
    scope: int
    warp: Warp
    instruction: Instruction


class Word:
    """An address that strong accesses have met at: clocks that were released there, and in global memory who came."""

    def __init__(self) -> None:
        self.narrow: dict[tuple[int, int], Array] = {}  # by cluster and CTA, at any scope
        self.wide: dict[tuple[int, int], Array] = {}  # by cluster and scope, at that of the cluster or the device
        self.last: dict[tuple[int, int, bool], Visit] = {}  # by cluster, lane and whether it wrote
        self.turn = 0  # how many have written
        self.narrowest = GPU  # scope of those who came

    def release(self, w: Warp, clock: Array, scope: int) -> None:
        cluster = w.cta.cluster
        own = cluster.number, w.cta.rank
        self.narrow[own] = merge(self.narrow.get(own), clock)
        for reach in range(CLUSTER, scope + 1):
            key = cluster.number, reach
            self.wide[key] = merge(self.wide.get(key), clock)

    def forget_releases(self) -> None:
        """A store that is no atomic: who reads it does not read from what was released here before."""
        self.narrow, self.wide = {}, {}

    def acquire(self, w: Warp, rows: Array, scope: int, now: bool) -> None:
        """`now`, or at the next fence."""
        cluster, clocks = w.cta.cluster, w.clocks
        seen = [(CTA, self.narrow.get((cluster.number, w.cta.rank)))]
        seen += [(reach, self.wide.get((cluster.number, reach))) for reach in range(CLUSTER, scope + 1)]
        for reach, clock in seen:
            if clock is not None and now:
                clocks.acquire(rows, clock)
            elif clock is not None:
                clocks.postpone(rows, reach, clock)
        if scope < GPU:
            return
        learn = clocks.acquire_elsewhere if now else clocks.postpone_elsewhere
        for (number, reach), clock in self.wide.items():
            if number != cluster.number and reach == GPU:
                for row in rows.tolist():
                    learn(row, number, clock[BASE].copy())

    def turn_of(self, number: int, row: int) -> int:
        """How many had written when this lane came last; -1 if it has not."""
        return max(
            (self.last[key].turn for wrote in (False, True) if (key := (number, row, wrote)) in self.last), default=-1
        )

    def unordered(self, site: Site, writes: bool, needed: Callable[[Visit, int], bool]) -> Visit | None:
        """An access of another lane that nothing orders before this one (`writes`: a store), of those that have to be:
        `needed` is told of each, and the number of its cluster."""
        clocks, own = site.warp.clocks, (site.warp.cta.cluster.number, site.row)
        for (number, row, _), seen in self.last.items():
            if (number, row) == own or not needed(seen, number):
                continue
            if not clocks.knows(site.row, number, row, seen.event, writes):
                return seen
        return None

    def check_scopes(self, site: Site, a: Any) -> None:
        """The scopes of this access and of each earlier one reach the other's thread, or something orders them."""
        cta = site.warp.cta

        def needed(seen: Visit, number: int) -> bool:
            scope = GPU if number != cta.cluster.number else CTA if seen.warp.cta is cta else CLUSTER
            return min(a.scope, seen.scope) < scope and (a.writes or seen.wrote)

        if seen := self.unordered(site, a.writes and not a.reads, needed):
            who = f"CTA {seen.warp.cta.index} accesses by another strong access"
            message = f"memory that {who}, and the scope of one of them does not reach the other's thread"
            site.report("race", message, seen.instruction)

    def check_store(self, site: Site) -> None:
        """A store that is no atomic comes after what others have added: those that this lane has seen here, as accesses
        of one address keep the order of the program, and those that something orders."""
        turn = self.turn_of(site.warp.cta.cluster.number, site.row)
        if seen := self.unordered(site, True, lambda seen, _: seen.added and seen.turn > turn):
            who = f"CTA {seen.warp.cta.index} adds to"
            message = f"memory that {who}, and nothing orders this store after that: what was added may be lost"
            site.report("race", message, seen.instruction)

    def check_weak(self, site: Site, writes: bool, address: int) -> None:
        # In which order strong accesses of several threads come is chance. That one came after others holds for what its
        # lane decides by the value it got, which is until its next strong access.
        first, end = site.warp.latest.get(site.lane, (0, 0))
        turn = self.turn_of(site.warp.cta.cluster.number, site.row) if first <= address < end else -1
        if seen := self.unordered(site, writes, lambda seen, _: seen.turn > turn and (writes or seen.wrote)):
            who = f"CTA {seen.warp.cta.index} accesses by atomics or other strong accesses"
            message = f"global memory that {who}, and nothing orders this weak one after them"
            site.report("race", message, seen.instruction)


ADDITIONS = {"add", "inc", "dec"}


def synchronise(w: Warp, lanes: Array, words: dict[int, Any], where: Array, a: Any) -> None:
    """A MemoryAccess that is strong: a release publishes the lane's clock at the address, an acquire takes it. The
    elements of a vector are accesses of their own."""
    clocks, number = w.clocks, w.cta.cluster.number
    everywhere = words is w.launch.words
    adds = bool(ADDITIONS & set(a.instruction.modifiers))
    stores = a.instruction.opcode == "st"
    for lane, start in zip(lanes.tolist(), where.tolist(), strict=True):
        row = w.first_row + lane
        rows = np.array([row])
        event = int(clocks.now[row])
        again = not everywhere or w.latest.get(lane) == (start, start + a.bytes)
        for address in range(start, start + a.bytes, a.size):
            word = words.get(address)
            if word is None:
                address = address if len(words) < MOST_WORDS else REST
                word = words.setdefault(address, Word())
            seen = word.last.get((number, row, False)) if again and not a.writes else None
            if seen and seen.turn == word.turn and seen.event == event and seen.acquired >= a.acquires:
                continue  # a lane that spins
            word.narrowest = min(word.narrowest, a.scope)
            if everywhere and word.narrowest < GPU:
                word.check_scopes(Site(w, a.instruction, lane), a)
            if stores and address != REST:
                if everywhere:
                    word.check_store(Site(w, a.instruction, lane))
                word.forget_releases()
            if a.reads:
                word.acquire(w, rows, a.scope, a.acquires)
            word.turn += a.writes
            visit = Visit(word.turn, event, a.acquires, a.writes, adds, a.scope, w, a.instruction)
            word.last[number, row, a.writes] = visit
            if a.writes:
                for clock, scope in clocks.published(rows, a.releases, a.scope):
                    word.release(w, clock, scope)
        if everywhere:
            w.latest[lane] = start, start + a.bytes


def check_weak(w: Warp, lanes: Array, where: Array, a: Any) -> None:
    """A MemoryAccess to global memory that is weak, at words where strong ones met."""
    words = w.launch.words
    for lane, address in zip(lanes.tolist(), where.tolist(), strict=True):
        for at in range(address, address + a.bytes, a.size):
            if at in words:
                words[at].check_weak(Site(w, a.instruction, lane), a.writes, at)
