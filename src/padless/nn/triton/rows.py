"""Passes over rows as Triton kernels: zeros behind the last group, FP8_BLOCK rows decoded."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from padless.formats import ceil_div
from padless.moe.triton import arithmetic
from padless.quantization.triton.launches import launch

_TAIL_ROWS, _TAIL_COLUMNS = 32, 512
_DECODED_ROWS, _BLOCK = 64, 128


def zero_tail(t: torch.Tensor, offs: torch.Tensor) -> None:
    """Writes zeros to the rows from offs[-1] on of t (M, N), contiguous. Programs that have none of them end at once."""
    rows, columns = t.shape
    if t.numel() > 0:
        launch(_zero_tail, ceil_div(rows, _TAIL_ROWS))(
            t, offs, rows, columns, offs.shape[0], ROWS=_TAIL_ROWS, COLUMNS=_TAIL_COLUMNS, num_warps=4
        )


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """bfloat16 values of FP8_BLOCK codes (M, N), contiguous, M and N not 0, with MN-major scales."""
    rows, columns = codes.shape
    out = torch.empty((rows, columns), dtype=torch.bfloat16, device=codes.device)
    blocks = ceil_div(columns, _BLOCK)
    launch(_dequantize, ceil_div(rows, _DECODED_ROWS) * blocks)(
        codes.view(torch.uint8), scale, out, rows, columns, scale.stride(1), blocks,
        ROWS=_DECODED_ROWS, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def moved(t: torch.Tensor, out: torch.Tensor, start: torch.Tensor, end: torch.Tensor, *, forth: bool) -> torch.Tensor:
    """out (M, N) with rows start.. end - 1 of t (M, N) at its front, or backwards: t's front at rows start.. end - 1.

    t, out: contiguous, not empty. start, end: (1,) int32. Programs that have none of these rows end immediately.
    """
    rows, columns = t.shape
    launch(_moved, ceil_div(rows, _TAIL_ROWS))(
        t, out, start, end, rows, columns, FORTH=forth, ROWS=_TAIL_ROWS, COLUMNS=_TAIL_COLUMNS, num_warps=4
    )
    return out


@triton.jit(do_not_specialize=["M"])
def _moved(
    t_ptr,  # (M, N), contiguous
    out_ptr,  # (M, N), contiguous
    start_ptr,
    end_ptr,
    M,
    N,
    FORTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    start = tl.minimum(tl.maximum(tl.load(start_ptr), 0), M)
    count = tl.minimum(tl.load(end_ptr), M) - start
    first = tl.program_id(0) * ROWS
    if first >= count:
        return
    row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    apart = start.to(tl.int64) * N
    begin = first * 0
    while begin < N:
        column = (begin + tl.arange(0, COLUMNS))[None, :]
        inside = (row < count) & (column < N)
        place = row * N + column
        if FORTH:
            tl.store(out_ptr + place, tl.load(t_ptr + apart + place, mask=inside), mask=inside)
        else:
            tl.store(out_ptr + apart + place, tl.load(t_ptr + place, mask=inside), mask=inside)
        begin += COLUMNS


@triton.jit(do_not_specialize=["M"])
def _zero_tail(
    t_ptr,  # (M, N), contiguous
    offs_ptr,  # (num_groups,) int32
    M,
    N,
    num_groups,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    end = tl.load(offs_ptr + num_groups - 1)
    if first + ROWS <= end:
        return
    row = first + tl.arange(0, ROWS)
    kept = (row >= end) & (row < M)
    start = tl.program_id(0) * 0
    while start < N:
        column = start + tl.arange(0, COLUMNS)
        place = row.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(t_ptr + place, 0.0, mask=kept[:, None] & (column < N)[None, :])
        start += COLUMNS


@triton.jit(do_not_specialize=["M", "scale_ld"])
def _dequantize(
    codes_ptr,  # (M, N) uint8, contiguous
    scale_ptr,  # (M, blocks) float32, strides (1, scale_ld)
    out_ptr,  # (M, N) bfloat16, contiguous
    M,
    N,
    scale_ld,
    blocks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0) % blocks
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = (row < M)[:, None] & (column < N)[None, :]
    place = row.to(tl.int64)[:, None] * N + column[None, :]
    codes = tl.load(codes_ptr + place, mask=inside, other=0)
    scale = tl.load(scale_ptr + block.to(tl.int64) * scale_ld + row, mask=row < M, other=0.0)
    value = arithmetic.from_e4m3(codes, False) * scale[:, None]
    tl.store(out_ptr + place, arithmetic.rounded(value, tl.bfloat16), mask=inside)
