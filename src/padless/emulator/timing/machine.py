"""A machine that keeps time: the same launch, its warps and operations in the order of simulated cycles.

A warp's block first passes its time on the warp's issue server and then takes effect. So everything that others can see
happens in the order of time, and barriers, queues and waits need no clocks of their own. Asynchronous operations
finish when their servers are done with them. Values are moved, but matrix products are not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from padless.emulator.checks.deadlock import release_parked, report_deadlock
from padless.emulator.instructions.matrix import WgmmaWait
from padless.emulator.instructions.tcgen05_access import AccessWait
from padless.emulator.run.machine import Machine
from padless.emulator.state.barriers import BarrierWait
from padless.emulator.state.launch import AsyncOperation
from padless.emulator.state.mbarrier import Mbarrier, MbarrierWait
from padless.emulator.state.program import EXIT, SYNC, Block
from padless.emulator.state.register_pool import PartitionedPool
from padless.emulator.state.schedule import Schedule
from padless.emulator.state.site import Site
from padless.emulator.state.warp import Cluster, Fragment
from padless.emulator.timing.costs import COMPILER_REUSE, BlockCost, Costs
from padless.emulator.timing.events import Events
from padless.emulator.timing.rates import Chip
from padless.emulator.timing.timeline import Timeline, Wait
from padless.emulator.timing.units import Sm, Units

NOTICED = 20  # cycles from which a wait for a loaded value is recorded
SCHEDULE = Schedule("late", 1.0, 0.0, 1 << 30, "lowest", 0.0, "forward")


class TimedMbarrier(Mbarrier):
    """Arrivals from another CTA are on their way for a while."""

    def arrive(self, count: int, clock: Any, site: Site, wide: Any = None) -> None:
        machine = self.cta.launch
        assert isinstance(machine, TimedMachine)
        arrive = partial(super().arrive, count, clock, site, wide)
        if machine.current is not None:
            machine.released(site.warp)
        if site.warp.cta is not self.cta and machine.current is not None:
            machine.events.at(machine.now + machine.chip["remote_arrive"], arrive)
        else:
            arrive()


def reason(wait: Any) -> str:
    """What a warp waits for, in words that are the same for the same sort of thing."""
    if isinstance(wait, MbarrierWait):
        bar = wait.groups[0][0]
        last = bar.last_arrival
        if last is None:
            return "first arrivals"
        if last.opcode == "tcgen05":
            return "products"
        if "expect_tx" in last.name:
            return "copies"
        return "arrivals of warps"
    if isinstance(wait, WgmmaWait):
        return "products"
    if isinstance(wait, AccessWait):
        return "tensor memory"
    if isinstance(wait, BarrierWait):
        return "named barrier"
    return "stores" if "bulk" in getattr(wait, "what", "") else "others"


class TimedMachine(Machine):
    """Machine with a clock. ``chip``: whose rates. ``from_memory``: share of loaded bytes that L2 does not have.
    ``sms``: CTAs at once. ``limit``: cycles after which the launch is given up as one that does not end. ``sample``: of
    the grid's clusters those that run, None for all. ``together``: how many clusters an SM, or a cluster's SMs, hold."""

    make_mbarrier = TimedMbarrier
    make_register_pool = PartitionedPool

    def __init__(
        self,
        *arguments: Any,
        chip: Chip,
        from_memory: float = 0.0,
        sms: int = 1 << 30,
        record: bool = True,
        limit: float = 1e8,
        sample: Sequence[int] | None = None,
        together: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        chip = self.chip = chip.counting()
        self.sample, self.together = sample, together
        self.schedule = SCHEDULE
        self.checks = False
        self.arithmetic = "none"
        self.sms = sms
        self.limit = limit
        self.events = Events()
        self.units = Units(chip, record, from_memory, "tensormap prefetch" in self.program.uses)
        self.timeline = Timeline(chip, self.units.sms, self.program)
        self.costs = Costs(chip, self.program.register_names, bool(self.program.uses & {"wgmma"}), self._reuse_run())
        self.now = 0.0
        self.current: Fragment | None = None
        self._times: dict[Fragment, float] = {}
        self._due: dict[Fragment, float] = {}  # blocks that have passed their time and are yet to take effect
        self._since: dict[Fragment, tuple[float, str]] = {}
        self._begun: dict[Any, float] = {}
        self._in_flight = 0
        self._shadow: dict[Any, float] = {}  # slots of arithmetic that a warp has issued since it last waited
        self._seen: dict[Any, float] = {}  # when a warp saw its products done, until it releases their stage
        self._pending: dict[Any, list[tuple[float, int]]] = {}  # when slow results come, and to which registers
        trace = self.trace
        self.observe = self._charge if trace is None else partial(self._traced, trace)

    def _reuse_run(self) -> int:
        """How many neighbouring multiply-adds keep an operand, where the kernel's machine code is marked so: a constant
        of its PTX says it. Else what ptxas does."""
        for name, variable in self.program.module.variables.items():
            if name.endswith("_reuse_run") and variable.initial:
                return int.from_bytes(variable.initial[:4], "little")
        return COMPILER_REUSE

    # ---- time
    def clock(self, name: str) -> int:
        value = int(self.now / self.chip.clocks_ghz[1] if "globaltimer" in name else self.now)
        if name.endswith("_hi"):
            return value >> 32
        return value & (0xFFFFFFFF if "64" not in name and name != "%globaltimer" else -1)

    def _traced(self, trace: Callable[[str], None], f: Fragment, b: Block) -> bool:
        waiting = self._charge(f, b)
        if not waiting:
            trace(f"{self._times.get(f, 0.0):10.0f}  CTA {f.warp.cta.index} warp {f.warp.index} block {b.index}")
        return waiting

    def _charge(self, f: Fragment, b: Block) -> bool:
        """Let a block's time pass on its warp; True if it is to take effect later than now."""
        due = self._due.pop(f, None)
        if due is not None:
            self._times[f] = due
            return False
        cost = self.costs.of(b)
        w = f.warp
        start = self._time(f)
        pending = self._pending.get(w)
        if pending:
            asked = start
            for time, registers in pending:
                if registers & b.touches and time > start:
                    start = time
            pending[:] = [entry for entry in pending if entry[0] > start]
            if start > asked + NOTICED:
                self.timeline.waits.append(Wait((w.cta.slot, w.index), asked, start, "values"))
        if start > self.now:  # servers are asked in the order of time
            self._times[f] = start
            return True
        sm = self.units.sm(w.cta.slot)
        server = sm.issue[w.index % 4]
        hidden = min(cost.waits, self._shadow.pop(w, 0.0))
        if not cost.dense:
            issued = server.squeeze(start, cost.slots)
        else:
            slots = self._beside_products(sm, cost)
            issued = server.take(start, slots, "instructions")[1]
            self._shadow[w] = slots
        end = max(issued, start + cost.chain - hidden)
        if cost.shared:
            end = max(end, sm.shared.take(start, cost.shared)[1])
        fed = sm.loads.take(start, cost.loaded / self.chip["l2_feed"], "loads")[1] if cost.loaded else start
        if cost.stored:
            end = max(end, sm.store.take(start, cost.stored / self.chip["store_bytes_per_clk"], "stores")[1])
        for latency, registers in cost.later:
            latency = max(latency, fed - start)
            self._pending.setdefault(w, []).append((start + latency, registers))
        if cost.signal is None and b.kind not in (SYNC, EXIT):
            self._times[f] = end
            return False
        self._due[f] = end
        at = end if b.kind in (SYNC, EXIT) else min(end, start + (cost.signal or 0.0))
        self._times[f] = at
        if at <= self.now:
            self._times[f] = self._due.pop(f)
            return False
        return True

    def _beside_products(self, sm: Sm, cost: BlockCost) -> float:
        """Slots of arithmetic, a part of it beside Hopper's products, which take half of the registers' bandwidth."""
        slow = cost.slots + cost.beside
        running = 0.0 if sm.products is None else sm.products.left(self.now)
        return slow if running >= slow else running + (1 - running / slow) * cost.slots

    def _time(self, f: Fragment) -> float:
        found = self._times.get(f)
        return self._begun.get(f.warp.cta.cluster, 0.0) if found is None else found

    # ---- asynchronous operations
    def enqueue(self, queue: Any, operation: AsyncOperation) -> None:
        self.statistics.async_operations += 1
        work = operation.work
        if work is not None and work.unit == "wgmma":
            (step,) = operation.steps
            self.units.wgmma(queue, work, self.events, partial(self._product, step, self.now))
            times = [self.now]
        else:
            times = self.units.finish(queue, work, self.now, len(operation.steps))
            for step, at in zip(operation.steps, times, strict=True):
                self.events.at(at, partial(self._happen, step))
        if work is not None and work.unit == "load":
            self._in_flight += work.size
            self.timeline.count_load(work.size, times[0] - self.now, self._in_flight)
            self.events.at(times[0], partial(self._landed, work.size))
        if work is None:
            return
        what = {"wgmma": "product", "mma": "product", "load": "load", "store": "store"}.get(work.unit)
        if what is not None:
            self.timeline.mark(what, self.now, times[-1])
        if self.current is not None:
            w = self.current.warp
            group = range(w.index & ~3, (w.index & ~3) + 4) if work.unit == "wgmma" else (w.index,)
            for index in group:
                self.timeline.work_of[w.cta.slot, index][work.unit] += 1
        self.timeline.cycles = max(self.timeline.cycles, times[-1])

    def _landed(self, size: int) -> None:
        self._in_flight -= size

    def released(self, warp: Any) -> None:
        """A warp arrives at a barrier: if it has seen products end, it held their stage until now."""
        seen = self._seen.pop(warp, None)
        if seen is not None:
            self.timeline.holds.append(self.now - seen)

    def _product(self, step: Callable[[], None], issued: float) -> None:
        self.timeline.mark("product", issued, self.events.now)
        self._happen(step)

    def _happen(self, step: Callable[[], None]) -> None:
        self.current, before = None, self.current
        step()
        self.current = before
        self.progress += 1

    def step_async(self) -> bool:
        return False  # everything is in the heap of events

    # ---- running
    def _run(self) -> None:
        total = 1
        for grid, size in zip(self.grid, self.cluster, strict=True):
            total *= grid // size
        self.waiting.extend(range(total) if self.sample is None else self.sample)
        self.statistics.ctas = self.grid[0] * self.grid[1] * self.grid[2]
        size = self.cluster[0] * self.cluster[1] * self.cluster[2]
        at_once = min(max(self.sms // size, 1), -(-len(self.waiting) // self.together))
        places = list(range(at_once))[::-1] * self.together
        while True:
            while self.waiting and places:
                cluster = Cluster(self, self.waiting.popleft(), places.pop())
                self._begun[cluster] = self.now
                self.timeline.began.append(self.now)
                self.clusters.append(cluster)
            f, at = self._earliest()
            if self.events.next <= at:
                if f is None and self.events.next == float("inf"):
                    if not self.clusters:
                        break
                    if release_parked(self):
                        continue
                    report_deadlock(self, "deadlock")
                    break
                self.events.step()
                self.now = self.events.now
                continue
            assert f is not None
            self.now = self.events.now = at
            if at > self.limit:
                report_deadlock(self, f"not over after {self.limit:.0f} cycles")
                break
            self._continue(f, at)
            w = f.warp
            if not w.live.any():
                self.timeline.ended[w.cta.slot, w.index] = self.now
                self._retire()
                places += self._freed(size)
        self.timeline.cycles = max(self.timeline.cycles, self.now)

    def _freed(self, size: int) -> list[int]:
        gone = [cluster for cluster in self._begun if cluster.finished() and cluster not in self.clusters]
        for cluster in gone:
            self.timeline.lasted.append(self.now - self._begun.pop(cluster))
        return [cluster.ctas[0].slot // size for cluster in gone]

    def _earliest(self) -> tuple[Fragment | None, float]:
        """The fragment that can go on first; of equal ones that of the lowest CTA and warp."""
        best, at = None, float("inf")
        for cluster in self.clusters:
            for cta in cluster.ctas:
                if cta.exited:
                    continue
                for w in cta.warps:
                    for f in w.fragments:
                        time = self._time(f)
                        if time >= at or (f.wait is not None and not f.wait.ready()):
                            continue
                        best, at = f, max(time, self.now)
                        if at <= self.now:
                            return best, at
        return best, at

    def _continue(self, f: Fragment, at: float) -> None:
        self._times[f] = at
        since = self._since.pop(f, None)
        if since is not None:
            if at > since[0]:
                self.timeline.waits.append(Wait((f.warp.cta.slot, f.warp.index), since[0], at, since[1]))
            self._times[f] = at + self._resumption(f.wait)
        if since is not None and since[1] == "products" and isinstance(f.wait, WgmmaWait):
            self._seen[f.warp] = at
        self.current = f
        self._resume(f)
        self.current = None
        if f.wait is not None and f not in self._due:
            self._since[f] = self._times[f], reason(f.wait)
        for other in f.warp.fragments:  # lanes that went another way go on from here
            if other not in self._times:
                self._times[other] = self._times[f]

    def _resumption(self, wait: Any) -> float:
        if isinstance(wait, MbarrierWait):
            return self.chip["mbarrier_wait"] / 2
        if isinstance(wait, WgmmaWait):
            return self.chip["wgmma_wait"]
        if isinstance(wait, AccessWait):
            return self.chip["tmem_wait"]
        return self.chip["named_barrier"] if isinstance(wait, BarrierWait) else 0.0


def timed(chip: Chip, **options: Any) -> Callable[..., Machine]:
    """What ``Emulator(machine=..)`` takes to run launches on ``chip``'s clock; options as of TimedMachine."""
    return partial(TimedMachine, chip=chip, **options)
