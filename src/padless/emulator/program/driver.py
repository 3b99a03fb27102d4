"""The CUDA driver's functions, in Python, over the emulator: what a program without a GPU calls.

Everything happens when it is called, in the order of the calls; that is the order of every stream. Names are those of
cuda.h without version suffixes; the semantics are those of CUDA 13.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from padless.emulator.errors import EmulatorError
from padless.emulator.program.device import COMMON, Chip, Memory
from padless.emulator.program.device_time import DeviceTime
from padless.emulator.program.modules import Function, Loaded, Loader
from padless.emulator.units import tensor_map

OK, INVALID, NOT_FOUND, NOT_SUPPORTED = 0, 1, 500, 801
NAMES = {OK: "CUDA_SUCCESS", INVALID: "CUDA_ERROR_INVALID_VALUE", 201: "CUDA_ERROR_INVALID_CONTEXT",
         209: "CUDA_ERROR_NO_BINARY_FOR_GPU", NOT_FOUND: "CUDA_ERROR_NOT_FOUND", 600: "CUDA_ERROR_NOT_READY",
         NOT_SUPPORTED: "CUDA_ERROR_NOT_SUPPORTED", 999: "CUDA_ERROR_UNKNOWN"}  # fmt: skip
NO_BINARY = 209
DRIVER_VERSION = 13000
SHARED_WITHOUT_ASKING = 48 << 10
CUDART_TABLE = bytes.fromhex("6bd5fb6c5bf4e74a8987d93912fd9df9")  # the first that libcudart asks for
EVENT_WITHOUT_TIMING = 2  # CU_EVENT_DISABLE_TIMING
CONTEXT = 0x10  # the handle of the one context
CLUSTER_DIMENSION, PROGRAMMATIC_SERIALIZATION = 4, 6  # CUlaunchAttributeID
SHARED_SIZE, MAX_DYNAMIC_SHARED = 1, 8  # CUfunction_attribute


# What begins or uses a graph, with the letters of its arguments.
GRAPH_FUNCTIONS = {
    "cuGraphCreate": "pu", "cuGraphInstantiate": "ppz", "cuGraphInstantiateWithFlags": "ppz", "cuGraphLaunch": "pp",
    "cuGraphDestroy": "p", "cuGraphExecDestroy": "p", "cuGraphAddKernelNode": "pppzp", "cuGraphAddNode": "ppppzp",
    "cuStreamBeginCapture": "pi", "cuStreamEndCapture": "pp", "cuStreamBeginCaptureToGraph": "ppppzi",
}  # fmt: skip


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)),
                ("count", ctypes.c_uint)]  # fmt: skip


def put(address: int | None, value: int, kind: Any = ctypes.c_uint64) -> int:
    """Store an output; nothing where the caller gave no place for it. Returns OK."""
    if address:
        kind.from_address(address).value = value
    return OK


def put_int(address: int | None, value: int) -> int:
    return put(address, value, ctypes.c_int)


class Driver:
    """State behind the functions.

    launch: runs a kernel: a function, grid, block, cluster, bytes of shared memory, values of the parameters, and
    whether the launch is programmatic. loader: what makes a module of an image. say: is given sentences for the one who
    runs the program. time: the device's.
    """

    def __init__(
        self, chip: Chip, memory: Memory, loader: Loader, launch: Callable[..., int], say: Callable[[str], None],
        time: DeviceTime,
    ) -> None:  # fmt: skip
        self.chip, self.memory, self.loader, self.launch, self.say = chip, memory, loader, launch, say
        self.time = time
        self.handles = itertools.count(0x1000, 0x10)
        self.modules: dict[int, Loaded] = {}
        self.functions: dict[int, Function] = {}
        self.events: dict[int, float] = {}  # milliseconds
        self.untimed: set[int] = set()  # events without a time
        self.current: int = 0
        self.texts = {code: ctypes.create_string_buffer(name.encode()) for code, name in NAMES.items()}
        self.address_of: Callable[[str], int | None] = lambda name: None

    def table(self) -> Mapping[str, tuple[str, Callable[..., int]]]:
        """Every function: its name, the letters of its arguments (`library.KINDS`), and what it does."""
        yes = self._nothing
        return {
            "cuInit": ("u", yes), "cuDriverGetVersion": ("p", lambda p: put_int(p, DRIVER_VERSION)),
            "cuGetErrorString": ("ip", self._error_text), "cuGetErrorName": ("ip", self._error_text),
            "cuGetExportTable": ("pp", self._export_table),
            "cuGetProcAddress": ("spizp", self._proc_address),
            "cuDeviceGet": ("pi", lambda p, i: put_int(p, i) if i == 0 else 101),
            "cuDeviceGetCount": ("p", lambda p: put_int(p, 1)),
            "cuDeviceGetName": ("pii", self._device_name), "cuDeviceGetUuid": ("pi", self._device_uuid),
            "cuDeviceTotalMem": ("pi", lambda p, i: put(p, self.chip.memory)),
            "cuDeviceGetAttribute": ("pii", lambda p, a, i: put_int(p, self.chip.attribute(a))),
            "cuDeviceComputeCapability": ("ppi", self._capability),
            "cuDevicePrimaryCtxRetain": ("pi", lambda p, i: put(p, CONTEXT)),
            "cuDevicePrimaryCtxRelease": ("i", yes), "cuDevicePrimaryCtxSetFlags": ("iu", yes),
            "cuDevicePrimaryCtxGetState": ("ipp", lambda i, p, q: put_int(p, 0) or put_int(q, 1)),
            "cuCtxGetCurrent": ("p", lambda p: put(p, self.current)), "cuCtxSetCurrent": ("p", self._set_current),
            "cuCtxPushCurrent": ("p", self._set_current), "cuCtxPopCurrent": ("p", lambda p: put(p, CONTEXT)),
            "cuCtxGetDevice": ("p", lambda p: put_int(p, 0)), "cuCtxSynchronize": ("", yes),
            "cuCtxCreate": ("pppp", lambda p, *_: put(p, CONTEXT) or self._set_current(CONTEXT)),
            "cuCtxDestroy": ("p", yes), "cuCtxSetLimit": ("iz", yes),
            "cuCtxGetLimit": ("pi", lambda p, i: put(p, 1 << 20)),
            "cuCtxGetStreamPriorityRange": ("pp", lambda p, q: put_int(p, 0) or put_int(q, -5)),
            "cuModuleLoadData": ("pp", self._load), "cuModuleLoadDataEx": ("ppupp", self._load),
            "cuModuleLoadFatBinary": ("pp", self._load), "cuModuleLoad": ("ps", self._load_file),
            "cuLibraryLoadData": ("ppppuppu", self._load), "cuModuleGetLoadingMode": ("p", lambda p: put_int(p, 1)),
            "cuModuleUnload": ("p", self._unload), "cuLibraryUnload": ("p", self._unload),
            "cuModuleGetFunction": ("pps", self._function), "cuLibraryGetKernel": ("pps", self._function),
            "cuModuleGetGlobal": ("ppps", self._variable), "cuLibraryGetGlobal": ("ppps", self._variable),
            "cuLibraryGetModule": ("pp", lambda p, m: put(p, m)),
            "cuKernelGetFunction": ("pp", lambda p, f: put(p, f)),
            "cuFuncSetAttribute": ("pii", self._set_attribute), "cuFuncGetAttribute": ("pip", self._attribute),
            "cuKernelSetAttribute": ("iipi", lambda a, v, f, d: self._set_attribute(f, a, v)),
            "cuKernelGetAttribute": ("pipi", lambda p, a, f, d: self._attribute(p, a, f)),
            "cuFuncSetCacheConfig": ("pi", yes), "cuFuncGetName": ("pp", self._name),
            "cuKernelGetName": ("pp", self._name),
            "cuFuncLoad": ("p", yes), "cuFuncIsLoaded": ("pp", lambda p, f: put_int(p, 1)),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": ("ppiz", lambda p, f, b, s: put_int(p, 1)),
            "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags": ("ppizu", lambda p, *_: put_int(p, 1)),
            "cuOccupancyMaxActiveClusters": ("ppp", lambda p, *_: put_int(p, max(self.chip.num_sms // 2, 1))),
            "cuMemAlloc": ("pz", self._allocate), "cuMemAllocAsync": ("pzp", self._allocate),
            "cuMemAllocManaged": ("pzu", self._allocate), "cuMemAllocHost": ("pz", self._allocate),
            "cuMemHostAlloc": ("pzu", self._allocate), "cuMemFree": ("d", self._free),
            "cuMemFreeHost": ("d", self._free),
            "cuMemFreeAsync": ("dp", self._free), "cuMemHostGetDevicePointer": ("pdu", lambda p, d, u: put(p, d)),
            "cuMemGetInfo": ("pp", self._memory_info),
            **{f"cuMemcpy{way}": ("ddz", self._copy) for way in ("", "HtoD", "DtoH", "DtoD")},
            **{f"cuMemcpy{way}Async": ("ddzp", self._copy) for way in ("", "HtoD", "DtoH", "DtoD")},
            **{f"cuMemsetD{8 * w}": ("duz", self._fill(w)) for w in (1, 2, 4)},
            **{f"cuMemsetD{8 * w}Async": ("duzp", self._fill(w)) for w in (1, 2, 4)},
            "cuPointerGetAttribute": ("pid", self._pointer_attribute),
            "cuStreamCreate": ("pu", self._handle), "cuStreamCreateWithPriority": ("pui", self._handle),
            "cuStreamDestroy": ("p", yes), "cuStreamSynchronize": ("p", yes), "cuStreamQuery": ("p", yes),
            "cuStreamWaitEvent": ("ppu", yes), "cuStreamIsCapturing": ("pp", lambda s, p: put_int(p, 0)),
            "cuStreamGetCtx": ("pp", lambda s, p: put(p, CONTEXT)),
            "cuEventCreate": ("pu", self._event), "cuEventDestroy": ("p", yes), "cuEventQuery": ("p", yes),
            "cuEventRecord": ("pp", self._record), "cuEventRecordWithFlags": ("ppu", self._record),
            "cuEventSynchronize": ("p", yes), "cuEventElapsedTime": ("ppp", self._elapsed),
            "cuLaunchKernel": ("puuuuuuuppp", self._launch_kernel), "cuLaunchKernelEx": ("pppp", self._launch_ex),
            "cuLaunchCooperativeKernel": ("puuuuuuupp", self._launch_kernel),
            "cuTensorMapEncodeTiled": ("piupppppiiii", self._encode),
            **{name: (letters, self._graph) for name, letters in GRAPH_FUNCTIONS.items()},
            "cuTensorMapReplaceAddress": ("pd", lambda p, d: NOT_SUPPORTED),
        }  # fmt: skip

    # ---- small ones
    def _export_table(self, place: int, which: int) -> int:
        """NVRTC looks for one and does without it."""
        put(place, 0)
        if ctypes.string_at(which, 16) == CUDART_TABLE:
            self.say(
                "the program uses the CUDA runtime API, which needs tables of the driver that are not documented; "
                "use the driver API (cuda.bindings.driver)"
            )
        return NOT_FOUND

    def _nothing(self, *_: Any) -> int:
        return OK

    def _graph(self, *_: Any) -> int:
        self.say(
            "graphs and captured streams are not emulated: kernels run when they are launched; launch them directly"
        )
        return NOT_SUPPORTED

    def _capability(self, major: int, minor: int, device: int) -> int:
        return put_int(major, self.chip.capability[0]) or put_int(minor, self.chip.capability[1])

    def _memory_info(self, free: int, total: int) -> int:
        return put(free, self.chip.memory) or put(total, self.chip.memory)

    def _error_text(self, code: int, text: int) -> int:
        found = self.texts.get(code, self.texts[999])
        put(text, ctypes.addressof(found))
        return OK

    def _proc_address(self, name: bytes, place: int, version: int, flags: int, status: int | None) -> int:
        found = self.address_of(name.decode())
        put(place, found or 0)
        put_int(status, 0 if found else 1)
        return OK if found else NOT_FOUND

    def _device_name(self, text: int, length: int, device: int) -> int:
        ctypes.memmove(text, self.chip.name.encode()[: length - 1] + b"\0", min(len(self.chip.name) + 1, length))
        return OK

    def _device_uuid(self, place: int, device: int) -> int:
        ctypes.memmove(place, b"padless-emulator", 16)
        return OK

    def _set_current(self, context: int | None) -> int:
        self.current = context or 0
        return OK

    def _handle(self, place: int, *_: Any) -> int:
        put(place, next(self.handles))
        return OK

    # ---- modules and functions
    def _load(self, place: int, image: int, *_: Any) -> int:
        found = self.loader.load(image)
        if found is None:
            return NO_BINARY
        handle = next(self.handles)
        self.modules[handle] = found
        put(place, handle)
        return OK

    def _load_file(self, place: int, path: bytes) -> int:
        try:
            with open(path, "rb") as file:
                image = ctypes.create_string_buffer(file.read())
        except OSError:
            return 301  # CUDA_ERROR_FILE_NOT_FOUND
        return self._load(place, ctypes.addressof(image))

    def _unload(self, module: int) -> int:
        self.modules.pop(module, None)
        return OK

    def _function(self, place: int, module: int, name: bytes) -> int:
        found = self.modules[module].function(name.decode())
        if found is None:
            return NOT_FOUND
        handle = next((h for h, f in self.functions.items() if f is found), None) or next(self.handles)
        self.functions[handle] = found
        put(place, handle)
        return OK

    def _variable(self, place: int | None, size: int | None, module: int, name: bytes) -> int:
        found = self.modules[module].variable(name.decode())
        if found is None:
            return NOT_FOUND
        put(place, found[0])
        put(size, found[1])
        return OK

    def _name(self, place: int, function: int) -> int:
        put(place, ctypes.addressof(self.functions[function].name_buffer))
        return OK

    def _set_attribute(self, function: int, attribute: int, value: int) -> int:
        if attribute == MAX_DYNAMIC_SHARED:
            found = self.functions[function]
            if value + found.static_shared > COMMON[97]:
                self.say(f"{found.name}: {value} bytes of dynamic shared memory are more than a CTA has")
                return INVALID
            found.max_dynamic_shared = value
        return OK

    def _attribute(self, place: int, attribute: int, function: int) -> int:
        found = self.functions[function]
        own = {0: found.max_threads, SHARED_SIZE: found.static_shared, MAX_DYNAMIC_SHARED: found.max_dynamic_shared,
               4: 32, 5: 90, 6: 10 * self.chip.capability[0] + self.chip.capability[1]}  # fmt: skip
        return put_int(place, own.get(attribute, 0))

    # ---- memory
    def _allocate(self, place: int, size: int, *_: Any) -> int:
        if not 0 < size <= self.chip.memory:
            return INVALID if size == 0 else 2  # CUDA_ERROR_OUT_OF_MEMORY
        put(place, self.memory.allocate(size))
        return OK

    def _free(self, address: int, *_: Any) -> int:
        return OK if address == 0 or self.memory.free(address) else INVALID

    def _copy(self, target: int, source: int, size: int, *_: Any) -> int:
        try:
            self.memory.copy(target, source, size)
        except EmulatorError as error:
            self.say(f"copy of {size} bytes: {error}")
            return INVALID
        return OK

    def _fill(self, width: int) -> Callable[..., int]:
        def fill(target: int, value: int, count: int, *_: Any) -> int:
            try:
                self.memory.fill(target, value, count, width)
            except EmulatorError as error:
                self.say(f"memset: {error}")
                return INVALID
            return OK

        return fill

    def _pointer_attribute(self, place: int, attribute: int, address: int) -> int:
        if attribute == 2:  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE: device
            put(place, 2, ctypes.c_uint)
        elif attribute in (3, 4):  # device and host pointer
            put(place, address)
        elif attribute == 9:  # device ordinal
            put_int(place, 0)
        else:
            return NOT_SUPPORTED
        return OK

    # ---- events: the device's time
    def _event(self, place: int, flags: int) -> int:
        put(place, handle := next(self.handles))
        if flags & EVENT_WITHOUT_TIMING:
            self.untimed.add(handle)
        return OK

    def _record(self, event: int, *_: Any) -> int:
        self.events[event] = self.time.ns / 1e6 if event in self.untimed else self.time.record()
        return OK

    def _elapsed(self, place: int, start: int, end: int) -> int:
        if start not in self.events or end not in self.events or {start, end} & self.untimed:
            return 400  # CUDA_ERROR_INVALID_HANDLE
        ctypes.c_float.from_address(place).value = self.time.between(self.events[start], self.events[end])
        return OK

    # ---- launches
    def _launch_kernel(self, function: int, *rest: Any) -> int:
        *numbers, _stream, parameters, extra = rest if len(rest) == 10 else (*rest, None)
        grid, block, shared_bytes = tuple(numbers[:3]), tuple(numbers[3:6]), numbers[6]
        return self._run(function, grid, block, (1, 1, 1), shared_bytes, parameters, extra, False)

    def _launch_ex(self, config: int, function: int, parameters: int | None, extra: int | None) -> int:
        given = _Config.from_address(config)
        cluster, programmatic = (1, 1, 1), False
        for i in range(given.count):
            attribute = given.attributes[i]
            if attribute.id == CLUSTER_DIMENSION:
                cluster = tuple(attribute.value[:3])
            elif attribute.id == PROGRAMMATIC_SERIALIZATION:
                programmatic = bool(attribute.value[0])
        shape = tuple(given.grid), tuple(given.block), cluster
        return self._run(function, *shape, given.shared_bytes, parameters, extra, programmatic)

    def _run(
        self, function: int, grid: Any, block: Any, cluster: Any, shared_bytes: int, parameters: int | None,
        extra: int | None, programmatic: bool,
    ) -> int:  # fmt: skip
        found = self.functions.get(function)
        if found is None:
            return 400
        allowed = max(found.max_dynamic_shared, SHARED_WITHOUT_ASKING - found.static_shared)
        if shared_bytes > allowed:
            self.say(
                f"{found.name}: a launch with {shared_bytes} bytes of dynamic shared memory, allowed are {allowed}; "
                "set CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES first"
            )
            return INVALID
        values = found.values_at(parameters) if parameters else found.values_in(extra)
        return self.launch(found, grid, block, cluster, shared_bytes, values, programmatic)

    def _encode(self, place: int, kind: int, rank: int, address: int | None, *rest: Any) -> int:
        dims, strides, box, steps, interleave, swizzle, promotion, fill = rest

        def numbers(where: int | None, count: int, of: Any) -> tuple[int, ...]:
            return tuple((of * count).from_address(where)) if where and count else ()

        try:
            if place % 64:
                raise ValueError(f"the map lies at {place:#x}, it has to be at a multiple of 64 bytes")
            raw = tensor_map.encode_tiled(
                kind, address or 0, numbers(dims, rank, ctypes.c_uint64), numbers(strides, rank - 1, ctypes.c_uint64),
                numbers(box, rank, ctypes.c_uint32), numbers(steps, rank, ctypes.c_uint32), interleave=interleave,
                swizzle=swizzle, l2_promotion=promotion, oob_fill=fill,
            )  # fmt: skip
        except ValueError as error:
            self.say(f"cuTensorMapEncodeTiled: {error}")
            return INVALID
        ctypes.memmove(place, raw, len(raw))
        return OK
