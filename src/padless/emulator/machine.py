"""The scheduler: which warp runs next, when asynchronous operations finish, and what to say when nothing can."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .ast import Instruction
from .asynchronous import AsyncOperation
from .checks import Collector
from .control_flow import BRANCH, EXIT, FALL, INDEXED, SYNC, TRAP, Block
from .errors import KernelFault, LaunchError
from .exit_checks import check_exit
from .instructions import barriers
from .memory import DeviceMemory
from .memory_access import shared_cells
from .program import Program
from .register_checks import check_busy, check_written
from .schedule import Schedule
from .warp import Cluster, Cta, Fragment, Token, Warp

Array = np.ndarray[Any, Any]
SHARED_BASE = 1024  # where a CTA's own shared memory starts; the first KiB is the system's
SHARED_LIMIT = 227 * 1024
QUANTUM = 400  # warp-instructions before a loop gives way, at most
IDLE_LIMIT = 4000  # turns without any change before spinning counts as a deadlock


@dataclass
class Statistics:
    """Counts of one launch. Times are host seconds."""

    warp_instructions: int = 0
    async_operations: int = 0
    shared_accesses: int = 0
    bank_conflicts: int = 0
    ctas: int = 0
    seconds: float = 0.0
    tensor_seconds: float = 0.0  # of which in matrix products
    opcodes: dict[str, int] = field(default_factory=dict)

    @property
    def warp_instructions_per_second(self) -> float:
        return self.warp_instructions / self.seconds if self.seconds else 0.0


class Machine:
    """One launch."""

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
        self.collector = Collector(seed, ignore=ignore)
        self.statistics = Statistics()
        self.clusters: list[Cluster] = []
        self.queues: dict[Any, deque[AsyncOperation]] = {}
        self.waiting: deque[int] = deque()  # clusters that have not started
        self.progress = 0
        self.stopped = False
        self.ticks = 0
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
                from .race import merge

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
                        self._release_parked()
                    if idle > IDLE_LIMIT:
                        self._deadlock("spinning with no progress")
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
            if self._release_parked() or self._give_up(last_progress):
                last_progress = self.progress
                continue
            if not any(cluster.fragments() for cluster in self.clusters):
                continue
            self._deadlock("deadlock")
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
        self._execute(fragment)

    def _execute(self, f: Fragment) -> None:
        """Run a fragment until it waits, parks, ends or has had its turn."""
        w, blocks = f.warp, self.blocks
        v = w.v
        checks, trace = self.checks, self.trace
        budget = self.random.randrange(1, QUANTUM)
        m: Any = f.active
        executed = 0
        while True:
            b = blocks[f.block]
            executed += b.count
            kind = b.kind
            if trace is not None:
                self._trace(f, b)
            if checks:
                if w.busy & b.touches:
                    check_busy(self, w, b)
                if b.reads & ~w.written:
                    check_written(self, w, b)
                w.written |= b.writes
                w.dirty |= b.writes
            if kind == SYNC:
                active = m
                if b.instructions[0].guard is not None:
                    active = self._guard(b.instructions[0], v, f)
                if active is True or active.any():
                    assert b.sync is not None
                    f.wait = b.sync(f, active)
                    if f.wait is not None:
                        break
                f.block = b.next
                if not w.arrive(f):
                    break
                m = f.active
                if f.yielded or self.random.random() < self.schedule.preempt:
                    f.yielded = False
                    break
                budget -= 1
                continue
            if b.run is not None:
                b.run(w, v, m)
            if kind == FALL:
                f.block = b.next
            elif kind == BRANCH:
                if b.guard < 0:
                    f.block = b.target
                else:
                    taken = ~v[b.guard] if b.guard_negated else v[b.guard]
                    taken = taken & f.mask
                    count = np.count_nonzero(taken)
                    if count == 0:
                        f.block = b.next
                    elif count == np.count_nonzero(f.mask):
                        f.block = b.target
                    else:
                        self._split(f, b, [(b.target, taken.copy()), (b.next, f.mask & ~taken)])
                        break
                if f.block <= b.index:
                    budget -= b.count + 1
                    if budget <= 0:
                        if not w.arrive(f):
                            break
                        break
            elif kind in (EXIT, TRAP):
                if not self._leave(f, b):
                    break
                m = f.active
            elif kind == INDEXED:
                index = v[b.target]
                values = np.unique(index[f.mask])
                if len(values) == 1:
                    f.block = b.targets[int(values[0])]
                else:
                    self._split(f, b, [(b.targets[int(x)], f.mask & (index == x)) for x in values])
                    break
            if f.tokens:
                if not w.arrive(f):
                    break
                m = f.active
        self.statistics.warp_instructions += executed

    def _guard(self, instruction: Instruction, v: Any, f: Fragment) -> Any:
        slot = self.program_guard(instruction)
        active = (~v[slot] if instruction.guard_negated else v[slot]) & f.mask
        return True if active.all() else active

    def program_guard(self, instruction: Instruction) -> int:
        cache = self.__dict__.setdefault("_guards", {})
        found = cache.get(instruction.index)
        if found is None:
            assert instruction.guard is not None
            names = self.program.register_names
            cls, row = self.program.register_rows[names.index(instruction.guard.name)]
            found = cache[instruction.index] = self.program.slots.index((cls, row, "pred"))
        return int(found)

    def _split(self, f: Fragment, b: Block, ways: list[tuple[int, Array]]) -> None:
        w = f.warp
        tokens = f.tokens
        if b.join >= 0 and not (tokens and tokens[-1].block == b.join):
            tokens = [*tokens, Token(b.join, f.mask)]
        w.fragments.remove(f)
        for target, mask in ways:
            new = Fragment(w, target, mask, list(tokens))
            w.fragments.append(new)
            w.arrive(new)

    def _leave(self, f: Fragment, b: Block) -> bool:
        """exit, ret or trap; False if no lane is left in the fragment."""
        w = f.warp
        end = b.terminator
        gone = f.mask.copy()
        if end is not None and end.guard is not None:
            taken = ~w.v[b.guard] if b.guard_negated else w.v[b.guard]
            gone &= taken
        if gone.any():
            if b.kind == TRAP and end is not None:
                self.fault(w, end, end.opcode, gone)
            w.live &= ~gone
            f.mask = f.mask & ~gone
            f.full = False
            self.progress += 1
            if not w.live.any():
                barriers.warp_ended(w)
            for token in list(f.tokens):
                w.settle(token)
            for other in list(w.fragments):
                for token in list(other.tokens):
                    w.settle(token)
        if not f.mask.any():
            w.fragments.remove(f)
            return False
        f.block = b.next
        return True

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

    def _release_parked(self) -> bool:
        """Forward progress: siblings need not meet where they would like to if the others cannot come."""
        for cluster in self.clusters:
            for cta in cluster.ctas:
                for w in cta.warps:
                    for f in list(w.fragments):
                        for token in f.tokens:
                            if token.parked:
                                other = token.parked.pop()
                                token.expected &= ~other.mask
                                other.tokens = other.tokens[: other.tokens.index(token)]
                                w.fragments.append(other)
                                w.arrive(other)
                                return True
        return False

    def _give_up(self, last_progress: int) -> bool:
        """try_wait returns false after a while: let it, once, before calling it a deadlock."""
        if self.progress == getattr(self, "_gave_up_at", -1):
            return False
        any_gave = False
        for cluster in self.clusters:
            for f in cluster.fragments():
                if f.wait is not None and f.wait.give_up(f):
                    f.wait = None
                    f.block = self.blocks[f.block].next
                    f.warp.arrive(f)
                    any_gave = True
        self._gave_up_at = self.progress
        return any_gave

    def _deadlock(self, what: str) -> None:
        """Who waits for what, once per distinct place."""
        lines = []
        first = None
        for cluster in self.clusters:
            for f in cluster.fragments():
                b = self.blocks[f.block]
                at = b.instructions[0] if b.instructions else b.terminator
                if first is None:
                    first = (at, f)
                reason = f.wait.describe() if f.wait is not None else "runs without progress"
                source = f"{at.source} " if at is not None and at.source else ""
                line = f"PTX line {at.line}" if at is not None else "?"
                lanes = int(np.count_nonzero(f.mask))
                lines.append(
                    f"CTA {f.warp.cta.index} warp {f.warp.index} ({lanes} lanes) at {source}({line}): {reason}"
                )
        at, last = first if first is not None else (None, None)
        self.report(
            "deadlock",
            f"{what}:\n      " + "\n      ".join(lines[:40]),
            at,
            last.warp if last is not None else None,
        )

    def _trace(self, f: Fragment, b: Block) -> None:
        assert self.trace is not None
        for instruction in [*b.instructions, *([b.terminator] if b.terminator and b.kind != SYNC else [])]:
            self.trace(
                f"{f.warp.cta.index} w{f.warp.index} {np.count_nonzero(f.mask):2d} lanes  "
                f"{instruction.line:5d}  {instruction}"
            )
