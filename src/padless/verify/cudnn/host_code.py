"""Host code of CuTe DSL programs without a GPU: its calls of the driver end here, its launches in the emulator.

The host code of such a program is a module in MLIR's LLVM dialect that declares the functions of the CUDA runtime.
Before it is turned into machine code every declaration gets a body that calls a method of `Device`; that is all.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from padless.emulator import Emulator
from padless.emulator.units import packed_map

DRIVER = re.compile(
    r"^  llvm\.func @((?:_cu|cuda_dialect_)\w+)\(([^)]*)\)(?: -> (\S+))?(?: attributes .*)?$", re.MULTILINE
)
_C_TYPES = {"!llvm.ptr": ctypes.c_void_p, "i32": ctypes.c_int32, "i64": ctypes.c_int64}
# cudaDevAttrMaxSharedMemoryPerBlockOptin of sm_100.
_SHARED_BYTES = 232_448
_CLUSTER, _PROGRAMMATIC = 4, 6  # cudaLaunchAttributeID
_CUDA_DEVICE = 2  # DLDeviceType
_NOT_SUPPORTED = 801  # cudaErrorNotSupported


@dataclass(frozen=True)
class LaunchShape:
    """The shape of a launch, as a cudaLaunchConfig says it."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    programmatic: bool


def read_launch(address: int) -> LaunchShape:
    """The cudaLaunchConfig at an address: grid, block, dynamic shared memory, stream, attributes of 72 bytes."""
    *sizes, shared_bytes, _, attributes, count = struct.unpack("<6IQQQI", ctypes.string_at(address, 52))
    cluster, programmatic = (1, 1, 1), False
    for i in range(count):
        kind, x, y, z = struct.unpack("<I4x3I", ctypes.string_at(attributes + 72 * i, 20))
        if kind == _CLUSTER:
            cluster = (x, y, z)
        elif kind == _PROGRAMMATIC:
            programmatic = bool(x)
    return LaunchShape(tuple(sizes[:3]), tuple(sizes[3:]), cluster, shared_bytes, programmatic)


def read_parameters(address: int, sizes: Sequence[int]) -> list[bytes]:
    """The bytes of a launch's parameters. Tensor maps, the parameters of 128 bytes, become the emulator's."""
    pointers = struct.unpack(f"<{len(sizes)}Q", ctypes.string_at(address, 8 * len(sizes)))
    raw = [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]
    return [packed_map.translate(value) if len(value) == 128 else value for value in raw]


def with_driver(module: str, address_of: Callable[[str, tuple[str, ...], str | None], int]) -> str:
    """The text of a host module in which every function of the driver is defined: it calls the address that
    ``address_of(name, types of the arguments, type of the result or None)`` gives."""

    def defined(match: re.Match[str]) -> str:
        name, result = match[1], match[3]
        types = tuple(t for t in match[2].split(", ") if t)
        if not {*types, *([result] if result else [])} <= set(_C_TYPES) or result == "!llvm.ptr":
            return match[0]  # error names and the like, from the runtime's library
        address = address_of(name, types, result)
        values = [f"%a{i}" for i in range(len(types))]
        signature = ", ".join(f"{v}: {t}" for v, t in zip(values, types, strict=True))
        call = f"llvm.call %p({', '.join(values)}) : !llvm.ptr, ({', '.join(types)}) -> {result or '()'}"
        return "\n".join(
            (
                f"  llvm.func @{name}({signature}){f' -> {result}' if result else ''} {{",
                f"    %c = llvm.mlir.constant({address} : i64) : i64",
                "    %p = llvm.inttoptr %c : i64 to !llvm.ptr",
                f"    %r = {call}" if result else f"    {call}",
                f"    llvm.return %r : {result}" if result else "    llvm.return",
                "  }",
            )
        )

    return DRIVER.sub(defined, module)


