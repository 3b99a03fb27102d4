"""The loads and stores that instructions compile to, by memory space.

Addresses: global memory is whatever address each array was registered at; `shared::cluster` addresses are
`rank << 24 | offset` and a CTA's own addresses carry its rank; a generic address adds the window of its space.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from padless.emulator.order.race import CLUSTER, CTA, GPU
from padless.emulator.ptx.ast import Instruction
from padless.emulator.state.global_access import global_pieces
from padless.emulator.state.memory import NUMPY, Array
from padless.emulator.state.shared_access import bank_conflicts, check_access, shared_groups
from padless.emulator.state.site import ALL_LANES, Site, lanes_of
from padless.emulator.state.spaces import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW
from padless.emulator.state.warp import Warp


class MemoryAccess:
    """A load, a store or an atomic as decoded when the kernel is prepared. slots: one register slot per vector element
    of `view`, -1 for `_`. base: the slot of the address, to which `offset` is added."""

    def __init__(
        self, instruction: Instruction, space: str, base: int, offset: int, view: str, slots: list[int], symbol: str = ""
    ) -> None:  # fmt: skip
        self.instruction = instruction
        self.space = space
        self.base, self.offset = base, offset
        self.view = view
        self.size = int(view[1:]) // 8
        self.slots = slots
        self.bytes = self.size * len(slots)
        self.symbol = symbol
        modifiers = set(instruction.modifiers)
        self.scope = CTA if "cta" in modifiers else CLUSTER if "cluster" in modifiers else GPU
        self.strong = bool(modifiers & {"relaxed", "volatile", "mmio", "acquire", "release", "acq_rel"})
        self.acquires = bool(modifiers & {"acquire", "acq_rel"})
        self.releases = bool(modifiers & {"release", "acq_rel"})
        self.reads = instruction.opcode not in ("st", "red")
        self.writes = instruction.opcode != "ld"


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
def load_global_at(a: MemoryAccess, w: Warp, v: Any, lanes: Array, where: Array) -> None:
    for view, index, took in global_pieces(a, w, where, lanes):
        for k, slot in enumerate(a.slots):
            if slot >= 0:
                put(v[slot], took if len(took) < 32 else ALL_LANES, view[index + k])


def store_global_at(a: MemoryAccess, w: Warp, v: Any, lanes: Array, where: Array) -> None:
    for view, index, took in global_pieces(a, w, where, lanes):
        for k, slot in enumerate(a.slots):
            view[index + k] = v[slot][took].astype(view.dtype, copy=False)
        w.launch.progress += 1


# ---- shared
def load_shared_at(a: MemoryAccess, w: Warp, v: Any, lanes: Array, where: Array) -> None:
    for cta, offsets, who in shared_groups(a.instruction, w, where, lanes, a.bytes):
        if cta.shared.shadow is not None:
            check_access(w, cta, who, offsets, a, write=False)
            bank_conflicts(w, offsets, a.bytes)
        view = cta.shared.views[NUMPY[a.view]]
        index = offsets // a.size
        for k, slot in enumerate(a.slots):
            if slot >= 0:
                put(v[slot], who, view[index + k])


def store_shared_at(a: MemoryAccess, w: Warp, v: Any, lanes: Array, where: Array) -> None:
    for cta, offsets, who in shared_groups(a.instruction, w, where, lanes, a.bytes):
        if cta.shared.shadow is not None:
            check_access(w, cta, who, offsets, a, write=True)
            bank_conflicts(w, offsets, a.bytes)
        view = cta.shared.views[NUMPY[a.view]]
        index = offsets // a.size
        for k, slot in enumerate(a.slots):
            view[index + k] = v[slot][who].astype(view.dtype, copy=False)
        w.launch.progress += 1


# ---- local, parameters, generic
def local_view(a: MemoryAccess, w: Warp, where: Array) -> tuple[Array, Array]:
    view = w.local.view(NUMPY[a.view])
    index = where // a.size
    if int(index.max()) + len(a.slots) > view.shape[1] or int(index.min()) < 0:
        Site(w, a.instruction).fault(f"local address {int(where.max())} is outside local memory")
    return view, index


def load_local_at(a: MemoryAccess, w: Warp, v: Any, lanes: Array, where: Array) -> None:
    view, index = local_view(a, w, where)
    for k, slot in enumerate(a.slots):
        if slot >= 0:
            put(v[slot], lanes, view[lanes, index + k])


def store_local_at(a: MemoryAccess, w: Warp, v: Any, lanes: Array, where: Array) -> None:
    view, index = local_view(a, w, where)
    for k, slot in enumerate(a.slots):
        view[lanes, index + k] = v[slot][lanes].astype(view.dtype, copy=False)


def load_parameter_at(a: MemoryAccess, w: Warp, v: Any, lanes: Array, where: Array) -> None:
    block = w.launch.parameters
    if int(where.max()) + a.bytes > len(block):
        Site(w, a.instruction).fault(f"parameter offset {int(where.max())} is past the parameters")
    for k, slot in enumerate(a.slots):
        if slot >= 0:
            parts = [block[x + k * a.size : x + (k + 1) * a.size] for x in where.tolist()]
            put(v[slot], lanes, np.concatenate(parts).view(NUMPY[a.view]))


WINDOWS: dict[int, tuple[int, Any, Any]] = {
    0: (0, load_global_at, store_global_at),
    SHARED_WINDOW >> 60: (SHARED_WINDOW, load_shared_at, store_shared_at),
    LOCAL_WINDOW >> 60: (LOCAL_WINDOW, load_local_at, store_local_at),
    PARAM_WINDOW >> 60: (PARAM_WINDOW, load_parameter_at, None),
}


def generic_at(a: MemoryAccess, w: Warp, v: Any, lanes: Array, where: Array, store: bool) -> None:
    """By the window that each lane's address lies in."""
    spaces = where >> 60
    first = int(spaces[0])
    alike = (spaces == first).all()
    for space in [first] if alike else np.unique(spaces).tolist():
        window, load, save = WINDOWS.get(space, (0, None, None))
        function = save if store else load
        if function is None:
            Site(w, a.instruction, int(lanes[0])).fault(f"generic address {int(where[0]):#x} is in no memory space")
        chosen = spaces == space
        function(a, w, v, lanes if alike else lanes[chosen], (where if alike else where[chosen]) - window)


def load_generic_at(a: MemoryAccess, w: Warp, v: Any, lanes: Array, where: Array) -> None:
    generic_at(a, w, v, lanes, where, False)


def store_generic_at(a: MemoryAccess, w: Warp, v: Any, lanes: Array, where: Array) -> None:
    generic_at(a, w, v, lanes, where, True)


LOADS: dict[str, Callable[..., None]] = {
    "global": load_global_at, "const": load_global_at, "shared": load_shared_at, "local": load_local_at,
    "param": load_parameter_at, "generic": load_generic_at,
}  # fmt: skip
STORES: dict[str, Callable[..., None]] = {
    "global": store_global_at, "shared": store_shared_at, "local": store_local_at, "param": store_local_at,
    "generic": store_generic_at,
}  # fmt: skip


def at_addresses(at: Callable[..., None], a: MemoryAccess) -> Callable[..., None]:
    """What an instruction compiles to where `at` does the access, for the lanes that take part."""

    def access(w: Warp, v: Any, m: Any) -> None:
        lanes = lanes_of(m)
        if len(lanes):
            at(a, w, v, lanes, addresses(a, v, lanes))

    return access
