"""What the copy engine does with one copy: check, queue, move the bytes later, and signal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from padless.emulator.instructions.operands import locate
from padless.emulator.instructions.synchronisation import find_mbarrier
from padless.emulator.order.race import ASYNC, IN_FLIGHT, pack
from padless.emulator.state import grid_dependency
from padless.emulator.state.asynchronous import AsyncOperation, Work
from padless.emulator.state.spaces import OFFSET_MASK

if TYPE_CHECKING:
    from padless.emulator.ptx.ast import Instruction
    from padless.emulator.state.mbarrier import Mbarrier
    from padless.emulator.state.warp import Cta, Warp

Array = np.ndarray[Any, Any]


class Transfer:
    """One store in flight: has it read its source, has it written its destination."""

    __slots__ = ("after", "instruction", "read", "written")

    def __init__(self, instruction: Instruction) -> None:
        self.instruction = instruction
        self.read = False
        self.written = False
        self.after: list[Any] = []


def cells_of(addresses: Array, granule: int, shift: int) -> Any:
    """Shadow cells of `granule`-byte pieces at CTA offsets; a slice where they fill one range."""
    low, high = int(addresses.min()), int(addresses.max()) + granule
    if high - low == len(addresses) * granule:
        return slice(low >> shift, -(-high >> shift))
    per = max(granule >> shift, 1)
    cells = (addresses >> shift)[:, None] + np.arange(per)
    return np.unique(cells) if granule >> shift == 0 else cells.reshape(-1)


def gather(w: Warp, ins: Instruction, lane: int, addresses: Array, granule: int) -> Array:
    """Read `granule`-byte pieces of global memory; what lies outside every allocation is reported and reads as 0xFF."""
    memory = w.cta.machine.memory
    out = np.full((len(addresses), granule), 0xFF, np.uint8)
    left = np.ones(len(addresses), bool)
    while left.any():
        at = int(np.argmax(left))
        address = int(addresses[at])
        found = memory.find(address)
        if found is None or address + granule > found.end:
            w.cta.machine.report(
                "out-of-bounds",
                f"a bulk copy reads global address {address:#x}, outside every registered array",
                ins,
                w,
                lane,
            )
            left[at] = False
            if found is None:
                outside = left & (addresses.astype(np.int64) // 4096 == address // 4096)
                left &= ~outside
            continue
        offsets = addresses.astype(np.int64) - found.address
        inside = left & (offsets >= 0) & (offsets + granule <= found.size)
        picked = offsets[inside]
        if granule in (2, 4, 8, 16) and not (picked % granule).any() and granule <= 8:
            kind = f"u{granule}"
            out[inside] = found.view(np.dtype(kind))[picked // granule].view(np.uint8).reshape(-1, granule)
        elif granule == 16 and not (picked % 16).any():
            out[inside] = found.view(np.dtype("u8,u8"))[picked // 16].view(np.uint8).reshape(-1, 16)
        else:
            out[inside] = found.bytes[picked[:, None] + np.arange(granule)]
        left &= ~inside
    return out


def scatter(w: Warp, ins: Instruction, lane: int, addresses: Array, data: Array) -> None:
    memory = w.cta.machine.memory
    granule = data.shape[1]
    left = np.ones(len(addresses), bool)
    while left.any():
        at = int(np.argmax(left))
        address = int(addresses[at])
        found = memory.find(address)
        if found is None or address + granule > found.end:
            w.cta.machine.report(
                "out-of-bounds",
                f"a bulk copy writes global address {address:#x}, outside every registered array",
                ins,
                w,
                lane,
            )
            left[at] = False
            continue
        offsets = addresses.astype(np.int64) - found.address
        inside = left & (offsets >= 0) & (offsets + granule <= found.size)
        found.bytes[offsets[inside][:, None] + np.arange(granule)] = data[inside]
        left &= ~inside


def destinations(
    w: Warp, lane: int, ins: Instruction, start: int, barrier: int, mask: int | None, pair: bool
) -> list[tuple[Cta, Mbarrier]]:
    """The CTAs that receive a copy, each with the barrier it completes on."""
    cta, _ = locate(w, start, ins, lane)
    cluster = w.cta.cluster
    ranks = [cta.rank] if mask is None else [r for r in range(16) if mask >> r & 1]
    out = []
    bar_rank = barrier >> 24
    for rank in ranks:
        if rank >= len(cluster.ctas):
            w.cta.machine.report(
                "tma", f"multicast to CTA {rank} of a cluster of {len(cluster.ctas)}", ins, w, lane
            )
            continue
        signalled = rank
        if pair:
            signalled = (rank & ~1) | (bar_rank & 1)
        elif mask is None and bar_rank != rank:
            w.cta.machine.report(
                "tma",
                f"data goes to CTA {rank}, the mbarrier is in CTA {bar_rank}; only .cta_group::2 allows it",
                ins, w, lane,
            )  # fmt: skip
            signalled = bar_rank
        bar = find_mbarrier(w, (signalled << 24) | (barrier & OFFSET_MASK), ins, lane, asynchronous=True)
        target = cluster.ctas[rank]
        if target.exited:
            w.cta.machine.report(
                "exit", f"copies into shared memory of CTA {target.index}, which has exited", ins, w, lane
            )
        if bar is not None:
            out.append((target, bar))
    return out


def begin_write(w: Warp, lane: int, ins: Instruction, cta: Cta, cells: Any, column: int) -> Any:
    """Check a write to shared memory at issue, and mark the bytes as in flight."""
    clocks = w.cta.cluster.clocks
    if clocks is None:
        return None
    stamp = pack(column, IN_FLIGHT, ASYNC)
    row = np.array([w.first_row + lane])
    cta.shared.shadow.bulk(cells, clocks.meet(row), stamp, ins, w, lane, write=True)
    return stamp


def tensor_load(
    w: Warp, lane: int, ins: Instruction, tensor_map: Any, coordinates: tuple[int, ...], start: int, barrier: int,
    mask: int | None, pair: bool, mode: str,
) -> None:  # fmt: skip
    from padless.emulator.units import tma

    machine = w.cta.machine
    offset = start & OFFSET_MASK
    plan = tma.plan(tensor_map, coordinates, offset, store=False, mode=mode)
    for problem in plan.problems:
        machine.report("tma", problem, ins, w, lane)
    if not len(plan.shared_address):
        return
    if int(plan.shared_address.max()) + plan.granule > w.cta.shared.size:
        machine.fault(w, ins, "a bulk copy reaches past the CTA's shared memory", np.arange(32) == lane)
    written = plan.shared_address, plan.granule
    if tensor_map.shared_bits != tensor_map.element_bits:
        # 16 bytes of which some are padding: written as a whole
        written = np.unique(plan.shared_address & ~15), 16
    ahead = grid_dependency.carried(w, lane)
    first = True
    for cta, bar in destinations(w, lane, ins, start, barrier, mask, pair):
        cells = cells_of(*written, cta.granule_shift) if cta.checks else None
        stamp = begin_write(w, lane, ins, cta, cells, bar.column)

        def land(cta: Cta = cta, bar: Mbarrier = bar, cells: Any = cells, stamp: Any = stamp) -> None:
            tma.load(plan, lambda a, g: gather(w, ins, lane, a, g), cta.shared.bytes)
            complete(w, ins, cta, bar, cells, stamp, plan.transaction_bytes, ahead)

        work = Work("load", cta, plan.transaction_bytes, tensor_map, w.cta, first)
        machine.enqueue(None, AsyncOperation(f"{ins.name} of CTA {w.cta.index}", land, work=work))
        first = False


def complete(
    w: Warp, ins: Instruction, cta: Cta, bar: Mbarrier, cells: Any, stamp: Any, size: int, ahead: Any = None
) -> None:
    """The bytes have landed: they belong to the barrier's current phase, and count down its transactions. `ahead`: what
    their issuer knew of the kernels ahead (GridDependency.carried)."""
    if stamp is not None:
        cta.shared.shadow.restamp(cells, stamp, pack(bar.column, bar.phase + 1, ASYNC))
    bar.complete_tx(size, ins, w, ahead)


def plain_load(
    w: Warp, lane: int, ins: Instruction, to: int, source: int, count: int, barrier: int, mask: int | None
) -> None:
    machine = w.cta.machine
    if not count:
        return
    where = (to & OFFSET_MASK) + np.arange(0, count, 16)
    if int(where.max()) + 16 > w.cta.shared.size:
        machine.fault(w, ins, "a bulk copy reaches past the CTA's shared memory", np.arange(32) == lane)
    ahead = grid_dependency.carried(w, lane)
    first = True
    for cta, bar in destinations(w, lane, ins, to, barrier, mask, False):
        cells = cells_of(where, 16, cta.granule_shift) if cta.checks else None
        stamp = begin_write(w, lane, ins, cta, cells, bar.column)

        def land(cta: Cta = cta, bar: Mbarrier = bar, cells: Any = cells, stamp: Any = stamp) -> None:
            data = gather(w, ins, lane, source + np.arange(0, count, 16), 16)
            cta.shared.bytes[where[0] : where[0] + count] = data.reshape(-1)
            complete(w, ins, cta, bar, cells, stamp, count, ahead)

        work = Work("load", cta, count, None, w.cta, first)
        machine.enqueue(None, AsyncOperation(f"{ins.name} of CTA {w.cta.index}", land, work=work))
        first = False


def begin_read(
    w: Warp, lane: int, ins: Instruction, cta: Cta, where: Array, granule: int, groups: Any
) -> Transfer:
    """Check a read of shared memory at issue and leave its stamp; the read ends with the thread's bulk group."""
    clocks = w.cta.cluster.clocks
    if clocks is not None:
        cells = cells_of(where, granule, cta.granule_shift)
        stamp = int(pack(groups.column, len(groups.groups) + 1, ASYNC))
        row = np.array([w.first_row + lane])
        cta.shared.shadow.bulk(cells, clocks.meet(row), stamp, ins, w, lane, write=False)
    transfer = Transfer(ins)
    groups.open.append(transfer)
    return transfer


