"""Checks of arguments that the layer's functions share, and where a function runs."""

from __future__ import annotations

import torch

from padless.arguments import check_sizes, refuse_negated
from padless.kernels.config import MAX_GROUPS
from padless.ops.checks import describe
from padless.quantization.quantize import INPUT_DTYPES, has_triton
from padless.row_groups import is_readable
from padless.runtime.devices import on_device_of as on_device_of

MAX_TOP_K = 16
SORT_TILE = 128  # slots that are ranked at once, by comparing all pairs; a row of the table of counts
MAX_EXPERTS = MAX_GROUPS


def check_matrix(name: str, t: object, rows: int | None, columns: int | None, device: torch.device) -> None:
    """Raises ValueError unless t is a (rows, columns) tensor of values on the device; None is any size."""
    sizes = ("any" if rows is None else rows, "any" if columns is None else columns)
    if (
        not isinstance(t, torch.Tensor)
        or t.layout is not torch.strided
        or t.is_nested
        or t.dtype not in INPUT_DTYPES
        or t.dim() != 2
        or (rows is not None and t.shape[0] != rows)
        or (columns is not None and t.shape[1] != columns)
        or t.device != device
    ):
        is_deep = isinstance(t, torch.Tensor) and not t.is_nested and t.dim() > 2
        remedy = "; .flatten(0, -2) makes a matrix" if is_deep else ""
        raise ValueError(
            f"{name} must be {sizes[0]} x {sizes[1]} bfloat16, float16 or float32 on {device}, got {describe(t)}{remedy}"
        )
    refuse_negated(name, t)
    check_sizes(name, t)


def check_device(name: str, t: torch.Tensor | None, x: torch.Tensor) -> None:
    """Raises ValueError unless t, if it is given, is on the device of x."""
    if isinstance(t, torch.Tensor) and t.device != x.device:
        raise ValueError(f"{name} is on {t.device} and x on {x.device}; they must be on one device")


def check_inverse(inverse: object, tokens: int | None, rows: int | None) -> None:
    """Raises ValueError unless inverse is (T, k) int32 for so many tokens and rows."""
    if (
        not isinstance(inverse, torch.Tensor)
        or inverse.layout is not torch.strided
        or inverse.is_nested
        or inverse.dtype != torch.int32
        or inverse.dim() != 2
    ):
        raise ValueError(f"inverse must be (T, k) int32 (see padless.moe.route), got {describe(inverse)}")
    if tokens is not None and inverse.shape[0] != tokens:
        raise ValueError(f"inverse must have a row for each of {tokens} tokens, got {describe(inverse)}")
    if not 1 <= inverse.shape[1] <= MAX_TOP_K:
        raise ValueError(f"inverse must be (T, k) with k from 1 to {MAX_TOP_K}, got {describe(inverse)}")
    if rows is not None and inverse.numel() > rows:
        raise ValueError(f"inverse has {inverse.numel()} entries and there are {rows} rows; there must be as many rows")


def check_rows_of(inverse: torch.Tensor, rows: int) -> None:
    """Raises ValueError for slots of rows that there are not; on a GPU they are not read."""
    if is_readable(inverse) and inverse.numel() > 0 and (largest := int(inverse.max())) >= rows:
        raise ValueError(f"inverse has row {largest} and there are {rows} rows; it must be that of their route")


def check_each_row(inverse: torch.Tensor) -> None:
    """Raises ValueError unless the slots' rows are all rows, each once; on a GPU they are not read."""
    if is_readable(inverse):
        flat = inverse.flatten()
        rows = torch.where(flat < 0, -1 - flat, flat).sort().values
        if not torch.equal(rows, torch.arange(rows.numel(), dtype=rows.dtype, device=rows.device)):
            raise ValueError(
                f"inverse must have each of {rows.numel()} rows once (see padless.moe.route), got rows from {rows[0]} "
                f"to {rows[-1]}"
            )


def sort_bins(num_experts: int) -> int:
    """Columns of the table of counts by which a GPU sorts slots: experts, dropped ids, and lanes past the end."""
    return max(1 << (num_experts + 1).bit_length(), 128)


def runs_triton(t: torch.Tensor) -> bool:
    """Whether the Triton kernels compute on t: it is on a GPU and Triton is installed."""
    return t.is_cuda and has_triton()
