"""Timing contenders fairly on one GPU.

Contenders take turns (A B A B ...), so that heat and clock changes meet all of them alike; 512 MB are written
before every call and as much as L2 holds is read again, so that none finds its operands in L2 nor waits for what the
flush itself had left to be written back; medians are reported with their spread. Two clocks:

* GPU time: CUDA events around the call, everything it launches included. The stream sleeps in front of the first event
  until the host has issued the call, so gaps in issuing do not count: a call that was issued later is timed again,
  behind a longer sleep. (After a rest Python needs several times as long as when it calls in a loop.)
* end-to-end time: from the Python call to the finished result, the host included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

FLUSH_BYTES = 512 << 20
# Read after that: several times what L2 holds, written long before the end, so that what L2 is left with is clean.
# Without it a call of 8 groups of 16 rows took 2.6 to 5 us longer, of any contender.
CLEAN_BYTES = 256 << 20
FLUSH = f"{FLUSH_BYTES >> 20} MB written, {CLEAN_BYTES >> 20} MB read"  # for the record
REPEATS = 10
WARM_UP_CALLS = 2

# torch.cuda._sleep counts clock cycles; at less than this rate it sleeps longer, which is harmless.
_SLEEP_CYCLES_PER_US = 2000
_SLEEP_MARGIN_US = 100.0
_SLEEP_MAX_US = 50_000.0

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Times of one contender in microseconds."""

    samples_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def spread_percent(self) -> float:
        """Distance between the first and the third quartile, in percent of the median."""
        if len(self.samples_us) < 2:
            return 0.0
        first, _, third = statistics.quantiles(self.samples_us, n=4, method="inclusive")
        return 100.0 * (third - first) / self.median_us if self.median_us else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "us": round(self.median_us, 2),
            "spread_percent": round(self.spread_percent, 2),
            "samples_us": [round(sample, 2) for sample in self.samples_us],
        }


class Timer:
    """Times calls on the current CUDA device and stream.

    repeats: timed calls of each contender.
    pause_s: idle time before each call, on top of twice what the last one took.
    """

    def __init__(self, repeats: int = REPEATS, pause_s: float = 0.0) -> None:
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {repeats}")
        self.repeats = repeats
        self.pause_s = pause_s
        self._flush_buffer = torch.zeros(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self._clean = self._flush_buffer[:CLEAN_BYTES].view(torch.int64)
        self._sum = torch.empty((), dtype=torch.int64, device="cuda")

    def _flush(self) -> None:
        self._flush_buffer.zero_()
        torch.sum(self._clean, 0, out=self._sum)

    def _host_us(self, call: Call) -> float:
        """Microseconds that the host takes to issue a call (warmed up, in a busy stream)."""
        for _ in range(WARM_UP_CALLS):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        elapsed = time.perf_counter() - start
        torch.cuda.synchronize()
        return 1e6 * elapsed

    def gpu(self, calls: Mapping[str, Call]) -> dict[str, Timing]:
        """GPU time of each call, interleaved."""
        sleep_us = {name: _sleep_us(self._host_us(call)) for name, call in calls.items()}

        def one(name: str, last_us: float) -> float:
            while True:
                last_us, host_us = self._one_gpu_time(calls[name], last_us, sleep_us[name])
                if host_us <= sleep_us[name] or sleep_us[name] == _SLEEP_MAX_US:
                    return last_us
                sleep_us[name] = _sleep_us(host_us)

        return self._in_turns(calls, one)

    def _in_turns(self, calls: Mapping[str, Call], one: Callable[[str, float], float]) -> dict[str, Timing]:
        """Every contender timed in every round; ``one`` times a contender behind another that took so long."""
        samples: dict[str, list[float]] = {name: [] for name in calls}
        last_us = 0.0
        for round_number in range(self.repeats):
            for name in _in_turn(calls, round_number):
                last_us = one(name, last_us)
                samples[name].append(last_us)
        return {name: Timing(tuple(values)) for name, values in samples.items()}

    def _one_gpu_time(self, call: Call, last_us: float, sleep_us: float) -> tuple[float, float]:
        """One call's GPU time behind a rest, a flush and a sleep, and how long the host took to issue it from when the
        sleep was issued; in microseconds."""
        self._pause(last_us)
        self._flush()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began = time.perf_counter()
        torch.cuda._sleep(int(sleep_us * _SLEEP_CYCLES_PER_US))
        start.record()
        call()
        end.record()
        host_us = 1e6 * (time.perf_counter() - began)
        torch.cuda.synchronize()
        return 1e3 * start.elapsed_time(end), host_us

    def end_to_end(self, calls: Mapping[str, Call]) -> dict[str, Timing]:
        """Time from each Python call to its finished result, interleaved."""
        for call in calls.values():
            call()

        def one(name: str, last_us: float) -> float:
            self._pause(last_us)
            self._flush()
            torch.cuda.synchronize()
            start = time.perf_counter()
            calls[name]()
            torch.cuda.synchronize()
            return 1e6 * (time.perf_counter() - start)

        return self._in_turns(calls, one)

    def _pause(self, last_us: float) -> None:
        """Rests, twice as long as the last call took at least: at full load the chip sits at its power limit, where the
        clock, and so the time of a call, depends on what ran before it (15% have been seen)."""
        torch.cuda.synchronize()
        time.sleep(self.pause_s + 2e-6 * last_us)


def _sleep_us(host_us: float) -> float:
    """Microseconds that the stream sleeps in front of a call that the host issues in ``host_us``."""
    return min(2 * host_us + _SLEEP_MARGIN_US, _SLEEP_MAX_US)


def _in_turn(calls: Mapping[str, Call], round_number: int) -> list[str]:
    """The contenders, starting with another one in every round: none always comes after the same one."""
    names = list(calls)
    first = round_number % len(names) if names else 0
    return names[first:] + names[:first]


def host_us_per_call(call: Call, calls: int = 200) -> float:
    """Python time of one eager call, in microseconds: the GPU is kept busy behind a sleep, so nothing waits for it.

    Median of blocks of ten calls; few enough that the launch queue (about a thousand entries) never fills.
    """
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    blocks = []
    for _ in range(max(calls // 10, 1)):
        torch.cuda._sleep(int(1000 * _SLEEP_CYCLES_PER_US))
        start = time.perf_counter()
        for _ in range(10):
            call()
        blocks.append(1e5 * (time.perf_counter() - start))
        torch.cuda.synchronize()
    return statistics.median(blocks)


def capture(call: Call, device: torch.device | None = None) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one call on a GPU, None for the current one.

    Warmed up on the stream that captures: autograd remembers the one on which a node was made, and torch's own stream
    for captures is of the GPU that was current at the first of them.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def copy_bytes_per_second(timer: Timer, buffer_bytes: int = 1 << 30) -> float:
    """The copy ceiling: bytes read plus bytes written per second by a device-to-device copy."""
    source = torch.randint(0, 256, (buffer_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    timing = timer.gpu({"copy": lambda: target.copy_(source)})["copy"]
    return 2 * buffer_bytes / (1e-6 * timing.median_us)


def geomean(values: Sequence[float]) -> float:
    """Geometric mean; NaN of nothing."""
    return statistics.geometric_mean(values) if values else float("nan")