@dataclass
class Device:
    """The driver of a program, with one device. A kernel's handle is its place in `kernels`, from 1.

    emulator: runs the launches; it is given once the program has been compiled. reports: what it found, by kind.
    """

    seed: int = 0
    emulator: Emulator | None = None
    kernels: list[str] = field(default_factory=list)
    launches: list[LaunchShape] = field(default_factory=list)
    reports: Counter[str] = field(default_factory=Counter)
    instructions: int = 0
    error: Exception | None = None
    _functions: list[Any] = field(default_factory=list)

    def address_of(self, name: str, types: tuple[str, ...], result: str | None) -> int:
        """The address of a C function that ends in the method of this name, or in an error code."""
        prototype = ctypes.CFUNCTYPE(_C_TYPES.get(result or ""), *(_C_TYPES[t] for t in types))
        function = prototype(lambda *arguments: self._call(name, arguments))
        self._functions.append(function)  # as long as the device lives
        return int(ctypes.cast(function, ctypes.c_void_p).value or 0)

    def _call(self, name: str, arguments: tuple[int, ...]) -> int:
        method = getattr(self, f"on{name}" if name.startswith("_") else f"on_{name}", None)
        if method is None:
            self.error = self.error or NotImplementedError(f"the host code calls {name}, which has no stand-in")
            return _NOT_SUPPORTED
        try:
            return int(method(*arguments) or 0)
        except Exception as error:  # cannot pass through the host code
            self.error = self.error or error
            return _NOT_SUPPORTED

    def raise_error(self) -> None:
        """Raises what went wrong inside of a call of the host code, if anything did."""
        if self.error is not None:
            raise self.error

    def on_cuda_dialect_init_library_once(self, library: int, load: int, to_device: int, _: int) -> int:
        prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
        found = prototype(load)(library)
        return int(found or ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)(to_device)(library, 0))

    def on_cuda_dialect_unload_library_once(self, library: int) -> None:
        pass

    def on_cudaLibraryLoadData(self, library: int, *_: int) -> None:
        ctypes.c_void_p.from_address(library).value = 1

    def on_cudaLibraryGetKernel(self, kernel: int, _: int, name: int) -> None:
        self.kernels.append(ctypes.string_at(name).decode())
        ctypes.c_void_p.from_address(kernel).value = len(self.kernels)

    def on_cudaDeviceGetAttribute(self, value: int, attribute: int, _: int) -> None:
        ctypes.c_int32.from_address(value).value = _SHARED_BYTES

    def on_cuKernelGetAttribute(self, value: int, *_: int) -> None:
        ctypes.c_int32.from_address(value).value = 0  # bytes of static shared memory

    def on_cudaGetDevice(self, device: int) -> None:
        ctypes.c_int32.from_address(device).value = 0

    def on_cudaSetDevice(self, device: int) -> None:
        pass

    def on_cudaKernelSetAttributeForDevice(self, *_: int) -> None:
        pass

    def on_cudaLaunchKernelEx(self, config: int, kernel: int, parameters: int) -> None:
        assert self.emulator is not None
        entry, shape = self.kernels[kernel - 1], read_launch(config)
        self.launches.append(shape)
        sizes = [parameter.size for parameter in self.emulator.program(entry).function.parameters]
        result = self.emulator.launch(
            entry, shape.grid, shape.block, read_parameters(parameters, sizes), cluster=shape.cluster,
            shared_bytes=shape.shared_bytes, seed=self.seed, programmatic=shape.programmatic,
        )  # fmt: skip
        self.reports.update(report.kind for report in result.reports)
        self.instructions += result.statistics.warp_instructions
        if fatal := [r for r in result.reports if r.kind in ("deadlock", "fault", "out-of-bounds", "race")]:
            raise RuntimeError(f"{entry[:60]}: {fatal[0]}")


class OnDevice:
    """A CPU tensor that DLPack's readers take for one of CUDA device 0. Its memory is the CPU's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.ndim = tensor, tensor.ndim

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self.tensor.__dlpack__(**{k: v for k, v in options.items() if k == "max_version"})
        api = ctypes.pythonapi
        name_of, pointer_of = api.PyCapsule_GetName, api.PyCapsule_GetPointer
        name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
        pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        name = name_of(capsule)
        # DLManagedTensorVersioned has four fields of eight bytes ahead of the tensor; in which data comes first.
        ahead = 32 if name == b"dltensor_versioned" else 0
        ctypes.c_int32.from_address(pointer_of(capsule, name) + ahead + 8).value = _CUDA_DEVICE
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA_DEVICE, 0
