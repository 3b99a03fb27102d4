"""tcgen05: which form is emitted where, and the fences."""

from __future__ import annotations

from padless.emulator.instructions.operands import of_clocks
from padless.emulator.instructions.tcgen05_access import access, wait
from padless.emulator.instructions.tcgen05_allocation import allocate, deallocate, relinquish
from padless.emulator.instructions.tcgen05_pipe import commit, copy, multiply
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import instruction


@instruction("tcgen05")
def tcgen05(e: Emitter) -> None:
    forms = {
        "alloc": allocate, "dealloc": deallocate, "relinquish_alloc_permit": relinquish, "mma": multiply, "cp": copy,
        "commit": commit, "ld": access, "st": access, "wait::ld": wait, "wait::st": wait,
        "fence::before_thread_sync": fence, "fence::after_thread_sync": fence,
    }  # fmt: skip
    form = e.instruction.modifiers[0] if e.instruction.modifiers else ""
    if form not in forms:
        e.unsupported()
    e.preparation.uses.add("tcgen05")
    forms[form](e)


def fence(e: Emitter) -> None:
    e.call(of_clocks("fence_before" if e.has("fence::before_thread_sync") else "fence_after"))
