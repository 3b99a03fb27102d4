"""A whole call on a whole chip: the queue of tiles with the clock's costs, memory behind it, and the frequency.

Cycles of tiles come from the emulated kernel; everything here belongs to the chip. The queue is that of a persistent
kernel: a worker (a CTA or a cluster of them) takes the next tile when it is free.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from padless.emulator.timing.rates import Chip


@dataclass(frozen=True)
class TileTimes:
    """Cycles of a kernel's tiles, by sort of tile (any key: units of rows, say).

    start: from the kernel's first instruction to its first tile's first product. period: a K block. between: from a
    tile's last K block to the next tile's first, on top of the period. end: from the last tile's last product to the
    end; ends: where a sort has its own. least: of a tile among others, however short its K: what its stores take.
    """

    start: float
    end: float
    period: Mapping[int, float]
    between: Mapping[int, float]
    least: Mapping[int, float] = field(default_factory=dict)
    ends: Mapping[int, float] = field(default_factory=dict)

    def of(self, sort: int, k_blocks: int) -> float:
        """Cycles of the products of one tile among others."""
        return self.between[sort] + k_blocks * self.period[sort]


@dataclass(frozen=True)
class Call:
    """One call. tiles: their sorts, in the order in which they are handed out. products: row x column x bytes of K
    that the tensor cores multiply. workers: how many take tiles. loads, stores: bytes that each tile is the first to
    read from memory (``first_touches``), and that it writes. received: bytes that copies bring into shared memory, on
    average over the workers' SMs. wide: whether elements have 16 bits, whose products take more power."""

    tiles: Sequence[int]
    k_blocks: int
    products: float
    workers: int
    loads: Sequence[float]
    stores: Sequence[float]
    received: float = 0.0
    wide: bool = False


def first_touches(tiles: Iterable[tuple[tuple[Hashable, float], tuple[Hashable, float]]]) -> list[float]:
    """Bytes that each tile is the first to read: of its two operands' parts, (which, bytes), those that no tile before
    had. Later ones find them in L2."""
    seen: set[tuple[int, Hashable]] = set()
    loads = []
    for parts in tiles:
        new = [(i, which, size) for i, (which, size) in enumerate(parts) if (i, which) not in seen]
        seen.update((i, which) for i, which, _ in new)
        loads.append(sum(size for *_, size in new))
    return loads


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
    """Cycles from the kernel's first instruction to its last, with all operands in L2."""
    return _queue(call, times, 1.0, [0.0] * len(call.tiles), 1.0)


def _queue(call: Call, times: TileTimes, ghz: float, memory: Sequence[float], p: float) -> float:
    """Nanoseconds of the queue. Tiles that begin together, a round of them, share the memory: ``memory``, nanoseconds of
    a tile's bytes alone, add up over the round, and join with each of its tiles' time as (t^p + m^p)^(1/p)."""
    # Of each worker: when its products so far are over, its stores of the last tile but one, of the last one, and
    # everything if nothing follows. Products need an accumulator, of two, that has been stored.
    free = [(0.0, 0.0, 0.0, times.end / ghz)] * max(min(call.workers, len(call.tiles)), 1)
    for first in range(0, len(call.tiles), len(free)):
        sorts = call.tiles[first : first + len(free)]
        asked = sum(memory[first : first + len(free)])
        cost = {sort: ((times.of(sort, call.k_blocks) / ghz) ** p + asked**p) ** (1 / p) for sort in set(sorts)}
        for sort in sorts:
            multiplied, before, stored, _ = free[0]
            multiplied = max(multiplied, before) + cost[sort]
            drained = max(multiplied, stored)
            end = drained + times.ends.get(sort, times.end) / ghz
            heapq.heapreplace(free, (multiplied, stored, drained + times.least.get(sort, 0.0) / ghz, end))
    return times.start / ghz + max(end for *_, end in free)


def clock_under_load(chip: Chip, tensor_use: float, received: float = 0.0, memory: float = 0.0) -> float:
    """GHz at a share of use of the tensor cores, with ``received`` bytes a cycle into each SM and ``memory`` GB/s.

    Power goes with what is done in a cycle x frequency x voltage squared, and voltage about with frequency. What memory
    takes of the limit goes with its rate alone. So at the limit the clock goes with the cube root of what is left over
    what is done in a cycle, up to the highest there is.
    """
    left = max(1 - chip["memory_power"] * memory, 0.1)
    done = max(tensor_use + chip["received_power"] * received, 1e-3)
    return min(chip.clocks_ghz[1], chip["full_load_ghz"] * (left / done) ** (1 / 3))


def _loaded_clock(call: Call, chip: Chip, cycles: float, memory_ns: float) -> float:
    """GHz of a call: what is done in a cycle, and memory's rate, follow from its time, and that from the clock."""
    ghz, p = chip.clocks_ghz[1], chip["memory_overlap"]
    gigabytes = sum(call.loads) + sum(call.stores)
    for _ in range(4):
        ns = ((cycles / ghz) ** p + memory_ns**p) ** (1 / p)
        use = call.products / (chip["tensor_bytes_per_clk"] * chip.num_sms) / (ns * ghz)
        power = min(use, 1.0) * (chip["wide_power"] if call.wide else 1.0)
        ghz = clock_under_load(chip, power, call.received / (ns * ghz), gigabytes / ns)
    return ghz


def call_time(
    call: Call, times: TileTimes, chip: Chip, ghz: float | None = None, cycles: float | None = None
) -> CallTime:
    """The time of a call. ``ghz``: a stated clock; None takes ``clock_under_load``. ``cycles``: of its queue, where they
    are known."""
    if cycles is None:
        cycles = queue_cycles(call, times)
    use = min(call.products / (chip["tensor_bytes_per_clk"] * chip.num_sms) / cycles, 1.0)
    read, written = chip["memory_gb_per_s"], chip["memory_write_gb_per_s"]
    memory = [load / read + store / written for load, store in zip(call.loads, call.stores, strict=True)]
    if ghz is None:
        ghz = _loaded_clock(call, chip, cycles, sum(memory))
    busy = _queue(call, times, ghz, memory, chip["memory_overlap"])
    return CallTime(cycles, sum(memory), ghz, chip["launch_ns"] + busy, use)


def band(call: Call, times: TileTimes, chip: Chip) -> tuple[float, float]:
    """Nanoseconds at the highest and at the lowest of the chip's stated clocks."""
    low, high = chip.clocks_ghz
    return call_time(call, times, chip, high).ns, call_time(call, times, chip, low).ns
