"""Servers: what does one piece of work after the other, and how long it was busy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial

from padless.emulator.timing.events import Events


@dataclass
class Server:
    """First come, first served. ``spans``: (start, end, label) of everything done, where ``record``."""

    name: str
    record: bool = False
    free: float = 0.0
    busy: float = 0.0
    spans: list[tuple[float, float, str]] = field(default_factory=list)

    def take(self, at: float, work: float, label: str = "") -> tuple[float, float]:
        """Do ``work`` cycles, asked for at ``at``; returns when it starts and ends."""
        start = max(at, self.free)
        self.free = end = start + work
        self.busy += work
        if self.record and work > 0:
            self.spans.append((start, end, label))
        return start, end

    def squeeze(self, at: float, work: float) -> float:
        """Do a little work at once, between the pieces of another's, which is later by as much. Returns its end."""
        if self.free <= at:
            return self.take(at, work)[1]
        self.free += work
        self.busy += work
        return at + work

    def utilization(self, start: float, end: float) -> float:
        """Share of [start, end) that it was busy; of all its work where spans are not recorded."""
        if end <= start:
            return 0.0
        if not self.record:
            return min(self.busy / (end - start), 1.0)
        inside = sum(max(0.0, min(b, end) - max(a, start)) for a, b, _ in self.spans)
        return inside / (end - start)


class Batches:
    """A server with one line for every customer, which stays with one as long as that one has work, then goes on to
    whoever has waited longest. So Hopper's tensor cores take the products of two warpgroups: not one of each in
    turns."""

    def __init__(self, server: Server, events: Events) -> None:
        self.server, self.events = server, events
        self._lines: dict[Hashable, deque[tuple[float, str, Callable[[], None]]]] = {}
        self._serving: Hashable = None
        self._active = False

    def put(self, customer: Hashable, work: float, label: str, done: Callable[[], None]) -> None:
        """Ask for ``work`` cycles; ``done`` is called at their end."""
        self._lines.setdefault(customer, deque()).append((work, label, done))
        if not self._active:
            self._begin()

    def left(self, now: float) -> float:
        """Cycles until all that was asked for is done."""
        return max(self.server.free - now, 0.0) + sum(work for line in self._lines.values() for work, *_ in line)

    def _begin(self) -> None:
        self._active = bool(self._lines)
        if not self._active:
            return
        if self._serving not in self._lines:
            self._serving = next(iter(self._lines))
        line = self._lines[self._serving]
        work, label, done = line.popleft()
        if not line:
            del self._lines[self._serving]
        _, end = self.server.take(self.events.now, work, label)
        self.events.at(end, partial(self._end, done))

    def _end(self, done: Callable[[], None]) -> None:
        done()
        self._begin()
