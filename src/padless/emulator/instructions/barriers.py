"""CTA and cluster barriers, warp barriers, and memory fences."""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.instructions.operands import GenericOperand, of_clocks, scope_of
from padless.emulator.instructions.warp_wide import predicate_source, write
from padless.emulator.order.memory_order import CLUSTER, GPU
from padless.emulator.order.race import merge
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import instruction
from padless.emulator.state.barriers import BarrierWait, complete_barrier, complete_cluster_barrier, publish_inits
from padless.emulator.state.global_access import check_grids
from padless.emulator.state.site import Site, lanes_of, rows_of
from padless.emulator.state.warp import Fragment, Wait, Warp
from padless.emulator.state.warp_sync import whole_warp


@instruction("bar", "barrier")
def barrier(e: Emitter) -> None:
    if e.opcode == "barrier" and e.has("cluster"):
        cluster_barrier(e)
    elif e.has("warp"):
        warp_barrier(e)
    else:
        cta_barrier(e)


def cta_barrier(e: Emitter) -> None:
    e.only("sync", "arrive", "red", "cta", "aligned", "popc", "and", "or", "all")
    ins = e.instruction
    operands = list(e.operands)
    destination = operands.pop(0) if e.has("red") else None
    id_slot = e.source_slot(operands[0], "u32")
    predicate, negated = predicate_source(e, operands.pop()) if e.has("red") else (-1, False)
    count_slot = e.source_slot(operands[1], "u32") if len(operands) > 1 else -1
    out = -1
    if destination is not None:
        out = e.destination_slot(destination, "u32" if e.has("popc") else "pred")
    aligned = e.opcode == "bar" or e.has("aligned")
    arrive_only = e.has("arrive")
    operation = e.either("popc", "and", "or")

    def meet(f: Fragment, m: Any) -> Wait | None:
        w, cta = f.warp, f.warp.cta
        site = Site(w, ins, int(np.argmax(f.mask)))
        number = site.value(id_slot)
        if number > 15:
            site.fault(f"barrier {number}: a CTA has barriers 0 to 15")
        bar = cta.barriers[number]
        everybody = count_slot < 0
        count = 32 * cta.live_warps() if everybody else site.value(count_slot)
        if count % 32 or count == 0:
            site.fault(f"barrier thread count {count} is not a positive multiple of 32")
        if bar.count and bar.expected != count and not everybody:
            message = f"barrier {number} with {count} threads while others use it with {bar.expected}"
            site.report("barrier", message)
        bar.expected = count
        bar.count += 32 if aligned else int(np.count_nonzero(f.mask))
        lanes = bar.arrived.setdefault(w, np.zeros(32, bool))
        lanes |= w.live if aligned else f.mask
        if w.clocks is not None:
            bar.clock = merge(bar.clock, w.clocks.release(rows_of(w, f.active)))
        if operation:
            p = w.v[predicate][f.mask]
            bar.value = (bar.value or []) + (~p if negated else p).tolist()
        waiting = None
        if not arrive_only:
            waiting = BarrierWait(lambda: f"barrier {number}: {bar.count} of {bar.expected} threads have arrived")
            if operation:
                waiting.after = lambda fragment, value: write(fragment.warp.v, out, value, fragment.mask)
            bar.waiting.append(waiting)
        if bar.count > count:
            site.report("barrier", f"{bar.count} threads arrive at barrier {number}, which expects {count}")
        bar.everybody, bar.operation = everybody, operation
        if bar.everybody_is_here(cta) if everybody else bar.count >= count:
            complete_barrier(cta, bar)
        return waiting

    e.synchronise(whole_warp(meet) if aligned and ins.guard is None else meet)


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
        waits = []
        for f in warp.fragments:
            if isinstance(f.wait, WarpBarrierWait) and (f.wait.needed == self.needed).all():
                waits.append(f.wait)
                here |= f.mask
        if (warp.live & self.needed & ~here).any():
            return False
        order_lanes(warp, here)
        for wait in waits:
            wait.done = True
        return True

    def describe(self) -> str:
        return f"bar.warp.sync of lanes {np.flatnonzero(self.needed).tolist()}"


