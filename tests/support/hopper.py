"""A process with a GPU that is not there, a Hopper one: everything up to the launches happens, and they are recorded.

Tensors lie in the CPU's memory and say that they are on the GPU. Triton compiles for it and is given handles; padless's
launches end in a libcuda that records kernel, grid, stream and every byte of the arguments. Nothing is computed.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver as triton_driver

from padless.kernels import launch, remembered, replay
from padless.kernels.sm90_moe_decode import host as moe_decode
from padless.quantization.triton import casts, launches
from padless.runtime import devices, driver, jit
from padless.runtime.driver import ByAddress, CudaDriver, CudaLaunch

STREAM = 0x5000
MAKERS = ("arange", "empty", "empty_strided", "full", "ones", "tensor", "zeros")


def forget_devices() -> None:
    """Empties the caches of what is known of a device."""
    for cached in (
        devices._cuda_of,
        driver._driver_of,
        devices.capability_of,
        launches.is_programmatic,
        casts.casts_in_hardware,
    ):
        cached.cache_clear()


def on_the_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the CPU for a GPU among its arguments."""

    def there(value: Any) -> Any:
        return "cpu" if isinstance(value, torch.device) and value.type == "cuda" else value

    return lambda *args, **kwargs: function(*map(there, args), **{name: there(v) for name, v in kwargs.items()})


@dataclass(frozen=True)
class Launched:
    """A launch as the driver was given it."""

    kernel: int
    grid: int
    block: int
    shared_bytes: int
    stream: int
    attributes: tuple[tuple[int, int], ...]
    arguments: tuple[bytes, ...]


HANDLES: dict[Any, int] = {}  # of functions, which Triton keeps for the whole process


def handle_of(function: Any) -> int:
    return HANDLES.setdefault(function, 0x7000 + 0x10 * len(HANDLES))


class Gpu:
    """libcuda: the functions that a CudaDriver calls. index: the device that torch says tensors are on."""

    def __init__(self, quick: bool, arch: str) -> None:
        self.launched: list[Launched] = []
        self.arch = arch
        self.capability = int(arch.removeprefix("sm_").rstrip("a"))
        self.by_triton = 0
        self.index, self.stream = 0, STREAM
        self._sizes: dict[int, list[int]] = {}
        self.counters: set[tuple[int, int]] = set()  # (kernel, argument)
        self.launched_by: Callable[[Launched], object] = lambda one: None
        # What was said of streams: ("wait", the stream waited for, the one that waits), and ("memory", the address of a
        # tensor, a stream that uses it).
        self.orders: list[tuple[str, int, int]] = []
        self.quick = quick

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: None) -> int:
        if self.quick:
            return 0
        c = config._obj
        sizes = self._sizes[function.value]
        assert len(pointers._obj) == len(sizes)
        given = tuple(ctypes.string_at(at, size) for at, size in zip(pointers._obj, sizes, strict=True))
        attributes = tuple((c.attributes[i].id, c.attributes[i].x) for i in range(c.num_attributes))
        one = Launched(function.value, c.grid[0], c.block[0], c.shared_bytes, c.stream, attributes, given)
        self.launched.append(one)
        self.launched_by(one)
        return 0

    def cuOccupancyMaxActiveClusters(self, clusters: Any, function: Any, config: Any) -> int:
        clusters._obj.value = 66
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        return 0

    def packed(self, function: Any, arguments: Any) -> None:
        """Is told of every launch that is packed."""
        counters = [i for i, a in enumerate(arguments) if isinstance(a, tuple) and isinstance(a[0], ByAddress)]
        self.counters.update((function.value, i) for i in counters)
        self._sizes[function.value] = [len(a) if isinstance(a, bytes) else a[1] for a in arguments]

    def encode(self, me: Any, spec: Any) -> bytes:
        """As a real one: the address, then what else there is."""
        rest = repr((spec.dims, spec.strides, spec.box, spec.swizzle, spec.data_type))
        return spec.address.to_bytes(8, "little") + hash(rest).to_bytes(9, "little", signed=True) + bytes(111)


@dataclass(frozen=True)
class _Stream:
    """A stream, as torch.cuda.current_stream gives it, and its events."""

    gpu: Gpu
    handle: int

    def synchronize(self) -> None: ...

    def record_event(self) -> _Stream:
        return self

    def wait_event(self, event: _Stream) -> None:
        self.gpu.orders.append(("wait", event.handle, self.handle))


@contextmanager
def _in_stream(stream: _Stream) -> Iterator[None]:
    before, stream.gpu.stream = stream.gpu.stream, stream.handle
    try:
        yield
    finally:
        stream.gpu.stream = before


