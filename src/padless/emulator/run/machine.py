"""Runs a launch: which warp goes on next, when asynchronous operations finish, when CTAs come and go."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import Any

import numpy as np

from padless.emulator.checks.deadlock import give_up, release_parked, report_deadlock
from padless.emulator.checks.exit import check_exit
from padless.emulator.errors import KernelFault
from padless.emulator.run.execution import Observer, execute, trace_block
from padless.emulator.state.launch import Launch
from padless.emulator.state.mbarrier import Mbarrier
from padless.emulator.state.register_pool import RegisterPool
from padless.emulator.state.warp import Cluster, Fragment

IDLE_LIMIT = 4000  # turns without any change before spinning counts as a deadlock


class Machine(Launch):
    """One launch on a machine whose schedule is drawn from a seed. Arguments as of Launch."""

    make_mbarrier = Mbarrier
    make_register_pool = RegisterPool

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.observe: Observer | None = None if self.trace is None else partial(trace_block, self)
        self.clusters: list[Cluster] = []
        self.slot = 0  # of the next cluster
        self.gave_up_at = -1

    # ---- running
    def run(self) -> None:
        started = time.perf_counter()
        old = np.seterr(all="ignore")
        try:
            self._run()
        except KernelFault:
            pass
        finally:
            np.seterr(**old)
            self.statistics.seconds = time.perf_counter() - started

    def _run(self) -> None:
        schedule = self.schedule
        total = int(np.prod(self.grid)) // int(np.prod(self.cluster))
        order = list(range(total))
        if schedule.order == "backward":
            order.reverse()
        elif schedule.order == "shuffled":
            self.random.shuffle(order)
        waiting = self.waiting = deque(order)
        self.statistics.ctas = int(np.prod(self.grid))
        idle = 0
        last_progress = -1
        while True:
            while waiting and len(self.clusters) < schedule.resident:
                self._start()
            fragment = self._pick()
            if fragment is not None:
                if self.progress == last_progress:
                    idle += 1
                else:
                    idle, last_progress = 0, self.progress
                self._resume(fragment)
                if schedule.policy == "eager":
                    while self.step_async():
                        pass
                elif schedule.policy == "random":
                    while self.queues and self.random.random() < schedule.complete:
                        self.step_async()
                if idle > 64 and (idle % 16 == 0):
                    # Spinning without any change: let something asynchronous or another CTA make the change.
                    if not self.step_async() and waiting and self._may_start():
                        self._start()
                    elif idle > 256:
                        release_parked(self)
                    if idle > IDLE_LIMIT:
                        report_deadlock(self, "spinning with no progress")
                        return
                self._retire()
                continue
            if self.step_async():
                continue
            self._retire()
            if not self.clusters and not waiting:
                break
            if waiting and self._may_start():
                self._start()
                continue
            if release_parked(self) or give_up(self):
                last_progress = self.progress
                continue
            if not any(cluster.fragments() for cluster in self.clusters):
                continue
            report_deadlock(self, "deadlock")
            return

    def _may_start(self) -> bool:
        """Whether a cluster may start beyond the schedule's number, since those on the machine get nowhere."""
        return True

    def _start(self) -> None:
        """Give the next cluster of the grid its place."""
        self.clusters.append(Cluster(self, self.waiting.popleft(), self.slot))
        self.slot += 1

    def _pick(self) -> Fragment | None:
        fragments = [f for cluster in self.clusters for f in cluster.fragments()]
        if not fragments:
            return None
        start = self.random.randrange(len(fragments))
        for fragment in fragments[start:] + fragments[:start]:
            if fragment.wait is None or fragment.wait.ready():
                return fragment
        return None

    def _resume(self, fragment: Fragment) -> None:
        if fragment.wait is not None:
            wait = fragment.wait
            fragment.wait = None
            fragment.wait = wait.finish(fragment)
            if fragment.wait is not None:
                return
            self.progress += 1
            fragment.block = self.blocks[fragment.block].next
            if not fragment.warp.arrive(fragment):
                return
        execute(self, fragment, self.observe)

    def _retire(self) -> None:
        """CTAs whose threads have all ended give up their place, a cluster when its last CTA has."""
        done = False
        for cluster in self.clusters:
            for cta in cluster.ctas:
                if not cta.exited and not any(w.live.any() for w in cta.warps):
                    cta.exited = True
                    self.progress += 1
                    check_exit(cta)
            done |= cluster.finished()
        if done:
            for cluster in [c for c in self.clusters if c.finished()]:
                while self.step_async():  # what is still on its way lands before the memory goes
                    pass
                self.clusters.remove(cluster)
