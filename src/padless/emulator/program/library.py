"""A shared library that takes libcuda's place in this process: every driver function it has is a Python function.

The library is compiled when a program is run, from C that is written here. Each of its functions hands its arguments
on to a slot, which holds a ctypes callback. Whoever opens "libcuda.so.1" later gets it by its soname: cuda.bindings,
ctypes, Triton's launcher, host code of compilers.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from padless.emulator.errors import LaunchError

SONAME = "libcuda.so.1"
MOST_ARGUMENTS = 12  # of a driver function: cuTensorMapEncodeTiled
UNKNOWN = 999  # CUDA_ERROR_UNKNOWN
# One letter an argument: pointer or handle, device pointer, int, unsigned, size_t, text.
KINDS = {"p": ctypes.c_void_p, "d": ctypes.c_uint64, "i": ctypes.c_int, "u": ctypes.c_uint, "z": ctypes.c_size_t,
         "s": ctypes.c_char_p}  # fmt: skip
SUFFIXES = ("", "_v2", "_ptsz", "_v2_ptsz")


class Library:
    """The loaded library. functions: by name, a signature and what is called. failed: is given what a function raised.

    Raises LaunchError where there is no C compiler or another libcuda is open already.
    """

    def __init__(
        self, functions: Mapping[str, tuple[str, Callable[..., int]]], failed: Callable[[str, BaseException], None]
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="padless-libcuda-"))
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        path = self.folder / SONAME
        self._callbacks = []
        names = list(functions)
        compile_c(c_text(names), path)
        (self.folder / "libcuda.so").symlink_to(SONAME)
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL | os.RTLD_NOW)
        if not hasattr(ctypes.CDLL(SONAME), "padless_slots"):
            raise LaunchError("a CUDA driver is open in this process already; --program runs where there is none")
        slots = (ctypes.c_void_p * len(names)).in_dll(library, "padless_slots")
        for i, (name, (signature, function)) in enumerate(functions.items()):
            made = ctypes.CFUNCTYPE(ctypes.c_int, *(KINDS[kind] for kind in signature))
            self._callbacks.append(made(guarded(name, function, failed)))
            slots[i] = ctypes.cast(self._callbacks[i], ctypes.c_void_p)
        self._library = library

    def address(self, name: str) -> int | None:
        """Where a driver function lies, None for one that the library does not have."""
        found = getattr(self._library, name, None)
        return None if found is None else ctypes.cast(found, ctypes.c_void_p).value


def guarded(
    name: str, function: Callable[..., int], failed: Callable[[str, BaseException], None]
) -> Callable[..., int]:
    def call(*arguments: Any) -> int:
        try:
            return int(function(*arguments))
        except BaseException as error:
            failed(name, error)
            if not isinstance(error, LaunchError):
                traceback.print_exc(file=sys.stderr)
            return UNKNOWN

    return call


def c_text(names: list[str]) -> str:
    """C in which each function passes on whatever it is given; none takes a floating-point number."""
    declared = ", ".join(f"long a{i}" for i in range(MOST_ARGUMENTS))
    given = ", ".join(f"a{i}" for i in range(MOST_ARGUMENTS))
    types = ", ".join(["long"] * MOST_ARGUMENTS)
    lines = [f"typedef int (*slot_t)({types});", f"slot_t padless_slots[{len(names)}];"]
    exported = {
        name + suffix: i for suffix in reversed(SUFFIXES) for i, name in enumerate(names)
    } | {name: i for i, name in enumerate(names)}  # fmt: skip
    lines += [f"int {name}({declared}) {{ return padless_slots[{i}]({given}); }}" for name, i in exported.items()]
    return "\n".join(lines) + "\n"


def compile_c(text: str, target: Path) -> None:
    """Compile a shared library with the soname of libcuda."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise LaunchError("--program needs a C compiler (cc, gcc or clang, or CC names one) to stand in for libcuda")
    command = [*compiler.split(), "-shared", "-fPIC", "-O1", "-x", "c", "-", f"-Wl,-soname,{SONAME}", "-o", str(target)]
    try:
        subprocess.run(command, input=text, text=True, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or error
        raise LaunchError(f"{compiler} cannot compile the stand-in for libcuda: {str(why)[:500]}") from None
