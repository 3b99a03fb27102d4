"""Memory spaces, and the loads, stores and atomics that instructions compile to.

Addresses: global memory is whatever address each array was registered at; `shared::cluster` addresses are
`rank << 24 | offset` and a CTA's own addresses carry its rank; a generic address adds the window of its space.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .ast import Symbol
from .errors import EmulatorError, KernelFault
from .spaces import LOCAL_WINDOW, OFFSET_MASK, PARAM_WINDOW, SHARED_WINDOW

if TYPE_CHECKING:
    from .instructions.data import MemoryAccess

Array = np.ndarray[Any, Any]
ALL_LANES = np.arange(32)
NUMPY = {
    "u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32,
    "f32": np.float32, "u64": np.uint64, "s64": np.int64, "f64": np.float64, "f16": np.uint16,
}  # fmt: skip


class Allocation:
    """One registered array: `size` bytes at `address`."""

    def __init__(self, address: int, data: Array, name: str) -> None:
        self.address = address
        self.bytes = data
        self.size = data.size
        self.end = address + data.size
        self.name = name
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

    def register(self, array: Any, address: int | None = None, name: str = "") -> int:
        """Make `array` (contiguous numpy array or CPU tensor) addressable; returns its device address.

        A tensor is registered at its own data_ptr(), so that a kernel can be handed `tensor.data_ptr()`; a numpy array
        at a fresh 4 KiB-aligned address unless one is given. The array is not copied: the kernel writes into it.
        """
        if hasattr(array, "data_ptr"):
            import torch

            if not array.is_contiguous():
                raise EmulatorError(
                    f"register: the tensor must be contiguous, its strides are {tuple(array.stride())}"
                )
            if address is None:
                address = array.data_ptr()
            data = array.detach().reshape(-1).view(torch.uint8).numpy()
        else:
            if not (isinstance(array, np.ndarray) and array.flags.c_contiguous):
                raise EmulatorError(
                    f"register: array must be a C-contiguous numpy array or CPU tensor, got {type(array)}"
                )
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
            raise EmulatorError(
                f"register: [{address:#x}, {address + data.size:#x}) overlaps an earlier registration"
            )
        self.starts.insert(at, address)
        self.allocations.insert(at, Allocation(address, data, name))
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

    def read_bytes(self, address: int, size: int) -> bytes:
        found = self.find(address)
        if found is None or address + size > found.end:
            raise KernelFault(
                f"global address {address:#x} (+{size} bytes) is outside every registered array"
            )
        at = address - found.address
        return found.bytes[at : at + size].tobytes()


def lanes_of(m: Any) -> Array:
    return ALL_LANES if m is True else np.flatnonzero(m)


def put(destination: Array, lanes: Array, values: Array) -> None:
    if lanes is ALL_LANES:
        destination[:] = values
    else:
        destination[lanes] = values


def addresses(a: MemoryAccess, v: Any, lanes: Array) -> Array:
    base = v[a.base]
    if lanes is not ALL_LANES:
        base = base[lanes]
    return base.astype(np.int64) + a.offset


# ---- global
def global_index(a: MemoryAccess, w: Any, where: Array, lanes: Array) -> tuple[Any, Array, Array, Any]:
    """(view of the allocation, element indices, lanes, kept); lanes out of bounds are reported and not kept."""
    low, high = int(where.min()), int(where.max())
    memory = w.cta.machine.memory
    found = memory.find(low)
    if found is None or high + a.bytes > found.end:
        inside: Any = np.zeros(len(lanes), bool)
        owner = None
        for i, address in enumerate(where.tolist()):
            this = memory.find(address)
            if this is None or address + a.bytes > this.end:
                nearest = memory.find(address - 1) or this
                hint = f" (just past {nearest.name or hex(nearest.address)})" if nearest is not None else ""
                w.cta.machine.report(
                    "out-of-bounds",
                    f"global address {address:#x}, {a.bytes} bytes, is outside every registered array{hint}",
                    a.instruction, w, int(lanes[i]),
                )  # fmt: skip
            else:
                owner = owner or this
                inside[i] = this is owner
        if owner is None:
            return None, where[:0], lanes[:0], inside
        found, where, lanes = owner, where[inside], lanes[inside]
    else:
        inside = None
    offset = where - found.address
    if a.bytes > 1 and (where % min(a.bytes, 16)).any():
        w.cta.machine.fault(
            w, a.instruction, f"misaligned global address {int(where[0]):#x}, {a.bytes} bytes", True
        )
    return found.view(NUMPY[a.view]), offset // a.size, lanes, inside


def load_global(a: MemoryAccess) -> Callable[..., None]:
    def ld_global(w: Any, v: Any, m: Any) -> None:
        lanes = lanes_of(m)
        if not len(lanes):
            return
        load_global_at(a, w, v, lanes, addresses(a, v, lanes))

    return ld_global


def load_global_at(a: MemoryAccess, w: Any, v: Any, lanes: Array, where: Array) -> None:
    first = lanes
    while len(lanes):
        view, index, took, inside = global_index(a, w, where, lanes)
        if view is not None:
            if a.strong:
                w.cta.machine.synchronise_global(w, took, where, a)
            for k, slot in enumerate(a.slots):
                if slot >= 0:
                    put(v[slot], took if len(took) < 32 else ALL_LANES, view[index + k])
        if inside is None or view is None:
            break
        left = ~inside & np.array([w.cta.machine.memory.find(x) is not None for x in where.tolist()])
        lanes, where = lanes[left], where[left]
        if len(lanes) == len(first):
            break


def store_global(a: MemoryAccess) -> Callable[..., None]:
    def st_global(w: Any, v: Any, m: Any) -> None:
        lanes = lanes_of(m)
        if not len(lanes):
            return
        store_global_at(a, w, v, lanes, addresses(a, v, lanes))

    return st_global


def store_global_at(a: MemoryAccess, w: Any, v: Any, lanes: Array, where: Array) -> None:
    first = lanes
    while len(lanes):
        view, index, took, inside = global_index(a, w, where, lanes)
        if view is not None:
            if a.strong:
                w.cta.machine.synchronise_global(w, took, where, a)
            for k, slot in enumerate(a.slots):
                view[index + k] = v[slot][took].astype(view.dtype, copy=False)
            w.cta.machine.progress += 1
        if inside is None or view is None:
            break
        left = ~inside & np.array([w.cta.machine.memory.find(x) is not None for x in where.tolist()])
        lanes, where = lanes[left], where[left]
        if len(lanes) == len(first):
            break


# ---- shared
class SharedMemory:
    """A CTA's shared memory, NaN-poisoned, with its race shadow."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.bytes = np.full(-(-size // 16) * 16, 0xFF, np.uint8)
        self.views = {kind: self.bytes.view(kind) for kind in set(NUMPY.values())}
        self.shadow: Any = None


