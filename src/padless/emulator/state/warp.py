"""Grid, cluster, CTA, warp, and the fragments a warp splits into when it diverges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from padless.emulator.state.memory import SharedMemory
from padless.emulator.state.spaces import STORAGE, VIEWS

if TYPE_CHECKING:
    from padless.emulator.ptx.ast import Instruction
    from padless.emulator.run.machine import Machine
    from padless.emulator.state.grid_dependency import GridDependency
    from padless.emulator.state.mbarrier import Mbarrier

Array = np.ndarray[Any, Any]


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
        self.mask = mask
        self.full = bool(mask.all())
        self.tokens = tokens
        self.wait: Wait | None = None
        self.yielded = False

    @property
    def active(self) -> Any:
        return True if self.full else self.mask

    def lanes(self, m: Any) -> Array:
        return np.flatnonzero(self.mask) if m is True else np.flatnonzero(m)


class Warp:
    def __init__(self, cta: Cta, index: int, threads: int) -> None:
        program = cta.machine.program
        self.cta = cta
        self.index = index
        self.first_row = cta.rank * cta.rows + 32 * index
        self.rows = slice(self.first_row, self.first_row + 32)
        self.live = np.arange(32) < threads
        self.arrays = {
            cls: np.full(
                (max(n, 1), 32),
                {"p": False}.get(cls, np.iinfo(STORAGE[cls]).max if cls != "p" else 0),
                STORAGE[cls],
            )
            for cls, n in program.rows.items()
        }
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
        # State of the asynchronous instruction families, made on first use.
        self.wgmma: Any = None
        self.tensor_loads: Any = None
        self._special_registers()

    def _special_registers(self) -> None:
        cta, machine = self.cta, self.cta.machine
        program = machine.program
        thread = 32 * self.index + np.arange(32)
        bx, by, _ = machine.block
        lane = np.arange(32)
        bits = np.uint32(1) << lane.astype(np.uint32)
        values: dict[str, Any] = {
            "%laneid": lane, "%warpid": self.index, "%nwarpid": len(cta.warps) or 1, "%smid": cta.slot, "%nsmid": 132,
            "%cluster_ctarank": cta.rank, "%cluster_nctarank": int(np.prod(machine.cluster)),
            "%is_explicit_cluster": machine.cluster != (1, 1, 1),
            "%lanemask_eq": bits, "%lanemask_lt": bits - 1, "%lanemask_le": (bits - 1) | bits,
            "%lanemask_gt": ~((bits - 1) | bits), "%lanemask_ge": ~(bits - 1),
            "%dynamic_smem_size": machine.dynamic_shared, "%total_smem_size": cta.shared.size, "%gridid": 1,
            "%tid.x": thread % bx, "%tid.y": thread // bx % by, "%tid.z": thread // (bx * by),
        }  # fmt: skip
        for axis, letter in enumerate("xyz"):
            size = machine.cluster[axis]
            values[f"%ntid.{letter}"] = machine.block[axis]
            values[f"%ctaid.{letter}"] = cta.index[axis]
            values[f"%nctaid.{letter}"] = machine.grid[axis]
            values[f"%clusterid.{letter}"] = cta.index[axis] // size
            values[f"%nclusterid.{letter}"] = machine.grid[axis] // size
            values[f"%cluster_ctaid.{letter}"] = cta.index[axis] % size
            values[f"%cluster_nctaid.{letter}"] = size
        for name, cls, row in program.specials:
            if name in values:
                self.arrays[cls][row] = values[name]
        for cls, row, symbol, offset in program.symbols:
            self.arrays[cls][row] = np.array(cta.symbol_address(symbol) + offset).astype(STORAGE[cls])

    def leave(self, fragment: Fragment, lanes: Array) -> None:
        """Lanes that will never reach the fragment's pending meeting points."""
        for token in fragment.tokens:
            token.expected &= ~lanes
            self.settle(token)

    def settle(self, token: Token) -> None:
        """Wake the fragments parked at a meeting point once all that will come have come."""
        if not token.parked:
            return
        arrived = np.logical_or.reduce([f.mask for f in token.parked])
        if (token.expected & self.live & ~arrived).any():
            return
        first, *others = token.parked
        token.parked = []
        first.mask = arrived
        first.full = bool(arrived.all())
        first.tokens = first.tokens[: first.tokens.index(token)]
        self.fragments.append(first)
        del others
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
        common = 0
        while common < min(len(fragment.tokens), len(other.tokens)) and (
            fragment.tokens[common] is other.tokens[common]
        ):
            common += 1
        for each in (fragment, other):
            for token in each.tokens[common:]:
                token.expected &= ~each.mask
                self.settle(token)
        fragment.tokens = fragment.tokens[:common]
        fragment.mask = fragment.mask | other.mask
        fragment.full = bool(fragment.mask.all())
        self.fragments.remove(other)


