"""Grid, cluster, CTA, warp, and the fragments a warp splits into when it diverges."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import numpy as np

from padless.emulator.order.grid_dependency import GridDependency
from padless.emulator.order.memory_order import OrderedClocks
from padless.emulator.order.other_clusters import OtherClusters
from padless.emulator.order.race import Shadow
from padless.emulator.order.unread import UnreadLoad
from padless.emulator.ptx.ast import Instruction
from padless.emulator.state.launch import Launch
from padless.emulator.state.memory import SharedMemory
from padless.emulator.state.spaces import STORAGE, VIEWS
from padless.emulator.units.number_formats import Array


class Wait:
    """Why a fragment cannot go on. `ready` is polled by the scheduler; `finish` runs before the fragment goes on."""

    def ready(self) -> bool:
        raise NotImplementedError

    def finish(self, fragment: Fragment) -> Wait | None:
        return None

    def describe(self) -> str:
        raise NotImplementedError

    def give_up(self, fragment: Fragment) -> bool:
        """For instructions that may return without success (try_wait): do so, and say so."""
        return False

    def begin(self, fragment: Fragment) -> Wait | None:
        """Wait, unless it is over already."""
        return self.finish(fragment) if self.ready() else self


class Until(Wait):
    """Waiting for a condition; `then` runs before the fragment goes on."""

    def __init__(self, ready: Callable[[], bool], then: Callable[[], None], describe: Callable[[], str]) -> None:
        self.condition, self.then, self.text = ready, then, describe

    def ready(self) -> bool:
        return self.condition()

    def finish(self, fragment: Fragment) -> Wait | None:
        self.then()
        return None

    def describe(self) -> str:
        return self.text()


class Token:
    """Where the sides of a divergent branch are to meet again."""

    def __init__(self, block: int, expected: Array) -> None:
        self.block = block
        self.expected = expected.copy()
        self.parked: list[Fragment] = []


class Fragment:
    """Lanes of one warp that execute together."""

    __slots__ = ("block", "full", "mask", "tokens", "wait", "warp", "yielded")

    def __init__(self, warp: Warp, block: int, mask: Array, tokens: list[Token]) -> None:
        self.warp = warp
        self.block = block
        self.become(mask)
        self.tokens = tokens
        self.wait: Wait | None = None
        self.yielded = False

    def become(self, mask: Array) -> None:
        self.mask = mask
        self.full = bool(mask.all())

    @property
    def active(self) -> Any:
        return True if self.full else self.mask

    def lanes(self, m: Any) -> Array:
        return np.flatnonzero(self.mask) if m is True else np.flatnonzero(m)


class Warp:
    """Thirty-two lanes: their registers and local memory, and what the checks know of them."""

    def __init__(self, cta: Cta, index: int, threads: int) -> None:
        program = cta.launch.program
        self.cta = cta
        self.launch = cta.launch
        self.clocks = cta.cluster.clocks  # None without checks
        self.index = index
        self.first_row = cta.rank * cta.rows + 32 * index
        self.rows = slice(self.first_row, self.first_row + 32)
        self.live = np.arange(32) < threads
        unwritten = {cls: False if cls == "p" else np.iinfo(kind).max for cls, kind in STORAGE.items()}
        self.arrays = {cls: np.full((max(n, 1), 32), unwritten[cls], STORAGE[cls]) for cls, n in program.rows.items()}
        views = {(cls, view): self.arrays[cls].view(VIEWS[view]) for cls, _, view in set(program.slots)}
        self.v = [views[cls, view][row] for cls, row, view in program.slots]
        for cls, row, bits in program.constants:
            self.arrays[cls][row] = bits
        self.carry = np.zeros(32, bool)
        self.local = np.zeros((32, -(-max(program.local_bytes, 16) // 16) * 16), np.uint8)
        self.fragments: list[Fragment] = []
        self.end: Instruction | None = None  # where its last lanes left
        # Bit sets over register numbers, for the checks.
        self.busy = 0
        self.busy_owner: dict[int, Any] = {}
        self.dirty = 0
        self.written = 0
        self.latest: dict[int, tuple[int, int]] = {}  # by lane, the bytes of its latest strong access to global memory
        # Groups of asynchronous operations by family and lane, made on first use.
        self.groups: dict[Any, Any] = {}
        self.unread: dict[int, list[UnreadLoad]] = {}  # by number, loads whose values nothing has needed yet

    def special_registers(self) -> None:
        cta, launch = self.cta, self.launch
        program = launch.program
        thread = 32 * self.index + np.arange(32)
        bx, by, _ = launch.block
        lane = np.arange(32)
        bits = np.uint32(1) << lane.astype(np.uint32)
        values: dict[str, Any] = {
            "%laneid": lane, "%warpid": self.index, "%nwarpid": len(cta.warps) or 1, "%smid": cta.slot, "%nsmid": 132,
            "%cluster_ctarank": cta.rank, "%cluster_nctarank": int(np.prod(launch.cluster)),
            "%is_explicit_cluster": launch.cluster != (1, 1, 1),
            "%lanemask_eq": bits, "%lanemask_lt": bits - 1, "%lanemask_le": (bits - 1) | bits,
            "%lanemask_gt": ~((bits - 1) | bits), "%lanemask_ge": ~(bits - 1),
            "%dynamic_smem_size": launch.dynamic_shared, "%total_smem_size": cta.shared.size, "%gridid": 1,
            "%tid.x": thread % bx, "%tid.y": thread // bx % by, "%tid.z": thread // (bx * by),
        }  # fmt: skip
        for axis, letter in enumerate("xyz"):
            size, at, grid = launch.cluster[axis], cta.index[axis], launch.grid[axis]
            of_axis = {
                "ntid": launch.block[axis], "ctaid": at, "nctaid": grid, "clusterid": at // size,
                "nclusterid": grid // size, "cluster_ctaid": at % size, "cluster_nctaid": size,
            }  # fmt: skip
            values |= {f"%{name}.{letter}": value for name, value in of_axis.items()}
        for name, cls, row in program.specials:
            if name in values:
                self.arrays[cls][row] = values[name]
        for cls, row, symbol, offset in program.symbols:
            self.arrays[cls][row] = np.array(cta.symbol_address(symbol) + offset).astype(STORAGE[cls])

    def use(self, loads: list[int]) -> None:
        """The next instruction needs what these loads have brought."""
        for index in loads:
            for load in self.unread.pop(index, ()):
                load.use(self)

    def drop(self, loads: list[int]) -> None:
        """The next instruction overwrites what these loads have brought, which nothing has needed."""
        for index in loads:
            for load in self.unread.pop(index, ()):
                load.is_dropped = True

    def settle(self, token: Token) -> None:
        """Wake the fragments parked at a meeting point once all that will come have come."""
        if not token.parked:
            return
        arrived = np.logical_or.reduce([f.mask for f in token.parked])
        if (token.expected & self.live & ~arrived).any():
            return
        first = token.parked[0]
        token.parked = []
        first.become(arrived)
        first.tokens = first.tokens[: first.tokens.index(token)]
        self.fragments.append(first)
        self.arrive(first)

    def arrive(self, fragment: Fragment) -> bool:
        """Called when a fragment has moved to a new block; False if it now waits there for its siblings."""
        while fragment.tokens and fragment.tokens[-1].block == fragment.block:
            token = fragment.tokens[-1]
            if not (token.expected & self.live & ~fragment.mask).any():
                fragment.tokens = fragment.tokens[:-1]
                continue
            self.fragments.remove(fragment)
            token.parked.append(fragment)
            self.settle(token)
            return False
        return True

    def absorb(self, fragment: Fragment, other: Fragment) -> None:
        """Join two fragments that stand at the same instruction."""
        pairs = zip(fragment.tokens, other.tokens, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], pairs))
        for each in (fragment, other):
            for token in each.tokens[common:]:
                token.expected &= ~each.mask
                self.settle(token)
        fragment.tokens = fragment.tokens[:common]
        fragment.become(fragment.mask | other.mask)
        self.fragments.remove(other)


class Converge(Wait):
    """A .sync or .aligned instruction waits here for the other lanes it names."""

    def __init__(self, fragment: Fragment, needed: Array, again: Any) -> None:
        self.fragment = fragment
        self.needed = needed
        self.again = again

    def missing(self) -> list[int]:
        return np.flatnonzero(self.fragment.warp.live & self.needed & ~self.fragment.mask).tolist()

    def ready(self) -> bool:
        return not self.missing()

    def finish(self, fragment: Fragment) -> Wait | None:
        result: Wait | None = self.again(fragment, fragment.active)
        return result

    def describe(self) -> str:
        return f"lanes {self.missing()} to reach the same instruction"


def gather(fragment: Fragment, needed: Array, again: Any) -> Wait | None:
    """None if the fragment holds all live lanes of `needed`, after taking in siblings that wait here; else a wait."""
    warp = fragment.warp
    if not (warp.live & needed & ~fragment.mask).any():
        return None
    for other in list(warp.fragments):
        if other is not fragment and other.block == fragment.block and isinstance(other.wait, Converge):
            warp.absorb(fragment, other)
    wait = Converge(fragment, needed, again)
    return None if wait.ready() else wait


class NamedBarrier:
    """One of the sixteen CTA barriers."""

    def __init__(self) -> None:
        self.count = 0
        self.expected = 0
        self.clock: Any = None
        self.waiting: list[Any] = []
        self.value: Any = None
        self.everybody = False
        self.operation = ""
        self.arrived: dict[Warp, Array] = {}  # the lanes of each warp that have arrived in this phase

    def everybody_is_here(self, cta: Cta) -> bool:
        """Whether every live thread of the CTA has arrived, warps of fewer than 32 threads included."""
        nobody = np.zeros(32, bool)
        return not any((w.live & ~self.arrived.get(w, nobody)).any() for w in cta.warps)


class Cta:
    """One CTA: its shared memory and barriers, its warps, and what instructions keep for it."""

    def __init__(self, cluster: Cluster, rank: int, index: tuple[int, int, int], slot: int) -> None:
        launch = self.launch = cluster.launch
        self.cluster = cluster
        self.rank = rank
        self.index = index
        self.slot = slot
        self.checks = launch.checks
        self.exited = False
        self.shared = SharedMemory(launch.shared_bytes)
        self.granule_shift = launch.program.granule.bit_length() - 1
        if cluster.clocks is not None:
            self.shared.shadow = Shadow(
                len(self.shared.bytes) >> self.granule_shift, cluster.clocks, launch.collector,
                launch.program.instructions, "shared memory", launch.program.granule,
            )  # fmt: skip
            self.shared.shadow.late = launch.program.late
        self.threads = int(np.prod(launch.block))
        count = -(-self.threads // 32)
        self.rows = 32 * count
        self.mbarriers: dict[int, Any] = {}  # Mbarrier by offset
        self.barriers = [NamedBarrier() for _ in range(16)]
        self.tensor_memory: Any = None  # TensorMemory, made on first use
        self.registers: Any = None  # RegisterPool, made on first use
        self.warpgroups: dict[int, Any] = {}  # wgmma state, made on first use
        self.words: dict[int, Any] = {}  # Word by offset
        # (clock row of another CTA's lane, offset of an mbarrier or -1) -> its last use of it: (event, site, Mbarrier or
        # None, its phase)
        self.remote: dict[tuple[int, int], tuple[int, Any, Any, int]] = {}
        self.warps = [Warp(self, i, min(32, self.threads - 32 * i)) for i in range(count)]
        for warp in self.warps:
            warp.special_registers()
            warp.fragments.append(Fragment(warp, 0, warp.live.copy(), []))

    def symbol_address(self, name: str) -> int:
        program = self.launch.program
        if name in program.shared:
            return (self.rank << 24) | (self.launch.shared_base + program.shared[name][0])
        own = program.parameters.get(name) or program.local.get(name)
        return own[0] if own is not None else self.launch.symbol_address(name)

    def symbol_at(self, offset: int) -> str:
        """A readable name of a shared-memory offset."""
        best, base = "", -1
        for name, (at, size) in self.launch.program.shared.items():
            start = at + self.launch.shared_base
            if start <= offset and start > base and (size < 0 or offset < start + size):
                best, base = name, start
        return f"{best}+{offset - base}" if best else f"at {offset:#x}"

    def live_warps(self) -> int:
        return sum(bool(w.live.any()) for w in self.warps)


class Cluster:
    """CTAs that run together, with the clocks that order their accesses."""

    def __init__(self, launch: Launch, index: int, slot: int) -> None:
        self.launch = launch
        self.number = index
        size = launch.cluster
        count = size[0] * size[1] * size[2]
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.clocks: Any = None  # OrderedClocks, with checks
        self.grids: GridDependency | None = None
        if launch.checks:
            others = OtherClusters(index, launch.clusters_know)
            clocks = self.clocks = OrderedClocks(count * 32 * -(-threads // 32), others)
            if launch.programmatic:
                self.grids = GridDependency(clocks)
        # The cluster barrier: lanes of each warp that have arrived, their clock, who waits, and warps that have arrived
        # in the last phase and are yet to wait.
        self.arrived: dict[Warp, Array] = {}
        self.barrier_clock: Any = None
        self.barrier_waiting: dict[Warp, Any] = {}
        self.barrier_done: dict[Warp, Any] = {}
        # mbarriers whose initialisation a relaxed arrival at the cluster barrier will publish
        self.fenced_inits: list[Any] = []
        self.cancel_failed = False  # somebody has seen that no cluster is left to cancel
        self.ctas: list[Cta] = []
        for rank in range(count):
            self.ctas.append(Cta(self, rank, launch.cta_position(index, rank), slot * count + rank))

    def fragments(self) -> list[Fragment]:
        return [f for cta in self.ctas for warp in cta.warps for f in warp.fragments]

    def finished(self) -> bool:
        return all(cta.exited for cta in self.ctas)
