"""What a program finds where a GPU would be: attributes of the device, and memory that the host and kernels share."""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from padless.emulator.errors import LaunchError
from padless.emulator.state.memory import DeviceMemory

ALIGNMENT = 256  # of what cuMemAlloc returns
POISON = 0xFF  # NaN in most formats


@dataclass(frozen=True)
class Chip:
    """A GPU as the driver describes it. attributes: by CUdevice_attribute, apart from those that all here share."""

    name: str
    capability: tuple[int, int]
    memory: int
    num_sms: int

    def attribute(self, number: int) -> int:
        """A CUdevice_attribute; 0 for what neither chip has or nobody here knows."""
        own = {16: self.num_sms, 75: self.capability[0], 76: self.capability[1]}
        return own.get(number, COMMON.get(number, 0))


# CUdevice_attribute -> value, the same for H200 and B200.
COMMON = {
    1: 1024, 2: 1024, 3: 1024, 4: 64, 5: 2**31 - 1, 6: 65535, 7: 65535, 8: 48 << 10, 9: 64 << 10, 10: 32, 11: 2**31 - 1,
    12: 65536, 13: 1_980_000, 14: 512, 15: 1, 17: 0, 19: 1, 20: 0, 31: 1, 32: 0, 33: 1, 36: 2_619_000, 37: 5120,
    38: 60 << 20, 39: 2048, 40: 3, 41: 1, 78: 1, 79: 1, 80: 1, 81: 228 << 10, 82: 65536, 83: 1, 89: 1, 90: 1, 95: 1,
    97: 227 << 10, 102: 1, 106: 32, 109: 30 << 20, 111: 1024, 115: 1, 120: 1, 123: 1,
}  # fmt: skip
# The attribute that is asked for most is how many CTAs a persistent kernel gets; num_sms of `--sms` takes its place.
CHIPS = {"H200": Chip("NVIDIA H200", (9, 0), 141 << 30, 132), "B200": Chip("NVIDIA B200", (10, 0), 180 << 30, 148)}


@dataclass
class Memory:
    """Device memory at addresses of the host, so that a tensor of the CPU is what its data_ptr says.

    arrays: what was allocated by the driver, by address. modules: the variables of loaded modules.
    """

    modules: DeviceMemory = field(default_factory=DeviceMemory)
    arrays: dict[int, Any] = field(default_factory=dict)

    def allocate(self, size: int) -> int:
        """The address of fresh bytes, all 0xFF."""
        whole = np.full(max(size, 1) + 2 * ALIGNMENT, POISON, np.uint8)
        start = -whole.ctypes.data % ALIGNMENT
        array = whole[start : start + size]
        self.arrays[array.ctypes.data] = array
        return int(array.ctypes.data)

    def free(self, address: int) -> bool:
        """Whether there was something to free."""
        return self.arrays.pop(address, None) is not None

    def visible(self) -> DeviceMemory:
        """All that a kernel may touch now: allocations, variables, and the storage of every live tensor of torch."""
        memory = DeviceMemory()
        memory.starts, memory.allocations = list(self.modules.starts), list(self.modules.allocations)
        end = 0
        for address, array in sorted({**self.arrays, **live_storages()}.items()):
            if address >= end:
                last, held = address, array
            elif address + array.size > end:  # tensors that share memory, as those made of one numpy array may
                memory.forget(last)
                held = np.ctypeslib.as_array((ctypes.c_uint8 * (address + array.size - last)).from_address(last))
            else:
                continue
            if held.size:
                memory.register(held, address=last)
            end = last + held.size
        return memory

    def host(self, address: int, size: int) -> int:
        """The host's address of device memory. LaunchError where the bytes are not all of one allocation."""
        found = self.modules.find(address)
        if found is not None:
            data, start, length = found.bytes.ctypes.data, found.address, found.size
        else:
            for start, array in self.arrays.items():
                if start <= address < start + max(array.size, 1):
                    data, length = start, array.size
                    break
            else:
                return address  # of a tensor, or of the host
        if address + size > start + length:
            raise LaunchError(f"{size} bytes at {address:#x} reach past the allocation of {length} bytes")
        return int(data) + address - start

    def copy(self, target: int, source: int, size: int) -> None:
        if size:
            ctypes.memmove(self.host(target, size), self.host(source, size), size)

    def fill(self, target: int, value: int, count: int, width: int) -> None:
        """`count` numbers of `width` bytes."""
        if count:
            raw = (value % (1 << 8 * width)).to_bytes(width, "little") * count
            ctypes.memmove(self.host(target, len(raw)), raw, len(raw))


def live_storages() -> dict[int, Any]:
    """Bytes of the storages behind all tensors of torch that Python holds, by address."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    found: dict[int, Any] = {}
    with torch._C.DisableTorchFunction(), torch.no_grad():
        for thing in gc.get_objects():
            if not issubclass(type(thing), torch.Tensor):
                continue
            try:
                storage = thing.untyped_storage()
                if thing.device.type == "cpu" and storage.nbytes():
                    raw = torch.empty(0, dtype=torch.uint8).set_(storage)
                    if raw.data_ptr() not in found or found[raw.data_ptr()].size < raw.numel():
                        found[raw.data_ptr()] = raw.numpy()
            except (RuntimeError, NotImplementedError, TypeError):  # no memory of its own: fake, meta, sparse
                continue
    return found
