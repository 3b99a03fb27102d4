"""The loads and stores that instructions compile to, by memory space.

Addresses: global memory is whatever address each array was registered at; `shared::cluster` addresses are
`rank << 24 | offset` and a CTA's own addresses carry its rank; a generic address adds the window of its space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from padless.emulator.ptx.ast import Symbol
from padless.emulator.state.memory import NUMPY, Array
from padless.emulator.state.spaces import LOCAL_WINDOW, OFFSET_MASK, PARAM_WINDOW, SHARED_WINDOW

if TYPE_CHECKING:
    from padless.emulator.instructions.data import MemoryAccess

ALL_LANES = np.arange(32)


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
    if w.cta.cluster.grids is not None:
        w.cta.cluster.grids.check(w, lanes, a.instruction, where)
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


def global_pieces(a: MemoryAccess, w: Any, where: Array, lanes: Array) -> Iterator[tuple[Any, Array, Array]]:
    """An access by the allocations that it touches, usually one: view, element indices, lanes."""
    everyone = len(lanes)
    while len(lanes):
        view, index, took, inside = global_index(a, w, where, lanes)
        if view is not None:
            if a.strong:
                w.cta.machine.synchronise_global(w, took, where, a)
            yield view, index, took
        if inside is None or view is None:
            break
        left = ~inside & np.array([w.cta.machine.memory.find(x) is not None for x in where.tolist()])
        lanes, where = lanes[left], where[left]
        if len(lanes) == everyone:
            break


def load_global_at(a: MemoryAccess, w: Any, v: Any, lanes: Array, where: Array) -> None:
    for view, index, took in global_pieces(a, w, where, lanes):
        for k, slot in enumerate(a.slots):
            if slot >= 0:
                put(v[slot], took if len(took) < 32 else ALL_LANES, view[index + k])


def store_global_at(a: MemoryAccess, w: Any, v: Any, lanes: Array, where: Array) -> None:
    for view, index, took in global_pieces(a, w, where, lanes):
        for k, slot in enumerate(a.slots):
            view[index + k] = v[slot][took].astype(view.dtype, copy=False)
        w.cta.machine.progress += 1


# ---- shared
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


def at_addresses(at: Callable[..., None]) -> Callable[[MemoryAccess], Callable[..., None]]:
    """What an instruction compiles to where `at` does the access, for the lanes that take part."""

    def make(a: MemoryAccess) -> Callable[..., None]:
        def access(w: Any, v: Any, m: Any) -> None:
            lanes = lanes_of(m)
            if len(lanes):
                at(a, w, v, lanes, addresses(a, v, lanes))

        return access

    return make


LOADS: dict[str, Callable[..., Any]] = {
    "global": at_addresses(load_global_at),
    "const": at_addresses(load_global_at),
    "shared": at_addresses(load_shared_at),
    "local": at_addresses(load_local_at),
    "generic": lambda a: generic(a, False),
}
STORES: dict[str, Callable[..., Any]] = {
    "global": at_addresses(store_global_at),
    "shared": at_addresses(store_shared_at),
    "local": at_addresses(store_local_at),
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
        return at_addresses(load_local_at)(a)
    return at_addresses(load_parameter_at)(a)


def store_parameter(e: Any, a: MemoryAccess, address: Any) -> Callable[..., None]:
    return at_addresses(store_local_at)(a)
