"""What must be over when a CTA ends: copies out of its memory, copies into it, products, other CTAs' accesses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from padless.emulator.order.race import ASYNC, COLUMN_SHIFT, IN_FLIGHT

if TYPE_CHECKING:
    from padless.emulator.state.warp import Cta


def _check_copies(cta: Cta, known: Any) -> None:
    """Copies into this CTA's memory whose end none of its threads has seen, whether they have landed or not."""
    shadow = cta.shared.shadow
    cells = np.flatnonzero(shadow.written & np.uint64(ASYNC))
    stamps = shadow.written[cells]
    missed = cells[
        known[(stamps >> np.uint64(COLUMN_SHIFT)).astype(np.intp)] < (stamps & np.uint64(IN_FLIGHT))
    ]
    if len(missed):
        site = int(shadow.write_site[missed[0]])
        cta.machine.report(
            "exit",
            f"CTA {cta.index} ends and nobody in it has waited for a copy into byte {int(missed[0]) * shadow.scale} "
            "of its memory",
            cta.machine.program.instructions[site], cta.warps[0], 0,
        )  # fmt: skip


def check_exit(cta: Cta) -> None:
    """Report what a CTA leaves unfinished. Like the race checks it asks what was waited for, not what happened."""
    cluster, report = cta.cluster, cta.machine.report
    from padless.emulator.instructions import barriers, tensor_memory

    barriers.cluster_barrier_check(cluster)
    tensor_memory.check_exit(cta)
    clocks = cluster.clocks
    if clocks is None:
        return
    if cluster.grids is not None:
        cluster.grids.check_exit(cta)
    for warp in cta.warps:
        for lane in range(32):
            groups = cluster.bulk_groups.get(warp.first_row + lane)
            if groups is None:
                continue
            last = max((i + 1 for i, group in enumerate(groups.groups) if group), default=0)
            stores = groups.groups[last - 1] if last else groups.open
            if groups.open or clocks.time[0, warp.first_row + lane, groups.column] < last:
                report(
                    "exit", "the CTA ends before this thread has waited for its bulk stores to read shared memory",
                    stores[0].instruction if stores else groups.open[0].instruction, warp, lane,
                )  # fmt: skip
        if warp.busy:
            owner = next(iter(warp.busy_owner.values()), None)
            report("exit", "the warp ends without waiting for its asynchronous products", owner, warp, 0)
    rows = slice(cta.warps[0].first_row, cta.warps[-1].first_row + 32)
    known = clocks.time[0, rows].max(axis=0)
    _check_copies(cta, known)
    for bar in cta.mbarriers.values():
        phase, instruction, warp = bar.foreign
        if bar.valid and phase > bar.waited_phase:
            report(
                "exit",
                f"CTA {cta.index} ends without having waited for this arrival on {bar.name}",
                instruction,
                warp,
                0,
            )
            break
    for row, (event, instruction, warp) in cta.remote.items():
        if known[row] < event:
            report(
                "exit", f"CTA {cta.index} ends with nothing ordering this access from another CTA before its end",
                instruction, warp, row % 32,
            )  # fmt: skip
            break
