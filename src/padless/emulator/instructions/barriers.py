"""CTA and cluster barriers, warp barriers, and memory fences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from padless.emulator.instructions.operands import GenericOperand
from padless.emulator.instructions.warp_wide import write
from padless.emulator.order.race import merge
from padless.emulator.prepare.registry import instruction
from padless.emulator.ptx.ast import Not
from padless.emulator.state.warp import Wait
from padless.emulator.state.warp_sync import whole_warp

if TYPE_CHECKING:
    from padless.emulator.prepare.emitter import Emitter
    from padless.emulator.state.warp import Fragment


class BarrierWait(Wait):
    """Waiting at a CTA or cluster barrier."""

    def __init__(self, fragment: Fragment, what: Any) -> None:
        self.fragment = fragment
        self.what = what
        self.done = False
        self.clock: Any = None
        self.value: Any = None
        self.after: Any = None

    def ready(self) -> bool:
        return self.done

    def finish(self, fragment: Fragment) -> Wait | None:
        clocks = fragment.warp.cta.cluster.clocks
        if clocks is not None and self.clock is not None:
            clocks.acquire(rows_of(fragment), self.clock)
        if self.after is not None:
            self.after(fragment, self.value)
        return None

    def describe(self) -> str:
        return str(self.what())


def rows_of(fragment: Fragment) -> Any:
    """Clock rows of a fragment's lanes: a slice where it is a whole warp."""
    if fragment.full:
        return fragment.warp.rows
    return fragment.warp.first_row + np.flatnonzero(fragment.mask)


def release(fragment: Fragment) -> Any:
    """Publish the clocks of a fragment's lanes; None without checks."""
    clocks = fragment.warp.cta.cluster.clocks
    if clocks is None:
        return None
    rows = rows_of(fragment)
    clock = clocks.join(rows)
    clocks.tick(rows)
    return clock