def order_lanes(w: Warp, lanes: Any) -> None:
    """Everything that these lanes did is ordered before what they do next."""
    if w.clocks is not None:
        rows = rows_of(w, True if lanes.all() else lanes)
        w.clocks.acquire(rows, w.clocks.release(rows))


def warp_barrier(e: Emitter) -> None:
    slot = e.source_slot(e.operands[0], "u32")

    def warp_sync(f: Fragment, m: Any) -> Wait | None:
        members = int(f.warp.v[slot][int(np.argmax(f.mask))])
        needed = ((members >> np.arange(32)) & 1).astype(bool)
        live = f.warp.live & needed
        if (live & ~f.mask).any():
            return WarpBarrierWait(f, needed)
        order_lanes(f.warp, live)
        return None

    e.synchronise(warp_sync)


def cluster_barrier(e: Emitter) -> None:
    e.only("cluster", "arrive", "wait", "release", "acquire", "relaxed", "aligned")
    ins = e.instruction
    relaxed = e.has("relaxed")

    def arrive(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        cluster = w.cta.cluster
        if relaxed:
            publish_inits(f)
        if w.clocks is not None:
            for clock, scope in w.clocks.published(rows_of(w, f.active), not relaxed, CLUSTER):
                if scope >= CLUSTER:
                    cluster.barrier_clock = merge(cluster.barrier_clock, clock)
        lanes = cluster.arrived.setdefault(w, np.zeros(32, bool))
        if (lanes & f.mask).any():
            Site(w, ins).report("barrier", "barrier.cluster.arrive twice without a wait")
        lanes |= f.mask
        complete_cluster_barrier(cluster)
        return None

    def wait(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        cluster = w.cta.cluster
        waiting = BarrierWait(lambda: "the cluster barrier")
        if w in cluster.barrier_done:
            waiting.complete(cluster.barrier_done.pop(w))
            return waiting.finish(f)
        if w not in cluster.arrived:
            Site(w, ins).report("barrier", "barrier.cluster.wait without an arrive")
        cluster.barrier_waiting[w] = waiting
        return waiting

    function = arrive if e.has("arrive") else wait
    e.synchronise(whole_warp(function) if e.has("aligned") else function)


@instruction("fence", "membar")
def fence(e: Emitter) -> None:
    """fence.proxy.async orders ordinary writes before the async proxy; fence.mbarrier_init publishes inits. Those of no
    proxy make relaxed accesses before and after them acquire and release."""
    e.only(
        "sc", "acq_rel", "acquire", "release", "cta", "cluster", "gpu", "sys", "gl", "level", "proxy", "async", "alias",
        "mbarrier_init", "async::global", "async::shared::cta", "async::shared::cluster", "tensormap::generic", "global",
        "shared::cta", "shared::cluster", "async::generic", "sync_restrict::shared::cta",
        "sync_restrict::shared::cluster",
    )  # fmt: skip
    if e.has("tensormap::generic", "acquire"):
        acquire_tensor_map(e)
    if any(m.startswith("async") for m in e.modifiers) and e.has("proxy"):
        if "async::global" not in e.modifiers and "global" not in e.modifiers:
            e.call(of_clocks("fence_proxy"))
    elif e.has("mbarrier_init"):
        e.call(mbarrier_init_fence)
    elif not e.has("proxy"):
        e.call(of_clocks("fence", scope_of(e, GPU), not e.has("acquire"), not e.has("release")))


def acquire_tensor_map(e: Emitter) -> None:
    """What the kernels ahead write to a tensor map after this is not acquired by it."""
    operand = GenericOperand(e, e.operands[0])

    def acquire(site: Site) -> None:
        where = operand.at(site)
        if where >> 60 == 0:
            check_grids(site.warp, [site.lane], site.instruction, np.array([where]))

    e.call_lanes(acquire)


def mbarrier_init_fence(w: Warp, v: Any, m: Any) -> None:
    rows = set((w.first_row + lanes_of(m)).tolist())
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


def wait_for_grids(w: Warp, v: Any, m: Any) -> None:
    grids = w.cta.cluster.grids
    if grids is not None and np.any(m):
        grids.wait(w.cta.rank, rows_of(w, m))
