"""What holds data: the arrays of global memory and a CTA's shared memory."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np

from padless.emulator.errors import EmulatorError, KernelFault
from padless.emulator.state.spaces import VIEWS
from padless.emulator.units.number_formats import Array


class Allocation:
    """One registered array: `size` bytes at `address`. `constant`: no kernel may write it. `ready`: no kernel ahead of
    the launch that may still run writes it. `followed`: its reads are remembered from the launch's start on, and not
    from its first ordinary store on."""

    def __init__(self, address: int, data: Array, name: str, constant: bool = False) -> None:
        self.address = address
        self.bytes = data
        self.size = data.size
        self.end = address + data.size
        self.name = name
        self.constant = constant
        self.ready = self.followed = False
        self.views: dict[Any, Array] = {}

    def view(self, kind: Any) -> Array:
        found = self.views.get(kind)
        if found is None:
            size = np.dtype(kind).itemsize
            found = self.views[kind] = self.bytes[: self.size // size * size].view(kind)
        return found


class DeviceMemory:
    """Global memory: numpy arrays or CPU torch tensors, registered and accessed in place, with gaps in between."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.allocations: list[Allocation] = []
        self.next_address = 0x7000_0000_0000

    def register(self, array: Any, address: int | None = None, name: str = "", constant: bool = False) -> int:
        """Make `array` (contiguous numpy array or CPU tensor) addressable; returns its device address.

        A tensor is registered at its own data_ptr(), so that a kernel can be handed `tensor.data_ptr()`; a numpy array
        at a fresh 4 KiB-aligned address unless one is given. The array is not copied: the kernel writes into it.
        constant: it is a .const variable of a module.
        """
        if hasattr(array, "data_ptr"):
            import torch

            if not array.is_contiguous():
                raise EmulatorError(f"register: the tensor must be contiguous, its strides are {tuple(array.stride())}")
            if address is None:
                address = array.data_ptr()
            data = array.detach().reshape(-1).view(torch.uint8).numpy()
        else:
            if not (isinstance(array, np.ndarray) and array.flags.c_contiguous):
                kind = f"got {type(array)}"
                raise EmulatorError(f"register: array must be a C-contiguous numpy array or CPU tensor, {kind}")
            data = array.reshape(-1).view(np.uint8)
        if address is None:
            address = self.next_address
            self.next_address += -(-(data.size + 4096) // 4096) * 4096
        at = bisect.bisect_right(self.starts, address)
        if at and self.allocations[at - 1].address == address and self.allocations[at - 1].size >= data.size:
            return address
        if (at and self.allocations[at - 1].end > address) or (
            at < len(self.starts) and self.starts[at] < address + data.size
        ):
            raise EmulatorError(f"register: [{address:#x}, {address + data.size:#x}) overlaps an earlier registration")
        self.starts.insert(at, address)
        self.allocations.insert(at, Allocation(address, data, name, constant))
        return address

    def forget(self, address: int) -> None:
        """Undo `register`."""
        at = bisect.bisect_left(self.starts, address)
        if at == len(self.starts) or self.starts[at] != address:
            raise EmulatorError(f"forget: nothing is registered at {address:#x}")
        del self.starts[at], self.allocations[at]

    def find(self, address: int) -> Allocation | None:
        at = bisect.bisect_right(self.starts, address) - 1
        if at >= 0 and address < self.allocations[at].end:
            return self.allocations[at]
        return None

    def next_start(self, address: int) -> float:
        """Where the first allocation behind an address begins; infinity if there is none."""
        at = bisect.bisect_right(self.starts, address)
        return self.starts[at] if at < len(self.starts) else float("inf")

    def read_bytes(self, address: int, size: int) -> bytes:
        found = self.find(address)
        if found is None or address + size > found.end:
            raise KernelFault(f"global address {address:#x} (+{size} bytes) is outside every registered array")
        at = address - found.address
        return found.bytes[at : at + size].tobytes()


class SharedMemory:
    """A CTA's shared memory, NaN-poisoned, with its race shadow."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.bytes = np.full(-(-size // 16) * 16, 0xFF, np.uint8)
        self.views = {kind: self.bytes.view(kind) for kind in VIEWS.values()}
        self.shadow: Any = None
