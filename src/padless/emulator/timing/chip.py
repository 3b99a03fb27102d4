"""A whole call on a whole chip: the queue of tiles with the clock's costs, memory behind it, and the frequency.

Cycles of tiles come from the emulated kernel; everything here belongs to the chip. The queue is that of a persistent
kernel: a worker (a CTA or a cluster of them) takes the next tile when it is free.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from padless.emulator.timing.rates import Chip


@dataclass(frozen=True)
class TileTimes:
    """Cycles of a kernel's tiles, by sort of tile (any key: units of rows, say).

    start: from the kernel's first instruction to its first tile's first product. period: a K block. between: from a
    tile's last K block to the next tile's first, on top of the period. end: from the last tile's last product to the
    end.
    """

    start: float
    end: float
    period: Mapping[int, float]
    between: Mapping[int, float]

    def of(self, sort: int, k_blocks: int) -> float:
        """Cycles of one tile among others."""
        return self.between[sort] + k_blocks * self.period[sort]


@dataclass(frozen=True)
class Call:
    """One call. tiles: their sorts, in the order in which they are handed out. products: row x column x bytes of K
    that the tensor cores multiply. memory_bytes: read and written at least once. workers: how many take tiles.
    written_bytes: of memory_bytes, those that are written."""

    tiles: Sequence[int]
    k_blocks: int
    products: float
    memory_bytes: float
    workers: int
    written_bytes: float = 0.0


@dataclass(frozen=True)
class CallTime:
    """``cycles``: of the queue alone. ``memory_ns``: of the bytes alone. ``ghz``: the clock taken. ``ns``: event to
    event."""

    cycles: float
    memory_ns: float
    ghz: float
    ns: float
    tensor_use: float

    @property
    def bound(self) -> str:
        """What takes longer."""
        return "memory" if self.memory_ns > self.cycles / self.ghz else "tiles"


def queue_cycles(call: Call, times: TileTimes) -> float:
    """Cycles from the kernel's first instruction to its last."""
    if not call.tiles:
        return times.start + times.end
    cost = {sort: times.of(sort, call.k_blocks) for sort in set(call.tiles)}
    free = [0.0] * max(min(call.workers, len(call.tiles)), 1)
    for sort in call.tiles:
        heapq.heapreplace(free, free[0] + cost[sort])
    return times.start + max(free) + times.end


def clock_under_load(chip: Chip, tensor_use: float, full_ghz: float) -> float:
    """GHz at a share of use of the tensor cores. Power goes with use x frequency x voltage squared, and voltage about
    with frequency: at a power limit the clock goes with the cube root of the use, up to the highest there is."""
    return min(chip.clocks_ghz[1], full_ghz * max(tensor_use, 1e-3) ** (-1 / 3))


def call_time(
    call: Call, times: TileTimes, chip: Chip, ghz: float | None = None, cycles: float | None = None
) -> CallTime:
    """The time of a call. ``ghz``: a stated clock; None takes ``clock_under_load``. ``cycles``: of its queue, where they
    are known."""
    if cycles is None:
        cycles = queue_cycles(call, times)
    use = min(call.products / (chip["tensor_bytes_per_clk"] * chip.num_sms) / cycles, 1.0)
    if ghz is None:
        ghz = clock_under_load(chip, use, chip["full_load_ghz"])
    read = call.memory_bytes - call.written_bytes
    memory = read / chip["memory_gb_per_s"] + call.written_bytes / chip["memory_write_gb_per_s"]
    p = chip["memory_overlap"]
    busy = ((cycles / ghz) ** p + memory**p) ** (1 / p)
    return CallTime(cycles, memory, ghz, chip["launch_ns"] + busy, use)


def band(call: Call, times: TileTimes, chip: Chip) -> tuple[float, float]:
    """Nanoseconds at the highest and at the lowest of the chip's stated clocks."""
    low, high = chip.clocks_ghz
    return call_time(call, times, chip, high).ns, call_time(call, times, chip, low).ns
