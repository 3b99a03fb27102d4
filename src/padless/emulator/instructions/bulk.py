"""The copy engine: cp.async.bulk, cp.async.bulk.tensor, cp.reduce.async.bulk, their groups, prefetches."""

from __future__ import annotations

from typing import Any

from padless.emulator.instructions import bulk_transfer
from padless.emulator.instructions.cp_async import small_copy
from padless.emulator.instructions.data import cache_qualifier
from padless.emulator.instructions.operands import GenericOperand, SharedOperand
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import instruction
from padless.emulator.ptx.ast import Address, Immediate
from padless.emulator.state.global_access import check_grids
from padless.emulator.state.groups import GroupWait, groups_of
from padless.emulator.state.site import Site
from padless.emulator.state.spaces import PARAM_WINDOW, SHARED_WINDOW
from padless.emulator.state.warp import Fragment, Wait
from padless.emulator.units import packed_map


@instruction("cp")
def copy(e: Emitter) -> None:
    if e.has("reduce", "async", "bulk"):
        operation = next((m for m in e.instruction.modifiers if m in REDUCTIONS), "")
        if "tensor" in e.modifiers:
            tensor_copy(e, operation)
        else:
            plain_copy(e, operation)
    elif e.has("async", "bulk"):
        if e.has("commit_group"):
            e.synchronise(commit_group(e))
        elif e.has("wait_group"):
            e.synchronise(wait_group(e))
        elif "prefetch" in e.modifiers:
            pass  # an L2 prefetch changes nothing
        elif "tensor" in e.modifiers:
            tensor_copy(e, "")
        else:
            plain_copy(e, "")
    elif e.has("async"):
        small_copy(e)
    else:
        e.unsupported()


REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


# ---- bulk groups of one thread
FAMILY = "bulk"


def commit_group(e: Emitter) -> Any:
    def bulk_commit(f: Fragment, m: Any) -> Wait | None:
        for lane in f.lanes(m).tolist():
            groups_of(f.warp, FAMILY, lane).commit()
        return None

    return bulk_commit


class BulkWait(GroupWait):
    what = "bulk copies"


def wait_group(e: Emitter) -> Any:
    operand = e.operands[0]
    if not isinstance(operand, Immediate):
        e.unsupported()
        return None
    pending, stage = operand.value, "read" if e.has("read") else "written"

    def bulk_wait(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        parts = [(w.first_row + lane, groups_of(w, FAMILY, lane)) for lane in f.lanes(m).tolist()]
        return BulkWait(w, parts, pending, stage).begin(f)

    return bulk_wait


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
    if spaces[:2] == ["shared", "global"]:
        return "load"
    if spaces[:2] == ["global", "shared"]:
        return "store"
    if spaces[:2] == ["shared", "shared"]:
        return "cluster"
    e.unsupported("state spaces")
    raise AssertionError


COMMON = {"async", "bulk", "tensor", "reduce", "mbarrier::complete_tx::bytes", "bulk_group", "shared::cluster",
          "shared::cta", "global", "multicast::cluster", "tile", "im2col", "tile::gather4", "tile::scatter4",
          "cta_group::1", "cta_group::2", "1d", "2d", "3d", "4d", "5d", "noftz", "ignore_oob"}  # fmt: skip


def check_modifiers(e: Emitter) -> None:
    for modifier in e.modifiers:
        if modifier not in COMMON and not cache_qualifier(modifier) and modifier not in (*REDUCTIONS, *e.types):
            e.unsupported(f"modifier .{modifier}")
    if e.has("im2col"):
        e.unsupported("im2col")


def tensor_copy(e: Emitter, operation: str) -> None:
    check_modifiers(e)
    direction = space_order(e)
    mode = "gather4" if e.has("tile::gather4") else "scatter4" if e.has("tile::scatter4") else "tile"
    rank = int(next((m for m in e.instruction.modifiers if m in ("1d", "2d", "3d", "4d", "5d")), "0d")[0])
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
    mask_slot = e.source_slot(rest[1], "u16") if e.has("multicast::cluster") else -1
    pair = e.has("cta_group::2")
    ins = e.instruction

    def bulk_tensor(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        check_grids(w, f.lanes(m), ins)
        for lane in f.lanes(m).tolist():
            site = Site(w, ins, lane)
            found = read_tensor_map(site, map_operand.one(w, lane))
            where = tuple(int(w.v[c][lane]) for c in coordinates)
            if found.rank != rank:
                site.report("tma", f"a {rank}-d copy through a tensor map of rank {found.rank}")
                continue
            start = memory.one(w, lane)
            if barrier is not None:
                mask = int(w.v[mask_slot][lane]) if mask_slot >= 0 else None
                bulk_transfer.tensor_load(site, found, where, start, barrier.one(w, lane), mask, pair, mode)
            else:
                groups = groups_of(w, FAMILY, lane)
                bulk_transfer.tensor_store(site, found, where, start, operation, mode, groups)
        return None

    e.synchronise(bulk_tensor)


def plain_copy(e: Emitter, operation: str) -> None:
    """cp.async.bulk without a tensor map: a run of bytes."""
    check_modifiers(e)
    direction = space_order(e)
    destination, source, size, *rest = e.operands
    size_slot = e.source_slot(size, "u32")
    ins = e.instruction
    if direction == "store":
        target: Any = GenericOperand(e, destination)
        origin: Any = SharedOperand(e, source)
    else:
        target = SharedOperand(e, destination)
        origin = GenericOperand(e, source) if direction == "load" else SharedOperand(e, source)
    barrier = SharedOperand(e, rest[0]) if direction != "store" else None
    mask_slot = e.source_slot(rest[1], "u16") if e.has("multicast::cluster") else -1
    reduce = (e.types[-1], operation) if operation else None

    def bulk_copy(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        for lane in f.lanes(m).tolist():
            site = Site(w, ins, lane)
            count = int(w.v[size_slot][lane])
            to, start = target.one(w, lane), origin.one(w, lane)
            if count % 16 or to % 16 or start % 16:
                site.fault(f"bulk copy of {count} bytes from {start:#x} to {to:#x}: not multiples of 16")
            if not count:
                continue
            if direction != "cluster":
                check_grids(w, [lane], ins)
            if barrier is None:
                bulk_transfer.plain_store(site, to, start, count, reduce, groups_of(w, FAMILY, lane))
            elif direction == "load":
                mask = int(w.v[mask_slot][lane]) if mask_slot >= 0 else None
                bulk_transfer.plain_load(site, to, start, count, barrier.one(w, lane), mask)
            else:
                bulk_transfer.shared_to_shared(site, to, start, count, barrier.one(w, lane), reduce)
        return None

    e.synchronise(bulk_copy)
