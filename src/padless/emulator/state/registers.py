"""Names of registers, for messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from padless.emulator.order.reports import set_bits

if TYPE_CHECKING:
    from padless.emulator.run.machine import Machine


def names_of(machine: Machine, bits: int) -> str:
    """The first few registers of a bit set, for a message."""
    names = machine.program.register_names
    found = [names[i] for i in set_bits(bits)]
    return ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