def shared_groups(a: Any, w: Any, where: Array, lanes: Array, size: int) -> list[tuple[Any, Array, Array]]:
    """Split an access by the CTA whose shared memory it addresses: (cta, byte offsets, lanes); checks bounds."""
    ranks = where >> 24
    offsets = where & OFFSET_MASK
    cluster = w.cta.cluster
    groups = []
    first = int(ranks[0])
    parts = [(first, offsets, lanes)] if (ranks == first).all() else [
        (int(r), offsets[ranks == r], lanes[ranks == r]) for r in np.unique(ranks)
    ]  # fmt: skip
    for rank, part, who in parts:
        cta = cluster.ctas[rank] if 0 <= rank < len(cluster.ctas) else None
        if cta is None or int(part.max()) + size > cta.shared.size or int(part.min()) < 0:
            bad = int(who[0])
            limit = cta.shared.size if cta is not None else 0
            w.cta.machine.report(
                "out-of-bounds",
                f"shared address {int(where.max()):#x} is outside the CTA's {limit} bytes of shared memory",
                a, w, bad,
            )  # fmt: skip
            continue
        if size > 1 and (part % min(size, 16)).any():
            w.cta.machine.fault(w, a, f"misaligned shared address {int(part[0]):#x}, {size} bytes", True)
        if cta is not w.cta and cta.exited:
            w.cta.machine.report(
                "exit", f"accesses shared memory of CTA {cta.index}, which has exited", a, w, int(who[0])
            )
        if cta is not w.cta and cta.checks:
            time = cluster.clocks.time
            for lane in who.tolist():
                row = w.first_row + lane
                cta.remote[row] = (int(time[0, row, row]), a, w)
        groups.append((cta, part, who))
    return groups


def shared_cells(cta: Any, offsets: Array, size: int) -> Array:
    shift = cta.granule_shift
    count = max(size >> shift, 1)
    base = offsets >> shift
    return base[:, None] + np.arange(count) if count > 1 else base[:, None]


