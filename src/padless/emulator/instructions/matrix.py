"""wgmma: products of a warpgroup, their fences, groups and waits."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from padless.emulator.order.race import ASYNC, pack
from padless.emulator.order.reports import set_bits
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import instruction
from padless.emulator.ptx.ast import Immediate, Instruction, Register, Vector
from padless.emulator.state.groups import Groups, GroupWait, Operation
from padless.emulator.state.launch import AsyncOperation
from padless.emulator.state.shared_access import cells_read
from padless.emulator.state.site import Site
from padless.emulator.state.warp import Cta, Fragment, Wait, Warp
from padless.emulator.state.warp_sync import whole_warp
from padless.emulator.state.work import Work
from padless.emulator.units import sparsity
from padless.emulator.units.matrix_descriptor import kind_of
from padless.emulator.units.number_formats import Array
from padless.emulator.units.wgmma import ELEMENT_BYTES, TYPES, Wgmma


class WgmmaOperation(Operation):
    """One wgmma.mma_async of a warpgroup, complete once all four warps have issued it."""

    __slots__ = ("clock", "group", "metadata", "operands", "registers", "warps")

    def __init__(self, ins: Instruction, group: int) -> None:
        super().__init__(ins)
        self.group = group
        self.warps: list[Warp] = []
        self.clock: Any = None
        self.operands: tuple[Any, ...] = ()
        self.registers = 0
        self.metadata: list[Any] = [None] * 4  # of the sparse form, by warp: read when it is issued


class Warpgroup:
    """Asynchronous state of four warps: operations in issue order, how many each warp has issued, and its groups."""

    def __init__(self, clocks: Any) -> None:
        self.operations: list[WgmmaOperation] = []
        self.issued = [0] * 4
        self.column = Groups(clocks).column
        self.groups = [Groups(clocks, self.column) for _ in range(4)]

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


@instruction("wgmma")
def wgmma(e: Emitter) -> None:
    ins = e.instruction
    pending = e.operands[0] if e.has("wait_group") else None

    def fence(f: Fragment, m: Any) -> Wait | None:
        warpgroup_of(f.warp, ins)
        f.warp.dirty = 0
        return None

    def commit(f: Fragment, m: Any) -> Wait | None:
        warpgroup_of(f.warp, ins).of(f.warp).commit()
        return None

    def wait(f: Fragment, m: Any) -> Wait | None:
        assert isinstance(pending, Immediate)
        w = f.warp
        return WgmmaWait(w, [(w.rows, warpgroup_of(w, ins).of(w))], pending.value).begin(f)

    forms = {"fence": fence, "commit_group": commit, "wait_group": wait, "mma_async": None}
    form = e.either(*forms)
    if not form or (form == "wait_group" and not isinstance(pending, Immediate)):
        e.unsupported()
    e.synchronise(whole_warp(forms[form] or make_mma(e)))


def make_mma(e: Emitter) -> Any:
    ins = e.instruction
    shape = next((m for m in ins.modifiers if re.fullmatch(r"m64n\d+k\d+", m)), "")
    kinds = [m for m in ins.modifiers if m in TYPES]
    e.only("mma_async", "sp", "sync", "aligned", shape, "satfinite", *TYPES)
    if not shape or len(kinds) != 3:
        e.unsupported("shape or types")
    n, k = (int(x) for x in re.findall(r"n(\d+)k(\d+)", shape)[0])
    d_type, a_type, b_type = kinds
    d, a, b, *rest = e.operands
    metadata_slot, selector = -1, None
    if e.has("sp"):
        metadata, chosen, *rest = rest
        if not isinstance(chosen, Immediate):
            e.unsupported("sp-sel that is no constant")
        metadata_slot, selector = e.source_slot(metadata, "u32"), chosen.value
    d_rows, d_bits = e.own_rows(e.items(d))
    expected = n // 2 if d_type != "f16" else n // 4
    if len(d_rows) != expected:
        e.unsupported(f"{len(d_rows)} accumulators, m64n{n} needs {expected}")
    a_rows, a_bits = e.own_rows(a.items if isinstance(a, Vector) else ())
    a_descriptor = -1 if a_bits else e.source_slot(a, "u64")
    b_descriptor = e.source_slot(b, "u64")
    all_bits = d_bits | a_bits
    owners = dict.fromkeys(set_bits(all_bits), ins)
    scale_slot, constant_scale = -1, True
    if rest and isinstance(rest[0], Register):
        scale_slot = e.source_slot(rest[0], "pred")
    elif rest and isinstance(rest[0], Immediate):
        constant_scale = bool(rest[0].value)
    immediates = [o.value for o in rest[1:] if isinstance(o, Immediate)]
    signs = [*immediates, 1, 1][:2]
    majors = ["mn" if t else "k" for t in [*immediates[2:], 0, 0]]
    if a_bits and len(immediates) == 3:
        majors.insert(0, "k")
    try:
        form = Wgmma(
            n, d_type, a_type, b_type, None if a_bits else 0, 0, True, signs[0] < 0, signs[1] < 0, majors[0], majors[1],
            e.has("satfinite"), selector,
        )  # fmt: skip
    except ValueError as error:
        e.unsupported(str(error))
    if form.k != k or (form.stored_k == 32 and "mn" in majors[:2]):
        e.unsupported("shape or types")
    e.preparation.uses.add("wgmma")

    def check_registers(w: Warp, accumulate: bool) -> None:
        site = Site(w, ins)
        dirty = w.dirty & all_bits
        if dirty:
            names = w.launch.program.names_of(dirty)
            first = "no wgmma.fence before the first wgmma"
            message = first if w.dirty == -1 else f"{names} were read or written since the last wgmma.fence"
            site.report("missing-wgmma-fence", message)
        if accumulate and d_bits & ~w.written:
            names = w.launch.program.names_of(d_bits & ~w.written)
            site.report("uninitialised-register", f"accumulates into {names}, never written")
        w.written |= d_bits
        w.busy |= all_bits
        w.busy_owner.update(owners)

    def wgmma_mma(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        v = w.v
        group = warpgroup_of(w, ins)
        accumulate = bool(v[scale_slot][0]) if scale_slot >= 0 else constant_scale
        values = int(v[a_descriptor][0]) if a_descriptor >= 0 else None, int(v[b_descriptor][0]), accumulate
        if w.cta.checks:
            check_registers(w, accumulate)
        issued, groups = group.issued[w.index % 4], group.of(w)
        if issued == len(group.operations):
            group.operations.append(WgmmaOperation(ins, groups.event))
        op = group.operations[issued]
        group.issued[w.index % 4] += 1
        groups.open.append(op)
        if op.instruction is not ins or (op.warps and op.operands != values):
            message = "the warps of a warpgroup issue different wgmma instructions or descriptors"
            Site(w, ins).report("divergence", message, op.instruction)
        op.warps.append(w)
        if metadata_slot >= 0:
            op.metadata[w.index % 4] = v[metadata_slot].copy()
        op.operands = values
        op.registers = all_bits
        if w.clocks is not None:
            clock = w.clocks.meet(w.rows)
            if op.clock is not None:
                width = min(clock.shape[1], op.clock.shape[1])
                clock = np.minimum(clock[:, :width], op.clock[:, :width])
            op.clock = clock
        if len(op.warps) == 4:
            launch_wgmma(group, op, with_descriptors(form, *values), a_rows, d_rows)
        return None

    return wgmma_mma


@lru_cache(maxsize=4096)
def with_descriptors(form: Wgmma, a_descriptor: int | None, b_descriptor: int, scale_d: bool) -> Wgmma:
    """The unit of one wgmma, from the cache: kernels use few descriptors."""
    return replace(form, a_descriptor=a_descriptor, b_descriptor=b_descriptor, scale_d=scale_d)


def launch_wgmma(group: Warpgroup, op: WgmmaOperation, unit: Wgmma, a_rows: Array, d_rows: Array) -> None:
    """All four warps have issued: check what it will read, and queue it."""
    warps = sorted(op.warps, key=lambda w: w.index)
    site = Site(op.warps[0], op.instruction)
    cta = site.warp.cta
    for problem in unit.problems():
        site.report(kind_of(problem), problem)
    chunks = None
    if unit.selector is not None:
        size = ELEMENT_BYTES[unit.a_type]
        chunks = sparsity.unpack(np.concatenate(op.metadata), size, unit.selector)
        if meaningless := sparsity.problem(chunks, size):
            site.report("descriptor", meaningless)
    cells, end = cells_read(unit, cta.granule_shift)
    if end > cta.shared.size:
        site.fault("a wgmma descriptor reaches past the CTA's shared memory")
    if cta.shared.shadow is not None:
        stamp = int(pack(group.column, op.group, ASYNC))
        cta.shared.shadow.bulk(cells, op.clock, stamp, site, write=False)

    def execute() -> None:
        if cta.launch.arithmetic != "none":  # that of a clock, which needs no values
            multiply(cta, warps, unit, a_rows, d_rows, chunks)
        op.finish()

    operation = AsyncOperation(op.instruction.name, execute, work=Work("wgmma", cta, 0, unit))
    cta.launch.enqueue(("wgmma", id(group)), operation)


def multiply(
    cta: Cta, warps: list[Warp], unit: Wgmma, a_rows: Array, d_rows: Array, chunks: Array | None = None
) -> None:
    """Read the fragments of four warps, multiply, and write the accumulators back."""
    launch = cta.launch
    started = time.perf_counter()
    registers = [w.arrays["w"] for w in warps]
    a = np.concatenate([r[a_rows].T for r in registers]) if len(a_rows) else None
    d = np.concatenate([r[d_rows].T for r in registers])
    result = unit.execute(cta.shared.bytes, d, a, mode=launch.arithmetic, chunks=chunks)
    for i, r in enumerate(registers):
        r[d_rows] = result[32 * i : 32 * i + 32].T
    launch.statistics.tensor_seconds += time.perf_counter() - started
