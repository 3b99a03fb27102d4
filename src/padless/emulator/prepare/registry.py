"""The table of instructions: one emitter per opcode, filled by the decorators in the modules of `instructions`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from padless.emulator.errors import refusing
from padless.emulator.prepare.emitter import Emitter, Preparation
from padless.emulator.ptx.ast import Instruction

Emit = Callable[[Emitter], None]
EMITTERS: dict[str, Emit] = {}
FLOATING: dict[str, Emit] = {}  # of opcodes that integers have too, where the type is a floating one
HELPERS: dict[str, Any] = {}  # functions that generated code calls by name


def instruction(*opcodes: str, table: dict[str, Emit] = EMITTERS) -> Callable[[Emit], Emit]:
    """Register the emitter of one or more opcodes."""

    def register(function: Emit) -> Emit:
        for opcode in opcodes:
            assert opcode not in table, opcode
            table[opcode] = function
        return function

    return register


def expressions(table: Mapping[str, tuple[str, ...]]) -> None:
    """Register opcodes that are one expression of their sources: opcode -> arguments of `Emitter.compute`. What follows
    the opcode are modifiers that have to be there; the first row that fits is taken."""
    rows: dict[str, list[tuple[list[str], tuple[str, ...]]]] = {}
    for key, row in table.items():
        opcode, *needed = key.split(".")
        rows.setdefault(opcode, []).append((needed, row))

    def emitter(forms: list[tuple[list[str], tuple[str, ...]]]) -> Emit:
        def choose(e: Emitter) -> None:
            needed, row = next((form for form in forms if e.has(*form[0])), forms[-1])
            e.only(*needed, *"".join(row[2:]).split())
            e.compute(*row)

        return choose

    for opcode, forms in rows.items():
        instruction(opcode)(emitter(forms))


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function callable from generated code under its own name."""
    HELPERS[function.__name__] = function
    return function


def emit(preparation: Preparation, instruction: Instruction) -> Emitter:
    """The emitter of one instruction, after the opcode's function has run on it."""
    with refusing(preparation.module, instruction):
        emitter = Emitter(preparation, instruction)
        opcode = instruction.opcode
        floating = bool(emitter.types) and emitter.type.startswith(("f", "bf"))
        function = (FLOATING.get(opcode) if floating else None) or EMITTERS.get(opcode)
        if function is None:
            emitter.unsupported("unknown instruction")
        function(emitter)
        return emitter