def bank_conflicts(w: Any, offsets: Array, size: int) -> None:
    """Count the extra passes of one access: words of one bank at different addresses, per 128 bytes moved."""
    statistics = w.cta.machine.statistics
    words = (offsets[:, None] + np.arange(0, max(size, 4), 4)).reshape(len(offsets), -1) >> 2
    per_pass = max(1, 32 // words.shape[1])
    extra = 0
    for start in range(0, len(offsets), per_pass):
        distinct = np.unique(words[start : start + per_pass])
        extra += int(np.bincount(distinct & 31).max()) - 1
    statistics.shared_accesses += 1
    statistics.bank_conflicts += extra


def load_shared(a: MemoryAccess) -> Callable[..., None]:
    def ld_shared(w: Any, v: Any, m: Any) -> None:
        lanes = lanes_of(m)
        if len(lanes):
            load_shared_at(a, w, v, lanes, addresses(a, v, lanes))

    return ld_shared


def load_shared_at(a: MemoryAccess, w: Any, v: Any, lanes: Array, where: Array) -> None:
    for cta, offsets, who in shared_groups(a.instruction, w, where, lanes, a.bytes):
        if cta.shared.shadow is not None:
            cta.machine.generic_shared(w, cta, who, offsets, a, write=False)
            bank_conflicts(w, offsets, a.bytes)
        view = cta.shared.views[NUMPY[a.view]]
        index = offsets // a.size
        for k, slot in enumerate(a.slots):
            if slot >= 0:
                put(v[slot], who, view[index + k])


def store_shared(a: MemoryAccess) -> Callable[..., None]:
    def st_shared(w: Any, v: Any, m: Any) -> None:
        lanes = lanes_of(m)
        if len(lanes):
            store_shared_at(a, w, v, lanes, addresses(a, v, lanes))

    return st_shared


def store_shared_at(a: MemoryAccess, w: Any, v: Any, lanes: Array, where: Array) -> None:
    for cta, offsets, who in shared_groups(a.instruction, w, where, lanes, a.bytes):
        if cta.shared.shadow is not None:
            cta.machine.generic_shared(w, cta, who, offsets, a, write=True)
            bank_conflicts(w, offsets, a.bytes)
        view = cta.shared.views[NUMPY[a.view]]
        index = offsets // a.size
        for k, slot in enumerate(a.slots):
            view[index + k] = v[slot][who].astype(view.dtype, copy=False)
        cta.machine.progress += 1


# ---- local, const, generic
def local_view(a: MemoryAccess, w: Any, where: Array, lanes: Array) -> tuple[Array, Array]:
    view = w.local.view(NUMPY[a.view])
    index = where // a.size
    if int(index.max()) + len(a.slots) > view.shape[1] or int(index.min()) < 0:
        w.cta.machine.fault(
            w, a.instruction, f"local address {int(where.max())} is outside local memory", True
        )
    return view, index


def load_local_at(a: MemoryAccess, w: Any, v: Any, lanes: Array, where: Array) -> None:
    view, index = local_view(a, w, where, lanes)
    for k, slot in enumerate(a.slots):
        if slot >= 0:
            put(v[slot], lanes, view[lanes, index + k])


def store_local_at(a: MemoryAccess, w: Any, v: Any, lanes: Array, where: Array) -> None:
    view, index = local_view(a, w, where, lanes)
    for k, slot in enumerate(a.slots):
        view[lanes, index + k] = v[slot][lanes].astype(view.dtype, copy=False)


def load_parameter_at(a: MemoryAccess, w: Any, v: Any, lanes: Array, where: Array) -> None:
    block = w.cta.machine.parameters
    if int(where.max()) + a.bytes > len(block):
        w.cta.machine.fault(
            w, a.instruction, f"parameter offset {int(where.max())} is past the parameters", True
        )
    for k, slot in enumerate(a.slots):
        if slot >= 0:
            values = np.array(
                [block[x + k * a.size : x + (k + 1) * a.size].view(NUMPY[a.view])[0] for x in where.tolist()]
            )
            put(v[slot], lanes, values)


WINDOWS: dict[int, tuple[int, Any, Any]] = {
    0: (0, load_global_at, store_global_at),
    SHARED_WINDOW >> 60: (SHARED_WINDOW, load_shared_at, store_shared_at),
    LOCAL_WINDOW >> 60: (LOCAL_WINDOW, load_local_at, store_local_at),
    PARAM_WINDOW >> 60: (PARAM_WINDOW, load_parameter_at, None),
}


def generic(a: MemoryAccess, store: bool) -> Callable[..., None]:
    def generic_access(w: Any, v: Any, m: Any) -> None:
        lanes = lanes_of(m)
        if not len(lanes):
            return
        where = addresses(a, v, lanes)
        spaces = where >> 60
        first = int(spaces[0])
        for space in [first] if (spaces == first).all() else np.unique(spaces).tolist():
            chosen = slice(None) if (spaces == space).all() else spaces == space
            window, load, save = WINDOWS.get(space, (0, None, None))
            function = save if store else load
            if function is None:
                w.cta.machine.fault(
                    w, a.instruction, f"generic address {int(where[0]):#x} is in no memory space", m
                )
                return
            function(
                a, w, v, lanes[chosen] if not isinstance(chosen, slice) else lanes, where[chosen] - window
            )

    return generic_access


def local(at: Callable[..., None]) -> Callable[[Any], Callable[..., None]]:
    def make(a: MemoryAccess) -> Callable[..., None]:
        def local_access(w: Any, v: Any, m: Any) -> None:
            lanes = lanes_of(m)
            if len(lanes):
                at(a, w, v, lanes, addresses(a, v, lanes))

        return local_access

    return make


LOADS: dict[str, Callable[..., Any]] = {
    "global": load_global,
    "const": load_global,
    "shared": load_shared,
    "local": local(load_local_at),
    "generic": lambda a: generic(a, False),
}
STORES: dict[str, Callable[..., Any]] = {
    "global": store_global,
    "shared": store_shared,
    "local": local(store_local_at),
    "generic": lambda a: generic(a, True),
}


def load_parameter(e: Any, a: MemoryAccess, address: Any) -> Callable[..., None]:
    """ld.param: from the launch's parameter block, or from a call's parameter variable (kept in local memory)."""
    function = e.preparation.function
    if isinstance(address.base, Symbol) and any(p.name == address.base.name for p in function.parameters):

        def ld_param(w: Any, v: Any, m: Any) -> None:
            start = w.cta.machine.parameter_offsets[a.symbol] + a.offset
            raw = w.cta.machine.parameters[start : start + a.bytes].view(NUMPY[a.view])
            for k, slot in enumerate(a.slots):
                if slot >= 0:
                    np.copyto(v[slot], raw[k], where=m, casting="unsafe")

        return ld_param
    if isinstance(address.base, Symbol):
        return local(load_local_at)(a)
    return local(load_parameter_at)(a)


def store_parameter(e: Any, a: MemoryAccess, address: Any) -> Callable[..., None]:
    return local(store_local_at)(a)


# ---- atomics
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, x: old + x,
    "min": min,
    "max": max,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "exch": lambda old, x: x,
    "inc": lambda old, x: type(old)(0) if old >= x else type(old)(old + 1),
    "dec": lambda old, x: x if old == 0 or old > x else type(old)(old - 1),
}


