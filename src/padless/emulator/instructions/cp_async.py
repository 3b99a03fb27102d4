"""cp.async: copies of 4, 8 or 16 bytes a lane, their groups and their arrivals on an mbarrier."""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.instructions.bulk_transfer import gather
from padless.emulator.instructions.data import cache_qualifier
from padless.emulator.instructions.operands import GenericOperand, SharedOperand
from padless.emulator.order.race import BEFORE, IN_FLIGHT, merge, pack
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.ptx.ast import Immediate, Instruction
from padless.emulator.state.global_access import check_copy, check_grids
from padless.emulator.state.groups import Operation, commit_of, groups_of, wait_of
from padless.emulator.state.launch import AsyncOperation
from padless.emulator.state.mbarrier import find_mbarrier
from padless.emulator.state.shared_access import shared_cells
from padless.emulator.state.site import Site
from padless.emulator.state.warp import Fragment, Wait, Warp
from padless.emulator.state.work import Work
from padless.emulator.units.number_formats import Array

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
        w, lanes = f.warp, f.lanes(m)
        counts = np.full(len(lanes), size.value)
        if count_slot >= 0:
            counts = np.minimum(w.v[count_slot][lanes].astype(np.int64), size.value)
        if ignore_slot >= 0:
            counts = np.where(w.v[ignore_slot][lanes], 0, counts)
        check_grids(w, lanes[counts > 0], ins)
        sources = w.v[origin.slot][lanes].astype(np.int64) + origin.offset
        copy(w, ins, lanes, target.values(w)[lanes], sources, counts, size.value)
        return None

    return cp_async


def copy(w: Warp, ins: Instruction, lanes: Array, to: Array, sources: Array, counts: Array, size: int) -> None:
    """`size` bytes per lane, of which `counts` are read and the rest are zero."""
    for at in np.flatnonzero((to % size != 0) | (sources % size != 0))[:1].tolist():
        message = f"cp.async of {size} bytes from {int(sources[at]):#x} to {int(to[at]):#x}: misaligned"
        Site(w, ins, int(lanes[at])).fault(message, "misaligned")
    operation = Operation(ins)  # of all lanes, as they land together
    groups = [groups_of(w, FAMILY, lane) for lane in lanes.tolist()]
    columns, events = np.array([g.column for g in groups]), np.array([g.event for g in groups])
    places = [Site(w, ins, lane).locate(address) for lane, address in zip(lanes.tolist(), to.tolist(), strict=True)]
    offsets, ctas = np.array([offset for _, offset in places]), [cta for cta, _ in places]
    work = []
    for cta in dict.fromkeys(ctas):
        own = np.flatnonzero([c is cta for c in ctas])
        # What lanes write twice is a race of one with the other: those are checked one by one.
        together = [own] if len(np.unique(offsets[own])) == len(own) else [own[i : i + 1] for i in range(len(own))]
        copied: dict[int, tuple[int, int]] = {}
        for part in together:
            cells, first = None, int(part[0])
            what = int(sources[first]), int(counts[first])
            again = len(part) == 1 and copied.get(int(offsets[first])) == what
            copied[int(offsets[first])] = what
            if w.clocks is not None:
                # cp.async is not the async proxy: it is ordered like an ordinary write of its lane, when waited for.
                cells, shadow = shared_cells(cta, offsets[part], size), cta.shared.shadow
                shadow.access(w, lanes[part], cells, ins, True, False, lambda picked, again=again: again)
                shadow.written[cells] = pack(columns[part], IN_FLIGHT)[:, None]
            work.append((cta, part, cells))
    for each in groups:
        each.open.append(operation)
    for i in np.flatnonzero(counts > 0).tolist() if w.launch.shadows else ():
        check_copy(Site(w, ins, int(lanes[i])), sources[i : i + 1], int(counts[i]))

    def land() -> None:
        data = read(w, ins, lanes, sources, counts, size)
        for cta, part, cells in work:
            cta.shared.bytes[offsets[part][:, None] + np.arange(size)] = data[part]
            if cells is not None:
                old, new = (pack(columns[part], event)[:, None] for event in (IN_FLIGHT, events[part]))
                cta.shared.shadow.restamp(cells, old, new)
        operation.finish()

    w.launch.enqueue(None, AsyncOperation(ins.name, land, work=Work("small_load", w.cta, int(counts.sum()))))


def read(w: Warp, ins: Instruction, lanes: Array, sources: Array, counts: Array, size: int) -> Array:
    """The lanes' bytes, (lanes, size), zero behind `counts`."""
    data = np.zeros((len(lanes), size), np.uint8)
    for count in np.unique(counts[counts > 0]).tolist():
        reading = np.flatnonzero(counts == count)
        where = sources[reading]
        found = w.launch.memory.find(int(where.min()))
        inside = found is not None and int(where.max()) + count <= found.end
        for part in [reading] if inside else reading[:, None]:  # a report names its lane
            data[part, :count] = gather(Site(w, ins, int(lanes[part[0]])), sources[part], count)
    return data


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
