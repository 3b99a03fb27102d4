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
        hit = [i for i in set_bits(w.busy & b.touches) if names[i] in text and _mentions(text, names[i])]
        if not hit:
            continue
        owner = w.busy_owner.get(hit[0])
        loads = [x for i in hit if (x := w.busy_owner.get(i)) is not None and "ld" in x.modifiers]
        into = _written(instruction)
        overwritten = [i for i in hit if names[i] in into and names[i] in _written(w.busy_owner.get(i))]
        if instruction.opcode == "mov" and len(loads) == len(hit) and not overwritten:
            _carry(w, [names.index(name) for name in into], [i for i in hit if names[i] not in into])
            continue
        what = owner.opcode if owner else "operation"
        found = program.names_of(sum(1 << i for i in overwritten or hit))
        message = f"{'overwrites' if overwritten else 'touches'} {found}, which an unfinished {what} uses"
        Site(w, instruction).report("register-in-flight", message, owner)
        _settle(w)
        unread = w.groups.get((FAMILY["ld"], -1))
        if unread is not None and w.clocks is not None and not w.launch.collector.strict:
            # Today's chips hold a use of a register until its load is over, so tensor memory has been read.
            w.busy = 0
            w.clocks.observe(w.rows, unread.column, len(unread.closed))
            w.clocks.time[TENSOR, w.rows, unread.column] = len(unread.closed)
        return


def _written(instruction: Instruction | None) -> set[str]:
    """The registers of the first operand."""
    operand = instruction.operands[0] if instruction is not None and instruction.operands else None
    return {x.name for x in (operand.items if isinstance(operand, Vector) else [operand]) if isinstance(x, Register)}


def _carry(w: Warp, into: list[int], copied: list[int]) -> None:
    """Copies and packings of what an unfinished tcgen05.ld loads, which compilers place where they like: what they write
    is in flight as well, and no longer where something else is moved there. The values are there from now on."""
    for number in into:
        w.busy &= ~(1 << number)
        if copied:
            w.busy |= 1 << number
            w.busy_owner[number] = w.busy_owner[copied[0]]
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
