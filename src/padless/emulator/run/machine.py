"""One launch: its state, which warp runs next, when asynchronous operations finish, reports and faults."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from padless.emulator.checks.deadlock import give_up, release_parked, report_deadlock
from padless.emulator.checks.exit import check_exit
from padless.emulator.errors import KernelFault, LaunchError
from padless.emulator.order.reports import Collector
from padless.emulator.prepare.control_flow import Block
from padless.emulator.prepare.program import Program
from padless.emulator.ptx.ast import Instruction
from padless.emulator.run.execution import execute, trace_block
from padless.emulator.state.asynchronous import AsyncOperation
from padless.emulator.state.mbarrier import Mbarrier
from padless.emulator.state.memory import DeviceMemory
from padless.emulator.state.memory_access import shared_cells
from padless.emulator.state.schedule import Schedule
from padless.emulator.state.statistics import Statistics
from padless.emulator.state.warp import Cluster, Cta, Fragment, Warp

Array = np.ndarray[Any, Any]
SHARED_BASE = 1024  # where a CTA's own shared memory starts; the first KiB is the system's
SHARED_LIMIT = 227 * 1024
IDLE_LIMIT = 4000  # turns without any change before spinning counts as a deadlock


class Machine:
    """One launch."""

    mbarrier: type[Mbarrier] = Mbarrier

    def __init__(
        self,
        program: Program,
        memory: DeviceMemory,
        symbols: dict[str, int],
        parameters: bytes,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        cluster: tuple[int, int, int],
        dynamic_shared: int,
        seed: int,
        arithmetic: str,
        checks: bool,
        trace: Callable[[str], None] | None = None,
        ignore: frozenset[str] = frozenset(),
        programmatic: bool = False,
    ) -> None:
        self.program = program
        self.blocks = program.blocks
        self.memory = memory
        self.symbols = symbols
        self.parameters: Array = np.frombuffer(parameters, np.uint8)
        self.parameter_offsets = {name: at for name, (at, _) in program.parameters.items()}
        self.grid, self.block, self.cluster = grid, block, cluster
        self.dynamic_shared = dynamic_shared
        alignment = max(program.shared_alignment, 16)
        self.shared_base = -(-SHARED_BASE // alignment) * alignment if alignment <= 1024 else SHARED_BASE
        self.shared_bytes = self.shared_base + program.static_shared_bytes + dynamic_shared
        if self.shared_bytes - SHARED_BASE > SHARED_LIMIT:
            raise LaunchError(
                f"shared memory: {self.shared_bytes - SHARED_BASE} bytes asked for, a CTA has {SHARED_LIMIT}"
            )
        self.seed = seed
        self.random = random.Random(seed)
        self.schedule = Schedule.draw(seed)
        self.arithmetic = arithmetic
        self.target = program.module.target
        self.checks = checks
        self.trace = trace
        # Called before a block runs; True: not yet, give the turn away. None costs nothing.
        self.observe: Callable[[Fragment, Block], bool] | None = (
            None if trace is None else partial(trace_block, self)
        )
        self.programmatic = programmatic
        self.collector = Collector(seed, ignore=ignore)
        self.statistics = Statistics()
        self.clusters: list[Cluster] = []
        self.queues: dict[Any, deque[AsyncOperation]] = {}
        self.waiting: deque[int] = deque()  # clusters that have not started
        self.progress = 0
        self.stopped = False
        self.ticks = 0
        self.guard_slots: dict[int, int] = {}  # instruction number -> slot of its guard
        self.gave_up_at = -1  # progress when waits last gave up
        self.global_clocks: dict[Any, Any] = {}

    # ---- reports and faults
    def report(
        self,
        kind: str,
        message: str,
        instruction: Any,
        warp: Any = None,
        lane: int = -1,
        other: Any = None,
        key: Any = None,
    ) -> None:
        self.collector.add(kind, message, instruction, warp, lane, other, key)

    def fault(self, warp: Warp, instruction: Instruction, message: str, m: Any, kind: str = "fault") -> None:
        """What stops real hardware: reported, and the launch ends."""
        lane = 0 if m is True else int(np.argmax(m))
        self.report(
            kind if kind != "fault" or "misaligned" not in message else "misaligned",
            message,
            instruction,
            warp,
            lane,
        )
        raise KernelFault(message)

    def symbol_address(self, name: str) -> int:
        if name not in self.symbols:
            if name in self.program.module.functions:
                return 0
            raise LaunchError(f"unknown symbol {name}")
        return self.symbols[name]

    def clock(self, name: str) -> int:
        self.ticks += 37
        value = self.statistics.warp_instructions + self.ticks
        return (
            value >> 32
            if name.endswith("_hi")
            else value & (0xFFFFFFFF if "64" not in name and name != "%globaltimer" else -1)
        )

    # ---- checks shared by instructions
    def generic_shared(
        self, w: Warp, cta: Cta, lanes: Array, offsets: Array, access: Any, write: bool, strong: bool = False
    ) -> None:
        cells = shared_cells(cta, offsets, access.bytes if not strong else access.size)
        strong = strong or access.strong
        cta.shared.shadow.access(w, lanes, cells, access.instruction, write, strong)
        if strong:
            self.synchronise(w, lanes, [("s", cta.cluster, cta.rank, int(o)) for o in offsets], access)
        if write and cta.mbarriers:
            for offset in np.unique(offsets >> 3).tolist():
                if 8 * offset in cta.mbarriers and cta.mbarriers[8 * offset].valid:
                    self.report(
                        "mbarrier",
                        f"writes into {cta.mbarriers[8 * offset].name}",
                        access.instruction,
                        w,
                        int(lanes[0]),
                    )

    def synchronise(self, w: Warp, lanes: Array, keys: list[Any], access: Any) -> None:
        """Strong accesses order: a release publishes the lane's clock at the address, an acquire takes it.

        Relaxed accesses are treated as both: the fences that make them so are executed next to them.
        """
        clocks = w.cta.cluster.clocks
        if clocks is None:
            return
        is_load = access.instruction.opcode == "ld"
        is_store = access.instruction.opcode in ("st", "red")
        for lane, key in zip(lanes.tolist(), keys, strict=True):
            row = np.array([w.first_row + lane])
            if not is_store and key in self.global_clocks:
                clocks.acquire(row, self.global_clocks[key])
            if not is_load:
                from padless.emulator.order.race import merge

                self.global_clocks[key] = merge(self.global_clocks.get(key), clocks.join(row))
                clocks.tick(row)

    def synchronise_global(self, w: Warp, lanes: Array, where: Array, access: Any) -> None:
        if self.checks:
            cluster = w.cta.cluster
            self.synchronise(w, lanes, [("g", cluster, int(x)) for x in where], access)

    # ---- clusters
    def cluster_position(self, index: int) -> tuple[int, int, int]:
        """Where in the grid of clusters the cluster with this number lies."""
        x, y, _ = (g // s for g, s in zip(self.grid, self.cluster, strict=True))
        return index % x, index // x % y, index // (x * y)

    def cancel_cluster(self) -> tuple[int, int, int] | None:
        """Take a cluster that has not started out of the grid: its first CTA, or None when all have."""
        if not self.waiting:
            return None
        x, y, z = self.cluster_position(self.waiting.popleft())
        return x * self.cluster[0], y * self.cluster[1], z * self.cluster[2]

    # ---- asynchronous operations
    def enqueue(self, queue: Any, operation: AsyncOperation) -> None:
        """Operations of one queue finish in order; those of different queues in any order. None: a queue of its own."""
        self.statistics.async_operations += 1
        key = ("own", self.statistics.async_operations) if queue is None else queue
        self.queues.setdefault(key, deque()).append(operation)

    def step_async(self) -> bool:
        """Let one operation, drawn at random, take its next step."""
        if not self.queues:
            return False
        key = self.random.choice(list(self.queues))
        queue = self.queues[key]
        operation = queue[0]
        step = operation.steps.popleft()
        if self.trace:
            self.trace(f"async {operation.description}")
        step()
        self.progress += 1
        if not operation.steps:
            queue.popleft()
            if not queue:
                del self.queues[key]
        return True

    # ---- running
    def run(self) -> None:
        started = time.perf_counter()
        old = np.seterr(all="ignore")
        try:
            self._run()
        except KernelFault:
            pass
        finally:
            np.seterr(**old)
            self.statistics.seconds = time.perf_counter() - started

    def _run(self) -> None:
        schedule = self.schedule
        total = int(np.prod(self.grid)) // int(np.prod(self.cluster))
        order = list(range(total))
        if schedule.order == "backward":
            order.reverse()
        elif schedule.order == "shuffled":
            self.random.shuffle(order)
        waiting = self.waiting = deque(order)
        self.statistics.ctas = int(np.prod(self.grid))
        idle = 0
        last_progress = -1
        slot = 0
        while True:
            while waiting and len(self.clusters) < schedule.resident:
                self.clusters.append(Cluster(self, waiting.popleft(), slot))
                slot += 1
            fragment = self._pick()
            if fragment is not None:
                if self.progress == last_progress:
                    idle += 1
                else:
                    idle, last_progress = 0, self.progress
                self._resume(fragment)
                if schedule.policy == "eager":
                    while self.step_async():
                        pass
                elif schedule.policy == "random":
                    while self.queues and self.random.random() < schedule.complete:
                        self.step_async()
                if idle > 64 and (idle % 16 == 0):
                    # Spinning without any change: let something asynchronous or another CTA make the change.
                    if not self.step_async() and waiting:
                        self.clusters.append(Cluster(self, waiting.popleft(), slot))
                        slot += 1
                    elif idle > 256:
                        release_parked(self)
                    if idle > IDLE_LIMIT:
                        report_deadlock(self, "spinning with no progress")
                        return
                self._retire()
                continue
            if self.step_async():
                continue
            self._retire()
            if not self.clusters and not waiting:
                break
            if waiting:
                self.clusters.append(Cluster(self, waiting.popleft(), slot))
                slot += 1
                continue
            if release_parked(self) or give_up(self):
                last_progress = self.progress
                continue
            if not any(cluster.fragments() for cluster in self.clusters):
                continue
            report_deadlock(self, "deadlock")
            return

    def _pick(self) -> Fragment | None:
        fragments = [
            f
            for cluster in self.clusters
            for cta in cluster.ctas
            if not cta.exited
            for w in cta.warps
            for f in w.fragments
        ]
        if not fragments:
            return None
        start = self.random.randrange(len(fragments))
        for i in range(len(fragments)):
            fragment = fragments[start + i - len(fragments)]
            if fragment.wait is None or fragment.wait.ready():
                return fragment
        return None

    def _resume(self, fragment: Fragment) -> None:
        if fragment.wait is not None:
            wait = fragment.wait
            fragment.wait = None
            fragment.wait = wait.finish(fragment)
            if fragment.wait is not None:
                return
            self.progress += 1
            fragment.block = self.blocks[fragment.block].next
            if not fragment.warp.arrive(fragment):
                return
        execute(self, fragment)

    def _retire(self) -> None:
        """CTAs whose threads have all ended give up their place, a cluster when its last CTA has."""
        done = False
        for cluster in self.clusters:
            for cta in cluster.ctas:
                if not cta.exited and not any(w.live.any() for w in cta.warps):
                    cta.exited = True
                    self.progress += 1
                    check_exit(cta)
            done |= cluster.finished()
        if done:
            for cluster in [c for c in self.clusters if c.finished()]:
                while self.step_async():  # what is still on its way lands before the memory goes
                    pass
                self.clusters.remove(cluster)
            if not self.checks:
                self.global_clocks.clear()
