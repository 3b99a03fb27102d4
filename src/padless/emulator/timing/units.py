"""The units of a multiprocessor as servers, and how long each asynchronous operation takes in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from padless.emulator.timing.events import Events
from padless.emulator.timing.rates import Chip
from padless.emulator.timing.servers import Batches, Server


class Sm:
    """The servers of one multiprocessor."""

    def __init__(self, number: int, record: bool) -> None:
        self.number = number
        self.issue = [Server(f"issue {i}", record) for i in range(4)]
        self.shared = Server("shared memory", record)
        self.copy = Server("copy engine", record)
        self.feed = Server("L2", record)
        self.loads = Server("L2, plain loads", record)  # apart: copies are entered before their bytes come
        self.memory = Server("memory", record)
        self.tensor = Server("tensor pipe", record)
        self.products: Batches | None = None  # of Hopper, made on first use
        self.store = Server("stores", record)
        self.tensor_memory = [Server(f"tensor memory {i}", record) for i in range(4)]
        self.landing: list[tuple[float, float]] = []  # copies whose writes are yet to be charged to products
        self.slow_tail = 0.0  # latency behind the last product
        self.maps: set[int] = set()  # identities of tensor maps that it has read

    def servers(self) -> Iterator[Server]:
        """All of them."""
        yield from (self.tensor, self.shared, self.copy, self.feed, self.loads, self.memory, self.store)
        yield from self.issue
        yield from self.tensor_memory


def mma_cycles(chip: Chip, rows: int, n: int, k_bytes: int, pair: bool, a_in_shared: bool) -> float:
    """Cycles between two tcgen05.mma (one accumulator after the other), whichever is slower: the pipe or the operands.

    rows: of A in one CTA, 64 or 128. n: columns of D. k_bytes: bytes of K in an operand's row, counting 4-bit elements
    at half a byte. pair: of two CTAs, of which each reads half of B. a_in_shared: else A is in tensor memory.
    """
    half = rows == 64
    if pair and half:  # the columns are split over the lanes
        pipe = rows * n * k_bytes / chip["tensor_bytes_per_clk"] * 1.0
    else:
        pipe = 128 * n * k_bytes / chip["tensor_bytes_per_clk"]
    pipe = max(pipe, chip["mma_floor"])
    if not a_in_shared:
        return pipe
    read = (rows * k_bytes + n * k_bytes / (2 if pair else 1)) / chip["mma_shared_bytes_per_clk"]
    extra = chip["mma_pair_extra"] / (3 if half else 1) if pair else 0
    return max(pipe, read + extra)


def mma_latency(chip: Chip, rows: int, pair: bool, a_in_shared: bool) -> float:
    """Cycles from the end of a product in the pipe to its barrier having been seen."""
    tail = chip["mma_latency"]
    if pair:
        tail += chip["mma_latency_pair"]
    if a_in_shared:
        tail += chip["mma_latency_shared_a"] * (2 if rows == 128 or pair else 1)
    return tail


def wgmma_cycles(chip: Chip, n: int, k_bytes: int, a_in_shared: bool = True) -> float:
    """Cycles of one m64nNkK of Hopper, K of ``k_bytes`` bytes."""
    pipe = 64 * n * k_bytes / chip["tensor_bytes_per_clk"] + (0 if a_in_shared else chip["wgmma_register_a"])
    read = (n + (64 if a_in_shared else 0)) * k_bytes / chip["shared_bytes_per_clk"]
    return max(pipe, read)


class Units:
    """Takes operations as they are issued and says when their steps are over."""

    def __init__(self, chip: Chip, record: bool = True, from_memory: float = 0.0, prefetched: bool = False) -> None:
        self.chip = chip
        self.prefetched = prefetched  # whether the kernel brings its tensor maps ahead of their use
        self.record = record
        self.from_memory = from_memory  # share of loaded bytes that L2 does not have
        self.sms: dict[int, Sm] = {}
        self.last: dict[Any, float] = {}

    def sm(self, number: int) -> Sm:
        """The multiprocessor of a CTA's place."""
        if number not in self.sms:
            self.sms[number] = Sm(number, self.record)
        return self.sms[number]

    def finish(self, queue: Any, work: Any, now: float, steps: int) -> list[float]:
        """When each of the steps of an operation, issued now, is over."""
        times: list[float] = getattr(self, f"_{work.unit}")(work, now) if work is not None else [now]
        times += [times[-1]] * (steps - len(times))
        if queue is not None:
            floor = self.last.get(queue, 0.0)
            times = [max(t, floor) for t in times]
            self.last[queue] = times[-1]
        return times

    # ---- one function a unit
    def _load(self, work: Any, now: float) -> list[float]:
        target = self.sm(work.cta.slot)
        source = self.sm(work.source.slot)
        rows = box_rows(work.detail) if work.detail is not None else math.ceil(work.size / 128)
        if work.first:
            source.copy.take(now, rows * self.chip["tma_row"], f"load of {work.size} B")
        extra = 0.0
        if work.detail is not None and id(work.detail) not in source.maps and not self.prefetched:
            source.maps.add(id(work.detail))
            extra = self.chip["tma_descriptor"]
        return self.load(source, target, work.size, now, source.copy.free, extra)

    def load(
        self, source: Sm, target: Sm, size: float, now: float, engine_end: float, extra: float = 0.0
    ) -> list[float]:
        """Bytes into ``target``, whose request leaves the engine of ``source`` at ``engine_end``, ``extra`` cycles later
        than others."""
        chip = self.chip
        latency = chip["tma_latency"] + self.from_memory * chip["memory_latency"] + extra
        begin = max(now, engine_end - size / 128 * chip["tma_row"]) + latency
        _, fed = target.feed.take(begin, size / chip["l2_feed"], f"{size:.0f} B")
        if self.from_memory:
            per_clk = chip["memory_gb_per_s"] / chip.clocks_ghz[0] / chip.num_sms
            _, read = target.memory.take(begin, size * self.from_memory / per_clk)
            fed = max(fed, read)
        done = max(fed, engine_end + latency)
        if "wgmma_shared_overlap" in chip.rates and chip["wgmma_shared_overlap"]:
            target.landing.append((done, size))
        target.shared.busy += size / chip["shared_bytes_per_clk"]
        return [done]

    def _store(self, work: Any, now: float) -> list[float]:
        sm = self.sm(work.cta.slot)
        rows = box_rows(work.detail) if work.detail is not None else math.ceil(work.size / 128)
        start, _ = sm.copy.take(now, rows * self.chip["tma_row"], f"store of {work.size} B")
        _, end = sm.store.take(start, work.size / self.chip["store_bytes_per_clk"], f"{work.size} B")
        return [end, end + self.chip["store_latency"]]

    def _small_load(self, work: Any, now: float) -> list[float]:
        sm = self.sm(work.cta.slot)
        _, end = sm.feed.take(now + self.chip["global_latency"], work.size / self.chip["l2_feed"], "cp.async")
        return [end]

    def _remote(self, work: Any, now: float) -> list[float]:
        return [now + self.chip["remote_arrive"] + work.size / 20]

    def _other(self, work: Any, now: float) -> list[float]:
        return [now + 2 * self.chip["global_latency"]]

    def wgmma(self, queue: Any, work: Any, events: Events, done: Callable[[], None]) -> None:
        """One product of a warpgroup, ``queue``; ``done`` is called at its end."""
        unit, sm = work.detail, self.sm(work.cta.slot)
        size = {"f16": 2, "bf16": 2, "tf32": 4}.get(unit.a_type, 1)
        in_shared = unit.a_descriptor is not None
        cycles = wgmma_cycles(self.chip, unit.n, unit.k * size, in_shared)
        sm.shared.busy += (unit.n + (64 if in_shared else 0)) * unit.k * size / self.chip["shared_bytes_per_clk"]
        if sm.products is None:
            sm.products = Batches(sm.tensor, events)
        if sm.landing:
            landed = sum(size for at, size in sm.landing if at <= events.now)
            sm.landing = [(at, size) for at, size in sm.landing if at > events.now]
            cycles += self.chip["wgmma_shared_overlap"] * landed / self.chip["shared_bytes_per_clk"]
        sm.products.put(queue, cycles, f"m64n{unit.n}", done)

    def _mma(self, work: Any, now: float) -> list[float]:
        unit, sm = work.detail, self.sm(work.cta.slot)
        fields, pair = unit.fields, unit.cta_group == 2
        rows = fields.m // unit.cta_group
        k_bytes = 32  # of every kind: K is 16, 32 or 64 elements
        in_shared = unit.a_descriptor is not None
        cycles = mma_cycles(self.chip, rows, fields.n, k_bytes, pair, in_shared)
        read = (rows + fields.n / (2 if pair else 1)) * k_bytes / self.chip["shared_bytes_per_clk"]
        start, end = sm.tensor.take(now, cycles, f"m{fields.m}n{fields.n}")
        sm.shared.busy += read
        if pair:
            other = self.sm(work.cta.slot ^ 1)
            other.tensor.take(start, cycles, f"m{fields.m}n{fields.n}")
            other.shared.busy += read
        sm.slow_tail = mma_latency(self.chip, rows, pair, in_shared) - self.chip["mbarrier_wait"]
        return [end]

    def _cp(self, work: Any, now: float) -> list[float]:
        sm = self.sm(work.cta.slot)
        size = sum(high - low for part in work.detail.shared_ranges().values() for low, high in part)
        return [sm.tensor.take(now, size / self.chip["cp_bytes_per_clk"], "tcgen05.cp")[1]]

    def _commit(self, work: Any, now: float) -> list[float]:
        sm = self.sm(work.cta.slot)
        return [max(now, sm.tensor.free) + sm.slow_tail]

    def _tmem_ld(self, work: Any, now: float) -> list[float]:
        sm, chip = self.sm(work.cta.slot), self.chip
        port = sm.tensor_memory[work.detail.index % 4]
        latency = chip["tmem_latency_busy" if sm.tensor.free > now else "tmem_latency"]
        return [port.take(now, work.size / chip["tmem_ld_bytes_per_clk"], "ld")[1] + latency]

    def _tmem_st(self, work: Any, now: float) -> list[float]:
        sm = self.sm(work.cta.slot)
        port = sm.tensor_memory[work.detail.index % 4]
        return [port.take(now, work.size / self.chip["tmem_st_bytes_per_clk"], "st")[1]]


def box_rows(tensor_map: Any) -> int:
    """Rows of at most 128 bytes in a tensor map's box."""
    row = tensor_map.box[0] * tensor_map.element_bits / 8
    return int(math.prod(tensor_map.box[1:]) * math.ceil(row / 128))
