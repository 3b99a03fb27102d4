"""The table of instructions: one emitter per opcode, filled by the decorators in the modules of `instructions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from padless.emulator.prepare.emitter import Emitter, Preparation
from padless.emulator.ptx.ast import Instruction

EMITTERS: dict[str, Callable[[Emitter], None]] = {}
HELPERS: dict[str, Any] = {}  # functions that generated code calls by name


def instruction(*opcodes: str) -> Callable[[Callable[[Emitter], None]], Callable[[Emitter], None]]:
    """Register the emitter of one or more opcodes."""

    def register(function: Callable[[Emitter], None]) -> Callable[[Emitter], None]:
        for opcode in opcodes:
            assert opcode not in EMITTERS, opcode
            EMITTERS[opcode] = function
        return function

    return register


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function callable from generated code under its own name."""
    HELPERS[function.__name__] = function
    return function


def emit(preparation: Preparation, instruction: Instruction) -> Emitter:
    """The emitter of one instruction, after the opcode's function has run on it."""
    emitter = Emitter(preparation, instruction)
    function = EMITTERS.get(instruction.opcode)
    if function is None:
        emitter.unsupported("unknown instruction")
    else:
        function(emitter)
    return emitter
