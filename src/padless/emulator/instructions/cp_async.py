"""cp.async: copies of 4, 8 or 16 bytes a lane, their groups and their arrivals on an mbarrier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from padless.emulator.instructions import bulk_transfer
from padless.emulator.instructions.data import cache_qualifier
from padless.emulator.instructions.operands import GenericOperand, SharedOperand
from padless.emulator.instructions.synchronisation import find_mbarrier
from padless.emulator.order.race import merge
from padless.emulator.ptx.ast import Immediate
from padless.emulator.state import grid_dependency
from padless.emulator.state.warp import Wait

if TYPE_CHECKING:
    from padless.emulator.prepare.emitter import Emitter
    from padless.emulator.state.warp import Fragment, Warp


class SmallGroups:
    """cp.async groups of one warp, by lane."""

    def __init__(self, w: Warp) -> None:
        clocks = w.cta.cluster.clocks
        self.columns = [clocks.new_column() for _ in range(32)] if clocks is not None else [-1] * 32
        self.open: list[list[Any]] = [[] for _ in range(32)]
        self.groups: list[list[list[Any]]] = [[] for _ in range(32)]


def small_groups(w: Warp) -> SmallGroups:
    agents = w.cta.cluster.agents
    key = ("cp.async", w.cta.rank, w.index)
    if key not in agents:
        agents[key] = SmallGroups(w)
    result: SmallGroups = agents[key]
    return result


class SmallWait(Wait):
    def __init__(self, f: Fragment, lanes: list[int], pending: int) -> None:
        self.warp = f.warp
        self.state = small_groups(f.warp)
        self.parts = [(lane, max(len(self.state.groups[lane]) - pending, 0)) for lane in lanes]

    def ready(self) -> bool:
        return all(t.written for lane, upto in self.parts for g in self.state.groups[lane][:upto] for t in g)

    def finish(self, fragment: Fragment) -> Wait | None:
        clocks = self.warp.cta.cluster.clocks
        if clocks is not None:
            for lane, upto in self.parts:
                clocks.observe(np.array([self.warp.first_row + lane]), self.state.columns[lane], upto)
        return None

    def describe(self) -> str:
        return "cp.async copies to finish"


def small_copy(e: Emitter) -> None:
    ins = e.instruction
    if e.has("commit_group"):

        def commit(f: Fragment, m: Any) -> Wait | None:
            state = small_groups(f.warp)
            for lane in f.lanes(m).tolist():
                state.groups[lane].append(state.open[lane])
                state.open[lane] = []
            return None

        e.synchronise(commit)
        return
    if e.has("wait_group") or e.has("wait_all"):
        operand = e.operands[0] if e.operands else Immediate(0)
        pending = operand.value if isinstance(operand, Immediate) else 0
        everything = e.has("wait_all")

        def wait(f: Fragment, m: Any) -> Wait | None:
            lanes = f.lanes(m).tolist()
            if everything:
                commit_open(f, lanes)
            waiting = SmallWait(f, lanes, pending)
            return waiting.finish(f) if waiting.ready() else waiting

        e.synchronise(wait)
        return
    if e.has("mbarrier", "arrive") or "mbarrier" in e.modifiers:
        small_arrive(e)
        return
    destination, source, size, *rest = e.operands
    for modifier in e.modifiers:
        if modifier not in ("async", "ca", "cg", "shared", "shared::cta", "global") and not cache_qualifier(
            modifier
        ):
            e.unsupported(f"modifier .{modifier}")
    assert isinstance(size, Immediate)
    target, origin = SharedOperand(e, destination), GenericOperand(e, source)
    count_slot = ignore_slot = -1
    for operand in rest[
        : len(rest) - e.has("L2::cache_hint")
    ]:  # the source's size or whether to ignore the source
        if e.width(operand) == 0:
            ignore_slot = e.source_slot(operand, "pred")
        else:
            count_slot = e.source_slot(operand, "u32")
    e.preparation.granule = min(e.preparation.granule, size.value)

    def cp_async(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        lanes = f.lanes(m).tolist()
        pieces = []
        for lane in lanes:
            count = int(w.v[count_slot][lane]) if count_slot >= 0 else size.value
            if ignore_slot >= 0 and w.v[ignore_slot][lane]:
                count = 0
            pieces.append((target.one(w, lane), origin.one(w, lane), min(count, size.value)))
        if w.cta.cluster.grids is not None:
            reading = [lane for lane, piece in zip(lanes, pieces, strict=True) if piece[2]]
            w.cta.cluster.grids.check(w, np.array(reading, np.intp), ins)
        bulk_transfer.small_load(w, lanes, ins, pieces, size.value, small_groups(w))
        return None

    e.synchronise(cp_async)


def commit_open(f: Fragment, lanes: list[int]) -> None:
    state = small_groups(f.warp)
    for lane in lanes:
        if state.open[lane]:
            state.groups[lane].append(state.open[lane])
            state.open[lane] = []


def small_arrive(e: Emitter) -> None:
    """cp.async.mbarrier.arrive: an arrival once the lane's earlier cp.async copies are done."""
    where = SharedOperand(e, e.operands[0])
    keep = e.has("noinc")
    ins = e.instruction

    def arrive(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        state = small_groups(w)
        clocks = w.cta.cluster.clocks
        for lane in f.lanes(m).tolist():
            bar = find_mbarrier(w, where.one(w, lane), ins, lane)
            if bar is None:
                continue
            if not keep:
                bar.pending += 1
            commit_open(f, [lane])
            upto = len(state.groups[lane])
            column = state.columns[lane]
            outstanding = [t for g in state.groups[lane] for t in g if not t.written]
            left = [len(outstanding)]
            ahead = grid_dependency.carried(w, lane)

            def finish(
                bar: Any = bar,
                lane: int = lane,
                upto: int = upto,
                column: int = column,
                left: list[int] = left,
                ahead: Any = ahead,
            ) -> None:
                left[0] -= 1
                if left[0] > 0:  # copies finish in any order
                    return
                clock = None
                if clocks is not None:
                    clock = np.zeros((4, clocks.columns), np.uint32)
                    clock[:, column] = upto
                    if ahead is not None:
                        clock = merge(clock, ahead)
                bar.arrive(1, clock, ins, w, lane)

            for transfer in outstanding:
                transfer.after.append(finish)
            if not outstanding:
                finish()
        return None

    e.synchronise(arrive)
