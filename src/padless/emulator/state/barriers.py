"""CTA and cluster barriers: who waits, what completes them, and the clocks that they carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from padless.emulator.state.site import rows_of
from padless.emulator.state.warp import Cluster, Cta, Fragment, NamedBarrier, Wait, Warp


class BarrierWait(Wait):
    """Waiting at a CTA or cluster barrier."""

    def __init__(self, what: Callable[[], str]) -> None:
        self.what = what
        self.done = False
        self.clock: Any = None
        self.value: Any = None
        self.after: Callable[[Fragment, Any], None] | None = None

    def complete(self, clock: Any, value: Any = None) -> None:
        self.done, self.clock, self.value = True, clock, value

    def ready(self) -> bool:
        return self.done

    def finish(self, fragment: Fragment) -> Wait | None:
        w = fragment.warp
        if w.clocks is not None and self.clock is not None:
            w.clocks.acquire(rows_of(w, fragment.active), self.clock)
        if self.after is not None:
            self.after(fragment, self.value)
        return None

    def describe(self) -> str:
        return self.what()


def complete_barrier(cta: Cta, bar: NamedBarrier) -> None:
    """Let everybody go who waits at a CTA barrier."""
    value = None
    if bar.operation:
        operations: dict[str, Any] = {"popc": sum, "and": all, "or": any}
        value = operations[bar.operation](bar.value)
    clock = None if bar.clock is None else bar.clock.copy()  # later arrivals go on changing the barrier's own
    for each in bar.waiting:
        each.complete(clock, value)
    bar.waiting, bar.count, bar.value, bar.arrived = [], 0, None, {}
    cta.launch.progress += 1


def threads_ended(w: Warp) -> None:
    """Threads that have ended are no longer waited for at barriers of the whole CTA and of the cluster."""
    for bar in w.cta.barriers:
        if bar.count and bar.everybody and bar.everybody_is_here(w.cta):
            complete_barrier(w.cta, bar)
    complete_cluster_barrier(w.cta.cluster)


def publish_inits(fragment: Fragment) -> None:
    """A relaxed arrival orders nothing but the initialisations of mbarriers that these lanes have followed by a
    fence.mbarrier_init: they are known once the barrier completes (PTX ISA, "membar / fence")."""
    cluster = fragment.warp.cta.cluster
    rows = set((fragment.warp.first_row + np.flatnonzero(fragment.mask)).tolist())
    for cta in cluster.ctas:
        for bar in cta.mbarriers.values():
            if bar.init_fenced and bar.init_stamp[0] in rows:
                cluster.fenced_inits.append(bar)


def complete_cluster_barrier(cluster: Cluster) -> None:
    """Complete the cluster barrier if every live thread of every CTA has arrived."""
    arrived = cluster.arrived
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
    waiting, cluster.barrier_waiting, cluster.arrived = cluster.barrier_waiting, {}, {}
    for w in arrived:
        seen = None if clock is None else clock.copy()
        if w in waiting:
            waiting[w].complete(seen)
        else:
            cluster.barrier_done[w] = seen
    cluster.launch.progress += 1
