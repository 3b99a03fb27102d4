"""tcgen05.ld and st of one warp, and the waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from padless.emulator.instructions.operands import tensor_address, value
from padless.emulator.instructions.tensor_memory import COLUMNS, tensor_memory
from padless.emulator.order.race import ASYNC, TENSOR, pack
from padless.emulator.order.reports import set_bits
from padless.emulator.ptx.ast import Immediate, Register, Vector
from padless.emulator.state import tensor_units
from padless.emulator.state.asynchronous import AsyncOperation, Work
from padless.emulator.state.registers import names_of
from padless.emulator.state.warp import Wait
from padless.emulator.state.warp_sync import whole_warp

if TYPE_CHECKING:
    from padless.emulator.prepare.emitter import Emitter
    from padless.emulator.state.warp import Fragment, Warp


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

    @whole_warp
    def tensor_access(f: Fragment, m: Any) -> Wait | None:
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

        work = Work(f"tmem_{kind}", w.cta, 4 * lanes.size, w)
        machine.enqueue(("tmem", id(w)), AsyncOperation(ins.name, execute, work=work))
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

    @whole_warp
    def tensor_wait(f: Fragment, m: Any) -> Wait | None:
        result = AccessWait(f.warp, kind)
        return result.finish(f) if result.ready() else result

    e.synchronise(tensor_wait)