def packed(kind: str, operation: str) -> Callable[[Any, Any], Any]:
    """add, min or max of one or two 16-bit floating-point numbers in a word."""
    from .instructions import floating

    base = kind.removesuffix("x2")
    widen = floating.widen_f16 if base == "f16" else floating.widen_bf16
    narrow = floating.narrow_f16 if base == "f16" else floating.narrow_bf16
    storage = np.uint32 if kind.endswith("x2") else np.uint16
    function: dict[str, Any] = {"add": np.add, "min": np.fmin, "max": np.fmax}

    def apply(old: Any, x: Any) -> Any:
        values = (widen(np.array([v], storage).view(np.uint16)) for v in (old, x))
        return narrow(function[operation](*values)).view(storage)[0]

    return apply


def atomic(a: MemoryAccess, operation: str, kind: str, sources: list[list[int]]) -> Callable[..., None]:
    """`sources`: the slots of each operand, one per element of a vector. Every element is atomic by itself; the two
    halves of 128 bits are one."""
    function = OPERATIONS.get(operation)
    if kind in ("f16", "bf16", "f16x2", "bf16x2") and operation in ("add", "min", "max"):
        function = packed(kind, operation)

    def atom(w: Any, v: Any, m: Any) -> None:
        lanes = lanes_of(m)
        if not len(lanes):
            return
        machine = w.cta.machine
        where = addresses(a, v, lanes)
        for lane, address in zip(lanes.tolist(), where.tolist(), strict=True):
            space = address >> 60 if a.space == "generic" else (1 if a.space == "shared" else 0)
            one = np.array([lane])
            if space == 1:
                local_address = np.array([address & 0xFFFFFFFF])
                groups = shared_groups(a.instruction, w, local_address, one, a.bytes)
                if not groups:
                    continue
                cta, offsets, _ = groups[0]
                if cta.shared.shadow is not None:
                    machine.generic_shared(w, cta, one, offsets, a, write=True, strong=True)
                view, index = cta.shared.views[NUMPY[a.view]], int(offsets[0]) // a.size
            else:
                view, found, _, _ = global_index(a, w, np.array([address]), one)
                if view is None:
                    continue
                index = int(found[0])
                machine.synchronise_global(w, one, np.array([address]), a)
            part = slice(index, index + len(a.slots))
            old = view[part].copy()
            if operation == "cas":
                if all(x == v[s][lane] for x, s in zip(old, sources[0], strict=True)):
                    view[part] = [v[s][lane] for s in sources[1]]
            elif function is not None:
                view[part] = [function(x, v[s][lane]) for x, s in zip(old, sources[0], strict=True)]
            for slot, x in zip(a.slots, old, strict=True):
                if slot >= 0:
                    v[slot][lane] = x
        machine.progress += 1

    return atom
