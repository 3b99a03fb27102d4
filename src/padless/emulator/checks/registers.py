"""What a warp must not do with its registers: touch those of unfinished operations, read what nothing has written."""

from __future__ import annotations

import re

from padless.emulator.instructions.tcgen05_access import FAMILY
from padless.emulator.order.race import TENSOR
from padless.emulator.order.reports import set_bits
from padless.emulator.ptx.ast import Instruction, Register, Vector
from padless.emulator.state.program import SYNC, Block
from padless.emulator.state.site import Site
from padless.emulator.state.warp import Warp


def check_busy(w: Warp, b: Block) -> None:
    """A block touches registers of an unfinished asynchronous instruction: find which instruction does."""
    if b.kind == SYNC and b.instructions[0].opcode in ("wgmma", "tcgen05"):
        return  # these check their own operands
    program = w.launch.program
    names = program.register_names
    for instruction in [*b.instructions, *([b.terminator] if b.terminator else [])]:
        text = str(instruction)
        hit = 0
        for i in set_bits(w.busy & b.touches):
            if names[i] in text and _mentions(text, names[i]):
                hit |= 1 << i
        if hit:
            owner = w.busy_owner.get((hit & -hit).bit_length() - 1)
            if instruction.opcode == "mov" and owner is not None and "ld" in owner.modifiers:
                _carry(w, instruction, owner)
                continue
            what = owner.opcode if owner else "operation"
            message = f"touches {program.names_of(hit)}, which an unfinished {what} uses"
            Site(w, instruction).report("register-in-flight", message, owner)
            _settle(w)
            loads = w.groups.get((FAMILY["ld"], -1))
            if loads is not None and w.clocks is not None and not w.launch.collector.strict:
                # Today's chips hold a use of a register until its load is over, so tensor memory has been read.
                w.busy = 0
                w.clocks.observe(w.rows, loads.column, len(loads.closed))
                w.clocks.time[TENSOR, w.rows, loads.column] = len(loads.closed)
            return


def _carry(w: Warp, move: Instruction, load: Instruction) -> None:
    """Copies and packings of what an unfinished tcgen05.ld loads, which compilers place where they like: what they write
    is in flight as well. The values are there from now on."""
    names = w.launch.program.register_names
    destination = move.operands[0]
    items = destination.items if isinstance(destination, Vector) else (destination,)
    for item in items:
        if isinstance(item, Register):
            number = names.index(item.name)
            w.busy |= 1 << number
            w.busy_owner[number] = load
    _settle(w)


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
