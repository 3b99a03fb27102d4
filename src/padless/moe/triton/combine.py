"""Weighted sums of experts' outputs, and their gradients, as Triton kernels: one pass, no atomics."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from padless.formats import ceil_div
from padless.kernels import ahead
from padless.moe.triton import arithmetic
from padless.quantization.triton import casts
from padless.quantization.triton.launches import begin, launch, programmatic

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
LANES = 256  # partial sums of a dot product


def choose_width(tokens: int, columns: int) -> int:
    """Columns a program adds up: up to 1024, fewer where that would leave a GPU idle."""
    most = 1024 if tokens * ceil_div(columns, 1024) >= 512 else 512 if tokens * ceil_div(columns, 512) >= 384 else 256
    return min(max(triton.next_power_of_2(columns), 128), most)


def combine(
    y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor | None, shared: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Writes out (T, N), neither of them 0, of checked arguments."""
    (tokens, n), top_k = out.shape, inverse.shape[1]
    width = choose_width(tokens, n)
    launch(_combine, tokens * ceil_div(n, width))(
        y,
        inverse,
        weights,
        shared,
        out,
        n,
        y.shape[0],
        y.stride(0),
        0 if shared is None else shared.stride(0),
        out.stride(0),
        OUT=DTYPES[out.dtype],
        TOP_K=top_k,
        BLOCK=width,
        **programmatic(y.device, early=ahead.current() is not None),
        num_warps=max(width // 256, 1),
        enable_fp_fusion=False,
    )


def combine_backward(
    dout: torch.Tensor,
    y: torch.Tensor,
    inverse: torch.Tensor,
    weights: torch.Tensor,
    dy: torch.Tensor,
    dweights: torch.Tensor,
) -> None:
    """Writes dy and dweights of checked arguments with at least one token and one column."""
    (tokens, n), top_k = dout.shape, inverse.shape[1]
    launch(_combine_backward, tokens)(
        dout,
        y,
        inverse,
        weights,
        dy,
        dweights,
        n,
        y.shape[0],
        dout.stride(0),
        y.stride(0),
        dy.stride(0),
        DY=DTYPES[dy.dtype],
        TOP_K=top_k,
        SLOTS=triton.next_power_of_2(top_k),
        LANES=LANES,
        num_warps=4,
        enable_fp_fusion=False,
    )


# What the number of rows decides is not compiled in. Rows that there are not are those of no expert.
@triton.jit(do_not_specialize=["rows"])
def _combine(
    y_ptr,  # (rows, N)
    inverse_ptr,  # (T, TOP_K) int32
    weights_ptr,  # (T, TOP_K), or None for ones
    shared_ptr,  # (T, N), or None
    out_ptr,  # (T, N)
    N,
    rows,
    y_stride,
    shared_stride,
    out_stride,
    OUT: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    begin(PROGRAMMATIC)
    chunks = tl.cdiv(N, BLOCK)
    pid = tl.program_id(0)
    token = (pid // chunks).to(tl.int64)
    column = pid % chunks * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        row = tl.load(inverse_ptr + token * TOP_K + j).to(tl.int64)
        kept = (row >= 0) & (row < rows)
        # Masked values are 0, and the sum is never -0, so that adding them changes nothing.
        values = tl.load(y_ptr + row * y_stride + column, mask=inside & kept, other=0.0)
        values = casts.to_float32(values)
        if weights_ptr is not None:
            weight = tl.load(weights_ptr + token * TOP_K + j, mask=kept, other=0.0)
            values = values * casts.to_float32(weight)
        total += values
    if shared_ptr is not None:
        total += casts.to_float32(tl.load(shared_ptr + token * shared_stride + column, mask=inside, other=0.0))
    tl.store(out_ptr + token * out_stride + column, arithmetic.rounded(total, OUT), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _combine_backward(
    dout_ptr,  # (T, N)
    y_ptr,  # (rows, N)
    inverse_ptr,  # (T, TOP_K) int32
    weights_ptr,  # (T, TOP_K)
    dy_ptr,  # (rows, N)
    dweights_ptr,  # (T, TOP_K) float32
    N,
    rows,
    dout_stride,
    y_stride,
    dy_stride,
    DY: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of two, at least TOP_K
    LANES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    there = slot < TOP_K
    row = tl.load(inverse_ptr + token * TOP_K + slot, mask=there, other=-1).to(tl.int64)
    target = tl.where(row >= 0, row, -1 - row)
    exists = there & (target < rows)
    kept = exists & (row >= 0)
    weight = casts.to_float32(tl.load(weights_ptr + token * TOP_K + slot, mask=kept, other=0.0))
    partial = tl.zeros((SLOTS, LANES), tl.float32)
    for first in range(0, N, LANES):
        column = first + tl.arange(0, LANES)
        inside = column < N
        d = casts.to_float32(tl.load(dout_ptr + token * dout_stride + column, mask=inside, other=0.0))
        both = kept[:, None] & inside[None, :]
        values = tl.load(y_ptr + target[:, None] * y_stride + column[None, :], mask=both, other=0.0)
        partial += tl.where(both, casts.to_float32(values) * d[None, :], 0.0)
        dy = tl.where(kept[:, None], weight[:, None] * d[None, :], 0.0)
        tl.store(
            dy_ptr + target[:, None] * dy_stride + column[None, :],
            arithmetic.rounded(dy, DY),
            mask=exists[:, None] & inside[None, :],
        )
    dots = tl.reshape(_halved(_halved(_halved(_halved(_halved(_halved(_halved(_halved(partial)))))))), (SLOTS,))
    tl.store(dweights_ptr + token * TOP_K + slot, dots, mask=there)


@triton.jit
def _halved(x):
    """(R, C) as (R, C / 2), the sums of columns c and c + C / 2: two numbers are added, in either order the same."""
    HALF: tl.constexpr = x.shape[1] // 2
    return tl.sum(tl.reshape(x, (x.shape[0], 2, HALF)), axis=1)
