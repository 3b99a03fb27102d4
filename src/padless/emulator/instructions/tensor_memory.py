"""tcgen05: allocation of tensor memory, the in-order pipe of cp and mma, commit, ld, st, waits and fences.

Every CTA has one pipe, in which the cp, mma and commit that its threads issue run in order, at moments that the
schedule picks. An operation is event number n of the pipe's `done` column once a commit after it has been waited for,
and of its `issued` column for the thread that issued it and whoever that thread hands over to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import tensor_units
from ..ast import Address, Immediate, Register, Vector
from ..asynchronous import AsyncOperation
from ..checks import set_bits
from ..race import ASYNC, BASE, BEFORE, READS, TENSOR, Shadow, pack
from ..register_checks import names_of
from ..spaces import OFFSET_MASK
from ..warp import Wait
from ..warp_sync import gather_warp
from .registry import instruction
from .synchronisation import SharedOperand, find_mbarrier, locate

if TYPE_CHECKING:
    from ..ast import Instruction
    from ..emitter import Emitter
    from ..warp import Cta, Fragment, Warp

Array = np.ndarray[Any, Any]
LANES, COLUMNS = 128, 512


class TensorMemory:
    """The 128 x 512 words of one CTA, who has allocated which columns, and the pipe of asynchronous operations."""

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.words = np.full((LANES, COLUMNS), 0x7FFFFFFF, np.uint32)
        self.allocated: dict[int, tuple[int, Any, Any]] = {}  # first column -> (columns, instruction, warp)
        self.relinquished = False
        self.smallest = COLUMNS
        self.sequence = 0
        self.issuers: dict[int, int] = {}
        self.pending = 0
        self.last: Any = None  # instruction of the latest operation
        clocks = cta.cluster.clocks
        self.shadow: Any = None
        self.done = self.issued = -1
        if clocks is not None:
            self.shadow = Shadow(
                LANES * COLUMNS,
                clocks,
                cta.machine.collector,
                cta.machine.program.instructions,
                "tensor memory",
            )
            self.done, self.issued = clocks.new_column(), clocks.new_column()

    def free_start(self, count: int) -> int:
        """First column of a free run of `count` aligned columns; -1 if there is none."""
        for start in range(0, COLUMNS - count + 1, count):
            if all(start + count <= s or s + n <= start for s, (n, _, _) in self.allocated.items()):
                return start
        return -1

    def owns(self, first: int, end: int) -> bool:
        covered = np.zeros(COLUMNS + 1, bool)
        for start, (n, _, _) in self.allocated.items():
            covered[start : start + n] = True
        return 0 <= first < end <= COLUMNS and bool(covered[first:end].all())


def tensor_memory(cta: Cta) -> TensorMemory:
    if cta.tensor_memory is None:
        cta.tensor_memory = TensorMemory(cta)
    result: TensorMemory = cta.tensor_memory
    return result


def check_exit(cta: Cta) -> None:
    """A CTA must have freed its tensor memory and waited for what its pipe does."""
    memory = cta.tensor_memory
    if memory is None:
        return
    for start, (count, ins, warp) in memory.allocated.items():
        cta.machine.report(
            "tensor-memory",
            f"columns {start} to {start + count - 1} are still allocated when the CTA ends",
            ins,
            warp,
        )
    if memory.shadow is not None and memory.sequence:
        known = 0
        for other in cta.cluster.ctas:
            rows = slice(other.warps[0].first_row, other.warps[-1].first_row + 32)
            known = max(known, int(cta.cluster.clocks.time[BASE, rows, memory.done].max()))
        if known < memory.sequence:
            cta.machine.report(
                "exit", f"the CTA ends without waiting for {memory.sequence - known} of its tcgen05 operations",
                memory.last, cta.warps[0], key="tcgen05",
            )  # fmt: skip


def cells(rectangle: tuple[int, int, int, int]) -> Array:
    """Shadow cells of (first lane, end lane, first column, end column)."""
    first_lane, end_lane, first, end = rectangle
    grid: Array = (np.arange(first_lane, end_lane)[:, None] * COLUMNS + np.arange(first, end)).reshape(-1)
    return grid


@instruction("tcgen05")
def tcgen05(e: Emitter) -> None:
    forms = {
        "alloc": allocate, "dealloc": deallocate, "relinquish_alloc_permit": relinquish, "mma": multiply, "cp": copy,
        "commit": commit, "ld": load, "st": store, "wait::ld": wait, "wait::st": wait,
        "fence::before_thread_sync": fence, "fence::after_thread_sync": fence,
    }  # fmt: skip
    form = e.instruction.modifiers[0] if e.instruction.modifiers else ""
    if form not in forms:
        e.unsupported()
    e.preparation.uses.add("tcgen05")
    forms[form](e)


# ---- allocation
class AllocationWait(Wait):
    def __init__(self, memory: TensorMemory, count: int, then: Any) -> None:
        self.memory, self.count, self.then = memory, count, then

    def ready(self) -> bool:
        return self.memory.free_start(self.count) >= 0

    def finish(self, fragment: Fragment) -> Wait | None:
        self.then(fragment)
        return None

    def describe(self) -> str:
        return f"tcgen05.alloc of {self.count} columns; allocated are {sorted(self.memory.allocated)}"


def allocate(e: Emitter) -> None:
    e.only("alloc", "cta_group::1", "cta_group::2", "sync", "aligned", "shared::cta")
    where, count_slot = SharedOperand(e, e.operands[0]), e.source_slot(e.operands[1], "u32")
    ins = e.instruction

    def alloc(f: Fragment, m: Any) -> Wait | None:
        waiting = gather_warp(f, alloc)
        if waiting is not None:
            return waiting
        w = f.warp
        lane = int(np.argmax(f.mask))
        count = int(w.v[count_slot][lane])
        memory = tensor_memory(w.cta)
        report = w.cta.machine.report
        if count not in (32, 64, 128, 256, 512):
            report(
                "tensor-memory",
                f"tcgen05.alloc of {count} columns; allowed are 32, 64, 128, 256, 512",
                ins,
                w,
                lane,
            )
            return None
        if memory.relinquished:
            report("tensor-memory", "tcgen05.alloc after relinquish_alloc_permit", ins, w, lane)
        if count > memory.smallest:
            report(
                "tensor-memory",
                f"tcgen05.alloc of {count} columns after one of {memory.smallest}",
                ins,
                w,
                lane,
            )
        memory.smallest = min(memory.smallest, count)

        def finish(fragment: Fragment) -> None:
            start = memory.free_start(count)
            memory.allocated[start] = (count, ins, w)
            memory.words[:, start : start + count] = 0x7FFFFFFF
            if memory.shadow is not None:
                for array in (memory.shadow.written, memory.shadow.reader_slots):
                    array.reshape(LANES, COLUMNS)[:, start : start + count] = 0
                memory.shadow.read.reshape(-1, LANES, COLUMNS)[:, :, start : start + count] = 0
            cta, offset = locate(w, where.one(w, lane), ins, lane)
            if cta.shared.shadow is not None:
                w.cta.machine.generic_shared(
                    w, cta, np.array([lane]), np.array([offset]), tensor_units.WordAccess(ins), write=True
                )
            cta.shared.bytes[offset : offset + 4].view(np.uint32)[0] = start
            w.cta.machine.progress += 1

        if memory.free_start(count) < 0:
            return AllocationWait(memory, count, finish)
        finish(f)
        return None

    e.preparation.granule = min(e.preparation.granule, 4)
    e.synchronise(alloc)


def deallocate(e: Emitter) -> None:
    e.only("dealloc", "cta_group::1", "cta_group::2", "sync", "aligned")
    address_slot, count_slot = e.source_slot(e.operands[0], "u32"), e.source_slot(e.operands[1], "u32")
    ins = e.instruction

    def dealloc(f: Fragment, m: Any) -> Wait | None:
        waiting = gather_warp(f, dealloc)
        if waiting is not None:
            return waiting
        w = f.warp
        lane = int(np.argmax(f.mask))
        start, count = int(w.v[address_slot][lane]) & 0xFFFF, int(w.v[count_slot][lane])
        memory = tensor_memory(w.cta)
        found = memory.allocated.get(start)
        if found is None or found[0] != count:
            have = f"{found[0]} columns are allocated there" if found else "nothing is allocated there"
            w.cta.machine.report(
                "tensor-memory", f"tcgen05.dealloc of {count} columns at {start}: {have}", ins, w, lane
            )
            return None
        if memory.shadow is not None:
            clock = w.cta.cluster.clocks.meet(np.array([w.first_row + lane]))
            memory.shadow.bulk(
                cells((0, LANES, start, start + count)), clock, 0, ins, w, lane, write=True, generic_plane=BASE,
                async_plane=BASE,
            )  # fmt: skip
        del memory.allocated[start]
        w.cta.machine.progress += 1
        return None

    e.synchronise(dealloc)


def relinquish(e: Emitter) -> None:
    def relinquish_permit(f: Fragment, m: Any) -> Wait | None:
        waiting = gather_warp(f, relinquish_permit)
        if waiting is None:
            tensor_memory(f.warp.cta).relinquished = True
        return waiting

    e.synchronise(relinquish_permit)


# ---- the pipe
def targets_of(w: Warp, pair: bool, ins: Instruction) -> list[Cta]:
    """The CTA, or both CTAs of the pair, even rank first."""
    cta = w.cta
    if not pair:
        return [cta]
    base = cta.rank & ~1
    if base + 1 >= len(cta.cluster.ctas):
        cta.machine.fault(w, ins, "cta_group::2 outside a CTA pair", True)
    return [cta.cluster.ctas[base], cta.cluster.ctas[base + 1]]


def issue(w: Warp, lane: int, ins: Instruction, ctas: list[Cta], unit: Any, run: Any) -> None:
    """Check an operation's reads and writes at issue, stamp them, and queue it behind the pipe's earlier ones."""
    cta = w.cta
    pipe = tensor_memory(cta)
    pipe.sequence += 1
    pipe.last = ins
    row = w.first_row + lane
    pipe.issuers[row] = pipe.sequence
    machine = cta.machine
    for problem in tensor_units.problems(unit):
        machine.report("descriptor", problem, ins, w, lane)
    ranges = tensor_units.shared_ranges(unit)
    reads, writes = tensor_units.tmem_reads(unit), tensor_units.tmem_writes(unit)
    clocks = cta.cluster.clocks
    for target in ctas:
        memory = tensor_memory(target)
        if target.exited:
            machine.report("exit", f"uses memory of CTA {target.index}, which has exited", ins, w, lane)
        for rectangle in (*reads, *writes):
            if not memory.owns(rectangle[2], rectangle[3]):
                machine.report(
                    "tensor-memory",
                    f"columns {rectangle[2]} to {rectangle[3] - 1} are not allocated in CTA {target.index}",
                    ins, w, lane,
                )  # fmt: skip
                return
        for _, high in ranges:
            if high > target.shared.size:
                machine.fault(
                    w, ins, f"a descriptor reaches byte {high} of {target.shared.size} of shared memory", True
                )
    if clocks is not None:
        clock = clocks.meet(np.array([row]))
        # Of this pipe's operations it is enough that they were issued before: it runs in order.
        for target in ctas:
            other = tensor_memory(target)
            clock[TENSOR, other.done] = max(clock[TENSOR, other.done], clock[TENSOR, other.issued])
        clock[TENSOR, pipe.done] = max(clock[TENSOR, pipe.done], clocks.time[TENSOR, row, pipe.issued])
        stamp = int(pack(pipe.done, pipe.sequence, ASYNC))
        for target in ctas:
            memory = tensor_memory(target)
            for r in ranges:
                part = slice(r[0] >> target.granule_shift, -(-r[1] >> target.granule_shift))
                target.shared.shadow.bulk(part, clock, stamp, ins, w, lane, write=False)
            for rectangle in reads:
                memory.shadow.bulk(
                    cells(rectangle),
                    clock,
                    stamp,
                    ins,
                    w,
                    lane,
                    write=False,
                    generic_plane=TENSOR,
                    async_plane=TENSOR,
                )
            for rectangle in writes:
                memory.shadow.bulk(
                    cells(rectangle), clock, stamp, ins, w, lane, write=True, generic_plane=TENSOR, async_plane=TENSOR,
                    own=stamp,
                )  # fmt: skip
        clocks.time[[BASE, TENSOR], row, pipe.issued] = pipe.sequence
    pipe.pending += 1

    def execute() -> None:
        for finding in run() or ():
            machine.report("tensor-memory", str(finding), ins, w, lane)
        pipe.pending -= 1

    machine.enqueue(("tcgen05", id(pipe)), AsyncOperation(ins.name, execute))


def multiply(e: Emitter) -> None:
    ins = e.instruction
    known = {"mma", "cta_group::1", "cta_group::2", "block_scale"}
    for modifier in e.modifiers:
        if modifier not in known and not modifier.startswith(
            ("kind::", "collector::", "scale_vec::", "block16", "block32")
        ):
            e.unsupported(f"modifier .{modifier}")
    kind = next((m[6:] for m in ins.modifiers if m.startswith("kind::")), "")
    block = next((m for m in ins.modifiers if m in ("block16", "block32") or m.startswith("scale_vec::")), "")
    pair = e.has("cta_group::2")
    d, a, b, idesc, *rest = e.operands
    d_slot = tensor_address(e, d)
    a_tmem = isinstance(a, Address)
    a_slot = tensor_address(e, a) if a_tmem else (e.source_slot(a, "u64"), 0)
    b_slot, i_slot = e.source_slot(b, "u64"), e.source_slot(idesc, "u32")
    scales = []
    if e.has("block_scale"):
        scales = [tensor_address(e, rest.pop(0)), tensor_address(e, rest.pop(0))]
    disable: list[int] = []
    if rest and isinstance(rest[0], Vector):
        disable = [e.source_slot(i, "u32") for i in rest.pop(0).items]  # type: ignore[union-attr]
    enable, *more = rest
    enable_slot = e.source_slot(enable, "pred")
    scale_input = more[0].value if more and isinstance(more[0], Immediate) else 0

    def mma(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        v = w.v
        for lane in f.lanes(m).tolist():
            ctas = targets_of(w, pair, ins)
            try:
                unit = tensor_units.mma(
                    kind, 2 if pair else 1, int(v[i_slot][lane]), value(v, d_slot, lane),
                    None if a_tmem else int(v[a_slot[0]][lane]), value(v, a_slot, lane) if a_tmem else None,
                    int(v[b_slot][lane]), bool(v[enable_slot][lane]),
                    *(value(v, s, lane) for s in scales or ()),
                    block=block, scale_input=scale_input, disabled=tuple(int(v[s][lane]) for s in disable),
                )  # fmt: skip
            except ValueError as error:
                w.cta.machine.fault(w, ins, f"tcgen05.mma: {error}", np.arange(32) == lane)
            mode = w.cta.machine.arithmetic

            def run(unit: Any = unit, ctas: Any = ctas, mode: Any = mode) -> Any:
                return tensor_units.run_mma(
                    unit, [c.shared.bytes for c in ctas], [c.tensor_memory.words for c in ctas], mode
                )

            issue(w, lane, ins, ctas, unit, run)
        return None

    e.synchronise(mma)


def value(v: Any, slot: tuple[int, int], lane: int) -> int:
    return (int(v[slot[0]][lane]) + slot[1]) & 0xFFFFFFFF


def tensor_address(e: Emitter, operand: Any) -> tuple[int, int]:
    if not isinstance(operand, Address) or not isinstance(operand.base, Register):
        e.unsupported(f"{operand} is not a tensor-memory address")
    return e.source_slot(operand.base, "u32"), operand.offset


def copy(e: Emitter) -> None:
    ins = e.instruction
    shape = next((m for m in ins.modifiers if m[0].isdigit()), "")
    multicast = next((m for m in ins.modifiers if m.startswith("warpx")), "")
    if any(m in e.modifiers for m in ("b8x16", "b4x16_p64", "b6x16_p32")):
        e.unsupported("decompression")
    pair = e.has("cta_group::2")
    t_slot, s_slot = tensor_address(e, e.operands[0]), e.source_slot(e.operands[1], "u64")

    def cp(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        for lane in f.lanes(m).tolist():
            ctas = targets_of(w, pair, ins)
            unit = tensor_units.copy(shape, multicast, int(w.v[s_slot][lane]), value(w.v, t_slot, lane))

            def run(unit: Any = unit, ctas: Any = ctas) -> Any:
                for cta in ctas:
                    unit.execute(cta.shared.bytes, cta.tensor_memory.words)

            issue(w, lane, ins, ctas, unit, run)
        return None

    e.synchronise(cp)


def commit(e: Emitter) -> None:
    e.only(
        "commit",
        "cta_group::1",
        "cta_group::2",
        "mbarrier::arrive::one",
        "shared::cluster",
        "multicast::cluster",
    )
    where = SharedOperand(e, e.operands[0])
    mask_slot = e.source_slot(e.operands[1], "u16") if len(e.operands) > 1 else -1
    ins = e.instruction

    def commit_pipe(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        cta = w.cta
        machine = cta.machine
        pipe = tensor_memory(cta)
        for lane in f.lanes(m).tolist():
            row = w.first_row + lane
            if row not in pipe.issuers:
                machine.report(
                    "tensor-memory",
                    "commit by a thread that has issued no tcgen05 operation: it covers none",
                    ins,
                    w,
                    lane,
                )
            address = where.one(w, lane)
            addresses = [address]
            if mask_slot >= 0:
                mask = int(w.v[mask_slot][lane])
                addresses = [(r << 24) | (address & OFFSET_MASK) for r in range(16) if mask >> r & 1]
            # A generic-proxy arrival (PTX ISA).
            bars = [find_mbarrier(w, a, ins, lane, later=True) for a in addresses]
            upto = pipe.issuers.get(row, 0)
            clocks = cta.cluster.clocks
            clock = None
            if clocks is not None:
                # What the thread knew to have happened when it issued the operations has happened when they are over;
                # but nothing is said of its own ordinary accesses, which it has not released.
                clock = clocks.join(np.array([row]))
                clock[:, row] = 0
                clock[BASE, pipe.done] = clock[BEFORE, pipe.done] = clock[READS, pipe.done] = upto

            def arrive(bars: Any = bars, clock: Any = clock, lane: int = lane) -> None:
                for bar in bars:
                    if bar is not None:
                        bar.arrive_from_outside(w, ins)
                        bar.arrive(1, clock, ins, w, lane)

            machine.enqueue(("tcgen05", id(pipe)), AsyncOperation(ins.name, arrive))
        return None

    e.synchronise(commit_pipe)


def fence(e: Emitter) -> None:
    before = e.has("fence::before_thread_sync")
    e.call(fence_before if before else fence_after)


def fence_before(w: Any, v: Any, m: Any) -> None:
    clocks = w.cta.cluster.clocks
    if clocks is not None:
        clocks.fence_before(w.rows if m is True else w.first_row + np.flatnonzero(m))


def fence_after(w: Any, v: Any, m: Any) -> None:
    clocks = w.cta.cluster.clocks
    if clocks is not None:
        clocks.fence_after(w.rows if m is True else w.first_row + np.flatnonzero(m))


# ---- ld and st of one warp
class WarpAccesses:
    """The tcgen05.ld and st of one warp: numbered, waited for all at once."""

    def __init__(self, w: Warp) -> None:
        clocks = w.cta.cluster.clocks
        self.columns = {kind: clocks.new_column() if clocks is not None else -1 for kind in ("ld", "st")}
        self.count = {"ld": 0, "st": 0}
        self.unfinished = {"ld": 0, "st": 0}


def accesses(w: Warp) -> WarpAccesses:
    if w.tensor_loads is None:
        w.tensor_loads = WarpAccesses(w)
    result: WarpAccesses = w.tensor_loads
    return result


def load(e: Emitter) -> None:
    access(e, True)


def store(e: Emitter) -> None:
    access(e, False)


def access(e: Emitter, is_load: bool) -> None:
    ins = e.instruction
    shape = next((m for m in ins.modifiers if m in tensor_units.SHAPES), "")
    repeat = next((int(m[1:]) for m in ins.modifiers if m[0] == "x" and m[1:].isdigit()), 0)
    packed = e.has("pack::16b") or e.has("unpack::16b")
    e.only("ld", "st", "sync", "aligned", shape, f"x{repeat}", "pack::16b", "unpack::16b")
    if not shape or not repeat:
        e.unsupported("shape")
    operands = list(e.operands)
    registers, address = (operands[0], operands[1]) if is_load else (operands[-1], operands[0])
    split = next((o.value for o in operands[1:] if isinstance(o, Immediate)), 0)
    items = registers.items if isinstance(registers, Vector) else (registers,)
    preparation = e.preparation
    bits = 0
    slots = []
    for item in items:
        assert isinstance(item, Register)
        cls, row = preparation.row(item.name)
        slots.append(preparation.slot(cls, row, "u32"))
        bits |= 1 << preparation.number_of[item.name]
    t_slot = tensor_address(e, address)
    kind = "ld" if is_load else "st"
    owners = dict.fromkeys(set_bits(bits), ins)

    def tensor_access(f: Fragment, m: Any) -> Wait | None:
        waiting = gather_warp(f, tensor_access)
        if waiting is not None:
            return waiting
        w = f.warp
        machine = w.cta.machine
        memory = tensor_memory(w.cta)
        where = value(w.v, t_slot, int(np.argmax(f.mask)))
        quarter = w.index % 4
        field = where >> 16 & 0x7F
        if field // 32 not in (0, quarter):
            machine.report(
                "tensor-memory",
                f"warp {w.index} may touch lanes {32 * quarter} to {32 * quarter + 31}, not lane {field}", ins, w,
            )  # fmt: skip
        lanes, columns = tensor_units.register_map(shape, repeat, where, quarter, split, packed)
        if len(slots) != lanes.shape[1] // (2 if packed else 1):
            machine.fault(w, ins, f"{len(slots)} registers for {shape}.x{repeat}", True)
        first, end = int(columns.min()), int(columns.max()) + 1
        if not memory.owns(first, end):
            machine.report("tensor-memory", f"columns {first} to {end - 1} are not allocated", ins, w)
            return None
        state = accesses(w)
        state.count[kind] += 1
        if memory.shadow is not None:
            clock = w.cta.cluster.clocks.meet(w.rows)
            stamp = int(pack(state.columns[kind], state.count[kind], ASYNC))
            touched = np.unique(lanes * COLUMNS + columns)
            if w.busy & bits:
                names = names_of(machine, w.busy & bits)
                machine.report(
                    "register-in-flight", f"{names} are still in use by an unfinished operation", ins, w
                )
            memory.shadow.bulk(
                touched, clock, stamp, ins, w, 0, write=not is_load, generic_plane=TENSOR, async_plane=TENSOR
            )
            w.busy |= bits
            w.busy_owner.update(owners)
            if is_load:
                w.written |= bits
        state.unfinished[kind] += 1

        def execute() -> None:
            if is_load:
                values: Any = memory.words[lanes, columns]
                if packed:
                    values = (values[:, 0::2] & 0xFFFF) | (values[:, 1::2] << 16)
                for i, slot in enumerate(slots):
                    w.v[slot][:] = values[:, i]
            else:
                values = np.stack([w.v[s] for s in slots], axis=1)
                if packed:
                    values = np.stack([values & 0xFFFF, values >> 16], axis=2).reshape(32, -1)
                memory.words[lanes, columns] = values
            state.unfinished[kind] -= 1

        machine.enqueue(("tmem", id(w)), AsyncOperation(ins.name, execute))
        return None

    e.synchronise(tensor_access)


class AccessWait(Wait):
    def __init__(self, w: Warp, kind: str) -> None:
        self.warp, self.kind = w, kind

    def ready(self) -> bool:
        return accesses(self.warp).unfinished[self.kind] == 0

    def finish(self, fragment: Fragment) -> Wait | None:
        w = self.warp
        state = accesses(w)
        if not any(state.unfinished.values()):
            w.busy = 0
        clocks = w.cta.cluster.clocks
        if clocks is not None:
            column = state.columns[self.kind]
            clocks.observe(w.rows, column, state.count[self.kind])
            clocks.time[TENSOR, w.rows, column] = state.count[self.kind]
        return None

    def describe(self) -> str:
        return f"tcgen05.wait::{self.kind}"


def wait(e: Emitter) -> None:
    kind = "ld" if e.has("wait::ld") else "st"

    def tensor_wait(f: Fragment, m: Any) -> Wait | None:
        waiting = gather_warp(f, tensor_wait)
        if waiting is not None:
            return waiting
        result = AccessWait(f.warp, kind)
        return result.finish(f) if result.ready() else result

    e.synchronise(tensor_wait)
