"""Values of slots in the order of rows, and back, as Triton kernels."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from padless.formats import ceil_div
from padless.moe.triton import arithmetic
from padless.moe.triton.combine import DTYPES
from padless.quantization.triton import casts
from padless.quantization.triton.launches import launch

_SLOTS = 256


def slots_to_rows(values: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """(T * k,) float32: values (T, k), contiguous, in the order of rows. T is not 0."""
    count = inverse.numel()
    out = torch.empty(count, dtype=torch.float32, device=values.device)
    launch(_slots_to_rows, ceil_div(count, _SLOTS))(values, inverse, out, count, SLOTS=_SLOTS, num_warps=4)
    return out


def rows_to_slots(values: torch.Tensor, inverse: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """(T, k) in out_dtype: values (T * k,) float32 in the order of slots, 0 where inverse is negative. T is not 0."""
    count = inverse.numel()
    out = torch.empty(inverse.shape, dtype=out_dtype, device=values.device)
    launch(_rows_to_slots, ceil_div(count, _SLOTS))(
        values, inverse, out, count, OUT=DTYPES[out_dtype], SLOTS=_SLOTS, num_warps=4
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _slots_to_rows(
    values_ptr,  # (count,) in the order of slots
    inverse_ptr,  # (count,) int32
    out_ptr,  # (count,) float32, in the order of rows
    count,
    SLOTS: tl.constexpr,
):
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    there = slot < count
    row = tl.load(inverse_ptr + slot, mask=there, other=0)
    row = tl.where(row < 0, -1 - row, row)
    value = casts.to_float32(tl.load(values_ptr + slot, mask=there, other=0.0))
    tl.store(out_ptr + row, value, mask=there & (row < count))


@triton.jit(do_not_specialize=["count"])
def _rows_to_slots(
    values_ptr,  # (count,) float32, in the order of rows
    inverse_ptr,  # (count,) int32
    out_ptr,  # (count,) in the order of slots
    count,
    OUT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    there = slot < count
    row = tl.load(inverse_ptr + slot, mask=there, other=-1)
    value = tl.load(values_ptr + row, mask=(row >= 0) & (row < count), other=0.0)
    tl.store(out_ptr + slot, arithmetic.rounded(value, OUT), mask=there)
