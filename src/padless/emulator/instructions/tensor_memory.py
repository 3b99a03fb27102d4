"""The tensor memory of a CTA: its words, who has allocated them, and how its pipe stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from padless.emulator.order.race import BASE, Shadow

if TYPE_CHECKING:
    from padless.emulator.state.warp import Cta

Array = np.ndarray[Any, Any]
LANES, COLUMNS = 128, 512


class TensorMemory:
    """The 128 x 512 words of one CTA, who has allocated which columns, and the pipe of asynchronous operations."""

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.words = np.full((LANES, COLUMNS), 0x7FFFFFFF, np.uint32)
        self.allocated: dict[int, tuple[int, Any, Any]] = {}  # first column -> (columns, instruction, warp)
        self.relinquished = False
        self.smallest = COLUMNS
        self.sequence = 0
        self.issuers: dict[int, int] = {}
        self.pending = 0
        self.last: Any = None  # instruction of the latest operation
        clocks = cta.cluster.clocks
        self.shadow: Any = None
        self.done = self.issued = -1
        if clocks is not None:
            self.shadow = Shadow(
                LANES * COLUMNS,
                clocks,
                cta.machine.collector,
                cta.machine.program.instructions,
                "tensor memory",
            )
            self.done, self.issued = clocks.new_column(), clocks.new_column()

    def free_start(self, count: int) -> int:
        """First column of a free run of `count` aligned columns; -1 if there is none."""
        for start in range(0, COLUMNS - count + 1, count):
            if all(start + count <= s or s + n <= start for s, (n, _, _) in self.allocated.items()):
                return start
        return -1

    def owns(self, first: int, end: int) -> bool:
        covered = np.zeros(COLUMNS + 1, bool)
        for start, (n, _, _) in self.allocated.items():
            covered[start : start + n] = True
        return 0 <= first < end <= COLUMNS and bool(covered[first:end].all())


def tensor_memory(cta: Cta) -> TensorMemory:
    if cta.tensor_memory is None:
        cta.tensor_memory = TensorMemory(cta)
    result: TensorMemory = cta.tensor_memory
    return result


def check_exit(cta: Cta) -> None:
    """A CTA must have freed its tensor memory and waited for what its pipe does."""
    memory = cta.tensor_memory
    if memory is None:
        return
    for start, (count, ins, warp) in memory.allocated.items():
        cta.machine.report(
            "tensor-memory",
            f"columns {start} to {start + count - 1} are still allocated when the CTA ends",
            ins,
            warp,
        )
    if memory.shadow is not None and memory.sequence:
        known = 0
        for other in cta.cluster.ctas:
            rows = slice(other.warps[0].first_row, other.warps[-1].first_row + 32)
            known = max(known, int(cta.cluster.clocks.time[BASE, rows, memory.done].max()))
        if known < memory.sequence:
            cta.machine.report(
                "exit", f"the CTA ends without waiting for {memory.sequence - known} of its tcgen05 operations",
                memory.last, cta.warps[0], key="tcgen05",
            )  # fmt: skip


def cells(rectangle: tuple[int, int, int, int]) -> Array:
    """Shadow cells of (first lane, end lane, first column, end column)."""
    first_lane, end_lane, first, end = rectangle
    grid: Array = (np.arange(first_lane, end_lane)[:, None] * COLUMNS + np.arange(first, end)).reshape(-1)
    return grid
