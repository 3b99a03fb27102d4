"""The loads and stores that instructions compile to, by memory space.

Addresses: global memory is whatever address each array was registered at; `shared::cluster` addresses are
`rank << 24 | offset` and a CTA's own addresses carry its rank; a generic address adds the window of its space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from padless.emulator.order.memory_order import CLUSTER, CTA, GPU
from padless.emulator.ptx.ast import Instruction
from padless.emulator.state.global_access import global_pieces
from padless.emulator.state.shared_access import bank_conflicts, check_access, shared_groups
from padless.emulator.state.site import ALL_LANES, Site, lanes_of
from padless.emulator.state.spaces import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, VIEWS
from padless.emulator.state.warp import Warp
from padless.emulator.units.number_formats import Array

Pieces = Iterator[tuple[Array, Array, Array]]


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
        self.writes = instruction.opcode not in ("ld", "ldu")

    def equals(self, w: Warp, view: Any, index: Array, lanes: Array) -> Callable[[Array], bool]:
        """Of a store to elements `index` of a view by these lanes: whether those picked store what is there."""
        if self.instruction.opcode != "st":
            return lambda picked: False
        return lambda picked: all(
            (view[index[picked] + k] == w.v[slot][lanes[picked]].astype(view.dtype, copy=False)).all()
            for k, slot in enumerate(self.slots)
        )


def addresses(a: MemoryAccess, v: Any, lanes: Array) -> Array:
    base = v[a.base]
    if lanes is not ALL_LANES:
        base = base[lanes]
    return base.astype(np.int64) + a.offset


# ---- an access in each space, as pieces: a view of the memory, the element of each lane in it, and the lanes
def shared_pieces(a: MemoryAccess, w: Warp, lanes: Array, where: Array) -> Pieces:
    for cta, offsets, who in shared_groups(a.instruction, w, where, lanes, a.bytes):
        view, index = cta.shared.views[VIEWS[a.view]], offsets // a.size
        if cta.shared.shadow is not None:
            check_access(w, cta, who, offsets, a, a.writes, a.equals(w, view, index, who))
            bank_conflicts(w, offsets, a.bytes)
        yield view, index, who
        w.launch.progress += a.writes


def local_pieces(a: MemoryAccess, w: Warp, lanes: Array, where: Array) -> Pieces:
    view = w.local.view(VIEWS[a.view])
    index = where // a.size
    if int(index.max()) + len(a.slots) > view.shape[1] or int(index.min()) < 0:
        Site(w, a.instruction).fault(f"local address {int(where.max())} is outside local memory")
    yield view.reshape(-1), lanes * view.shape[1] + index, lanes


def parameter_pieces(a: MemoryAccess, w: Warp, lanes: Array, where: Array) -> Pieces:
    block = w.launch.parameters
    if int(where.max()) + a.bytes > len(block):
        Site(w, a.instruction).fault(f"parameter offset {int(where.max())} is past the parameters")
    starts, which = np.unique(where, return_inverse=True)  # usually one
    read = np.concatenate([block[x : x + a.bytes] for x in starts.tolist()]).view(VIEWS[a.view])
    yield read, which * len(a.slots), lanes


WINDOWS: dict[int, tuple[int, Any]] = {
    0: (0, global_pieces),
    SHARED_WINDOW >> 60: (SHARED_WINDOW, shared_pieces),
    LOCAL_WINDOW >> 60: (LOCAL_WINDOW, local_pieces),
    PARAM_WINDOW >> 60: (PARAM_WINDOW, parameter_pieces),
}


def generic_pieces(a: MemoryAccess, w: Warp, lanes: Array, where: Array) -> Pieces:
    """By the window that each lane's address lies in."""
    spaces = where >> 60
    for space in np.unique(spaces).tolist():
        window, pieces = WINDOWS.get(space, (0, None))
        if pieces is None or (window == PARAM_WINDOW and a.writes):
            Site(w, a.instruction, int(lanes[0])).fault(f"generic address {int(where[0]):#x} is in no memory space")
        chosen = spaces == space
        yield from pieces(a, w, lanes[chosen], where[chosen] - window)


PIECES: dict[str, Callable[..., Pieces]] = {
    "global": global_pieces, "const": global_pieces, "shared": shared_pieces, "local": local_pieces,
    "param": parameter_pieces, "generic": generic_pieces,
}  # fmt: skip


def load(pieces: Callable[..., Pieces], a: MemoryAccess) -> Callable[..., None]:
    """What a load compiles to, for the lanes that take part."""

    def loaded(w: Warp, v: Any, m: Any) -> None:
        lanes = lanes_of(m)
        if not len(lanes):
            return
        for view, index, who in pieces(a, w, lanes, addresses(a, v, lanes)):
            for k, slot in enumerate(a.slots):
                if slot >= 0:
                    v[slot][who if len(who) < 32 else slice(None)] = view[index + k]

    return loaded


def store(pieces: Callable[..., Pieces], a: MemoryAccess) -> Callable[..., None]:
    """What a store compiles to."""

    def stored(w: Warp, v: Any, m: Any) -> None:
        lanes = lanes_of(m)
        if not len(lanes):
            return
        for view, index, who in pieces(a, w, lanes, addresses(a, v, lanes)):
            for k, slot in enumerate(a.slots):
                view[index + k] = v[slot][who].astype(view.dtype, copy=False)

    return stored
