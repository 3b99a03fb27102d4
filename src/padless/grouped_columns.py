"""Token-contiguous FP8 copies of grouped rows: the operands of a product along the tokens (a weight gradient).

wgmma reads FP8 operands along the summed dimension, and a weight gradient sums over tokens, so both its operands are
stored with tokens innermost. A group starts at a multiple of ``alignment`` tokens; the slack between a group's last
token and the next start, and everything past the last group, holds zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from padless.formats import ceil_div, round_up
from padless.gradients import refuse_gradients

ALIGNMENTS = (32, 128)  # tokens: one wgmma K step, or one line of shared memory
SCALE_BLOCK = 128  # tokens that share a scale, counted from the group's start


@dataclass(frozen=True, eq=False)
class GroupedColumns:
    """Codes (features, T') with tokens innermost, and a scale per 128 tokens of a group.

    data: (features, T') float8_e4m3fn, row-major. Tokens of group g are columns starts[g] .. starts[g] + M_g; all other
        columns are zero. T' is ``padded_tokens``: known on the host, whatever the sizes are.
    scale: float32 decode scales. For ``block`` (1, 128): (S, features), features contiguous, a scale per feature and 128
        tokens. For (128, 128): (S, ceil(features / 128)), a scale per 128 features and 128 tokens. Row
        block_starts[g] + i belongs to tokens 128 i .. of group g. S is ``num_scale_rows``.
    offs: (G,) int32 cumulative END rows of the groups in the source.
    starts: (G,) int32, starts[0] = 0, starts[g + 1] = starts[g] + round_up(M_g, alignment).
    block_starts: (G,) int32, the sum of ceil(M_h / 128) over h < g.
    block: (features, tokens) that share a scale: (1, 128) or (128, 128).
    alignment: 32 or 128 tokens.
    """

    data: torch.Tensor
    scale: torch.Tensor
    offs: torch.Tensor
    starts: torch.Tensor
    block_starts: torch.Tensor
    block: tuple[int, int]
    alignment: int

    def __post_init__(self) -> None:
        refuse_gradients(data=self.data, scale=self.scale)

    @property
    def features(self) -> int:
        return self.data.shape[0]

    @property
    def num_groups(self) -> int:
        return self.offs.shape[0]


def padded_tokens(num_rows: int, num_groups: int, alignment: int) -> int:
    """Columns T' that hold num_rows tokens in num_groups groups of any sizes, a multiple of 128."""
    return round_up(num_rows + (alignment - 1) * num_groups, SCALE_BLOCK)


def num_scale_rows(num_rows: int, num_groups: int) -> int:
    """Rows S of the scales: every group may end in a started block of 128 tokens."""
    return num_rows // SCALE_BLOCK + num_groups


def scale_columns(features: int, block: tuple[int, int]) -> int:
    """Scales in a row: one per ``block[0]`` features."""
    return ceil_div(features, block[0])
