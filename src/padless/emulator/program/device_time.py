"""The device's time: what events of a program are told, and what benchmarks measure. It passes while kernels run.

A launch takes the time of the clock (`padless.emulator.timing.kernel`), that of the whole chip whatever multiprocessors
the device claims. Launches are timed from the first event on that a program records, each shape of a launch once;
torch's own operations take no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from padless.emulator.timing.kernel import KernelTime

RESOLUTION_MS = 0.0005  # of CUDA's events: half a microsecond


@dataclass
class DeviceTime:
    """say: is given a sentence about launches that cannot be timed. ns: since the start. wanted: whether a program
    looks. benchmark: inside of one, whose launches are timed and not run."""

    say: Callable[[str], None]
    ns: float = 0.0
    wanted: bool = False
    benchmark: bool = False
    benchmarks: int = 0
    untimed: int = 0  # launches of the benchmark that is under way
    known: dict[Any, KernelTime] = field(default_factory=dict)

    def record(self) -> float:
        """The time of an event in milliseconds; launches are timed from now on."""
        self.wanted = True
        return self.ns / 1e6

    @staticmethod
    def between(start: float, end: float) -> float:
        """Milliseconds from one event to another: 0 is told as the events' resolution, which programs divide by."""
        return end - start if end - start >= RESOLUTION_MS or end < start else RESOLUTION_MS

    def launch(self, key: Any, name: str, work_out: Callable[[], KernelTime]) -> None:
        """A launch passes; ``key``: of launches that take the same time."""
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = work_out()
            if not found.known:
                self.say(f"{name}: {found}")
        if math.isnan(found.low_ns):
            self.untimed += 1
        else:  # where L2 decides, as if it kept everything
            self.ns += found.low_ns

    @contextmanager
    def benchmarking(self) -> Iterator[None]:
        """Launches inside are timed and not run."""
        before, self.benchmark, self.untimed = self.benchmark, True, 0
        self.benchmarks += not before
        try:
            yield
        finally:
            self.benchmark = before

    def bench(self, call: Callable[[], Any]) -> float:
        """Milliseconds of one call, whose launches are timed and not run; infinity where one cannot be timed."""
        with self.benchmarking():
            start = self.ns
            call()
            return float("inf") if self.untimed else self.between(start / 1e6, self.ns / 1e6)