def tensor_store(
    w: Warp, lane: int, ins: Instruction, tensor_map: Any, coordinates: tuple[int, ...], start: int, operation: str,
    mode: str, groups: Any,
) -> None:  # fmt: skip
    from padless.emulator.units import tma

    machine = w.cta.machine
    cta, offset = locate(w, start, ins, lane)
    plan = tma.plan(tensor_map, coordinates, offset, store=True, mode=mode)
    for problem in plan.problems:
        machine.report("tma", problem, ins, w, lane)
    if not len(plan.shared_address):
        return
    if int(plan.shared_address.max()) + plan.granule > cta.shared.size:
        machine.fault(w, ins, "a bulk copy reaches past the CTA's shared memory", np.arange(32) == lane)
    transfer = begin_read(w, lane, ins, cta, plan.shared_address, plan.granule, groups)
    taken: list[Any] = []

    def read() -> None:
        tma.store(plan, cta.shared.bytes, lambda a, data: taken.append((a, np.array(data, copy=True))))
        transfer.read = True

    def write() -> None:
        for addresses, values in taken:
            data = values
            if operation:
                old = gather(w, ins, lane, addresses, data.shape[1])
                data = tma.reduce_values(old, data, tensor_map.element, operation)
            scatter(w, ins, lane, addresses, data)
        transfer.written = True

    work = Work("store", cta, len(plan.shared_address) * plan.granule, tensor_map)
    machine.enqueue(None, AsyncOperation(f"{ins.name} of CTA {w.cta.index}", read, write, work=work))


