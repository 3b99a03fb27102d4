"""What the emulator raises: PTX it cannot read, a kernel it cannot prepare, a launch that cannot go on."""

from __future__ import annotations


class EmulatorError(ValueError):
    """Any error of the emulator: the message names the file, the PTX line and the instruction where there is one."""


class PtxSyntaxError(EmulatorError):
    """The text is not PTX this parser reads."""


class UnsupportedInstruction(EmulatorError):
    """An instruction, or a form of it, that the emulator does not model; raised when the kernel is prepared."""


class LaunchError(EmulatorError):
    """A launch whose arguments do not fit the kernel."""


class KernelFault(EmulatorError):
    """The kernel did what stops real hardware: an illegal address, a trap, an illegal instruction."""
