"""Host side of the kernels on tiles of 128 tokens (device/token_tiles.cuh): ragged groups as launches are given them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from padless.kernels.config import MAX_GROUPS

_LINE = 16  # bytes of a copy


@dataclass(frozen=True, eq=False)
class TokenGroups:
    """Groups of rows, and where their columns are to begin.

    offs: (G,) int32 cumulative END rows. starts, block_starts: (G,) int32, which a kernel writes: the first column and
    the first tile of each group, as in `GroupedColumns`. alignment: 32 or 128 columns. num_tiles: enough tiles of 128
    tokens for all rows and columns, whatever the sizes of the groups are.
    """

    offs: torch.Tensor
    starts: torch.Tensor
    block_starts: torch.Tensor
    alignment: int
    num_tiles: int

    @property
    def num_groups(self) -> int:
        return self.offs.shape[0]

    def integers(self, codes: torch.Tensor, scale: torch.Tensor) -> tuple[int, ...]:
        """Arguments of kernels behind their own; codes (features, T') and scale (S, ..) of columns."""
        return self.num_groups, self.alignment, codes.shape[1], scale.shape[0], self.num_tiles


def fits(offs: torch.Tensor, *values: torch.Tensor) -> bool:
    """Whether the kernels take offs and values: at most 1024 groups; bfloat16 rows at multiples of 16 bytes."""
    return 0 < offs.shape[0] <= MAX_GROUPS and all(
        t.dtype == torch.bfloat16
        and t.stride(1) == 1
        and t.data_ptr() % _LINE == 0
        and t.stride(0) * t.element_size() % _LINE == 0
        for t in values
    )