def plain_store(
    w: Warp,
    lane: int,
    ins: Instruction,
    to: int,
    source: int,
    count: int,
    operation: str,
    kind: str,
    groups: Any,
) -> None:
    machine = w.cta.machine
    cta, offset = locate(w, source, ins, lane)
    if not count:
        return
    where = offset + np.arange(0, count, 16)
    if int(where.max()) + 16 > cta.shared.size:
        machine.fault(w, ins, "a bulk copy reaches past the CTA's shared memory", np.arange(32) == lane)
    transfer = begin_read(w, lane, ins, cta, where, 16, groups)
    taken: list[Array] = []

    def read() -> None:
        taken.append(cta.shared.bytes[offset : offset + count].copy().reshape(-1, 16))
        transfer.read = True

    def write() -> None:
        data = taken[0]
        addresses = to + np.arange(0, count, 16)
        if operation:
            data = reduce_bytes(gather(w, ins, lane, addresses, 16), data, kind, operation)
        scatter(w, ins, lane, addresses, data)
        transfer.written = True

    work = Work("store", cta, count)
    machine.enqueue(None, AsyncOperation(f"{ins.name} of CTA {w.cta.index}", read, write, work=work))


def reduce_bytes(old: Array, new: Array, kind: str, operation: str) -> Array:
    from padless.emulator.units import tma

    return np.asarray(tma.reduce_values(old, new, kind, operation))


