"""Programmatic launches: every access to global memory has to come after griddepcontrol.wait, and every CTA has to wait.

Such a launch may begin before the kernels ahead of it have ended. griddepcontrol.wait returns when they have, with
what they wrote visible to the whole grid (PTX ISA, "griddepcontrol"), so an access is safe if its thread has executed
the wait or is ordered after a thread that has. The kernels ahead are one more column of the cluster's clocks: 0 until a
lane has waited, then 1, which travels as everything else in a clock does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.order.race import BASE, TENSOR, Clocks
from padless.emulator.units.number_formats import Array

KIND = "grid-dependency"
EARLY = (
    "global memory is accessed and nothing orders this after a griddepcontrol.wait; the kernels ahead of this launch "
    "may still be running: execute griddepcontrol.wait first, in this thread or in one that a barrier orders before it"
)
UNWAITED = (
    "the CTA ends and none of its threads has executed griddepcontrol.wait: this launch may be over before the kernels "
    "ahead of it, and one behind it that waits for it would not be ordered after them; execute griddepcontrol.wait on "
    "every way out"
)


class GridDependency:
    """What the lanes of one cluster know of the kernels ahead. Only in programmatic launches, with checks."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.column = clocks.new_column()
        self.waited: set[int] = set()  # ranks of the CTAs of which a thread has executed the wait
        self.settled: set[int] = set()  # first rows of warps of which every lane is ordered after a wait

    def wait(self, rank: int, rows: Any) -> None:
        """These lanes of the CTA of this rank have executed griddepcontrol.wait."""
        self.clocks.observe(rows, self.column, 1)
        self.waited.add(rank)

    def early(self, first_row: int, lanes: Array) -> Array | None:
        """Which of a warp's lanes nothing orders after a wait, as flags beside `lanes`; None if none."""
        if first_row in self.settled:
            return None
        known = self.clocks.time[BASE, first_row : first_row + 32, self.column] > 0
        if known.all():
            self.settled.add(first_row)
            return None
        found: Array = ~known[lanes]
        return found if found.any() else None

    def carried(self, row: int) -> Array | None:
        """What the end of an asynchronous operation, issued now by this lane, tells of the kernels ahead: as a clock."""
        if not self.clocks.time[BASE, row, self.column]:
            return None
        clock = np.zeros((TENSOR, self.clocks.columns), np.uint32)
        clock[:, self.column] = 1
        return clock
