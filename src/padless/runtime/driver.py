"""The CUDA driver, and the only module that talks to it: load a kernel, encode a tensor map, launch.

``CudaDriver`` drives a GPU. The emulator has a driver with the same methods that executes the kernel on the CPU, so
everything above this module is the same in both.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, Protocol, Self

import torch

from padless.runtime.jit import CompiledKernel
from padless.runtime.tensor_map import TensorMapSpec

# The index of the GPU that is current in this thread. A torch without CUDA has no such function and no GPU to ask for.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)

# The handle of torch's current stream on a device, by index; as above.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


def stream_of(t: torch.Tensor) -> int:
    """The handle of torch's current stream on the device of ``t``; 0 on the CPU."""
    return current_stream(t.get_device()) if t.is_cuda else 0


TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNMENT = 64
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class LaunchShape:
    """Number of CTAs, of threads in each, and of CTAs in a cluster along x.

    programmatic: the launch may begin before the kernel ahead of it in the stream has ended (programmatic dependent
    launch). Only for kernels that execute griddepcontrol.wait before they touch global memory.
    ready: addresses of tensors that they may read before that, since no kernel that may still run writes them; for
        drivers that check.
    """

    grid: int
    block: int
    cluster: int
    programmatic: bool = False
    ready: tuple[int, ...] = field(default=(), compare=False)


# One kernel argument: an integer with its size in bytes, or encoded tensor maps (a multiple of 128 bytes).
Argument = tuple[int, int] | bytes


# A launch with everything packed, to be called with the handle of a stream.
PreparedLaunch = Callable[[int], None]


class ByAddress(int):
    """An argument that the address of a launch's output chooses: a tile counter's number, or where scratch is.

    elsewhere: what another address chooses; it raises LookupError where there is nothing left to choose.
    """

    address: int
    elsewhere: Callable[[int], int]

    def __new__(cls, value: int, address: int, elsewhere: Callable[[int], int]) -> Self:
        made = super().__new__(cls, value)
        made.address, made.elsewhere = address, elsewhere
        return made


class Driver(Protocol):
    """Methods that grouped_gemm needs of a device."""

    kind: str  # of image that load() takes: "cubin" or "ptx"

    @property
    def arch(self) -> str:
        """The architecture that it runs, such as "sm_90a"."""
        ...

    def __hash__(self) -> int: ...

    def num_sms(self, device: int) -> int: ...

    def load(self, kernel: CompiledKernel, device: int) -> Any: ...

    def encode(self, spec: TensorMapSpec) -> bytes: ...

    def prepare(
        self,
        function: Any,
        kernel: CompiledKernel,
        shape: LaunchShape,
        arguments: Sequence[Argument],
        tensors: Sequence[torch.Tensor],
    ) -> PreparedLaunch: ...


class DriverError(RuntimeError):
    """The CUDA driver refused a call."""


class _Attribute(ctypes.Structure):
    # CUlaunchAttribute; a value that is one integer lies in x
    _fields_ = [
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("x", ctypes.c_uint),
        ("y", ctypes.c_uint),
        ("z", ctypes.c_uint),
        ("rest", ctypes.c_char * 52),
    ]


class _LaunchConfig(ctypes.Structure):
    # CUlaunchConfig
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MULTIPROCESSOR_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_COMPUTE_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: this thread has none
_INVALID_HANDLE = 400  # CUDA_ERROR_INVALID_HANDLE: a function of another context