def shared_to_shared(
    w: Warp,
    lane: int,
    ins: Instruction,
    to: int,
    source: int,
    count: int,
    barrier: int,
    operation: str,
    kind: str,
) -> None:
    """Distributed shared memory: own shared memory to another CTA's, completing on a barrier there."""
    machine = w.cta.machine
    origin, offset = locate(w, source, ins, lane)
    target, start = locate(w, to, ins, lane)
    bar = find_mbarrier(w, barrier, ins, lane, asynchronous=True)
    if bar is None:
        return
    clocks = w.cta.cluster.clocks
    cells = stamp = None
    if clocks is not None:
        row = np.array([w.first_row + lane])
        reads = cells_of(offset + np.arange(0, count, 16), 16, origin.granule_shift)
        # The source is free again when the barrier completes.
        origin.shared.shadow.bulk(
            reads, clocks.meet(row), int(pack(bar.column, bar.phase + 1, ASYNC)), ins, w, lane, write=False
        )
        cells = cells_of(start + np.arange(0, count, 16), 16, target.granule_shift)
        stamp = begin_write(w, lane, ins, target, cells, bar.column)
    ahead = grid_dependency.carried(w, lane)

    def land() -> None:
        data = origin.shared.bytes[offset : offset + count].copy()
        if operation:
            old = target.shared.bytes[start : start + count].reshape(-1, 16)
            data = reduce_bytes(old, data.reshape(-1, 16), kind, operation).reshape(-1)
        target.shared.bytes[start : start + count] = data
        complete(w, ins, target, bar, cells, stamp, count, ahead)

    work = Work("remote", target, count, None, origin)
    machine.enqueue(None, AsyncOperation(f"{ins.name} of CTA {w.cta.index}", land, work=work))


def small_load(
    w: Warp, lanes: list[int], ins: Instruction, pieces: list[tuple[int, int, int]], size: int, state: Any
) -> None:
    """cp.async: `size` bytes per lane, of which `count` are read and the rest are zero."""
    machine = w.cta.machine
    clocks = w.cta.cluster.clocks
    work = []
    for lane, (to, source, count) in zip(lanes, pieces, strict=True):
        cta, offset = locate(w, to, ins, lane)
        if offset % size or source % size:
            machine.fault(
                w,
                ins,
                f"cp.async of {size} bytes from {source:#x} to {to:#x}: misaligned",
                np.arange(32) == lane,
            )
        transfer = Transfer(ins)
        state.open[lane].append(transfer)
        stamp = cells = None
        if clocks is not None:
            cells = slice(offset >> cta.granule_shift, (offset + size) >> cta.granule_shift)
            row = np.array([w.first_row + lane])
            # cp.async is not the async proxy: it is ordered like an ordinary write of this thread, when waited for.
            stamp = pack(state.columns[lane], IN_FLIGHT)
            cta.shared.shadow.bulk(cells, clocks.meet(row), stamp, ins, w, lane, write=True, generic_plane=0)
        work.append((lane, cta, offset, source, count, transfer, cells, stamp, len(state.groups[lane]) + 1))

    def land() -> None:
        for lane, cta, offset, source, count, transfer, cells, stamp, group in work:
            data = np.zeros(size, np.uint8)
            if count:
                data[:count] = gather(w, ins, lane, np.array([source]), count)[0]
            cta.shared.bytes[offset : offset + size] = data
            if stamp is not None:
                cta.shared.shadow.restamp(cells, stamp, pack(state.columns[lane], group))
            transfer.written = transfer.read = True
            for function in transfer.after:
                function()

    read_bytes = sum(count for _, _, count in pieces)
    machine.enqueue(None, AsyncOperation(ins.name, land, work=Work("small_load", w.cta, read_bytes)))