@instruction("bar", "barrier")
def barrier(e: Emitter) -> None:
    if e.opcode == "barrier" and e.has("cluster"):
        cluster_barrier(e)
        return
    if e.has("warp"):
        warp_barrier(e)
        return
    e.only("sync", "arrive", "red", "cta", "aligned", "popc", "and", "or", "all")
    ins = e.instruction
    operands = list(e.operands)
    destination = operands.pop(0) if e.has("red") else None
    id_slot = e.source_slot(operands[0], "u32")
    predicate = None
    if e.has("red"):
        last = operands.pop()
        predicate = (
            (e.source_slot(last.operand, "pred"), True)
            if isinstance(last, Not)
            else (e.source_slot(last, "pred"), False)
        )
    count_slot = e.source_slot(operands[1], "u32") if len(operands) > 1 else -1
    out = -1
    if destination is not None:
        out = e.destination_slot(destination, "u32" if e.has("popc") else "pred")
    aligned = e.opcode == "bar" or e.has("aligned")
    arrive_only = e.has("arrive")
    operation = next((m for m in ("popc", "and", "or") if e.has(m)), "")

    def cta_barrier(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        cta = w.cta
        lane = int(np.argmax(f.mask))
        number = int(w.v[id_slot][lane])
        if number > 15:
            cta.machine.fault(w, ins, f"barrier {number}: a CTA has barriers 0 to 15", f.mask)
        bar = cta.barriers[number]
        everybody = count_slot < 0
        count = 32 * cta.live_warps() if everybody else int(w.v[count_slot][lane])
        if count % 32 or count == 0:
            cta.machine.fault(
                w, ins, f"barrier thread count {count} is not a positive multiple of 32", f.mask
            )
        if bar.count and bar.expected != count and not everybody:
            cta.machine.report(
                "barrier",
                f"barrier {number} with {count} threads while others use it with {bar.expected}",
                ins,
                w,
                lane,
            )
        bar.expected = count
        bar.count += 32 if aligned else int(np.count_nonzero(f.mask))
        lanes = bar.arrived.setdefault(w, np.zeros(32, bool))
        lanes |= w.live if aligned else f.mask
        clock = release(f)
        if clock is not None:
            bar.clock = merge(bar.clock, clock)
        if operation:
            assert predicate is not None
            p = w.v[predicate[0]][f.mask]
            held = ~p if predicate[1] else p
            bar.value = (bar.value or []) + held.tolist()
        waiting = None
        if not arrive_only:
            waiting = BarrierWait(
                f, lambda: f"barrier {number}: {bar.count} of {bar.expected} threads have arrived"
            )
            if operation:
                waiting.after = lambda fragment, value: write(fragment.warp.v, out, value, fragment.mask)
            bar.waiting.append(waiting)
        if bar.count > count:
            cta.machine.report(
                "barrier",
                f"{bar.count} threads arrive at barrier {number}, which expects {count}",
                ins,
                w,
                lane,
            )
        bar.everybody, bar.operation = everybody, operation
        if bar.everybody_is_here(cta) if everybody else bar.count >= count:
            complete_barrier(cta, bar)
        return waiting

    e.synchronise(whole_warp(cta_barrier) if aligned and ins.guard is None else cta_barrier)


def complete_barrier(cta: Any, bar: Any) -> None:
    """Let everybody go who waits at a CTA barrier."""
    value = None
    if bar.operation:
        operations: dict[str, Any] = {"popc": sum, "and": all, "or": any}
        value = operations[bar.operation](bar.value)
    clock = None if bar.clock is None else bar.clock.copy()  # later arrivals go on changing the barrier's own
    for each in bar.waiting:
        each.done, each.clock, each.value = True, clock, value
    bar.waiting, bar.count, bar.value, bar.arrived = [], 0, None, {}
    cta.machine.progress += 1


def threads_ended(w: Any) -> None:
    """Threads that have ended are no longer waited for at barriers of the whole CTA and of the cluster."""
    for bar in w.cta.barriers:
        if bar.count and bar.everybody and bar.everybody_is_here(w.cta):
            complete_barrier(w.cta, bar)
    cluster_barrier_check(w.cta.cluster)


class WarpBarrierWait(Wait):
    """bar.warp.sync: lanes of one warp may wait at different instructions."""

    def __init__(self, fragment: Fragment, needed: Any) -> None:
        self.fragment = fragment
        self.needed = needed
        self.done = False

    def ready(self) -> bool:
        if self.done:
            return True
        warp = self.fragment.warp
        here = self.fragment.mask.copy()
        others = [
            f
            for f in warp.fragments
            if isinstance(f.wait, WarpBarrierWait) and (f.wait.needed == self.needed).all()
        ]
        for other in others:
            here |= other.mask
        if (warp.live & self.needed & ~here).any():
            return False
        clocks = warp.cta.cluster.clocks
        if clocks is not None:
            rows = warp.first_row + np.flatnonzero(here)
            clock = clocks.join(rows)
            clocks.tick(rows)
            clocks.acquire(rows, clock)
        for other in others:
            assert isinstance(other.wait, WarpBarrierWait)
            other.wait.done = True
        return True

    def describe(self) -> str:
        return f"bar.warp.sync of lanes {np.flatnonzero(self.needed).tolist()}"


def warp_barrier(e: Emitter) -> None:
    slot = e.source_slot(e.operands[0], "u32")

    def warp_sync(f: Fragment, m: Any) -> Wait | None:
        lane = int(np.argmax(f.mask))
        members = int(f.warp.v[slot][lane])
        needed = ((members >> np.arange(32)) & 1).astype(bool)
        live = f.warp.live & needed
        if not (live & ~f.mask).any():
            clocks = f.warp.cta.cluster.clocks
            if clocks is not None:
                rows = f.warp.rows if live.all() else f.warp.first_row + np.flatnonzero(live)
                clock = clocks.join(rows)
                clocks.tick(rows)
                clocks.acquire(rows, clock)
            return None
        return WarpBarrierWait(f, needed)

    e.synchronise(warp_sync)


def cluster_barrier(e: Emitter) -> None:
    e.only("cluster", "arrive", "wait", "release", "acquire", "relaxed", "aligned")
    ins = e.instruction
    relaxed = e.has("relaxed")
    aligned = e.has("aligned")

    if e.has("arrive"):

        def arrive(f: Fragment, m: Any) -> Wait | None:
            w = f.warp
            cluster = w.cta.cluster
            if relaxed:
                publish_inits(f)
            elif (clock := release(f)) is not None:
                cluster.barrier_clock = merge(cluster.barrier_clock, clock)
            arrived = cluster.agents.setdefault("arrived", {})
            lanes = arrived.setdefault(w, np.zeros(32, bool))
            if (lanes & f.mask).any():
                w.cta.machine.report("barrier", "barrier.cluster.arrive twice without a wait", ins, w)
            lanes |= f.mask
            cluster_barrier_check(cluster)
            return None

        e.synchronise(whole_warp(arrive) if aligned else arrive)
        return

    def wait_cluster(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        cluster = w.cta.cluster
        done = cluster.agents.setdefault("cluster_done", {})
        clock = done.pop(w, None)
        waiting = BarrierWait(f, lambda: "the cluster barrier")
        if clock is not None:
            waiting.clock = clock if not isinstance(clock, bool) else None
            waiting.finish(f)
            return None
        arrived = cluster.agents.get("arrived", {})
        if w not in arrived:
            w.cta.machine.report("barrier", "barrier.cluster.wait without an arrive", ins, w)
        cluster.barrier_waiting.append((w, waiting))
        return waiting

    e.synchronise(whole_warp(wait_cluster) if aligned else wait_cluster)


def publish_inits(fragment: Fragment) -> None:
    """A relaxed arrival orders nothing but the initialisations of mbarriers that these lanes have followed by a
    fence.mbarrier_init: they are known once the barrier completes (PTX ISA, "membar / fence")."""
    cluster = fragment.warp.cta.cluster
    rows = set((fragment.warp.first_row + np.flatnonzero(fragment.mask)).tolist())
    for cta in cluster.ctas:
        for bar in cta.mbarriers.values():
            if bar.init_fenced and bar.init_stamp[0] in rows:
                cluster.fenced_inits.append(bar)


def cluster_barrier_check(cluster: Any) -> None:
    """Complete the cluster barrier once every live thread of every CTA has arrived."""
    arrived = cluster.agents.get("arrived", {})
    if not arrived:
        return
    for cta in cluster.ctas:
        for w in cta.warps:
            if w.live.any() and (w not in arrived or (w.live & ~arrived[w]).any()):
                return
    for bar in cluster.fenced_inits:
        bar.published = True
    cluster.fenced_inits = []
    clock = cluster.barrier_clock
    cluster.agents["arrived"] = {}
    done = cluster.agents.setdefault("cluster_done", {})
    waiting = dict(cluster.barrier_waiting)
    cluster.barrier_waiting = []
    for w in arrived:
        if w in waiting:
            waiting[w].done = True
            waiting[w].clock = None if clock is None else clock.copy()
        else:
            done[w] = True if clock is None else clock.copy()
    cluster.machine.progress += 1


@instruction("fence", "membar")
def fence(e: Emitter) -> None:
    """fence.proxy.async orders ordinary writes before the async proxy; fence.mbarrier_init publishes inits. The other
    fences order what barriers and strong accesses here order already."""
    known = {
        "sc", "acq_rel", "acquire", "release", "cta", "cluster", "gpu", "sys", "gl", "level", "proxy", "async", "alias",
        "mbarrier_init", "async::global", "async::shared::cta", "async::shared::cluster", "tensormap::generic", "global",
        "shared::cta", "shared::cluster", "async::generic", "sync_restrict::shared::cta",
        "sync_restrict::shared::cluster",
    }  # fmt: skip
    e.only(*known)
    if e.has("tensormap::generic", "acquire"):
        acquire_tensor_map(e)
    if any(m.startswith("async") for m in e.modifiers) and e.has("proxy"):
        if "async::global" not in e.modifiers and "global" not in e.modifiers:
            e.call(proxy_fence)
    elif e.has("mbarrier_init"):
        e.call(mbarrier_init_fence)


def acquire_tensor_map(e: Emitter) -> None:
    """What the kernels ahead write to a tensor map after this is not acquired by it."""
    operand, ins = GenericOperand(e, e.operands[0]), e.instruction

    def acquire(w: Any, v: Any, m: Any) -> None:
        if w.cta.cluster.grids is None:
            return
        lanes = np.arange(32) if m is True else np.flatnonzero(m)
        where = np.array([operand.one(w, lane) for lane in lanes.tolist()], np.int64)
        outside = where >> 60 == 0
        if outside.any():
            w.cta.cluster.grids.check(w, lanes[outside], ins, where[outside])

    e.call(acquire)


def proxy_fence(w: Any, v: Any, m: Any) -> None:
    clocks = w.cta.cluster.clocks
    if clocks is not None:
        clocks.fence_proxy(w.rows if m is True else w.first_row + np.flatnonzero(m))


def mbarrier_init_fence(w: Any, v: Any, m: Any) -> None:
    lanes = np.arange(32) if m is True else np.flatnonzero(m)
    rows = set((w.first_row + lanes).tolist())
    for cta in w.cta.cluster.ctas:
        for bar in cta.mbarriers.values():
            if bar.init_stamp[0] in rows:
                bar.init_fenced = True


@instruction("griddepcontrol")
def grid_dependency(e: Emitter) -> None:
    """Orders kernels after each other. A launch here runs alone: what counts is who has waited, in those that must."""
    e.only("wait", "launch_dependents")
    if e.has("wait"):
        e.call(wait_for_grids)


def wait_for_grids(w: Any, v: Any, m: Any) -> None:
    grids = w.cta.cluster.grids
    if grids is not None and np.any(m):
        grids.wait(w, w.rows if m is True else w.first_row + np.flatnonzero(m))
