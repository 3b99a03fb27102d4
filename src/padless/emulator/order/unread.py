"""Loads from shared memory whose values nothing has needed yet, and asynchronous copies over what they read."""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.units.number_formats import Array


class UnreadLoad:
    """One load of a warp. cells: of the shadow, ascending. used: the warp's events at its first use, None before it.

    A use in one lane counts for the warp, which issues in order: an arrival of any lane behind it comes after the value.
    """

    def __init__(self, instruction: Any, cells: Array) -> None:
        self.instruction = instruction
        self.cells = cells
        self.low, self.high = int(cells[0]), int(cells[-1])
        self.used: Array | None = None
        self.is_dropped = False  # its value was never used
        self.overwritten: Any = None  # the Site of a copy over it

    def use(self, warp: Any) -> None:
        self.used = warp.clocks.now[warp.rows].copy()
        if self.overwritten is not None:
            self._report(self.overwritten)

    def overwrite(self, cells: Any, clock: Array, site: Any, first_row: int) -> bool:
        """A copy to `cells`, ordered after `clock`: whether it is the last word on this load. first_row: of its warp."""
        if isinstance(cells, slice):
            if self.low >= cells.stop or self.high < cells.start:
                return False
            hit = bool(((self.cells >= cells.start) & (self.cells < cells.stop)).any())
        else:
            hit = bool(np.isin(self.cells, cells).any())
        if not hit:
            return False
        if self.is_dropped:
            return True
        if self.used is None:
            self.overwritten = site
        elif not (clock[first_row : first_row + 32] >= self.used).any():
            self._report(site)
        return True

    def _report(self, copy: Any) -> None:
        message = "overwrites what a load reads whose value was not needed before an arrival that lets this copy begin"
        copy.report("unread-load", message, self.instruction)
