"""Compiled Triton kernels as padless launches them, and those that padless-cubins has: found without a compiler.

A kernel of the package is found by the hash of all that Triton would compile it from: its source and those that it
calls, Triton's version, the GPU's architecture, facts of arguments, constants, options, and what the environment asks of
Triton.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import ctypes
import hashlib
import re
import struct
from dataclasses import asdict, dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, Self

import torch
import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITCallable

from padless.kernels.remembered import keep
from padless.runtime import devices, driver, jit, shipped
from padless.runtime.driver import CudaLaunch, LaunchShape

# Types of parameters: how they are packed into a 64-bit word, and their bytes.
_NUMBERS = {"pointer": ("Q", 8), "i32": ("i4x", 4), "i64": ("q", 8), "fp32": ("f4x", 4)}
_MOST_GRIDS = 64
_PARAMETER = re.compile(r"\.param\s+\.[a-z]+(\d+)")


@dataclass(frozen=True)
class Description:
    """The facts of a compiled kernel that a launch needs.

    kinds: of the first arguments, "constexpr" where they are compiled in. sizes: bytes of the kernel's parameters, those
    for addresses of scratch memory, which it does not have, at the end.
    """

    entry: str
    shared_bytes: int
    threads: int
    programmatic: bool
    kinds: list[str]
    sizes: list[int]

    @classmethod
    def of(cls, compiled: Any, num_arguments: int) -> Self | None:
        """None where the kernel's own parameters are not those of its signature, or it is launched in another way."""
        data = compiled.metadata
        needs = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid")
        entry = re.search(r"\.entry\s+\w+\((.*?)\)", compiled.asm["ptx"], re.DOTALL)
        if data.num_ctas != 1 or any(getattr(data, name, 0) for name in needs) or entry is None:
            return None
        every = ["pointer" if kind.startswith("*") else kind for kind in compiled.src.signature.values()]
        kinds, late = every[:num_arguments], every[num_arguments:]
        own = [kind for kind in kinds if kind != "constexpr"]
        if {*late} - {"constexpr"} or not _NUMBERS.keys() >= {*own}:
            return None
        own_sizes = [_NUMBERS[kind][1] for kind in own]
        sizes = [int(bits) // 8 for bits in _PARAMETER.findall(entry[1])]
        scratch = [8] * (len(sizes) - len(own_sizes))
        if sizes != own_sizes + scratch or len(scratch) > 2:
            return None
        is_programmatic = bool(getattr(data, "launch_pdl", False))
        return cls(data.name, data.shared, 32 * data.num_warps, is_programmatic, kinds, sizes)


class Compiled:
    """A loaded kernel, launched by the driver: to be called with a number of programs and the first arguments."""

    def __init__(self, description: Description, function: ctypes.c_void_p, device: int) -> None:
        shape = LaunchShape(1, description.threads, 1, description.programmatic)
        zeros = [(0, size) for size in description.sizes]
        gpu = driver.cuda_driver(device)
        self._prototype = CudaLaunch(gpu, function, description.shared_bytes, shape, zeros, device)
        self._is_taken = [kind != "constexpr" for kind in description.kinds]
        packed = "".join(_NUMBERS[kind][0] for kind in description.kinds if kind != "constexpr")
        self._pack_into = struct.Struct("<" + packed).pack_into
        self._device = device
        self._idle: dict[int, list[CudaLaunch]] = {}  # by programs; each is used by one call at a time

    def __call__(self, programs: int, arguments: tuple[Any, ...]) -> None:
        values = [
            value.data_ptr() if isinstance(value, torch.Tensor) else value
            for value, is_taken in zip(arguments, self._is_taken, strict=False)
            if is_taken
        ]
        idle = self._idle.get(programs)
        if idle is None:
            idle = keep(self._idle, _MOST_GRIDS, programs, [])
        try:
            launch = idle.pop()
        except IndexError:
            launch = self._prototype.copy(programs)
        self._pack_into(launch.words, 0, *values)
        launch(driver.current_stream(self._device))
        if not driver.is_observed():  # an observer reads the launch later
            idle.append(launch)


# --- compiled before they are installed ------------------------------------------------------------------


@lru_cache(maxsize=256)
def sources_of(kernel: Any) -> list[tuple[str, ...]]:
    """Names and texts of a kernel and all that it calls, and constants that they name, in a fixed order.

    Triton's own key is of no use here: its library has functions that call each other in circles, and the key of what
    calls them depends on which kernel of the process had its key made first.
    """
    found: dict[int, Any] = {}
    constants: set[tuple[str, ...]] = set()
    waiting = [kernel]
    while waiting:
        function = waiting.pop()
        if id(function) in found:
            continue
        found[id(function)] = function
        names, known = function.fn.__code__.co_names, function.fn.__globals__
        values = [(name, known[name]) for name in names if name in known]
        modules = [value for _, value in values if isinstance(value, ModuleType)]
        while modules:  # tl.sum, and tl.extra.cuda.some_function
            module = modules.pop()
            inside = [(name, vars(module)[name]) for name in names if name in vars(module)]
            modules += [value for _, value in inside if isinstance(value, ModuleType) and value is not module]
            values += inside
        waiting += [value for _, value in values if isinstance(value, JITCallable)]
        constants |= {(function.__module__, n, repr(v)) for n, v in values if isinstance(v, triton.language.constexpr)}
    texts = [(f.__module__, f.__name__, f.src, str(getattr(f, "noinline", False))) for f in found.values()]
    return [*sorted(texts), *sorted(constants)]


def name_of(kernel: Any, capability: int, facts: list[Any], options: dict[str, Any]) -> str:
    """Name of a compiled kernel's file, which holds the hash of everything that can change its image.

    kernel: a @triton.jit function. capability: 90 for Hopper. facts: what it depends on of each of its first arguments.
    options: its other parameters, all of them constants, and options of the compiler.
    """
    asked = {
        "debug": kernel.debug or knobs.runtime.debug,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
    }
    resolved = vars(make_backend(GPUTarget("cuda", capability, 32)).parse_options(options | asked))
    parts = (
        triton.__version__,
        sources_of(kernel),
        facts,
        sorted(options.items()),
        sorted((name, value) for name, value in resolved.items() if name != "extern_libs"),  # paths of this machine
        sorted(get_cache_invalidating_env_vars().items()),
        (knobs.compilation.always_compile, knobs.compilation.override, knobs.nvidia.libdevice_path),
        knobs.runtime.add_stages_inspection_hook is None,
    )
    digest = hashlib.sha256("\0".join(map(repr, parts)).encode()).hexdigest()
    return f"{kernel.__name__.strip('_')}-sm_{capability}-{digest[:24]}"


def shipped_kernel(kernel: Any, device: int, facts: list[Any], options: dict[str, Any]) -> Compiled | None:
    """The kernel as padless-cubins has it, loaded into a GPU; None where it has none."""
    if (found := shipped.shipped()) is None or not found.kernels:
        return None
    major, minor = devices.capability_of(device)
    read = found.read(name_of(kernel, 10 * major + minor, facts, options))
    if read is None:
        return None
    image, said = read
    description = Description(**{name: said[name] for name in Description.__dataclass_fields__})
    loaded = jit.CompiledKernel(
        image, "cubin", description.entry, description.shared_bytes, description.threads, 1, 0, 0, 0, ""
    )
    return Compiled(description, driver.cuda_driver(device).load(loaded, device), device)


def compile_for(
    kernel: Any, capability: int, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[bytes, dict[str, Any]] | None:
    """Image and description of a kernel for a GPU that need not be here; None where it is launched in another way.

    arguments: as of the launch, dtypes in the place of tensors, whose addresses count as multiples of 16.
    """
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Target(capability))  # type: ignore[arg-type]
    try:
        compiled = kernel.warmup(*arguments, grid=(1,), **options)
    finally:
        triton.runtime.driver._active = before
    description = Description.of(compiled, len(arguments))
    return None if description is None else (compiled.asm["cubin"], asdict(description))


class _Target:
    """Triton's driver of a GPU that is not here, for which it compiles. Its index is its capability: Triton keeps what
    it knows of a target by index."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 1000 + self._capability

    def get_current_stream(self, device: int) -> int:
        return 0
