"""Matrix instructions of a warp or a warpgroup: ldmatrix, stmatrix, movmatrix, mma.sync and wgmma."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from padless.emulator.instructions.operands import SharedOperand
from padless.emulator.order.race import ASYNC, pack
from padless.emulator.order.reports import set_bits
from padless.emulator.prepare.registry import instruction
from padless.emulator.ptx.ast import Immediate, Register, Vector
from padless.emulator.state import tensor_core
from padless.emulator.state.asynchronous import AsyncOperation, Work
from padless.emulator.state.memory_access import shared_groups
from padless.emulator.state.registers import names_of
from padless.emulator.state.warp import Wait
from padless.emulator.state.warp_sync import whole_warp

if TYPE_CHECKING:
    from padless.emulator.prepare.emitter import Emitter
    from padless.emulator.ptx.ast import Instruction
    from padless.emulator.state.warp import Cta, Fragment, Warp

Array = np.ndarray[Any, Any]


# ---- ldmatrix, stmatrix
class MatrixAccess:
    """What memory.generic_shared wants to know about an access."""

    def __init__(self, ins: Instruction, size: int) -> None:
        self.instruction = ins
        self.bytes = self.size = size
        self.strong = False


def matrix_shape(e: Emitter) -> int:
    e.only("sync", "aligned", "m8n8", "m16n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16")
    if not e.has("m8n8") or e.type != "b16":
        e.unsupported("only .m8n8 of .b16")
    return int(next((m for m in e.instruction.modifiers if m in ("x1", "x2", "x4")), "x1")[1])


@instruction("ldmatrix", "stmatrix")
def matrix_move(e: Emitter) -> None:
    """Lane l gives the address of row l % 8 of matrix l / 8; lane t holds row t / 4, columns 2 (t % 4) and the next."""
    count = matrix_shape(e)
    load = e.opcode == "ldmatrix"
    registers, address = (e.operands[0], e.operands[1]) if load else (e.operands[1], e.operands[0])
    items = registers.items if isinstance(registers, Vector) else (registers,)
    slots = [e.destination_slot(i, "u32") if load else e.source_slot(i, "u32") for i in items]
    where = SharedOperand(e, address)
    transpose = e.has("trans")
    ins = e.instruction
    shape = MatrixAccess(ins, 16)
    e.preparation.granule = min(e.preparation.granule, 16)

    @whole_warp
    def matrix_sync(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        v = w.v
        rows = 8 * count
        lanes = np.arange(rows)
        groups = shared_groups(ins, w, where.values(w)[:rows], lanes, 16)
        if sum(len(g[2]) for g in groups) != rows:
            return None
        halves = np.zeros((rows, 8), np.uint16)
        if not load:
            for k, slot in enumerate(slots):
                tile = v[slot].view(np.uint16).reshape(8, 8)  # [row t/4, columns 2(t%4) + half]
                halves[8 * k : 8 * k + 8] = tile.T if transpose else tile
        for cta, offsets, who in groups:
            if cta.shared.shadow is not None:
                w.cta.machine.generic_shared(w, cta, who, offsets, shape, write=not load)
            index = (offsets >> 1)[:, None] + np.arange(8)
            if load:
                halves[who] = cta.shared.views[np.uint16][index]
            else:
                cta.shared.views[np.uint16][index] = halves[who]
                w.cta.machine.progress += 1
        if load:
            for k, slot in enumerate(slots):
                tile = halves[8 * k : 8 * k + 8]
                v[slot][:] = (
                    np.ascontiguousarray(tile.T if transpose else tile).reshape(32, 2).view(np.uint32)[:, 0]
                )
        return None

    e.synchronise(matrix_sync)


@instruction("movmatrix")
def move_matrix(e: Emitter) -> None:
    d, a = e.operands
    out, source = e.destination_slot(d, "u32"), e.source_slot(a, "u32")

    @whole_warp
    def movmatrix(f: Fragment, m: Any) -> Wait | None:
        v = f.warp.v
        tile = v[source].view(np.uint16).reshape(8, 8)
        v[out][:] = np.ascontiguousarray(tile.T).reshape(32, 2).view(np.uint32)[:, 0]
        return None

    e.synchronise(movmatrix)


# ---- mma.sync
@instruction("mma")
def mma(e: Emitter) -> None:
    """mma.sync m16n8kK with 16-bit, 8-bit float, 8-bit integer or tf32 operands, row.col."""
    shape = next((m for m in e.instruction.modifiers if re.fullmatch(r"m\d+n\d+k\d+", m)), "")
    kinds = [m for m in e.instruction.modifiers if m in tensor_core.MMA_TYPES]
    e.only("sync", "aligned", "row", "col", shape, "satfinite", *tensor_core.MMA_TYPES)
    if len(kinds) == 3:
        kinds.append(kinds[0])
    found = re.fullmatch(r"m16n8k(\d+)", shape)
    if not found or len(kinds) != 4:
        e.unsupported("shape")
        return
    k = int(found[1])
    d, a, b, c = e.operands
    view = "f32" if kinds[0] == "f32" else ("s32" if kinds[0] == "s32" else "u32")

    def slots(operand: Any, kind: str, destination: bool = False) -> list[int]:
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return [e.destination_slot(i, kind) if destination else e.source_slot(i, kind) for i in items]

    sa, sb = slots(a, "u32"), slots(b, "u32")
    sc = slots(c, "f32" if kinds[3] == "f32" else view)
    sd = slots(d, view, True)

    @whole_warp
    def mma_sync(f: Fragment, m: Any) -> Wait | None:
        v = f.warp.v
        machine = f.warp.cta.machine
        results = tensor_core.mma_sync(
            [v[s] for s in sa],
            [v[s] for s in sb],
            [v[s] for s in sc],
            k,
            kinds,
            machine.arithmetic,
            machine.target,
        )
        for slot, values in zip(sd, results, strict=True):
            v[slot][:] = values
        return None

    e.synchronise(mma_sync)


# ---- wgmma
class WgmmaOperation:
    """One wgmma.mma_async of a warpgroup, complete once all four warps have issued it."""

    def __init__(self, ins: Instruction, group: int) -> None:
        self.instruction = ins
        self.group = group
        self.warps: list[Warp] = []
        self.clock: Any = None
        self.operands: tuple[Any, ...] = ()
        self.registers = 0
        self.done = False


class Warpgroup:
    """Asynchronous state of four warps: operations in issue order, and how far each warp has come."""

    def __init__(self, cta: Cta, index: int) -> None:
        self.cta = cta
        self.index = index
        self.operations: list[WgmmaOperation] = []
        self.column = cta.cluster.clocks.new_column() if cta.cluster.clocks is not None else -1


class WarpProgress:
    """How far one warp of a warpgroup has come."""

    def __init__(self, group: Warpgroup) -> None:
        self.warpgroup = group
        self.issued = 0  # operations
        self.open: list[WgmmaOperation] = []
        self.groups: list[list[WgmmaOperation]] = []
        self.finished = 0  # groups known to be complete


def progress_of(w: Warp, ins: Instruction) -> WarpProgress:
    if w.wgmma is None:
        cta = w.cta
        index = w.index // 4
        if 4 * index + 4 > len(cta.warps):
            cta.machine.fault(w, ins, "wgmma needs a warpgroup of four warps", True)
        group = cta.cluster.agents.setdefault(("warpgroup", cta.rank, index), None)
        if group is None:
            group = cta.cluster.agents["warpgroup", cta.rank, index] = Warpgroup(cta, index)
        w.wgmma = WarpProgress(group)
        w.dirty = -1
    result: WarpProgress = w.wgmma
    return result


@instruction("wgmma")
def wgmma(e: Emitter) -> None:
    if e.has("fence"):
        e.synchronise(make_fence(e))
    elif e.has("commit_group"):
        e.synchronise(make_commit(e))
    elif e.has("wait_group"):
        e.synchronise(make_wait(e))
    elif e.has("mma_async"):
        e.synchronise(make_mma(e))
    else:
        e.unsupported()


def make_fence(e: Emitter) -> Any:
    ins = e.instruction

    @whole_warp
    def wgmma_fence(f: Fragment, m: Any) -> Wait | None:
        progress_of(f.warp, ins)
        f.warp.dirty = 0
        return None

    return wgmma_fence


def make_commit(e: Emitter) -> Any:
    ins = e.instruction

    @whole_warp
    def wgmma_commit(f: Fragment, m: Any) -> Wait | None:
        progress = progress_of(f.warp, ins)
        progress.groups.append(progress.open)
        progress.open = []
        return None

    return wgmma_commit


class WgmmaWait(Wait):
    def __init__(self, f: Fragment, progress: WarpProgress, upto: int) -> None:
        self.fragment = f
        self.progress = progress
        self.upto = upto

    def ready(self) -> bool:
        return all(
            op.done for group in self.progress.groups[self.progress.finished : self.upto] for op in group
        )

    def finish(self, fragment: Fragment) -> Wait | None:
        w, progress = fragment.warp, self.progress
        progress.finished = max(progress.finished, self.upto)
        w.busy = 0
        for group in [*progress.groups[progress.finished :], progress.open]:
            for op in group:
                w.busy |= op.registers
        clocks = w.cta.cluster.clocks
        if clocks is not None:
            clocks.observe(w.rows, progress.warpgroup.column, self.upto)
        return None

    def describe(self) -> str:
        missing = [
            op
            for group in self.progress.groups[self.progress.finished : self.upto]
            for op in group
            if not op.done
        ]
        waiting = [x.index for x in missing[0].warps] if missing else []
        return f"wgmma.wait_group: {len(missing)} operations unfinished; warps {waiting} have issued the first of them"


def make_wait(e: Emitter) -> Any:
    operand = e.operands[0]
    if not isinstance(operand, Immediate):
        e.unsupported()
        return None
    pending = operand.value
    ins = e.instruction

    @whole_warp
    def wgmma_wait(f: Fragment, m: Any) -> Wait | None:
        progress = progress_of(f.warp, ins)
        waiting = WgmmaWait(f, progress, max(len(progress.groups) - pending, 0))
        if waiting.ready():
            return waiting.finish(f)
        return waiting

    return wgmma_wait


def make_mma(e: Emitter) -> Any:
    ins = e.instruction
    shape = next((m for m in ins.modifiers if re.fullmatch(r"m64n\d+k\d+", m)), "")
    kinds = [m for m in ins.modifiers if m in tensor_core.WGMMA_TYPES]
    e.only("mma_async", "sync", "aligned", shape, "satfinite", *tensor_core.WGMMA_TYPES)
    if not shape or len(kinds) != 3 or kinds[0] not in ("f32", "f16", "s32"):
        e.unsupported("shape or types")
    n, k = (int(x) for x in re.findall(r"n(\d+)k(\d+)", shape)[0])
    d, a, b, *rest = e.operands
    assert isinstance(d, Vector)
    preparation = e.preparation
    registers = 0

    def quiet(operand: Any, view: str) -> int:
        """A slot that the block-level register checks do not see; this instruction does its own."""
        nonlocal registers
        assert isinstance(operand, Register)
        cls, row = preparation.row(operand.name)
        registers |= 1 << preparation.number_of[operand.name]
        return preparation.slot(cls, row, view)

    view = {"f32": "f32", "s32": "s32", "f16": "u32"}[kinds[0]]
    d_slots = [quiet(i, view) for i in d.items]
    d_bits = registers
    expected = n // 2 if kinds[0] != "f16" else n // 4
    if len(d_slots) != expected:
        e.unsupported(f"{len(d_slots)} accumulators, m64n{n} needs {expected}")
    a_slots: list[int] = []
    a_descriptor = -1
    if isinstance(a, Vector):
        a_slots = [quiet(i, "u32") for i in a.items]
    else:
        a_descriptor = e.source_slot(a, "u64")
    b_descriptor = e.source_slot(b, "u64")
    all_bits = registers
    owners = dict.fromkeys(set_bits(all_bits), ins)
    scale_slot, constant_scale = -1, True
    if rest and isinstance(rest[0], Register):
        scale_slot = e.source_slot(rest[0], "pred")
    elif rest and isinstance(rest[0], Immediate):
        constant_scale = bool(rest[0].value)
    immediates = [o.value for o in rest[1:] if isinstance(o, Immediate)]
    signs = [*immediates, 1, 1][:2]
    transposes = [*immediates[2:], 0, 0][:2]
    if a_slots and len(immediates) == 3:
        transposes = [0, immediates[2]]
    spec = tensor_core.WgmmaShape(
        n, k, kinds[0], kinds[1], kinds[2], signs[0], signs[1], transposes[0], transposes[1]
    )
    if not spec.legal():
        e.unsupported("shape or types")
    preparation.uses.add("wgmma")

    @whole_warp
    def wgmma_mma(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        v = w.v
        cta = w.cta
        progress = progress_of(w, ins)
        group = progress.warpgroup
        accumulate = bool(v[scale_slot][0]) if scale_slot >= 0 else constant_scale
        values = (
            int(v[a_descriptor][0]) if a_descriptor >= 0 else None, int(v[b_descriptor][0]), accumulate,
        )  # fmt: skip
        if cta.checks:
            dirty = w.dirty & all_bits
            if dirty:
                cta.machine.report(
                    "missing-wgmma-fence",
                    f"{names_of(cta.machine, dirty)} were written since the last wgmma.fence" if w.dirty != -1
                    else "no wgmma.fence before the first wgmma",
                    ins, w,
                )  # fmt: skip
            if accumulate and d_bits & ~w.written:
                cta.machine.report(
                    "uninitialised-register",
                    f"accumulates into {names_of(cta.machine, d_bits & ~w.written)}, never written",
                    ins, w,
                )  # fmt: skip
            w.written |= d_bits
            w.busy |= all_bits
            w.busy_owner.update(owners)
        if progress.issued == len(group.operations):
            group.operations.append(WgmmaOperation(ins, len(progress.groups)))
        op = group.operations[progress.issued]
        progress.issued += 1
        progress.open.append(op)
        if op.instruction is not ins or (op.warps and op.operands != values):
            cta.machine.report(
                "divergence", "the warps of a warpgroup issue different wgmma instructions or descriptors", ins, w, 0,
                op.instruction,
            )  # fmt: skip
        op.warps.append(w)
        op.operands = values
        op.registers = all_bits
        if cta.checks:
            clock = cta.cluster.clocks.meet(w.rows)
            if op.clock is not None:
                width = min(clock.shape[1], op.clock.shape[1])
                clock = np.minimum(clock[:, :width], op.clock[:, :width])
            op.clock = clock
        if len(op.warps) == 4:
            launch_wgmma(cta, group, op, spec, a_slots, d_slots)
        return None

    return wgmma_mma


def launch_wgmma(
    cta: Cta, group: Warpgroup, op: WgmmaOperation, spec: Any, a_slots: list[int], d_slots: list[int]
) -> None:
    """All four warps have issued: check what it will read, and queue it."""
    machine = cta.machine
    a_descriptor, b_descriptor, accumulate = op.operands
    first = op.warps[0]
    unit = tensor_core.wgmma_unit(spec, a_descriptor, b_descriptor, accumulate)
    for problem in unit.problems():
        machine.report("descriptor", problem, op.instruction, first)
    ranges = tensor_core.wgmma_ranges(spec, a_descriptor, b_descriptor)
    if ranges[-1][1] > cta.shared.size:
        machine.fault(first, op.instruction, "a wgmma descriptor reaches past the CTA's shared memory", True)
    if cta.shared.shadow is not None:
        cells = tensor_core.cells_of_ranges(ranges, cta.granule_shift)
        stamp = int(pack(group.column, op.group + 1, ASYNC))
        cta.shared.shadow.bulk(cells, op.clock, stamp, op.instruction, first, 0, write=False)
    warps = sorted(op.warps, key=lambda w: w.index)

    def execute() -> None:
        tensor_core.run_wgmma(machine, cta, warps, unit, a_slots, d_slots)
        op.done = True

    work = Work("wgmma", cta, 0, unit)
    machine.enqueue(("wgmma", id(group)), AsyncOperation(str(op.instruction.name), execute, work=work))
