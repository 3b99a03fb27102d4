"""cp.async: copies of 4, 8 or 16 bytes a lane, their groups and their arrivals on an mbarrier."""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.instructions.bulk_transfer import gather
from padless.emulator.instructions.data import cache_qualifier
from padless.emulator.instructions.operands import GenericOperand, SharedOperand
from padless.emulator.order.race import BEFORE, IN_FLIGHT, merge, pack
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.ptx.ast import Immediate
from padless.emulator.state.global_access import check_grids
from padless.emulator.state.groups import Operation, commit_of, groups_of, wait_of
from padless.emulator.state.launch import AsyncOperation
from padless.emulator.state.mbarrier import find_mbarrier
from padless.emulator.state.site import Site
from padless.emulator.state.warp import Fragment, Wait, Warp
from padless.emulator.state.work import Work

FAMILY = "cp.async"


def small_copy(e: Emitter) -> None:
    if e.has("commit_group"):
        e.synchronise_lanes(commit_of(FAMILY))
    elif e.has("wait_group") or e.has("wait_all"):
        operand = e.operands[0] if e.operands else Immediate(0)
        pending = operand.value if isinstance(operand, Immediate) else 0
        e.synchronise(wait_of(FAMILY, pending, commits=e.has("wait_all")))
    elif "mbarrier" in e.modifiers:
        where, keep = SharedOperand(e, e.operands[0]), e.has("noinc")
        e.synchronise_lanes(lambda site: arrive_after(site, where.at(site), keep))
    else:
        e.synchronise(make_copy(e))


def make_copy(e: Emitter) -> Any:
    ins = e.instruction
    destination, source, size, *rest = e.operands
    e.only("async", "ca", "cg", "shared", "shared::cta", "global", *filter(cache_qualifier, e.modifiers))
    assert isinstance(size, Immediate)
    target, origin = SharedOperand(e, destination), GenericOperand(e, source)
    count_slot = ignore_slot = -1
    # the source's size or whether to ignore the source
    for operand in rest[: len(rest) - e.has("L2::cache_hint")]:
        if e.width(operand) == 0:
            ignore_slot = e.source_slot(operand, "pred")
        else:
            count_slot = e.source_slot(operand, "u32")
    e.limit_granule(size.value)

    def cp_async(f: Fragment, m: Any) -> Wait | None:
        copies = []
        for site in [Site(f.warp, ins, lane) for lane in f.lanes(m).tolist()]:
            count = site.value(count_slot) if count_slot >= 0 else size.value
            if ignore_slot >= 0 and site.value(ignore_slot):
                count = 0
            copies.append((site, target.at(site), origin.at(site), min(count, size.value)))
        check_grids(f.warp, [site.lane for site, _, _, count in copies if count], ins)
        copy(f.warp, copies, size.value)
        return None

    return cp_async


def copy(w: Warp, copies: list[tuple[Site, int, int, int]], size: int) -> None:
    """`size` bytes per lane, of which `count` are read and the rest are zero."""
    work = []
    for site, to, source, count in copies:
        cta, offset = site.locate(to)
        if offset % size or source % size:
            site.fault(f"cp.async of {size} bytes from {source:#x} to {to:#x}: misaligned", "misaligned")
        groups = groups_of(w, FAMILY, site.lane)
        operation = Operation(site.instruction)
        stamp = cells = None
        if w.clocks is not None:
            cells = slice(offset >> cta.granule_shift, (offset + size) >> cta.granule_shift)
            # cp.async is not the async proxy: it is ordered like an ordinary write of this thread, when waited for.
            stamp = pack(groups.column, IN_FLIGHT)
            cta.shared.shadow.bulk(cells, site.clock(), stamp, site, write=True, generic_plane=0)
        work.append((site, cta, offset, source, count, operation, cells, stamp, groups.column, groups.event))
        groups.open.append(operation)

    def land() -> None:
        for site, cta, offset, source, count, operation, cells, stamp, column, event in work:
            data = np.zeros(size, np.uint8)
            if count:
                data[:count] = gather(site, np.array([source]), count)[0]
            cta.shared.bytes[offset : offset + size] = data
            if stamp is not None:
                cta.shared.shadow.restamp(cells, stamp, pack(column, event))
            operation.finish()

    read_bytes = sum(count for _, _, _, count in copies)
    name = copies[0][0].instruction.name if copies else ""
    w.launch.enqueue(None, AsyncOperation(name, land, work=Work("small_load", w.cta, read_bytes)))


def arrive_after(site: Site, address: int, keep: bool) -> None:
    """cp.async.mbarrier.arrive: the lane's copies so far finish in any order; the last to do so arrives. keep: the
    arrival is a counted one."""
    w = site.warp
    bar = find_mbarrier(site, address)
    if bar is None:
        return
    if not keep:
        bar.pending += 1
    groups = groups_of(w, FAMILY, site.lane)
    if groups.open:
        groups.commit()
    upto = len(groups.closed)
    outstanding = groups.unfinished(upto)
    left = [len(outstanding)]
    ahead = site.carried()

    def finish() -> None:
        left[0] -= 1
        if left[0] > 0:
            return
        clock = None
        if w.clocks is not None:
            clock = np.zeros((BEFORE + 1, w.clocks.columns), np.uint32)
            clock[:, groups.column] = upto
            if ahead is not None:
                clock = merge(clock, ahead)
        bar.arrive(1, clock, site)

    for operation in outstanding:
        operation.after.append(finish)
    if not outstanding:
        finish()
