"""The copy engine: cp.async.bulk, cp.async.bulk.tensor, cp.reduce.async.bulk, their groups, prefetches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from padless.emulator.instructions import bulk_transfer
from padless.emulator.instructions.cp_async import small_copy
from padless.emulator.instructions.data import cache_qualifier
from padless.emulator.instructions.operands import GenericOperand, SharedOperand
from padless.emulator.prepare.registry import instruction
from padless.emulator.ptx.ast import Address, Immediate
from padless.emulator.state import grid_dependency
from padless.emulator.state.spaces import PARAM_WINDOW, SHARED_WINDOW
from padless.emulator.state.warp import Wait

if TYPE_CHECKING:
    from padless.emulator.prepare.emitter import Emitter
    from padless.emulator.ptx.ast import Instruction
    from padless.emulator.state.warp import Fragment, Warp


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
class BulkGroups:
    """The bulk groups of one lane: which of its copies are still reading, and which still writing."""

    def __init__(self, warp: Warp, lane: int) -> None:
        self.open: list[Any] = []
        self.groups: list[list[Any]] = []
        clocks = warp.cta.cluster.clocks
        self.column = clocks.new_column() if clocks is not None else -1


def bulk_groups(warp: Warp, lane: int) -> BulkGroups:
    groups = warp.cta.cluster.bulk_groups
    key = warp.first_row + lane
    if key not in groups:
        groups[key] = BulkGroups(warp, lane)
    result: BulkGroups = groups[key]
    return result


def commit_group(e: Emitter) -> Any:
    def bulk_commit(f: Fragment, m: Any) -> Wait | None:
        for lane in f.lanes(m).tolist():
            groups = bulk_groups(f.warp, lane)
            groups.groups.append(groups.open)
            groups.open = []
        return None

    return bulk_commit


class BulkWait(Wait):
    def __init__(self, warp: Warp, lanes: list[int], pending: int, read: bool) -> None:
        self.warp = warp
        self.read = read
        self.parts = []
        for lane in lanes:
            groups = bulk_groups(warp, lane)
            self.parts.append((lane, groups, max(len(groups.groups) - pending, 0)))

    def _unfinished(self) -> int:
        return sum(
            not (t.read if self.read else t.written)
            for _, groups, upto in self.parts
            for group in groups.groups[:upto]
            for t in group
        )

    def ready(self) -> bool:
        return self._unfinished() == 0

    def finish(self, fragment: Fragment) -> Wait | None:
        clocks = self.warp.cta.cluster.clocks
        if clocks is not None:
            for lane, groups, upto in self.parts:
                clocks.observe(np.array([self.warp.first_row + lane]), groups.column, upto)
        return None

    def describe(self) -> str:
        return f"{self._unfinished()} bulk copies to " + ("be read" if self.read else "finish")


def wait_group(e: Emitter) -> Any:
    operand = e.operands[0]
    if not isinstance(operand, Immediate):
        e.unsupported()
        return None
    pending, read = operand.value, e.has("read")

    def bulk_wait(f: Fragment, m: Any) -> Wait | None:
        waiting = BulkWait(f.warp, f.lanes(m).tolist(), pending, read)
        return waiting.finish(f) if waiting.ready() else waiting

    return bulk_wait


# ---- operands
def read_tensor_map(w: Warp, address: int, ins: Instruction, lane: int) -> Any:
    """Decode the 128 bytes at a generic address: kernel parameter, global or constant memory."""
    from padless.emulator.units import tensor_map

    machine = w.cta.machine
    if address % 64:
        machine.fault(
            w, ins, f"tensor map address {address:#x} is not a multiple of 64", np.arange(32) == lane
        )
    if address >> 60 == PARAM_WINDOW >> 60:
        at = address - PARAM_WINDOW
        raw = machine.parameters[at : at + 128].tobytes()
    elif address >> 60 == SHARED_WINDOW >> 60:
        machine.fault(w, ins, "a tensor map in shared memory cannot be used", np.arange(32) == lane)
        raise AssertionError
    else:
        raw = machine.memory.read_bytes(address, 128)
    cache = machine.__dict__.setdefault("_tensor_maps", {})
    if raw not in cache:
        try:
            cache[raw] = tensor_map.decode(raw)
        except ValueError as error:
            machine.fault(w, ins, f"not a tensor map: {error}", np.arange(32) == lane)
    return cache[raw]


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
        if (
            modifier not in COMMON
            and not cache_qualifier(modifier)
            and modifier not in (*REDUCTIONS, *e.types)
        ):
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
        grid_dependency.check(w, f.lanes(m), ins)
        for lane in f.lanes(m).tolist():
            tensor_map = read_tensor_map(w, map_operand.one(w, lane), ins, lane)
            where = tuple(int(w.v[c][lane]) for c in coordinates)
            if tensor_map.rank != rank:
                w.cta.machine.report(
                    "tma", f"a {rank}-d copy through a tensor map of rank {tensor_map.rank}", ins, w, lane
                )
                continue
            start = memory.one(w, lane)
            if direction == "load":
                assert barrier is not None
                mask = int(w.v[mask_slot][lane]) if mask_slot >= 0 else None
                bulk_transfer.tensor_load(
                    w, lane, ins, tensor_map, where, start, barrier.one(w, lane), mask, pair, mode
                )
            else:
                bulk_transfer.tensor_store(
                    w, lane, ins, tensor_map, where, start, operation, mode, bulk_groups(w, lane)
                )
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
    kind = e.types[-1] if operation else ""

    def bulk_copy(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        for lane in f.lanes(m).tolist():
            count = int(w.v[size_slot][lane])
            to, source_address = target.one(w, lane), origin.one(w, lane)
            if count % 16 or to % 16 or source_address % 16:
                w.cta.machine.fault(
                    w, ins, f"bulk copy of {count} bytes from {source_address:#x} to {to:#x}: not multiples of 16",
                    np.arange(32) == lane,
                )  # fmt: skip
            if count and direction != "cluster":
                grid_dependency.check(w, [lane], ins)
            mask = int(w.v[mask_slot][lane]) if mask_slot >= 0 else None
            if direction == "load":
                assert barrier is not None
                bulk_transfer.plain_load(w, lane, ins, to, source_address, count, barrier.one(w, lane), mask)
            elif direction == "store":
                bulk_transfer.plain_store(
                    w, lane, ins, to, source_address, count, operation, kind, bulk_groups(w, lane)
                )
            else:
                assert barrier is not None
                bulk_transfer.shared_to_shared(
                    w, lane, ins, to, source_address, count, barrier.one(w, lane), operation, kind
                )
        return None

    e.synchronise(bulk_copy)


# ---- cp.async of 4, 8 or 16 bytes a lane
