"""Strong accesses: loads, stores and atomics that order what their lanes do, where they meet at an address.

In one cluster by the clocks of its lanes. Between clusters, which have clocks of their own, at words of global memory
only: what a lane acquires there from another cluster counts for its whole cluster, and relaxed accesses acquire. A weak
access to such a word has to come after the strong ones before it, and so does a strong one of which either scope does
not reach the other's thread.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from padless.emulator.order.memory_order import CLUSTER, CTA, GPU
from padless.emulator.order.race import BASE, merge
from padless.emulator.ptx.ast import Instruction
from padless.emulator.state.site import Site
from padless.emulator.state.warp import Cluster, Warp

Array = np.ndarray[Any, Any]


# Words that are told apart; those that come later count as one, which orders too much rather than too little.
MOST_WORDS = 1 << 14
REST = -1


class Visit(NamedTuple):
    """A strong access of a lane: how many had written, its event, whether it acquired and wrote, its scope, and where it
    is."""

    turn: int
    event: int
    acquired: bool
    wrote: bool
    scope: int
    warp: Warp
    instruction: Instruction


class Word:
    """An address that strong accesses have met at: clocks that were released there, and in global memory who came."""

    def __init__(self) -> None:
        self.narrow: dict[tuple[int, int], Array] = {}  # by cluster and CTA, at any scope
        self.wide: dict[tuple[int, int], Array] = {}  # by cluster and scope, at that of the cluster or the device
        self.last: dict[tuple[int, int], Visit] = {}  # by cluster and lane
        self.turn = 0  # how many have written
        self.narrowest = GPU  # scope of those who came

    def release(self, w: Warp, clock: Array, scope: int) -> None:
        cluster = w.cta.cluster
        own = cluster.number, w.cta.rank
        self.narrow[own] = merge(self.narrow.get(own), clock)
        for reach in range(CLUSTER, scope + 1):
            key = cluster.number, reach
            self.wide[key] = merge(self.wide.get(key), clock)
        if scope >= GPU:
            for number, known in cluster.elsewhere.items():
                self.wide[number, GPU] = merge(self.wide.get((number, GPU)), known)

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
        if scope >= GPU:
            for (number, reach), clock in self.wide.items():
                if number != cluster.number and reach == GPU:
                    cluster.elsewhere[number] = merge(cluster.elsewhere.get(number), clock)

    def check_scopes(self, site: Site, a: Any) -> None:
        """The scopes of this access and of each earlier one reach the other's thread, or something orders them."""
        cluster = site.warp.cta.cluster
        for (number, row), seen in self.last.items():
            needed = GPU if number != cluster.number else CTA if seen.warp.cta is site.warp.cta else CLUSTER
            if min(a.scope, seen.scope) >= needed or not (a.writes or seen.wrote):
                continue
            if not knows(cluster, site.row, number, row, seen.event):
                who = f"CTA {seen.warp.cta.index} accesses by another strong access"
                message = f"memory that {who}, and the scope of one of them does not reach the other's thread"
                site.report("race", message, seen.instruction)
                return

    def check_weak(self, site: Site) -> None:
        cluster = site.warp.cta.cluster
        mine = cluster.number, site.row
        # In which order strong accesses of several threads come is chance. That one came after others holds for what its
        # lane decides by the value it got, which is until its next strong access.
        turn = self.last[mine].turn if site.warp.latest.get(site.lane) is self else -1
        for (number, row), seen in self.last.items():
            if seen.turn > turn and (number, row) != mine and not knows(cluster, site.row, number, row, seen.event):
                who = f"CTA {seen.warp.cta.index} accesses by atomics or other strong accesses"
                message = f"global memory that {who}, and nothing orders this weak one after them"
                site.report("race", message, seen.instruction)
                return


def knows(cluster: Cluster, lane: int, number: int, row: int, event: int) -> bool:
    """Whether a lane of a cluster is ordered after an event of a lane of the cluster of that number."""
    if number == cluster.number:
        return bool(cluster.clocks.time[BASE, lane, row] >= event)
    clock = cluster.elsewhere.get(number)
    return clock is not None and bool(clock[BASE, row] >= event)


def synchronise(w: Warp, lanes: Array, words: dict[int, Any], where: Array, a: Any) -> None:
    """A MemoryAccess that is strong: a release publishes the lane's clock at the address, an acquire takes it."""
    clocks, number = w.clocks, w.cta.cluster.number
    everywhere = words is w.launch.words
    for lane, address in zip(lanes.tolist(), where.tolist(), strict=True):
        word = words.get(address) or words.setdefault(address if len(words) < MOST_WORDS else REST, Word())
        row = w.first_row + lane
        event = int(clocks.now[row])
        if not a.writes and (seen := word.last.get((number, row))) is not None:
            known = seen.turn == word.turn and seen.event == event and seen.acquired >= a.acquires
            if known and (not everywhere or w.latest.get(lane) is word):
                continue  # a lane that spins
        rows = np.array([row])
        word.narrowest = min(word.narrowest, a.scope)
        if word.narrowest < GPU and everywhere:
            word.check_scopes(Site(w, a.instruction, lane), a)
        if a.reads:
            word.acquire(w, rows, a.scope, a.acquires)
        word.turn += a.writes
        word.last[number, row] = Visit(word.turn, event, a.acquires, a.writes, a.scope, w, a.instruction)
        if everywhere:
            w.latest[lane] = word
        if a.writes:
            for clock, scope in clocks.published(rows, a.releases, a.scope):
                word.release(w, clock, scope)


def check_weak(w: Warp, lanes: Array, where: Array, a: Any) -> None:
    """A MemoryAccess to global memory that is weak, at words where strong ones met."""
    words = w.launch.words
    for lane, address in zip(lanes.tolist(), where.tolist(), strict=True):
        for at in range(address, address + a.bytes, a.size):
            if at in words:
                words[at].check_weak(Site(w, a.instruction, lane))