class Converge(Wait):
    """A .sync or .aligned instruction waits here for the other lanes it names."""

    def __init__(self, fragment: Fragment, needed: Array, again: Any) -> None:
        self.fragment = fragment
        self.needed = needed
        self.again = again

    def ready(self) -> bool:
        return not (self.fragment.warp.live & self.needed & ~self.fragment.mask).any()

    def finish(self, fragment: Fragment) -> Wait | None:
        result: Wait | None = self.again(fragment, fragment.active)
        return result

    def describe(self) -> str:
        missing = np.flatnonzero(self.fragment.warp.live & self.needed & ~self.fragment.mask).tolist()
        return f"lanes {missing} to reach the same instruction"


def gather(fragment: Fragment, needed: Array, again: Any) -> Wait | None:
    """None if the fragment holds all live lanes of `needed`, after taking in siblings that wait here; else a wait."""
    warp = fragment.warp
    missing = warp.live & needed & ~fragment.mask
    if not missing.any():
        return None
    for other in list(warp.fragments):
        if other is not fragment and other.block == fragment.block and isinstance(other.wait, Converge):
            warp.absorb(fragment, other)
    if (warp.live & needed & ~fragment.mask).any():
        return Converge(fragment, needed, again)
    return None


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
    def __init__(self, cluster: Cluster, rank: int, index: tuple[int, int, int], slot: int) -> None:
        machine = cluster.machine
        self.machine: Machine = machine
        self.cluster = cluster
        self.rank = rank
        self.index = index
        self.slot = slot
        self.checks = machine.checks
        self.exited = False
        self.shared = SharedMemory(machine.shared_bytes)
        self.granule_shift = machine.program.granule.bit_length() - 1
        self.threads = int(np.prod(machine.block))
        count = -(-self.threads // 32)
        self.rows = 32 * count
        self.mbarriers: dict[int, Mbarrier] = {}
        self.barriers = [NamedBarrier() for _ in range(16)]
        self.tensor_memory: Any = None
        self.registers: Any = None  # the pool of setmaxnreg, made on first use
        self.remote: dict[int, Any] = {}  # clock row of another CTA's lane -> its last use of our memory
        self.warps: list[Warp] = []
        for i in range(count):
            self.warps.append(Warp(self, i, min(32, self.threads - 32 * i)))
        for warp in self.warps:
            warp.fragments.append(Fragment(warp, 0, warp.live.copy(), []))

    def symbol_address(self, name: str) -> int:
        program = self.machine.program
        if name in program.shared:
            return (self.rank << 24) | (self.machine.shared_base + program.shared[name][0])
        if name in program.parameters:
            return program.parameters[name][0]
        if name in program.local:
            return program.local[name][0]
        return self.machine.symbol_address(name)

    def symbol_at(self, offset: int) -> str:
        """A readable name of a shared-memory offset."""
        best, base = "", -1
        for name, (at, size) in self.machine.program.shared.items():
            start = at + self.machine.shared_base
            if start <= offset and start > base and (size < 0 or offset < start + size):
                best, base = name, start
        return f"{best}+{offset - base}" if best else f"at {offset:#x}"

    def live_warps(self) -> int:
        return sum(bool(w.live.any()) for w in self.warps)


class Cluster:
    def __init__(self, machine: Machine, index: int, slot: int) -> None:
        self.machine = machine
        size = machine.cluster
        base = machine.cluster_position(index)
        count = size[0] * size[1] * size[2]
        self.clocks: Any = None
        self.grids: GridDependency | None = None
        self.ctas: list[Cta] = []
        self.bulk_groups: dict[int, Any] = {}
        self.agents: dict[Any, Any] = {}
        for rank in range(count):
            inside = (rank % size[0], rank // size[0] % size[1], rank // (size[0] * size[1]))
            position = tuple(b * s + i for b, s, i in zip(base, size, inside, strict=True))
            self.ctas.append(Cta(self, rank, (position[0], position[1], position[2]), slot * count + rank))
        self.arrived = 0
        self.barrier_clock: Any = None
        self.barrier_generation = 0
        self.barrier_waiting: list[Any] = []
        # mbarriers whose initialisation a relaxed arrival at the cluster barrier will publish
        self.fenced_inits: list[Any] = []
        self.cancel_failed = False  # somebody has seen that no cluster is left to cancel
        if machine.checks:
            from padless.emulator.order.race import Clocks, Shadow

            rows = sum(cta.rows for cta in self.ctas)
            self.clocks = Clocks(rows)
            for cta in self.ctas:
                cells = len(cta.shared.bytes) >> cta.granule_shift
                cta.shared.shadow = Shadow(
                    cells, self.clocks, machine.collector, machine.program.instructions, "shared memory"
                )
                cta.shared.shadow.scale = machine.program.granule
            if machine.programmatic:
                from padless.emulator.state.grid_dependency import GridDependency

                self.grids = GridDependency(self)

    def fragments(self) -> list[Fragment]:
        return [f for cta in self.ctas for warp in cta.warps for f in warp.fragments]

    def finished(self) -> bool:
        return all(cta.exited for cta in self.ctas)
