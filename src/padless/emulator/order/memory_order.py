"""Memory order: what strong accesses and fences of some lanes publish and take, by scope.

A release publishes a lane's clock and an acquire takes it if the scopes of both reach the other thread. A relaxed access
publishes what its lane knew at its last fence, and what it has seen is acquired at the next fence (PTX ISA, "Release and
Acquire Patterns"). An mbarrier arrival that releases nothing, or not far enough, still says that what came before it is
done with: reads that have been served and asynchronous operations that have been waited for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.order.other_clusters import OtherClusters, later
from padless.emulator.order.race import BASE, BEFORE, PROXY, READS, TENSOR, Clocks, merge
from padless.emulator.units.number_formats import Array

CTA, CLUSTER, GPU = range(3)  # scopes; that of the system is the device's here


class OrderedClocks(Clocks):
    """Clocks of a cluster that follow releases, acquires and fences of every scope. others: what it knows of others."""

    def __init__(self, lanes: int, others: OtherClusters) -> None:
        super().__init__(lanes)
        self.others = others
        # By lane and scope: what it knew at its last fence, and what it will know after the next one.
        self.fenced: dict[int, dict[int, Array]] = {}
        self.pending: dict[int, dict[int, Array]] = {}
        # By lane and cluster: what it will know of another cluster after the next fence.
        self.pending_elsewhere: dict[int, dict[int, Array]] = {}

    def completed(self, rows: Any) -> Array:
        """What has been done with when these lanes go on, whoever is told so and how: their reads, and the asynchronous
        operations that they have waited for. Writes of lanes are not in it: those need a release to be seen."""
        return reads_of(self.join(rows), self.lanes)

    def published(self, rows: Any, release: bool, scope: int) -> list[tuple[Array, int]]:
        """What a strong access of these lanes publishes, with its scope: of a release all they know, of a relaxed access
        what they knew at their last fence."""
        if release:
            return [(self.release(rows), scope)]
        by_scope: dict[int, Array] = {}
        if self.fenced:
            for row in np.arange(self.lanes)[rows].tolist():
                for reach, clock in self.fenced.get(row, {}).items():
                    known = min(reach, scope)
                    by_scope[known] = merge(by_scope.get(known), clock)
        return [(clock, reach) for reach, clock in by_scope.items()]

    def fence(self, rows: Any, scope: int, release: bool = True, acquire: bool = True) -> None:
        """fence.acq_rel or .sc, or half of it: relaxed accesses of these lanes before it acquire, later ones release."""
        for row in np.arange(self.lanes)[rows].tolist():
            for reach, clock in list(self.pending.get(row, {}).items()) if acquire else ():
                if reach <= scope:
                    self.acquire(slice(row, row + 1), clock)
                    del self.pending[row][reach]
            if acquire and scope >= GPU:
                for number, clock in self.pending_elsewhere.pop(row, {}).items():
                    self.acquire_elsewhere(row, number, clock)
            if release:
                known = self.join(slice(row, row + 1))
                self.fenced.setdefault(row, {}).update(dict.fromkeys(range(scope + 1), known))
        self.tick(rows)

    def postpone(self, rows: Any, scope: int, clock: Array) -> None:
        """Relaxed accesses of these lanes have seen what was released at a scope: the next fence acquires it."""
        for row in np.arange(self.lanes)[rows].tolist():
            waiting = self.pending.setdefault(row, {})
            waiting[scope] = merge(waiting.get(scope), clock)

    def acquire_elsewhere(self, row: int, number: int, clock: Array) -> None:
        """This lane comes after a clock (columns) of another cluster, and all that it has of others."""
        own = self.others.acquire(row, int(self.now[row]), number, clock)
        if own is not None:
            planes = np.zeros((TENSOR, len(own)), np.uint32)
            planes[[BASE, READS]] = own
            self.acquire(slice(row, row + 1), planes)

    def postpone_elsewhere(self, row: int, number: int, clock: Array) -> None:
        """As `postpone`, of what another cluster released at the scope of the device."""
        waiting = self.pending_elsewhere.setdefault(row, {})
        waiting[number] = later(waiting.get(number), clock)

    def knows(self, row: int, number: int, column: int, event: int, writes: bool = False) -> bool:
        """Whether a lane comes after an event of a column of the cluster of that number. `writes`: it is about to store,
        which hardware does not do ahead of a load that a branch waits for, so what it has seen counts with no fence."""
        time = self.time[BASE, row : row + 1]
        own = number == self.others.number
        if own:
            known = int(time[0, column])
        else:
            known = int(self.others.known(time, number, np.array([column]))[0, 0])
        if known >= event or not writes:
            return known >= event
        if own:
            seen = [clock[BASE] for clock in self.pending.get(row, {}).values()]
        else:
            seen = [clock for other, clock in self.pending_elsewhere.get(row, {}).items() if other == number]
        return any(column < len(clock) and clock[column] >= event for clock in seen)


def reads_of(clock: Array, lanes: int) -> Array:
    """A published clock without what lanes have written: OrderedClocks.completed."""
    found = clock.copy()
    found[[[BASE], [PROXY], [BEFORE]], :lanes] = 0
    return found
