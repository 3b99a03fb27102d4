"""What a warp must not do with its registers: touch those of unfinished operations, read what nothing has written."""

from __future__ import annotations

import re

from padless.emulator.order.reports import set_bits
from padless.emulator.state.program import SYNC, Block
from padless.emulator.state.site import Site
from padless.emulator.state.warp import Warp


def check_busy(w: Warp, b: Block) -> None:
    """A block touches registers of an unfinished asynchronous instruction: find which instruction does."""
    if b.kind == SYNC and b.instructions[0].opcode in ("wgmma", "tcgen05"):
        return  # these check their own operands
    program = w.launch.program
    names = program.register_names
    candidates = set_bits(w.busy & b.touches)
    for instruction in [*b.instructions, *([b.terminator] if b.terminator else [])]:
        text = str(instruction)
        hit = 0
        for i in candidates:
            if names[i] in text and _mentions(text, names[i]):
                hit |= 1 << i
        if hit:
            owner = w.busy_owner.get((hit & -hit).bit_length() - 1)
            what = owner.opcode if owner else "operation"
            message = f"touches {program.names_of(hit)}, which an unfinished {what} uses"
            Site(w, instruction).report("register-in-flight", message, owner)
            _settle(w)
            return


def _settle(w: Warp) -> None:
    """Finish a warp's tcgen05.ld and st, once the missing wait is reported: the rest of the run is then judged with
    the values that the registers would have got."""
    queue = w.launch.queues.pop(("tmem", id(w)), None)
    for operation in queue or ():
        for step in operation.steps:
            step()


def check_written(w: Warp, b: Block) -> None:
    """A block reads registers that nothing has written: find which instruction does, unless it only copies them."""
    missing = b.reads & ~w.written
    if b.kind == SYNC and b.instructions[0].opcode in ("wgmma", "tcgen05"):
        return
    w.written |= missing
    names = [w.launch.program.register_names[i] for i in set_bits(missing)]
    for instruction in [*b.instructions, *([b.terminator] if b.terminator else [])]:
        text = str(instruction)
        for name in names:
            if name in text and _mentions(text, name):
                if instruction.opcode == "mov":
                    return  # copies of undefined values are what compilers emit for unused ones
                message = f"reads {name}, which nothing has written"
                Site(w, instruction).report("uninitialised-register", message)
                return


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w$%]){re.escape(name)}(?![\w$@~])", text) is not None