def _as_parameter(kind: str, value: Any) -> bytes:
    if kind.startswith("*"):
        return struct.pack("<Q", value.data_ptr())
    return struct.pack({"i32": "<i", "i64": "<q", "fp32": "<f"}[kind], value)


class _Triton:
    """Triton's driver: one, since Triton keeps compiled kernels and their launchers."""

    gpu: Gpu

    def __init__(self) -> None:
        self.utils = self

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, ...]:
        return 1, handle_of((name, device, len(HANDLES))), 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 228000, "multiprocessor_count": 132}

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """As Triton's launcher: what is not compiled in, then two addresses of scratch memory."""

        def launched(programs: int, _y: int, _z: int, stream: int, function: int, *rest: Any) -> None:
            pairs = zip(source.signature.values(), rest[4:], strict=True)
            given = [_as_parameter(kind, value) for kind, value in pairs if kind != "constexpr"]
            attributes = ((6, 1),) if metadata.launch_pdl else ()
            arguments = (*given, bytes(8), bytes(8))
            threads = 32 * metadata.num_warps
            one = Launched(function, programs, threads, metadata.shared, stream, attributes, arguments)
            self.gpu.by_triton += 1
            self.gpu.launched.append(one)
            self.gpu.launched_by(one)

        return launched

    def get_current_device(self) -> int:
        return self.gpu.index

    def get_current_stream(self, device: int) -> int:
        return self.gpu.stream + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.gpu.capability, 32)


_TRITON = _Triton()


@contextmanager
def pretended(quick: bool = False, arch: str = "sm_90a", num_sms: int = 132) -> Iterator[Gpu]:
    """A GPU inside. quick: launches are not recorded, for timing what is in front of them."""
    forget_devices()
    launch.load_kernel.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        gpu = Gpu(quick, arch)

        def start(me: CudaDriver, device: int = 0, programmatic: bool = True) -> None:
            me._device, me.programmatic, me._cuda, me._contexts, me._resident = device, programmatic, gpu, {}, set()
            vars(me)["arch"] = arch

        def load(me: CudaDriver, kernel: Any, device: int) -> ctypes.c_void_p:
            return ctypes.c_void_p(handle_of((kernel, device)))

        def compiled(*arguments: Any) -> jit.CompiledKernel:
            return jit.CompiledKernel(repr(arguments).encode(), "cubin", "entry", 202_752, 384, 5, 168, 0, 0, "")

        def packed(me: CudaLaunch, *given: Any) -> None:
            gpu.packed(given[1], given[4])
            pack(me, *given)

        pack = CudaLaunch.__init__
        patch.setattr(CudaDriver, "__init__", start)
        patch.setattr(CudaDriver, "num_sms", lambda me, device: num_sms)
        patch.setattr(CudaDriver, "load", load)
        patch.setattr(CudaDriver, "encode", lambda me, spec: gpu.encode(me, spec))
        patch.setattr(CudaLaunch, "__init__", packed)
        patch.setattr(launch, "compile_kernel", compiled)
        patch.setattr(jit, "nvrtc_version", lambda: "13.0")
        patch.setattr(driver, "current_device", lambda: gpu.index)
        _TRITON.gpu = gpu
        patch.setattr(triton_driver, "_active", _TRITON)
        patch.setattr(launches, "_KNOWN", {})
        patch.setattr(remembered, "_KNOWN", {})
        patch.setattr(replay, "_REPLAYS", {})
        for name in ("_CHUNKS", "_USED", "_NEXT", "_SCRATCH"):
            patch.setattr(moe_decode, name, {})
        answers = {
            "is_available": lambda: True, "device_count": lambda: 2, "current_device": lambda: gpu.index,
            "get_device_capability": lambda device=None: divmod(gpu.capability, 10),
            "get_device_name": lambda device=None: "Pretended",
            "is_current_stream_capturing": lambda: False,
            "current_stream": lambda device=None: _Stream(gpu, gpu.stream + gpu.index),
            "ExternalStream": lambda handle, device=None: _Stream(gpu, handle), "stream": _in_stream,
        }  # fmt: skip
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(driver, "current_stream", lambda index: gpu.stream + index)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: gpu.stream + index, raising=False)
        for name in MAKERS:
            patch.setattr(torch, name, on_the_cpu(getattr(torch, name)))
        patch.setattr(torch.Tensor, "device", property(lambda t: torch.device("cuda", gpu.index)))
        patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        patch.setattr(torch.Tensor, "get_device", lambda t: gpu.index)
        patch.setattr(
            torch.Tensor, "record_stream", lambda t, stream: gpu.orders.append(("memory", t.data_ptr(), stream.handle))
        )
        yield gpu
    forget_devices()
    launch.load_kernel.cache_clear()
