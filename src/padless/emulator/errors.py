"""What the emulator raises: PTX it cannot read, a kernel it cannot prepare, a launch that cannot go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class EmulatorError(ValueError):
    """Any error of the emulator: the message names the file, the PTX line and the instruction where there is one."""


class PtxSyntaxError(EmulatorError):
    """The text is not PTX this parser reads."""


class UnsupportedInstruction(EmulatorError):
    """An instruction, or a form of it, that the emulator does not model; raised when the kernel is prepared."""


@contextmanager
def refusing(module: Any, instruction: Any) -> Iterator[None]:
    """What goes wrong inside, and is no refusal yet, refuses this instruction of this module."""
    try:
        yield
    except UnsupportedInstruction:
        raise
    except Exception as error:
        raise refusal(module, instruction, error) from error


def refusal(module: Any, instruction: Any, why: str | Exception = "") -> UnsupportedInstruction:
    """One sentence: the file, the line, the instruction, and why it is refused. Errors of other kinds are named."""
    if isinstance(why, Exception):
        why = str(why) if isinstance(why, EmulatorError) else f"{type(why).__name__}: {why}"
    text = f"{module.name}:{instruction.line}: `{instruction}` is not supported"
    return UnsupportedInstruction(text + (f" ({why})" if why else ""))


class LaunchError(EmulatorError):
    """A launch whose arguments do not fit the kernel."""


class KernelFault(EmulatorError):
    """The kernel did what stops real hardware: an illegal address, a trap, an illegal instruction."""
