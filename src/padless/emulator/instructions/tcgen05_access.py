"""tcgen05.ld and st of one warp, and the waits for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.instructions.operands import TensorOperand
from padless.emulator.order.race import ASYNC, TENSOR, pack
from padless.emulator.order.reports import set_bits
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.ptx.ast import Immediate
from padless.emulator.state.groups import GroupWait, Operation, groups_of
from padless.emulator.state.launch import AsyncOperation
from padless.emulator.state.site import Site
from padless.emulator.state.tensor_memory import COLUMNS, tensor_memory
from padless.emulator.state.warp import Fragment, Wait
from padless.emulator.state.warp_sync import whole_warp
from padless.emulator.state.work import Work
from padless.emulator.units.tensor_memory import LOAD_SHAPES, access_problems, load, register_map, store

FAMILY = {"ld": "tcgen05.ld", "st": "tcgen05.st"}


def access(e: Emitter) -> None:
    ins, kind = e.instruction, e.either("ld", "st")
    is_load = kind == "ld"
    shape = e.either(*LOAD_SHAPES)
    repeat = next((int(m[1:]) for m in ins.modifiers if m[0] == "x" and m[1:].isdigit()), 0)
    packed = e.has("pack::16b") or e.has("unpack::16b")
    e.only("ld", "st", "sync", "aligned", shape, f"x{repeat}", "pack::16b", "unpack::16b")
    if not shape or not repeat:
        e.unsupported("shape")
    operands = list(e.operands)
    registers, address = (operands[0], operands[1]) if is_load else (operands[-1], operands[0])
    split = next((o.value for o in operands[1:] if isinstance(o, Immediate)), 0)
    rows, bits = e.own_rows(e.items(registers))
    place = TensorOperand(e, address)
    owners = dict.fromkeys(set_bits(bits), ins)

    @whole_warp
    def tensor_access(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        site = Site(w, ins)
        memory = tensor_memory(w.cta)
        where = place.at(Site(w, ins, int(np.argmax(f.mask))))
        for problem in access_problems(shape, where, w.index % 4):
            site.report("tensor-memory", problem)
        words = lanes, columns = register_map(shape, repeat, where, w.index % 4, split, packed)
        if len(rows) != lanes.shape[1] // (2 if packed else 1):
            site.fault(f"{len(rows)} registers for {shape}.x{repeat}")
        first, end = int(columns.min()), int(columns.max()) + 1
        if not memory.owns(first, end):
            site.report("tensor-memory", f"columns {first} to {end - 1} are not allocated")
            if end > COLUMNS:
                return None
        groups = groups_of(w, FAMILY[kind])
        if memory.shadow is not None:
            stamp = int(pack(groups.column, groups.event, ASYNC))
            # An unfinished tcgen05.st reads its registers, as this one would.
            shared = 0 if is_load else sum(1 << i for i in set_bits(w.busy & bits) if "st" in w.busy_owner[i].modifiers)
            if w.busy & bits & ~shared:
                names = w.launch.program.names_of(w.busy & bits & ~shared)
                site.report("register-in-flight", f"{names} are still in use by an unfinished operation")
            touched, clock = np.unique(lanes * COLUMNS + columns), w.clocks.meet(w.rows)
            memory.shadow.bulk(touched, clock, stamp, site, write=not is_load, generic_plane=TENSOR)
            w.busy |= bits
            w.busy_owner.update(owners)
            if is_load:
                w.written |= bits
        operation = Operation(ins)
        groups.open.append(operation)
        groups.commit()

        def execute() -> None:
            registers = w.arrays["w"]
            if is_load:
                registers[rows] = load(memory.words, words, packed).T
            else:
                store(memory.words, words, registers[rows].T, packed)
            operation.finish()

        work = Work(f"tmem_{kind}", w.cta, 4 * lanes.size, w)
        w.launch.enqueue(("tmem", id(w)), AsyncOperation(ins.name, execute, work=work))
        return None

    e.synchronise(tensor_access)


class AccessWait(GroupWait):
    """tcgen05.wait: for all of the warp's loads, or all of its stores."""

    def finish(self, fragment: Fragment) -> Wait | None:
        w = self.warp
        if all(groups.over(len(groups.closed)) for groups in (groups_of(w, x) for x in FAMILY.values())):
            w.busy = 0
        if w.clocks is not None:
            _, groups, upto = self.parts[0]
            w.clocks.time[TENSOR, w.rows, groups.column] = upto
        return super().finish(fragment)

    def describe(self) -> str:
        return f"{len(self.unfinished())} accesses before tcgen05.wait"


def wait(e: Emitter) -> None:
    kind = "ld" if e.has("wait::ld") else "st"

    @whole_warp
    def tensor_wait(f: Fragment, m: Any) -> Wait | None:
        return AccessWait(f.warp, [(f.warp.rows, groups_of(f.warp, FAMILY[kind]))]).begin(f)

    e.synchronise(tensor_wait)
