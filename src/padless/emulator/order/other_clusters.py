"""Happens-before between clusters: what the lanes of one cluster know of the events of others.

A cluster's clocks have columns for its own lanes and agents alone. What a lane acquires from another cluster is kept
here, with the lane and its event at that moment. A lane that is ordered after that event knows it too, so the
barriers, fences and releases of a cluster carry what it knows of others in the clocks that they carry anyway.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from padless.emulator.units.number_formats import Array


def later(one: Array | None, two: Array) -> Array:
    """The greater of two rows of events, of which either may be the longer."""
    if one is None:
        return two
    if len(one) < len(two):
        one, two = two, one
    found = one.copy()
    np.maximum(found[: len(two)], two, out=found[: len(two)])
    return found


class Acquired:
    """What a cluster has acquired from one other cluster, in turn: by which lane, at which of its events, and what."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.events: list[int] = []
        self.clocks: list[Array] = []
        self.by_row: dict[int, Array] = {}  # all that a lane has acquired itself

    def add(self, row: int, event: int, clock: Array) -> None:
        known = self.by_row.get(row)
        if known is not None and len(known) >= len(clock) and (known[: len(clock)] >= clock).all():
            return
        self.by_row[row] = later(known, clock)
        self.rows.append(row)
        self.events.append(event)
        self.clocks.append(clock)

    def seen(self, time: Array) -> Array:
        """Of clocks of the acquiring cluster (..., columns), which acquisitions they come after (..., acquisitions)."""
        found: Array = time[..., self.rows] >= np.array(self.events, np.uint32)
        return found


class OtherClusters:
    """What the cluster of this number knows of others. `grid`: the same of every cluster of the launch, by number."""

    def __init__(self, number: int, grid: dict[int, OtherClusters]) -> None:
        self.number, self.grid = number, grid
        self.acquired: dict[int, Acquired] = {}
        grid[number] = self

    def carried(self, clock: Array) -> Iterator[tuple[int, Array]]:
        """What a lane with this clock of the cluster knows of others: their numbers and events."""
        for number, acquired in self.acquired.items():
            known: Array | None = None
            for n in np.flatnonzero(acquired.seen(clock)).tolist():
                known = later(known, acquired.clocks[n])
            if known is not None:
                yield number, known

    def acquire(self, row: int, event: int, number: int, clock: Array) -> Array | None:
        """A lane acquires a clock of another cluster, and what that one knows of others (causality is cumulative): of
        this cluster itself, if it does, that is returned."""
        own = None
        for other, known in [(number, clock), *self.grid[number].carried(clock)]:
            if other == self.number:
                own = known
            else:
                self.acquired.setdefault(other, Acquired()).add(row, event, known)
        return own

    def known(self, time: Array, number: int, columns: Array) -> Array:
        """The latest events of some columns of another cluster that lanes with these clocks (lanes, ...) come after:
        (lanes, columns)."""
        found = np.zeros((len(time), len(columns)), np.uint32)
        acquired = self.acquired.get(number)
        if acquired is None:
            return found
        seen = acquired.seen(time)
        for n in np.flatnonzero(seen.any(axis=0)).tolist():
            clock = acquired.clocks[n]
            events = np.where(columns < len(clock), clock[np.minimum(columns, len(clock) - 1)], 0)
            np.maximum(found, np.where(seen[:, n, None], events, 0), out=found)
        return found
