"""Programmatic launches: every access to global memory has to come after griddepcontrol.wait, and every CTA has to wait.

Such a launch may begin before the kernels ahead of it have ended. griddepcontrol.wait returns when they have, with
what they wrote visible to the whole grid (PTX ISA, "griddepcontrol"), so an access is safe if its thread has executed
the wait or is ordered after a thread that has. The kernels ahead are one more column of the cluster's clocks: 0 until a
lane has waited, then 1, which travels as everything else in a clock does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from padless.emulator.order.race import BASE, TENSOR

if TYPE_CHECKING:
    from padless.emulator.ptx.ast import Instruction
    from padless.emulator.state.warp import Cluster, Cta, Warp

Array = np.ndarray[Any, Any]
KIND = "grid-dependency"
REMEDY = (
    "the kernels ahead of this launch may still be running: execute griddepcontrol.wait first, in this thread or in one "
    "that a barrier orders before it"
)


class GridDependency:
    """What the lanes of one cluster know of the kernels ahead. Only in programmatic launches, with checks."""

    def __init__(self, cluster: Cluster) -> None:
        self.clocks = cluster.clocks
        self.column: int = self.clocks.new_column()
        self.waited: set[int] = set()  # ranks of the CTAs of which a thread has executed the wait
        self.settled: set[int] = set()  # first rows of warps of which every lane is ordered after a wait

    def wait(self, w: Warp, rows: Any) -> None:
        """These lanes have executed griddepcontrol.wait."""
        self.clocks.observe(rows, self.column, 1)
        self.waited.add(w.cta.rank)

    def check(self, w: Warp, lanes: Array, instruction: Instruction, where: Array | None = None) -> None:
        """Lanes access global memory, at the addresses `where`; constants of the module are nobody's to write."""
        if w.first_row in self.settled:
            return
        known = self.clocks.time[BASE, w.rows, self.column] > 0
        if known.all():
            self.settled.add(w.first_row)
            return
        early = ~known[lanes]
        if where is not None and early.any():
            find = w.cta.machine.memory.find
            early[early] = [not ((found := find(x)) and found.constant) for x in where[early].tolist()]
        if early.any():
            w.cta.machine.report(
                KIND, f"global memory is accessed and nothing orders this after a griddepcontrol.wait; {REMEDY}",
                instruction, w, int(lanes[np.argmax(early)]),
            )  # fmt: skip

    def carried(self, w: Warp, lane: int) -> Array | None:
        """What the end of an asynchronous operation, issued now by this lane, tells of the kernels ahead: as a clock."""
        if not self.clocks.time[BASE, w.first_row + lane, self.column]:
            return None
        clock = np.zeros((TENSOR, self.clocks.columns), np.uint32)
        clock[:, self.column] = 1
        return clock

    def check_exit(self, cta: Cta) -> None:
        """A grid that does not wait may end before the kernels ahead of it, and the kernel behind waits for it alone."""
        if cta.rank not in self.waited:
            cta.machine.report(
                KIND, "the CTA ends and none of its threads has executed griddepcontrol.wait: this launch may be over "
                "before the kernels ahead of it, and one behind it that waits for it would not be ordered after them; "
                "execute griddepcontrol.wait on every way out",
                cta.warps[0].end, cta.warps[0], 0,
            )  # fmt: skip


def check(w: Warp, lanes: Any, instruction: Instruction, where: Array | None = None) -> None:
    """`GridDependency.check`, where there is one."""
    grids = w.cta.cluster.grids
    if grids is not None:
        grids.check(w, np.asarray(lanes), instruction, where)


def carried(w: Warp, lane: int) -> Array | None:
    """`GridDependency.carried`, where there is one."""
    grids = w.cta.cluster.grids
    return None if grids is None else grids.carried(w, lane)
