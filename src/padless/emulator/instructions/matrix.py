"""wgmma: products of a warpgroup, their fences, groups and waits."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from padless.emulator.order.race import ASYNC, pack
from padless.emulator.order.reports import set_bits
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import instruction
from padless.emulator.ptx.ast import Immediate, Instruction, Register, Vector
from padless.emulator.state import tensor_core
from padless.emulator.state.asynchronous import AsyncOperation, Work
from padless.emulator.state.groups import Groups, GroupWait, Operation
from padless.emulator.state.site import Site
from padless.emulator.state.warp import Fragment, Wait, Warp
from padless.emulator.state.warp_sync import whole_warp


class WgmmaOperation(Operation):
    """One wgmma.mma_async of a warpgroup, complete once all four warps have issued it."""

    __slots__ = ("clock", "group", "operands", "registers", "warps")

    def __init__(self, ins: Instruction, group: int) -> None:
        super().__init__(ins)
        self.group = group
        self.warps: list[Warp] = []
        self.clock: Any = None
        self.operands: tuple[Any, ...] = ()
        self.registers = 0


class Warpgroup:
    """Asynchronous state of four warps: operations in issue order, how many each warp has issued, and its groups."""

    def __init__(self, clocks: Any) -> None:
        self.operations: list[WgmmaOperation] = []
        self.issued = [0] * 4
        self.groups = [Groups(clocks)]
        self.groups += [Groups(clocks, self.column) for _ in range(3)]

    @property
    def column(self) -> int:
        return self.groups[0].column

    def of(self, w: Warp) -> Groups:
        return self.groups[w.index % 4]


def warpgroup_of(w: Warp, ins: Instruction) -> Warpgroup:
    index = w.index // 4
    group: Warpgroup | None = w.cta.warpgroups.get(index)
    if group is None:
        if 4 * index + 4 > len(w.cta.warps):
            Site(w, ins).fault("wgmma needs a warpgroup of four warps")
        group = w.cta.warpgroups[index] = Warpgroup(w.clocks)
        for other in w.cta.warps[4 * index : 4 * index + 4]:
            other.dirty = -1
    return group


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
        warpgroup_of(f.warp, ins)
        f.warp.dirty = 0
        return None

    return wgmma_fence


def make_commit(e: Emitter) -> Any:
    ins = e.instruction

    @whole_warp
    def wgmma_commit(f: Fragment, m: Any) -> Wait | None:
        warpgroup_of(f.warp, ins).of(f.warp).commit()
        return None

    return wgmma_commit


class WgmmaWait(GroupWait):
    def finish(self, fragment: Fragment) -> Wait | None:
        w = fragment.warp
        _, groups, upto = self.parts[0]
        w.busy = 0
        for operation in groups.later(upto):
            w.busy |= operation.registers
        return super().finish(fragment)

    def describe(self) -> str:
        missing = self.unfinished()
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
        w = f.warp
        return WgmmaWait(w, [(w.rows, warpgroup_of(w, ins).of(w))], pending).begin(f)

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
    spec = tensor_core.WgmmaShape(n, k, kinds[0], kinds[1], kinds[2], signs[0], signs[1], transposes[0], transposes[1])
    if not spec.legal():
        e.unsupported("shape or types")
    preparation.uses.add("wgmma")

    def check_registers(w: Warp, accumulate: bool) -> None:
        site = Site(w, ins)
        dirty = w.dirty & all_bits
        if dirty:
            names = w.launch.program.names_of(dirty)
            site.report(
                "missing-wgmma-fence",
                f"{names} were read or written since the last wgmma.fence" if w.dirty != -1
                else "no wgmma.fence before the first wgmma",
            )  # fmt: skip
        if accumulate and d_bits & ~w.written:
            names = w.launch.program.names_of(d_bits & ~w.written)
            site.report("uninitialised-register", f"accumulates into {names}, never written")
        w.written |= d_bits
        w.busy |= all_bits
        w.busy_owner.update(owners)

    @whole_warp
    def wgmma_mma(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        v = w.v
        group = warpgroup_of(w, ins)
        accumulate = bool(v[scale_slot][0]) if scale_slot >= 0 else constant_scale
        values = (
            int(v[a_descriptor][0]) if a_descriptor >= 0 else None, int(v[b_descriptor][0]), accumulate,
        )  # fmt: skip
        if w.cta.checks:
            check_registers(w, accumulate)
        issued, groups = group.issued[w.index % 4], group.of(w)
        if issued == len(group.operations):
            group.operations.append(WgmmaOperation(ins, groups.event))
        op = group.operations[issued]
        group.issued[w.index % 4] += 1
        groups.add(op)
        if op.instruction is not ins or (op.warps and op.operands != values):
            message = "the warps of a warpgroup issue different wgmma instructions or descriptors"
            Site(w, ins).report("divergence", message, op.instruction)
        op.warps.append(w)
        op.operands = values
        op.registers = all_bits
        if w.clocks is not None:
            clock = w.clocks.meet(w.rows)
            if op.clock is not None:
                width = min(clock.shape[1], op.clock.shape[1])
                clock = np.minimum(clock[:, :width], op.clock[:, :width])
            op.clock = clock
        if len(op.warps) == 4:
            launch_wgmma(group, op, spec, a_slots, d_slots)
        return None

    return wgmma_mma


def launch_wgmma(group: Warpgroup, op: WgmmaOperation, spec: Any, a_slots: list[int], d_slots: list[int]) -> None:
    """All four warps have issued: check what it will read, and queue it."""
    a_descriptor, b_descriptor, accumulate = op.operands
    warps = sorted(op.warps, key=lambda w: w.index)
    site = Site(op.warps[0], op.instruction)
    cta = site.warp.cta
    unit = tensor_core.wgmma_unit(spec, a_descriptor, b_descriptor, accumulate)
    for problem in unit.problems():
        site.report("descriptor", problem)
    ranges = tensor_core.wgmma_ranges(spec, a_descriptor, b_descriptor)
    if ranges[-1][1] > cta.shared.size:
        site.fault("a wgmma descriptor reaches past the CTA's shared memory")
    if cta.shared.shadow is not None:
        cells = tensor_core.cells_of_ranges(ranges, cta.granule_shift)
        stamp = int(pack(group.column, op.group, ASYNC))
        cta.shared.shadow.bulk(cells, op.clock, stamp, site, write=False)

    def execute() -> None:
        tensor_core.run_wgmma(cta, warps, unit, a_slots, d_slots)
        op.finish()

    operation = AsyncOperation(op.instruction.name, execute, work=Work("wgmma", cta, 0, unit))
    cta.launch.enqueue(("wgmma", id(group)), operation)
