"""NVRTC through ctypes: source text in, image and log out."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

_LIBRARY = "libnvrtc.so.13"


class CompileError(RuntimeError):
    """NVRTC refused a kernel: a defect of padless, with the compiler's log."""


@cache
def _nvrtc() -> ctypes.CDLL:
    """The library of the wheel nvidia-cuda-nvrtc, else the one that the loader finds. Raises OSError without one."""
    found = importlib.util.find_spec("nvidia")
    folders = found.submodule_search_locations if found is not None else None
    wheels = [path for folder in folders or () if (path := Path(folder) / "cu13" / "lib" / _LIBRARY).is_file()]
    if wheels:  # its second half is asked for by name, which is found once it is loaded
        for part in sorted(wheels[0].parent.glob("libnvrtc-builtins.so.13.*")):
            ctypes.CDLL(str(part))
    library = ctypes.CDLL(str(wheels[0]) if wheels else _LIBRARY)
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _call(name: str, *arguments: object) -> None:
    library = _nvrtc()
    if code := getattr(library, name)(*arguments):
        raise CompileError(f"NVRTC: {name}: {library.nvrtcGetErrorString(code).decode()}")


@cache
def version() -> str:
    """Version of the compiler, such as "13.0". Raises OSError where the library is absent, else CompileError."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compile_text(
    text: str, name: str, headers: Mapping[str, str], options: Sequence[str], kinds: Sequence[str]
) -> tuple[list[bytes], str]:
    """Images of ``text`` and the compiler's log.

    name: file name in messages and line information. headers: what ``#include "key"`` reads. kinds: the images that
    are wanted, "cubin" or "ptx"; PTX ends in a zero byte. Raises CompileError with the log where ``text`` is refused.
    """
    program = ctypes.c_void_p()
    _call(
        "nvrtcCreateProgram",
        ctypes.byref(program),
        text.encode(),
        name.encode(),
        len(headers),
        _strings(list(headers.values())),
        _strings(list(headers)),
    )
    try:
        code = _nvrtc().nvrtcCompileProgram(program, len(options), _strings(options))
        log = _read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if code:
            raise CompileError(f"{name} does not compile for {_target(options)}:\n{log}")
        return [_read(program, kind.upper()) for kind in kinds], log
    finally:
        _nvrtc().nvrtcDestroyProgram(ctypes.byref(program))


def _target(options: Sequence[str]) -> str:
    return next((option.partition("=")[2] for option in options if option.startswith("--gpu-arch")), "any target")


def _read(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
    room = ctypes.create_string_buffer(size.value)
    _call(f"nvrtcGet{what}", program, room)
    return room.raw


def _strings(texts: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
