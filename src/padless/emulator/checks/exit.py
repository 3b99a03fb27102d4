"""What must be over when a CTA ends: copies out of its memory, copies into it, products, other CTAs' accesses."""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.order.grid_dependency import KIND, UNWAITED
from padless.emulator.order.race import ASYNC, BASE, COLUMN_SHIFT, IN_FLIGHT
from padless.emulator.state.barriers import complete_cluster_barrier
from padless.emulator.state.groups import Groups
from padless.emulator.state.warp import Cta, Warp


def check_exit(cta: Cta) -> None:
    """Report what a CTA leaves unfinished. Like the race checks it asks what was waited for, not what happened."""
    cluster, report = cta.cluster, cta.launch.report
    complete_cluster_barrier(cluster)
    if cta.tensor_memory is not None:
        _check_tensor_memory(cta)
    if cluster.clocks is None:
        return
    first = cta.warps[0]
    if cluster.grids is not None and cta.rank not in cluster.grids.waited:
        report(KIND, UNWAITED, first.end, first, 0)
    for warp in cta.warps:
        for (family, lane), groups in warp.groups.items():
            if family == "bulk":
                _check_stores(warp, lane, groups)
        if warp.busy:
            owner = next(iter(warp.busy_owner.values()), None)
            report("exit", "the warp ends without waiting for its asynchronous products", owner, warp, 0)
    known = cluster.clocks.time[BASE, first.first_row : first.first_row + cta.rows].max(axis=0)
    _check_copies(cta, known)
    _check_arrivals(cta)
    for (row, _), (event, site, bar, phase) in cta.remote.items():
        if known[row] < event and (bar is None or bar.waited_phase < phase):
            message = f"CTA {cta.index} ends with nothing ordering this access from another CTA before its end"
            site.report("exit", message)
            break


def _check_arrivals(cta: Cta) -> None:
    """Asynchronous arrivals from other CTAs that none of its threads has waited for: one, the gravest."""
    waited: dict[Any, int] = {}  # of each pipe the latest commit that was waited for
    missed = []
    for bar in cta.mbarriers.values():
        phase, _, pipe, number = bar.foreign
        if phase <= bar.waited_phase:
            waited[pipe] = max(waited.get(pipe, 0), number)
        elif bar.valid:
            missed.append(bar)
    kinds: dict[str, tuple[Any, str]] = {}
    for bar in missed:
        _, site, pipe, number = bar.foreign
        is_covered = pipe is not None and number < waited.get(pipe, 0)
        kinds.setdefault("exit-covered" if is_covered else "exit", (site, bar.name))
    if kinds:
        kind = min(kinds, key=len)
        site, name = kinds[kind]
        site.report(kind, f"CTA {cta.index} ends without having waited for this arrival on {name}")


def _check_stores(warp: Warp, lane: int, groups: Groups) -> None:
    """Bulk stores of a thread that it has not waited for."""
    last = max((i + 1 for i, group in enumerate(groups.closed) if group), default=0)
    if groups.open or warp.clocks.time[BASE, warp.first_row + lane, groups.column] < last:
        store = (groups.closed[last - 1] if last else groups.open)[0]
        message = "the CTA ends before this thread has waited for its bulk stores to read shared memory"
        warp.launch.report("exit", message, store.instruction, warp, lane)


def _check_copies(cta: Cta, known: Any) -> None:
    """Copies into this CTA's memory whose end none of its threads has seen, whether they have landed or not."""
    shadow = cta.shared.shadow
    cells = np.flatnonzero(shadow.written & np.uint64(ASYNC))
    stamps = shadow.written[cells]
    seen = known[(stamps >> np.uint64(COLUMN_SHIFT)).astype(np.intp)]
    missed = cells[seen < (stamps & np.uint64(IN_FLIGHT))]
    if len(missed):
        instruction = cta.launch.program.instructions[int(shadow.write_site[missed[0]])]
        message = (
            f"CTA {cta.index} ends and nobody in it has waited for a copy into byte {int(missed[0]) * shadow.scale} "
            "of its memory"
        )
        cta.launch.report("exit", message, instruction, cta.warps[0], 0)


def _check_tensor_memory(cta: Cta) -> None:
    """A CTA must have freed its tensor memory and waited for what its pipe does."""
    memory = cta.tensor_memory
    for start, (count, site) in memory.allocated.items():
        columns = f"columns {start} to {start + count - 1}"
        site.report("tensor-memory", f"{columns} are still allocated when the CTA ends")
    if memory.shadow is not None and memory.sequence:
        known = int(cta.cluster.clocks.time[BASE, :, memory.done].max())
        if known < memory.sequence:
            message = f"the CTA ends without waiting for {memory.sequence - known} of its tcgen05 operations"
            cta.launch.report("exit", message, memory.last, cta.warps[0], key="tcgen05")
