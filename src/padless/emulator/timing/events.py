"""Discrete events: a heap of moments, processes that wait in it, and barriers with phases."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterator
from typing import Any

Process = Generator[Any, None, None]


class Events:
    """Moments in order of time; of equal ones the first entered comes first, so that a run repeats."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Have ``action`` called at ``time``, or now if that has passed."""
        self._count += 1
        heapq.heappush(self._heap, (max(time, self.now), self._count, action))

    @property
    def next(self) -> float:
        """Time of the next action; infinity if there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def step(self) -> None:
        """Call the next action."""
        self.now, _, action = heapq.heappop(self._heap)
        action()


class Barrier:
    """An mbarrier: a phase ends when ``count`` arrivals have come and no bytes are outstanding."""

    def __init__(self, events: Events, count: int = 1, name: str = "") -> None:
        self.events, self.count, self.name = events, count, name
        self.phase = 0
        self.pending = count
        self.bytes = 0
        self.waiting: list[tuple[int, Callable[[], None]]] = []

    def arrive(self, count: int = 1, expect: int = 0) -> None:
        """Arrivals, which may announce bytes."""
        if count > self.pending:
            raise ValueError(f"{count} arrivals at {self.name or 'a barrier'}, which expects {self.pending}")
        self.pending -= count
        self.bytes += expect
        self._check()

    def complete(self, size: int) -> None:
        """Bytes have come."""
        self.bytes -= size
        self._check()

    def _check(self) -> None:
        if self.pending or self.bytes:
            return
        self.phase += 1
        self.pending = self.count
        woken = [entry for entry in self.waiting if entry[0] <= self.phase]
        self.waiting = [entry for entry in self.waiting if entry[0] > self.phase]
        for _, action in woken:
            self.events.at(self.events.now, action)


class Simulation(Events):
    """Processes are generators. They yield a number (cycles to pass), or (barrier, phases to have ended, cycles that
    going on takes). ``waits``: cycles that each process has waited at each barrier, by names."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: dict[str, dict[str, float]] = {}
        self.alive = 0

    def start(self, name: str, process: Process) -> None:
        """Begin a process now."""
        self.alive += 1
        self.waits.setdefault(name, {})
        self.at(self.now, lambda: self._resume(name, process))

    def _resume(self, name: str, process: Process) -> None:
        try:
            asked = next(process)
        except StopIteration:
            self.alive -= 1
            return
        if not isinstance(asked, tuple):
            self.at(self.now + asked, lambda: self._resume(name, process))
            return
        barrier, phases, resume = asked
        since = self.now

        def go_on() -> None:
            waited = self.waits[name]
            waited[barrier.name] = waited.get(barrier.name, 0.0) + self.now - since
            self.at(self.now + resume, lambda: self._resume(name, process))

        if barrier.phase >= phases:
            go_on()
        else:
            barrier.waiting.append((phases, go_on))

    def run(self, limit: float = float("inf")) -> float:
        """Until nothing is left to happen. RuntimeError if processes then still wait. Returns the time."""
        while self.next < limit:
            self.step()
        if self.alive and self.next == float("inf"):
            raise RuntimeError(f"{self.alive} processes wait for barriers whose phase never ends")
        return self.now


def ring(stages: int) -> Iterator[tuple[int, int]]:
    """(stage, how often it was used before), forever."""
    use = 0
    while True:
        for stage in range(stages):
            yield stage, use
        use += 1
