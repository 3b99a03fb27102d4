"""The copy engine: cp.async.bulk, cp.async.bulk.tensor, cp.reduce.async.bulk, their groups, prefetches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from padless.emulator.instructions import bulk_transfer
from padless.emulator.instructions.cp_async import small_copy
from padless.emulator.instructions.data import cache_qualifier
from padless.emulator.instructions.operands import GenericOperand, SharedOperand
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import instruction
from padless.emulator.ptx.ast import Address, Immediate, Operand
from padless.emulator.state.global_access import check_grids
from padless.emulator.state.groups import commit_of, groups_of, wait_of
from padless.emulator.state.site import Site
from padless.emulator.state.spaces import PARAM_WINDOW, SHARED_WINDOW
from padless.emulator.units import packed_map

FAMILY = "bulk"  # of the groups of one thread
REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


@instruction("cp")
def copy(e: Emitter) -> None:
    if not e.has("async"):
        e.unsupported()
    elif not e.has("bulk"):
        small_copy(e)
    elif e.has("commit_group"):
        e.synchronise_lanes(commit_of(FAMILY))
    elif e.has("wait_group"):
        pending = e.operands[0]
        if not isinstance(pending, Immediate):
            e.unsupported()
        else:
            e.synchronise(wait_of(FAMILY, pending.value, "read" if e.has("read") else "written"))
    elif "prefetch" not in e.modifiers:  # which is of L2 and changes nothing
        operation = e.either(*REDUCTIONS) if e.has("reduce") else ""
        (tensor_copy if e.has("tensor") else plain_copy)(e, operation)


# ---- operands
def read_tensor_map(site: Site, address: int) -> Any:
    """Decode the 128 bytes at a generic address: kernel parameter, global or constant memory."""
    launch = site.warp.launch
    if address % 64:
        site.fault(f"tensor map address {address:#x} is not a multiple of 64")
    if address >> 60 == PARAM_WINDOW >> 60:
        at = address - PARAM_WINDOW
        raw = launch.parameters[at : at + 128].tobytes()
    elif address >> 60 == SHARED_WINDOW >> 60:
        site.fault("a tensor map in shared memory cannot be used")
    else:
        raw = launch.memory.read_bytes(address, 128)
    if raw not in launch.tensor_maps:
        try:
            launch.tensor_maps[raw] = packed_map.decode(raw)
        except ValueError as error:
            site.fault(f"not a tensor map: {error}")
    return launch.tensor_maps[raw]


def space_order(e: Emitter) -> str:
    """ "load" for shared <- global, "store" for global <- shared, "cluster" for shared::cluster <- shared::cta."""
    spaces = [m.split("::")[0] for m in e.instruction.modifiers if m.split("::")[0] in ("global", "shared")]
    orders = {"shared global": "load", "global shared": "store", "shared shared": "cluster"}
    return orders.get(" ".join(spaces[:2])) or e.unsupported("state spaces")


COMMON = ("async", "bulk", "tensor", "reduce", "mbarrier::complete_tx::bytes", "bulk_group", "shared::cluster",
          "shared::cta", "global", "multicast::cluster", "tile", "tile::gather4", "tile::scatter4",
          "cta_group::1", "cta_group::2", "1d", "2d", "3d", "4d", "5d", "noftz", "ignore_oob")  # fmt: skip


def check_modifiers(e: Emitter) -> None:
    e.only(*COMMON, *REDUCTIONS, *filter(cache_qualifier, e.modifiers))


def multicast_mask(e: Emitter, operands: list[Operand]) -> Callable[[Site], int | None]:
    """The CTAs that a copy goes to as a bit set; None for the one that its address names."""
    if not e.has("multicast::cluster"):
        return lambda site: None
    slot = e.source_slot(operands[1], "u16")
    return lambda site: site.value(slot)


def tensor_copy(e: Emitter, operation: str) -> None:
    check_modifiers(e)
    direction = space_order(e)
    mode = "gather4" if e.has("tile::gather4") else "scatter4" if e.has("tile::scatter4") else "tile"
    rank = int(e.either("1d", "2d", "3d", "4d", "5d", default="0d")[0])
    first, second, *rest = e.operands
    tensor, shared = (second, first) if direction == "load" else (first, second)
    assert isinstance(tensor, Address)
    wanted = 5 if mode != "tile" else rank
    if len(tensor.coordinates) != wanted:
        e.unsupported(f"{len(tensor.coordinates)} coordinates for {rank} dimensions")
    map_operand = GenericOperand(e, Address(tensor.base, tensor.offset))
    coordinates = [e.source_slot(c, "s32") for c in tensor.coordinates]
    memory = SharedOperand(e, shared)
    barrier = SharedOperand(e, rest[0]) if direction == "load" else None
    mask = multicast_mask(e, rest)
    pair = e.has("cta_group::2")

    def bulk_tensor(site: Site) -> None:
        found = read_tensor_map(site, map_operand.at(site))
        check_grids(site.warp, [site.lane], site.instruction, np.array([found.address]))
        where = tuple(site.value(c) for c in coordinates)
        if found.rank != rank:
            site.report("tma", f"a {rank}-d copy through a tensor map of rank {found.rank}")
            return
        start = memory.at(site)
        if barrier is not None:
            bulk_transfer.tensor_load(site, found, where, start, barrier.at(site), mask(site), pair, mode)
        else:
            groups = groups_of(site.warp, FAMILY, site.lane)
            bulk_transfer.tensor_store(site, found, where, start, operation, mode, groups)

    e.synchronise_lanes(bulk_tensor)


def plain_copy(e: Emitter, operation: str) -> None:
    """cp.async.bulk without a tensor map: a run of bytes."""
    check_modifiers(e)
    direction = space_order(e)
    destination, source, size, *rest = e.operands
    size_slot = e.source_slot(size, "u32")
    target = (GenericOperand if direction == "store" else SharedOperand)(e, destination)
    origin = (GenericOperand if direction == "load" else SharedOperand)(e, source)
    barrier = SharedOperand(e, rest[0]) if direction != "store" else None
    mask = multicast_mask(e, rest)
    reduce = (e.types[-1], operation) if operation else None

    def bulk_copy(site: Site) -> None:
        count, to, start = site.value(size_slot), target.at(site), origin.at(site)
        if count % 16 or to % 16 or start % 16:
            site.fault(f"bulk copy of {count} bytes from {start:#x} to {to:#x}: not multiples of 16")
        if not count:
            return
        if direction != "cluster":
            check_grids(site.warp, [site.lane], site.instruction)
        if barrier is None:
            groups = groups_of(site.warp, FAMILY, site.lane)
            bulk_transfer.plain_store(site, to, start, count, reduce, groups)
        elif direction == "load":
            bulk_transfer.plain_load(site, to, start, count, barrier.at(site), mask(site))
        else:
            bulk_transfer.shared_to_shared(site, to, start, count, barrier.at(site), reduce)

    e.synchronise_lanes(bulk_copy)
