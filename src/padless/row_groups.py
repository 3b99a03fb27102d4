"""Groups of rows that scales were made for: what an operand remembers of them and holds against those of a call."""

from __future__ import annotations

from itertools import accumulate

import torch


class RowGroups:
    """The groups that (G,) cumulative END offsets gave when this was made.

    offs: the tensor itself, held so that no other one can take its memory.

    On a CPU the values are remembered and compared. On a GPU nothing waits for them: there the tensor counts, by its
    memory and by the number of times that torch wrote to it.
    """

    __slots__ = ("_ends", "_version", "offs")

    def __init__(self, offs: torch.Tensor) -> None:
        self.offs = offs
        self._version = _version_of(offs)
        self._ends: list[int] | None = offs.tolist() if offs.is_cpu else None

    def is_of(self, offs: torch.Tensor | None) -> bool:
        """Whether ``offs`` is the same tensor, or another one over the same memory, unchanged as far as torch knows."""
        mine = self.offs
        if offs is not mine and (offs is None or offs.data_ptr() != mine.data_ptr() or offs.shape != mine.shape):
            return False
        return offs.dtype == mine.dtype and _version_of(offs) == self._version

    def check(self, name: str, offs: torch.Tensor | None, rows: int, num_groups: int, whose: str) -> None:
        """Raises ValueError unless the groups of ``offs`` are these; None stands for one group of all rows.

        name: the operand in the message. whose: the argument with num_groups groups.
        """
        again = f"quantize {name} with the offs of this call"
        if len(self.offs) != num_groups:
            groups = "1 group" if num_groups == 1 else f"{num_groups} groups"
            raise ValueError(f"{name} has scales for {len(self.offs)} groups of rows and {whose} has {groups}; {again}")
        if offs is None:
            if self._ends is not None and (end := clamped_ends(self._ends, rows)[-1]) != rows:
                raise ValueError(
                    f"{name} has scales for a group that ends at row {end} and M is {rows}; {again}, or without any"
                )
        elif self._ends is None or not offs.is_cpu:
            if not self.is_of(offs):
                raise ValueError(
                    f"offs is another tensor than the one that {name} was quantized with, or was written to since; "
                    f"pass that one, or {again}"
                )
        else:
            ends = zip(clamped_ends(offs.tolist(), rows), clamped_ends(self._ends, rows), strict=True)
            for group, (end, mine) in enumerate(ends):
                if end != mine:
                    raise ValueError(
                        f"offs[{group}] is {end} and {name} has scales for groups of which that one ends at {mine}; "
                        f"{again}"
                    )


def clamped_ends(offs: list[int], rows: int) -> list[int]:
    """The ends that count: the running maximum, within [0, rows]."""
    return [min(end, rows) for end in accumulate(offs, max, initial=0)][1:]


def _version_of(offs: torch.Tensor) -> int | None:
    """The number of times torch wrote to the tensor; unknown for one that was made in inference mode."""
    return None if offs.is_inference() else offs._version
