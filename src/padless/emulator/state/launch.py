"""One launch as instructions and checks see it: shape, parameters, memory, pending operations, findings."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from padless.emulator.errors import LaunchError
from padless.emulator.order.global_race import GlobalShadow
from padless.emulator.order.other_clusters import OtherClusters
from padless.emulator.order.race import PLANES, Shadow
from padless.emulator.order.reports import Collector
from padless.emulator.state.memory import DeviceMemory
from padless.emulator.state.program import Program
from padless.emulator.state.schedule import RESIDENT, Schedule
from padless.emulator.state.spaces import STORAGE
from padless.emulator.state.work import Work
from padless.emulator.units.number_formats import Array

SHARED_BASE = 1024  # where a CTA's own shared memory starts; the first KiB is the system's
SHARED_LIMIT = 227 * 1024


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

    @property
    def warp_instructions_per_second(self) -> float:
        return self.warp_instructions / self.seconds if self.seconds else 0.0


Shape = Sequence[int] | int  # grid, block or cluster, as callers give them
Dimensions = tuple[int, int, int]


def _as_three(value: Shape, name: str) -> Dimensions:
    """Three numbers. LaunchError where they are none."""
    try:
        values = [value] if isinstance(value, int) else [int(x) for x in value]
    except (TypeError, ValueError):
        values = []
    values = values and values + [1] * (3 - len(values))
    if len(values) != 3 or any(x < 1 for x in values):
        raise LaunchError(f"{name} is {value!r}, it must be one to three positive integers")
    return values[0], values[1], values[2]


def shape_of(program: Program, grid: Shape, block: Shape, cluster: Shape) -> tuple[Dimensions, Dimensions, Dimensions]:
    """Grid, block and cluster of a launch; the cluster that the kernel declares where none is given."""
    grid, block, cluster = _as_three(grid, "grid"), _as_three(block, "block"), _as_three(cluster, "cluster")
    if cluster == (1, 1, 1) and program.function.cluster is not None:
        cluster = program.function.cluster
    return grid, block, cluster


def bytes_needed(program: Program, block: int, cluster: int, shared_bytes: int, checks: bool) -> int:
    """About what the clusters on the machine take: registers, local and shared memory, clocks and shadows."""
    warps = -(-block // 32)
    registers = sum(32 * count * np.dtype(STORAGE[cls]).itemsize for cls, count in program.rows.items())
    shared = SHARED_BASE + program.static_shared_bytes + shared_bytes
    cta = warps * (registers + 32 * program.local_bytes) + shared
    total = cluster * cta
    if checks:
        lanes = 32 * warps * cluster
        total += PLANES * lanes * (lanes + 64) * 4 + cluster * shared // program.granule * Shadow.CELL_BYTES
    return max(RESIDENT) * total


class AsyncOperation:
    """Work that an instruction starts and that finishes later: `steps` run one by one, each at a moment that the
    schedule picks; operations of one queue run in order."""

    __slots__ = ("description", "steps", "work")

    def __init__(self, description: str, *steps: Callable[[], None], work: Work | None = None) -> None:
        self.description = description
        self.steps = deque(steps)
        self.work = work


class Launch:
    """What a launch was given and what has happened to it. `run.machine.Machine` runs it."""

    make_mbarrier: Callable[..., Any]  # the class of mbarriers
    make_register_pool: Callable[..., Any]  # and of CTAs' registers

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
        strict: bool = True,
    ) -> None:
        self.program = program
        self.blocks = program.blocks
        self.memory = memory
        self.symbols = symbols
        self.parameters: Array = np.frombuffer(parameters, np.uint8)
        self.grid, self.block, self.cluster = grid, block, cluster
        self.dynamic_shared = dynamic_shared
        alignment = max(program.shared_alignment, 16)
        self.shared_base = -(-SHARED_BASE // alignment) * alignment if alignment <= 1024 else SHARED_BASE
        self.shared_bytes = self.shared_base + program.static_shared_bytes + dynamic_shared
        if self.shared_bytes - SHARED_BASE > SHARED_LIMIT:
            asked = self.shared_bytes - SHARED_BASE
            raise LaunchError(f"shared memory: {asked} bytes asked for, a CTA has {SHARED_LIMIT}")
        self.seed = seed
        self.random = random.Random(seed)
        self.schedule = Schedule.draw(seed)
        self.arithmetic = arithmetic
        self.target = program.module.target
        self.checks = checks
        self.trace = trace
        self.programmatic = programmatic
        self.collector = Collector(seed, ignore=ignore, strict=strict)
        self.report = self.collector.add
        self.statistics = Statistics()
        self.tensor_maps: dict[bytes, Any] = {}  # decoded, by their bytes
        self.queues: dict[Any, deque[AsyncOperation]] = {}
        self.words: dict[int, Any] = {}  # Word by address, of global memory
        self.shadows: dict[int, GlobalShadow] = {}  # of arrays of global memory that are written, by their address
        self.clusters_know: dict[int, OtherClusters] = {}  # what each cluster that has started knows of others
        self.waiting: deque[int] = deque()  # clusters that have not started
        self.progress = 0
        self.ticks = 0

    def symbol_address(self, name: str) -> int:
        if name not in self.symbols:
            if name in self.program.module.functions:
                return 0
            raise LaunchError(f"unknown symbol {name}")
        return self.symbols[name]

    def clock(self, name: str) -> int:
        """The value of a special register that counts time."""
        self.ticks += 37
        value = self.statistics.warp_instructions + self.ticks
        if name.endswith("_hi"):
            return value >> 32
        return value & (0xFFFFFFFF if "64" not in name and name != "%globaltimer" else -1)

    # ---- clusters
    def cluster_position(self, index: int) -> tuple[int, int, int]:
        """Where in the grid of clusters the cluster with this number lies."""
        x, y, _ = (g // s for g, s in zip(self.grid, self.cluster, strict=True))
        return index % x, index // x % y, index // (x * y)

    def cta_position(self, index: int, rank: int) -> tuple[int, int, int]:
        """Where in the grid the CTA of this rank of a cluster lies."""
        (a, b, c), (x, y, z) = self.cluster, self.cluster_position(index)
        return x * a + rank % a, y * b + rank // a % b, z * c + rank // (a * b)

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
