"""Places FP8_BLOCK's scales of gathered rows: from one row a token to MN-major ones, as a small Triton kernel.

A token's scales go to as many rows as it has experts, each to another line of memory: 4 bytes a store, and as many lines
as the codes of 128 columns take. So the quantizing kernel stores them once, beside each other, and says which token each
row is; behind it this kernel reads 32 rows' scales and stores them in runs along the rows.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from padless.formats import ceil_div, round_up
from padless.quantization.triton.launches import begin, launch, programmatic

# Small tiles, since most of the time is a chain of loads and stores behind the quantizing launch.
_ROWS_AT_ONCE = 32
_FEW_ROWS = 1 << 16  # below, twice as many warps a program
_MOST_COLUMNS = 32
_ALIGNMENT = 16  # of rows of scales, so that they are loaded 16 bytes at once


class Placed(NamedTuple):
    """scale: (items, ceil(K / 128) and some) float32 of each item. items: (rows,) int32, the item of each row."""

    scale: torch.Tensor
    items: torch.Tensor


def empty(items: int, K: int, rows: int, device: torch.device, tokens: torch.Tensor | None) -> Placed:
    """Tensors that the quantizing kernel fills; tokens: the items of the rows, where they are known."""
    if tokens is None:
        tokens = torch.empty(rows, dtype=torch.int32, device=device)
    return Placed(
        torch.empty((items, round_up(ceil_div(K, 128), _ALIGNMENT)), dtype=torch.float32, device=device), tokens
    )


def place(placed: Placed, scale: torch.Tensor, *, are_known: bool = False) -> None:
    """Writes the scales (rows, ceil(K / 128)), MN-major, and the zeros of their padding.

    are_known: the items were there before the launch ahead began, which has not written them and begins no other before
    it has itself waited.
    """
    rows, columns = scale.shape
    width = min(triton.next_power_of_2(columns), _MOST_COLUMNS)
    ld = scale.stride(1)
    launch(_place_scales, ceil_div(ld, _ROWS_AT_ONCE) * ceil_div(columns, width))(
        placed.scale, placed.items, scale, rows, columns, ld, placed.scale.shape[0], placed.scale.stride(0),
        ROWS=_ROWS_AT_ONCE, COLUMNS=width, ARE_KNOWN=are_known, **programmatic(scale.device, releases=False),
        num_warps=8 if rows < _FEW_ROWS else 4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "ld", "items"])
def _place_scales(
    from_ptr,  # (items, columns) float32, strides (from_ld, 1)
    items_ptr,  # (rows,) int32; of an item that there is not scales are 0
    to_ptr,  # (rows, columns) float32, strides (1, ld)
    rows,
    columns,
    ld,
    items,
    from_ld,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ARE_KNOWN: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    if not ARE_KNOWN:
        begin(PROGRAMMATIC)
    chunks = tl.cdiv(columns, COLUMNS)
    pid = tl.program_id(0)
    row = pid // chunks * ROWS + tl.arange(0, ROWS)
    column = pid % chunks * COLUMNS + tl.arange(0, COLUMNS)
    item = tl.load(items_ptr + row, mask=row < rows, other=0).to(tl.int64)
    # The quantizing launch lets this one begin only when it has itself waited for what was launched before it, so that
    # items written there can be read ahead.
    if ARE_KNOWN:
        begin(PROGRAMMATIC)
    there = (row < rows) & (item >= 0) & (item < items)
    inside = there[:, None] & (column[None, :] < columns)
    scale = tl.load(from_ptr + item[:, None] * from_ld + column[None, :], mask=inside, other=0.0)
    at = to_ptr + column.to(tl.int64)[None, :] * ld + row[:, None]
    tl.store(at, scale, mask=(row[:, None] < ld) & (column[None, :] < columns))
