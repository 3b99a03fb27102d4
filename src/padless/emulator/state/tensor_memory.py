"""The tensor memory of a CTA: its words, who has allocated them, and how its pipe stands."""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.order.race import Shadow
from padless.emulator.state.site import Site
from padless.emulator.state.warp import Cta
from padless.emulator.units.number_formats import Array

LANES, COLUMNS = 128, 512


class TensorMemory:
    """The 128 x 512 words of one CTA, who has allocated which columns, and the pipe of asynchronous operations."""

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.words = np.full((LANES, COLUMNS), 0x7FFFFFFF, np.uint32)
        self.allocated: dict[int, tuple[int, Site]] = {}  # first column -> (columns, of which instruction)
        self.requested = self.granted = 0  # allocations so far
        self.relinquished = False
        self.smallest = COLUMNS
        self.sequence = self.commits = 0
        self.issuers: dict[int, int] = {}
        self.last: Any = None  # instruction of the latest operation
        clocks = cta.cluster.clocks
        self.shadow: Any = None
        self.done = self.issued = -1
        if clocks is not None:
            launch = cta.launch
            self.shadow = Shadow(
                LANES * COLUMNS, clocks, launch.collector, launch.program.instructions, "tensor memory"
            )
            self.done, self.issued = clocks.new_column(), clocks.new_column()

    def free_start(self, count: int) -> int:
        """First column of a free run of `count` aligned columns; -1 if there is none."""
        for start in range(0, COLUMNS - count + 1, count):
            if all(start + count <= s or s + n <= start for s, (n, _) in self.allocated.items()):
                return start
        return -1

    def owns(self, first: int, end: int) -> bool:
        covered = np.zeros(COLUMNS + 1, bool)
        for start, (n, _) in self.allocated.items():
            covered[start : start + n] = True
        return 0 <= first < end <= COLUMNS and bool(covered[first:end].all())


def tensor_memory(cta: Cta) -> TensorMemory:
    if cta.tensor_memory is None:
        cta.tensor_memory = TensorMemory(cta)
    result: TensorMemory = cta.tensor_memory
    return result


def targets_of(site: Site, pair: bool) -> list[Cta]:
    """The CTA, or both CTAs of the pair, even rank first."""
    cta = site.warp.cta
    if not pair:
        return [cta]
    base = cta.rank & ~1
    if base + 1 >= len(cta.cluster.ctas):
        site.fault("cta_group::2 outside a CTA pair")
    return [cta.cluster.ctas[base], cta.cluster.ctas[base + 1]]


def cells(rectangle: tuple[int, int, int, int]) -> Array:
    """Shadow cells of (first lane, end lane, first column, end column)."""
    first_lane, end_lane, first, end = rectangle
    grid: Array = (np.arange(first_lane, end_lane)[:, None] * COLUMNS + np.arange(first, end)).reshape(-1)
    return grid
