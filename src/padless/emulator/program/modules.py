"""Modules that a program loads: PTX, or a cubin whose PTX the compiler left behind in this process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from padless.emulator.emulator import Emulator
from padless.emulator.errors import EmulatorError, LaunchError
from padless.emulator.state.memory import DeviceMemory

ELF, FATBIN = b"\x7fELF", (0x466243B1).to_bytes(4, "little")
FATBIN_TEXT = (0xBA55ED50).to_bytes(4, "little")


class Function:
    """A kernel of a module. max_dynamic_shared: what was set for it."""

    def __init__(self, emulator: Emulator, name: str) -> None:
        self.emulator, self.name = emulator, name
        self.program = emulator.program(name)
        self.max_dynamic_shared = 0
        self.static_shared = self.program.static_shared_bytes
        self.name_buffer = ctypes.create_string_buffer(name.encode())

    @property
    def max_threads(self) -> int:
        limit = self.program.function.max_threads
        return 1024 if limit is None else limit[0] * limit[1] * limit[2]

    def values_at(self, addresses: int) -> list[bytes]:
        """The parameters from an array of their addresses."""
        sizes = [self.program.parameters[p.name][1] for p in self.program.function.parameters]
        places = (ctypes.c_void_p * len(sizes)).from_address(addresses)
        return [ctypes.string_at(place, size) for place, size in zip(places, sizes, strict=True) if place]

    def values_in(self, extra: int | None) -> list[bytes]:
        """The parameters from a launch's `extra`: a block of them all, as they lie in memory."""
        spans = [self.program.parameters[p.name] for p in self.program.function.parameters]
        if not extra:
            return []
        words = (ctypes.c_void_p * 5).from_address(extra)
        if words[0] != 1:  # CU_LAUNCH_PARAM_BUFFER_POINTER
            raise LaunchError(f"{self.name}: extra begins with {words[0]}, known is CU_LAUNCH_PARAM_BUFFER_POINTER")
        return [ctypes.string_at((words[1] or 0) + offset, size) for offset, size in spans]


class Loaded:
    """A loaded module."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        self._functions: dict[str, Function] = {}

    def function(self, name: str) -> Function | None:
        """None where the module has no such kernel; raises EmulatorError for one that cannot be prepared."""
        if name not in self.emulator.module.entries():
            return None
        if name not in self._functions:
            self._functions[name] = Function(self.emulator, name)
        return self._functions[name]

    def variable(self, name: str) -> tuple[int, int] | None:
        """Address and bytes of a variable."""
        if name not in self.emulator.symbols:
            return None
        return self.emulator.symbols[name], self.emulator.module.variables[name].size


class Loader:
    """Makes modules of images. make: an Emulator of PTX in the program's memory. say: is given sentences."""

    def __init__(self, make: Callable[[str, DeviceMemory], Emulator], variables: DeviceMemory, say: Any) -> None:
        self.make, self.variables, self.say = make, variables, say
        self._cubins: list[tuple[bytes, str]] = []

    def remember(self, cubin: bytes, ptx: str) -> None:
        """`cubin` was made of `ptx`."""
        self._cubins.append((cubin, ptx))

    def load(self, address: int) -> Loaded | None:
        """The module of an image in memory; None, and a sentence, where it cannot be run."""
        start = ctypes.string_at(address, 4)
        if start == ELF:
            ptx = self._ptx_of(address)
            if ptx is None:
                self.say(
                    "a cubin was loaded: the emulator runs PTX; load PTX (NVRTC with --gpu-architecture=compute_..), "
                    "or compile with cuda.bindings.nvrtc or Triton in the program"
                )
                return None
        elif start in (FATBIN, FATBIN_TEXT):
            self.say("a fat binary was loaded: the emulator runs PTX; load the PTX of it (cuobjdump -ptx)")
            return None
        else:
            ptx = ctypes.string_at(address).decode()
        return self.make_module(ptx)

    def make_module(self, ptx: str) -> Loaded | None:
        """The module of a PTX text; None, and a sentence, where it is refused."""
        try:
            return Loaded(self.make(ptx, self.variables))
        except EmulatorError as error:
            self.say(f"a module was refused: {error}")
            return None

    def _ptx_of(self, address: int) -> str | None:
        """Its PTX if the cubin is one that was made here; tools may have set bits of its instructions since."""
        header = ctypes.string_at(address, 64)  # holds the offset of the last table, so the size
        made = [(np.frombuffer(cubin, np.uint8), ptx) for cubin, ptx in self._cubins if cubin[:64] == header]
        if not made:
            return None
        image = np.frombuffer(ctypes.string_at(address, made[0][0].size), np.uint8)
        differ, _, ptx = min((int((image != cubin).sum()), i, ptx) for i, (cubin, ptx) in enumerate(made))
        return ptx if differ * 16 <= image.size else None
