"""Contents of a `GroupedColumns` in plain torch: the definition that the GPU kernels must equal in every bit.

Rows of groups are laid out token-contiguous, and 128 tokens of one group share a scale: the rule for scale and codes is
FP8_BLOCK's (`padless.quantization.rules.fp8_block`). Nothing here waits for the GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from padless.formats import ceil_div, round_up
from padless.layouts import SCALE_BLOCK, group_of_rows
from padless.quantization import rules as quantize_rules


def padded_tokens(num_rows: int, num_groups: int, alignment: int) -> int:
    """Columns T' that hold num_rows tokens in num_groups groups of any sizes, a multiple of 128."""
    return round_up(num_rows + (alignment - 1) * num_groups, SCALE_BLOCK)


def num_scale_rows(num_rows: int, num_groups: int) -> int:
    """Rows S of the scales: every group may end in a started block of 128 tokens."""
    return num_rows // SCALE_BLOCK + num_groups


def scale_columns(features: int, block: tuple[int, int]) -> int:
    """Scales in a row: one per ``block[0]`` features."""
    return ceil_div(features, block[0])


class GroupStarts(NamedTuple):
    """Starts of groups; int64, ``rows``, ``columns``, ``blocks`` have G + 1 entries, the last one the end of all.

    rows: first row in the source. columns: first column of the codes. blocks: first row of the scales.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    blocks: torch.Tensor


def group_starts(offs: torch.Tensor, num_rows: int, alignment: int) -> GroupStarts:
    """Starts of the groups that end at ``offs``, (G,) int32; as for the GEMM, ends are made ascending and in range.

    Example: offs [130, 130, 170], alignment 32 -> rows [0, 130, 130, 170], columns [0, 160, 160, 224],
        blocks [0, 2, 2, 3].
    """
    ends = offs.to(torch.int64).clamp(0, num_rows).cummax(0).values
    rows = torch.cat([ends.new_zeros(1), ends])
    sizes = rows.diff()
    columns = ((sizes + alignment - 1) // alignment * alignment).cumsum(0)
    blocks = ((sizes + SCALE_BLOCK - 1) // SCALE_BLOCK).cumsum(0)
    zero = ends.new_zeros(1)
    return GroupStarts(rows, torch.cat([zero, columns]), torch.cat([zero, blocks]))


def columns(
    values: torch.Tensor, offs: torch.Tensor, block: tuple[int, int], alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes uint8 (features, T'), scale float32, starts, block_starts) of values (M, features), any float dtype.

    Codes of columns without a token and scales of blocks without one are 0.
    """
    num_rows, features = values.shape
    num_groups = offs.shape[0]
    starts = group_starts(offs, num_rows, alignment)
    group = group_of_rows(offs, num_rows)
    inside = group < num_groups
    token = torch.arange(num_rows, device=values.device) - starts.rows[group]
    num_blocks = num_scale_rows(num_rows, num_groups)
    width = padded_tokens(num_rows, num_groups, alignment)
    # One block and one column more than there are collect what is in no group.
    row_block = torch.where(inside, starts.blocks[group] + token // SCALE_BLOCK, num_blocks)
    column = torch.where(inside, starts.columns[group] + token, width)

    padded = values.new_zeros(((num_blocks + 1) * SCALE_BLOCK, features), dtype=torch.float32)
    padded[row_block * SCALE_BLOCK + torch.where(inside, token % SCALE_BLOCK, 0)] = values.to(torch.float32)
    amax = quantize_rules.block_amax(padded[: num_blocks * SCALE_BLOCK], SCALE_BLOCK, block[0])
    scale, inverse = quantize_rules.fp8_block_scale(amax)
    per_feature = torch.cat([inverse, torch.zeros_like(inverse[:1])]).repeat_interleave(block[0], dim=1)
    codes = quantize_rules.to_e4m3(values.to(torch.float32) * per_feature[row_block][:, :features])
    data = codes.new_zeros((features, width + 1))
    data[:, column] = codes.t()
    used = torch.arange(num_blocks, device=values.device) < starts.blocks[-1]
    starts_of_groups = (starts.columns[:-1].to(torch.int32), starts.blocks[:-1].to(torch.int32))
    return data[:, :width].contiguous(), torch.where(used[:, None], scale, 0.0), *starts_of_groups