class CudaDriver:
    """A GPU's driver, through ctypes on libcuda: a launch is one foreign call with everything packed before.

    Tensors and arguments say which GPU does what, never which one is current; that stays what it is, after an error too.

    device: the index of the GPU, whose architecture it has.
    programmatic: whether launches may begin before the kernel ahead of them has ended (``LaunchShape.programmatic``).
    """

    kind = "cubin"

    def __init__(self, device: int = 0, programmatic: bool = True) -> None:
        self._device = device
        self.programmatic = programmatic
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(f"no CUDA driver on this machine ({error})") from None
        self._check("cuInit", self._cuda.cuInit(0))
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._resident: set[tuple[object, ...]] = set()  # clusters of which some fit, by kernel

    def _check(self, call: str, code: int) -> None:
        if code != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            reason = text.value.decode() if text.value else "unknown error"
            raise DriverError(f"{call} failed: {reason} (CUresult {code})")

    def num_sms(self, device: int) -> int:
        """Multiprocessors of the device."""
        return self._attribute(_MULTIPROCESSOR_COUNT, device)

    @cached_property
    def arch(self) -> str:
        """The architecture that kernels are compiled for."""
        major, minor = (self._attribute(attribute, self._device) for attribute in _COMPUTE_CAPABILITY)
        return f"sm_{major}{minor}a"

    def _attribute(self, attribute: int, device: int) -> int:
        value = ctypes.c_int()
        self._check("cuDeviceGetAttribute", self._cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
        return value.value

    @contextmanager
    def context_of(self, device: int) -> Iterator[None]:
        """Makes torch's context of ``device`` current in this thread; what was current, if any, is again behind it."""
        if device not in self._contexts:
            context = ctypes.c_void_p()
            self._check("cuDevicePrimaryCtxRetain", self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
            self._contexts[device] = context
        self._check("cuCtxPushCurrent", self._cuda.cuCtxPushCurrent_v2(self._contexts[device]))
        try:
            yield
        finally:
            self._cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def load(self, kernel: CompiledKernel, device: int) -> ctypes.c_void_p:
        """Loads the kernel into the device's context and gives it its shared memory."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        entry = kernel.entry.encode()
        with self.context_of(device):
            self._check("cuModuleLoadData", self._cuda.cuModuleLoadData(ctypes.byref(module), kernel.image))
            self._check("cuModuleGetFunction", self._cuda.cuModuleGetFunction(ctypes.byref(function), module, entry))
            self._check(
                "cuFuncSetAttribute", self._cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, kernel.shared_bytes)
            )
        return function

    def encode(self, spec: TensorMapSpec) -> bytes:
        """The 128 bytes of a tensor map. Raises DriverError when the driver refuses it."""
        rank = len(spec.dims)
        # The driver wants the map on a 64-byte boundary, more than ctypes promises: take one out of a larger buffer.
        buffer = ctypes.create_string_buffer(TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT)
        address = -(-ctypes.addressof(buffer) // _TENSOR_MAP_ALIGNMENT) * _TENSOR_MAP_ALIGNMENT
        encode = partial(
            self._cuda.cuTensorMapEncodeTiled,
            ctypes.c_void_p(address),
            ctypes.c_int(spec.data_type),
            ctypes.c_uint32(rank),
            ctypes.c_void_p(spec.address),
            (ctypes.c_uint64 * rank)(*spec.dims),
            (ctypes.c_uint64 * max(rank - 1, 1))(*spec.strides),
            (ctypes.c_uint32 * rank)(*spec.box),
            (ctypes.c_uint32 * rank)(*(1,) * rank),
            ctypes.c_int(0),  # no interleave
            ctypes.c_int(spec.swizzle),
            ctypes.c_int(spec.l2_promotion),
            ctypes.c_int(0),  # out of bounds: zeros
        )
        code = encode()
        if code == _INVALID_CONTEXT:
            with self.context_of(self._device):
                code = encode()
        if code != 0:
            raise DriverError(f"cuTensorMapEncodeTiled refused {spec} (CUresult {code})")
        return ctypes.string_at(address, TENSOR_MAP_BYTES)

    def prepare(
        self,
        function: ctypes.c_void_p,
        kernel: CompiledKernel,
        shape: LaunchShape,
        arguments: Sequence[Argument],
        tensors: Sequence[torch.Tensor],
    ) -> PreparedLaunch:
        """Packs a launch. ``arguments`` in the kernel's order; ``tensors`` is for drivers that track memory.

        Raises DriverError where no cluster of it can be resident: GPUs differ in how many multiprocessors a cluster has
        to choose from.
        """
        launch = CudaLaunch(self, function, kernel.shared_bytes, shape, arguments, tensors[0].device.index or 0)
        key = (launch.device, function.value, shape.cluster, shape.block)
        if shape.cluster > 1 and key not in self._resident:
            with self.context_of(launch.device):
                if launch.resident_clusters() == 0:
                    raise DriverError(
                        f"{kernel.entry} needs clusters of {shape.cluster} CTAs with {shape.block} threads and "
                        f"{kernel.shared_bytes} bytes of shared memory each, and not one is resident on "
                        f"GPU {launch.device}"
                    )
            self._resident.add(key)
        return launch


class CudaLaunch:
    """A packed launch on a GPU.

    device: the index of the GPU.
    words: its arguments as the driver reads them, each from a 64-bit word on. Who changes them owns the launch (`copy`).
    counters: by the word that it lies in, every argument that an address chooses.
    """

    def __init__(
        self,
        driver: CudaDriver,
        function: ctypes.c_void_p,
        shared_bytes: int,
        shape: LaunchShape,
        arguments: Sequence[Argument],
        device: int,
    ) -> None:
        self._driver = driver
        self.device = device
        self._launch = driver._cuda.cuLaunchKernelEx
        self._function = function
        self._shared_bytes = shared_bytes
        self._shape = shape
        self.counters: dict[int, ByAddress] = {}
        self._starts: list[int] = []
        packed = bytearray()
        for argument in arguments:
            self._starts.append(len(packed))
            if isinstance(argument, bytes):
                packed += argument
                continue
            if isinstance(argument[0], ByAddress):
                self.counters[len(packed) // 8] = argument[0]
            packed += (argument[0] & _WORD).to_bytes(8, "little")  # a smaller integer is the lower part
        self._take(packed)
        attributes = []
        if shape.cluster > 1:
            attributes.append(_Attribute(id=_CLUSTER_DIMENSION, x=shape.cluster, y=1, z=1))
        if shape.programmatic and driver.programmatic:
            attributes.append(_Attribute(id=_PROGRAMMATIC_SERIALIZATION, x=1))
        self._attributes = (_Attribute * len(attributes))(*attributes)

    def _take(self, packed: bytes | bytearray) -> None:
        self.words = (ctypes.c_uint64 * (len(packed) // 8)).from_buffer_copy(packed)
        first = ctypes.addressof(self.words)
        self._pointers = (ctypes.c_void_p * len(self._starts))(*[first + start for start in self._starts])
        # The foreign call with its arguments, one a stream and never changed: threads may share it. Made once, it takes
        # a third of the time.
        self._calls: dict[int, Callable[[], int]] = {}

    def __call__(self, stream: int) -> None:
        if _observers and not is_made(self):
            return
        call = self._calls.get(stream)
        if call is None:
            call = self._calls[stream] = self._call(stream)
        code = call() if current_device() == self.device else _INVALID_CONTEXT
        if code != 0:
            # A device that torch names need not have its context current: torch makes one current when it is needed.
            if code in (_INVALID_CONTEXT, _INVALID_HANDLE):
                with self._driver.context_of(self.device):
                    code = call()
            self._driver._check("cuLaunchKernelEx", code)

    def copy(self, grid: int | None = None) -> CudaLaunch:
        """The same launch with separate words, and another grid where one is given."""
        other = copy(self)
        if grid is not None:
            other._shape = replace(self._shape, grid=grid)
        other._take(bytes(self.words))
        return other

    def words_from(self, byte: int) -> ctypes.Array[ctypes.c_uint64]:
        """The words from a byte of the arguments on: the same memory."""
        return (ctypes.c_uint64 * (len(self.words) - (byte > 0))).from_buffer(self.words, byte)

    @property
    def kernel(self) -> tuple[object, ...]:
        """Kernel, device and options of the launch: all but the values of the arguments."""
        how = (self.device, self._function.value, self._shared_bytes, self._shape, self._driver.programmatic)
        return *how, len(self.words), *self._starts, *self.counters

    def resident_clusters(self) -> int | None:
        """Clusters of this launch that the device can hold together; None where the driver does not say."""
        found = ctypes.c_int()
        ask = self._driver._cuda.cuOccupancyMaxActiveClusters
        code = ask(ctypes.byref(found), self._function, ctypes.byref(self._config(0)))
        return found.value if code == 0 else None

    def _config(self, stream: int) -> _LaunchConfig:
        return _LaunchConfig(
            grid=(self._shape.grid, 1, 1),
            block=(self._shape.block, 1, 1),
            shared_bytes=self._shared_bytes,
            stream=stream,
            attributes=self._attributes,
            num_attributes=len(self._attributes),
        )

    def _call(self, stream: int) -> Callable[[], int]:
        pointers = ctypes.byref(self._pointers)
        return partial(self._launch, ctypes.byref(self._config(stream)), self._function, pointers, None)


# --- what a thread launches --------------------------------------------------------------------------------

# Is told of every launch, None for one that is not by `CudaLaunch`, and says whether it is made.
Observer = Callable[["CudaLaunch | None"], bool]
_observers: dict[int, Observer] = {}  # by thread


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """In this block ``observer`` is told of what this thread launches."""
    thread = threading.get_ident()
    before = _observers.get(thread)
    _observers[thread] = observer
    try:
        yield
    finally:
        if before is None:
            del _observers[thread]
        else:
            _observers[thread] = before


def is_observed() -> bool:
    """Whether this thread has an observer."""
    return bool(_observers) and threading.get_ident() in _observers


def is_made(launch: CudaLaunch | None) -> bool:
    """Whether a launch is to be made in this thread, whose observer is told of it."""
    observer = _observers.get(threading.get_ident())
    return observer is None or observer(launch)


def cuda_driver(device: int = 0) -> CudaDriver:
    """The one driver of the GPU ``device`` in this process. Raises DriverError without one.

    With PADLESS_PROGRAMMATIC_LAUNCH=0 in the environment every launch waits until the kernel ahead of it has ended.
    """
    return _driver_of(device)


@cache
def _driver_of(device: int) -> CudaDriver:
    return CudaDriver(device, programmatic=os.environ.get("PADLESS_PROGRAMMATIC_LAUNCH", "1") != "0")
