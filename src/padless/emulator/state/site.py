"""A lane of a warp at an instruction: what reports name, and whose addresses are looked up."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from padless.emulator.errors import KernelFault
from padless.emulator.ptx.ast import Instruction
from padless.emulator.state.spaces import OFFSET_MASK
from padless.emulator.state.warp import Cta, Warp
from padless.emulator.units.number_formats import Array


class Site:
    """One lane that executes one instruction."""

    __slots__ = ("instruction", "lane", "warp")

    def __init__(self, warp: Warp, instruction: Instruction, lane: int = 0) -> None:
        self.warp = warp
        self.instruction = instruction
        self.lane = lane

    @property
    def row(self) -> int:
        """Of the lane, in the cluster's clocks."""
        return self.warp.first_row + self.lane

    @property
    def description(self) -> str:
        """Of an asynchronous operation that is issued here, in a trace."""
        return f"{self.instruction.name} of CTA {self.warp.cta.index}"

    def value(self, slot: int) -> int:
        """Of the lane, in a register's slot."""
        return int(self.warp.v[slot][self.lane])

    def report(self, kind: str, message: str, other: Instruction | None = None, key: Any = None) -> None:
        self.warp.launch.report(kind, message, self.instruction, self.warp, self.lane, other, key)

    def fault(self, message: str, kind: str = "fault") -> NoReturn:
        """Report what stops real hardware, and end the launch."""
        self.report(kind, message)
        raise KernelFault(message)

    def clock(self) -> Array:
        """What the lane is ordered after: five planes."""
        clock: Array = self.warp.clocks.meet(np.array([self.row]))
        return clock

    def carried(self) -> Array | None:
        """GridDependency.carried of this lane, where there is one."""
        grids = self.warp.cta.cluster.grids
        return None if grids is None else grids.carried(self.row)

    def locate(self, address: int) -> tuple[Cta, int]:
        """(CTA, offset) of a shared::cluster address."""
        rank, offset = address >> 24, address & OFFSET_MASK
        ctas = self.warp.cta.cluster.ctas
        if not 0 <= rank < len(ctas) or offset >= ctas[rank].shared.size:
            self.fault(f"shared address {address:#x} is in no CTA of the cluster")
        return ctas[rank], offset


def lanes_of(m: Any) -> Array:
    """The active lanes, ascending; the array ALL_LANES itself if that is all of them."""
    return ALL_LANES if m is True else np.flatnonzero(m)


def rows_of(w: Warp, m: Any) -> Any:
    """Clock rows of the active lanes: a slice where that is the whole warp."""
    return w.rows if m is True else w.first_row + np.flatnonzero(m)


ALL_LANES = np.arange(32)
