"""CuTe DSL's programs: what they compile calls the CUDA runtime, whose functions are Python's here.

A compiled program is a host module in MLIR's LLVM dialect that declares the runtime's functions. Before it becomes
machine code each declaration gets a body that calls an address, behind which a method of `HostCode` is.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

DECLARATION = re.compile(
    r"^  llvm\.func @((?:_cu|cuda_dialect_)\w+)\(([^)]*)\)(?: -> (\S+))?(?: attributes .*)?$", re.MULTILINE
)
C_TYPES = {"!llvm.ptr": ctypes.c_void_p, "i32": ctypes.c_int32, "i64": ctypes.c_int64}
SHARED_BYTES = 232_448  # cudaDevAttrMaxSharedMemoryPerBlockOptin of sm_90 and sm_100
MAX_SHARED_ATTRIBUTE, MULTIPROCESSORS_ATTRIBUTE = 97, 16  # cudaDeviceAttr
CLUSTER, PROGRAMMATIC = 4, 6  # cudaLaunchAttributeID
NOT_SUPPORTED = 801  # cudaErrorNotSupported


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
        if kind == CLUSTER:
            cluster = (x, y, z)
        elif kind == PROGRAMMATIC:
            programmatic = bool(x)
    return LaunchShape(tuple(sizes[:3]), tuple(sizes[3:]), cluster, shared_bytes, programmatic)


def with_driver(module: str, address_of: Callable[[str, tuple[str, ...], str | None], int]) -> str:
    """The text of a host module in which every function of the runtime is defined: it calls the address that
    ``address_of(name, types of the arguments, type of the result or None)`` gives."""

    def defined(match: re.Match[str]) -> str:
        name, result = match[1], match[3]
        types = tuple(t for t in match[2].split(", ") if t)
        if not {*types, *([result] if result else [])} <= set(C_TYPES) or result == "!llvm.ptr":
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

    return DECLARATION.sub(defined, module)


@dataclass
class HostCode:
    """The runtime's functions of one program, with one device. A kernel's handle is its place in `kernels`, from 1."""

    kernels: list[Any] = field(default_factory=list, kw_only=True)
    num_sms: int = field(default=1, kw_only=True)
    _functions: list[Any] = field(default_factory=list, init=False, repr=False)  # as long as the device lives

    def kernel(self, name: str) -> Any:
        """Look up what `launch` is given for a kernel of this name."""
        return name

    def launch(self, kernel: Any, shape: LaunchShape, parameters: int) -> int:
        """Run a kernel; parameters: the address of an array of their addresses. Returns a cudaError_t."""
        raise NotImplementedError

    def address_of(self, name: str, types: tuple[str, ...], result: str | None) -> int:
        """The address of a C function that ends in the method of this name, or in an error code."""
        prototype = ctypes.CFUNCTYPE(C_TYPES.get(result or ""), *(C_TYPES[t] for t in types))
        function = prototype(lambda *arguments: self._call(name, arguments))
        self._functions.append(function)
        return int(ctypes.cast(function, ctypes.c_void_p).value or 0)

    def other(self, name: str) -> Callable[..., int] | None:
        """A stand-in for a function that has no method here, None where there is none."""
        return None

    def failed(self, name: str, error: Exception) -> None:
        """A call that raised; the host code gets an error code."""
        raise NotImplementedError

    def _call(self, name: str, arguments: tuple[int, ...]) -> int:
        method = getattr(self, f"on{name}" if name.startswith("_") else f"on_{name}", None) or self.other(name)
        try:
            if method is None:
                raise NotImplementedError(f"the host code calls {name}, which has no stand-in")
            return int(method(*arguments) or 0)
        except Exception as error:  # cannot pass through the host code
            self.failed(name, error)
            return NOT_SUPPORTED

    def on_cuda_dialect_init_library_once(self, library: int, load: int, to_device: int, _: int) -> int:
        prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
        found = prototype(load)(library)
        return int(found or ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32)(to_device)(library, 0))

    def on_cuda_dialect_unload_library_once(self, library: int) -> None:
        pass

    def on_cuda_dialect_assert_success(self, code: int) -> None:
        if code:
            raise RuntimeError(f"the driver answered {code} to the host code")

    def on_cudaLibraryLoadData(self, library: int, *_: int) -> None:
        ctypes.c_void_p.from_address(library).value = 1

    def on_cudaLibraryGetKernel(self, kernel: int, _: int, name: int) -> None:
        self.kernels.append(self.kernel(ctypes.string_at(name).decode()))
        ctypes.c_void_p.from_address(kernel).value = len(self.kernels)

    def on_cudaDeviceGetAttribute(self, value: int, attribute: int, _: int) -> None:
        known = {MAX_SHARED_ATTRIBUTE: SHARED_BYTES, MULTIPROCESSORS_ATTRIBUTE: self.num_sms}
        ctypes.c_int32.from_address(value).value = known.get(attribute, SHARED_BYTES)

    def on_cuKernelGetAttribute(self, value: int, *_: int) -> None:
        ctypes.c_int32.from_address(value).value = 0  # bytes of static shared memory

    def on_cudaGetDevice(self, device: int) -> None:
        ctypes.c_int32.from_address(device).value = 0

    def on_cudaSetDevice(self, device: int) -> None:
        pass

    def on_cudaKernelSetAttributeForDevice(self, *_: int) -> None:
        pass

    def on_cudaLaunchKernelEx(self, config: int, kernel: int, parameters: int) -> int:
        return self.launch(self.kernels[kernel - 1], read_launch(config), parameters)


@dataclass
class ProgramCode(HostCode):
    """The runtime of one module that a program compiled.

    modules: what was loaded of the PTX that its compiler left, newest first. run: runs a function with grid, block,
    cluster, bytes of shared memory, the parameters' values and whether the launch is programmatic. refuse: is given
    sentences about what could not be done. driver: the driver's functions by name, as `Driver.table` has them.
    """

    modules: Sequence[Any]
    run: Callable[..., int]
    refuse: Callable[[str], None]
    driver: Mapping[str, tuple[str, Callable[..., int]]]

    def other(self, name: str) -> Callable[..., int] | None:
        return self.driver[name[1:]][1] if name[1:] in self.driver else None

    def failed(self, name: str, error: Exception) -> None:
        self.refuse(f"{name}: {type(error).__name__}: {error}")

    def kernel(self, name: str) -> Any:
        found = next((f for f in (module.function(name) for module in self.modules) if f is not None), None)
        if found is None:
            raise LookupError(f"no PTX was left for the kernel {name}")
        return found

    def launch(self, kernel: Any, shape: LaunchShape, parameters: int) -> int:
        values = kernel.values_at(parameters) if parameters else []
        return self.run(kernel, shape.grid, shape.block, shape.cluster, shape.shared_bytes, values, shape.programmatic)


class CuteDsl:
    """Changes to CuTe DSL's modules. load: makes a module of PTX, None where it is refused. refuse: is given sentences
    about what could not be done, say: others."""

    def __init__(
        self, folder: Path, chip: Any, load: Callable[[str], Any], run: Callable[..., int],
        refuse: Callable[[str], None], say: Callable[[str], None], driver: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.folder, self.chip, self.load, self.run = folder, chip, load, run
        self.refuse, self.say, self.driver = refuse, say, driver
        self.modules: list[Any] = []
        self.kept: list[ProgramCode] = []
        folder.mkdir(exist_ok=True)
        major = chip.capability[0]
        os.environ |= {"CUTE_DSL_ARCH": f"sm_{10 * major}a", "CUTE_DSL_KEEP": "ptx", "CUTE_DSL_DUMP_DIR": str(folder)}
        os.environ |= {"CUTE_DSL_DISABLE_FILE_CACHING": "1", "CUTE_DSL_LINEINFO": "1"}
        # What is compiled here holds addresses of this process: it must not be found by another.
        os.environ |= {"QUACK_CACHE_ENABLED": "0", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}

    def changes(self) -> dict[str, Callable[[ModuleType], None]]:
        """By module."""
        return {
            "cutlass.base_dsl.compiler": self._compiler,
            "cutlass.cutlass_dsl.tvm_ffi_provider": self._exporter,
            "cutlass.cutlass_dsl.cuda_jit_executor": self._executor,
            "cutlass.utils.hardware_info": self._hardware,
            "cutlass.testing": self._testing,
        }

    def linked(self, module: Any) -> Any:
        """A host module whose runtime is here."""
        from cutlass._mlir import ir

        for path in sorted(self.folder.glob("*.ptx"), key=lambda p: p.stat().st_mtime_ns):
            made = self.load(path.read_text().rstrip("\0"))
            path.unlink()
            if made is not None:
                self.modules.insert(0, made)
        code = ProgramCode(list(self.modules), self.run, self.refuse, self.driver, num_sms=self.chip.num_sms)
        self.kept.append(code)
        with module.context:
            return ir.Module.parse(with_driver(str(module), code.address_of))

    def _compiler(self, compiler: Any) -> None:
        jit = compiler.Compiler.jit

        def changed(made: Any, module: Any, *rest: Any, **options: Any) -> Any:
            return jit(made, self.linked(module), *rest, **options)

        compiler.Compiler.jit = changed

    def _exporter(self, provider: Any) -> None:
        export = provider._aot_support.export_module_to_bytes

        def changed(module: Any, **options: Any) -> Any:
            return export(self.linked(module), **options)

        provider._aot_support.export_module_to_bytes = changed

    def _executor(self, executor: Any) -> None:
        executor.CudaDialectJitCompiledFunction.num_devices = 1
        executor.CudaDialectJitModule.unload = lambda module: module.cuda_library.clear()

    def _hardware(self, hardware: Any) -> None:
        def clusters(info: Any, cluster_size: int, stream: Any = None) -> int:
            return max(self.chip.num_sms // cluster_size, 1)

        hardware.HardwareInfo.get_max_active_clusters = clusters

    def _testing(self, testing: Any) -> None:
        def benchmark(
            callable: Any, *, kernel_arguments: Any = None, workspace_generator: Any = None, **_: Any
        ) -> float:
            given = workspace_generator() if workspace_generator else kernel_arguments or testing.JitArguments()
            callable(*given.args, **given.kwargs)
            self.say("cutlass.testing.benchmark, a measurement of speed, is one call and returns NaN")
            return float("nan")

        testing.benchmark = benchmark
