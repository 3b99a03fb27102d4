"""SwiGLU's backward in 16 or 32 bits as a Triton kernel, for products that are not quantized.

The arithmetic of `padless.quantization.swiglu_rules`, bit for bit, rounded once to the values' type.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from padless.formats import ceil_div
from padless.moe.triton.arithmetic import rounded
from padless.moe.triton.combine import DTYPES
from padless.quantization.triton import casts, tiles
from padless.quantization.triton import swiglu_arithmetic as arithmetic
from padless.quantization.triton.launches import launch

_BLOCK = 128
_INTERLEAVE = tl.constexpr(32)


def swiglu_backward(
    dh: torch.Tensor, z: torch.Tensor, offs: torch.Tensor, prob: torch.Tensor, gate_up: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dZ (M, 2 I), H (M, I), dprob (M,) float32) for dh (M, I), z (M, 2 I), neither empty, and prob (M,) float32."""
    dh, z = (t if t.stride(-1) == 1 else t.contiguous() for t in (dh, z))
    rows, hidden = dh.shape
    dz = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    h = torch.empty(dh.shape, dtype=z.dtype, device=z.device)
    dprob = torch.empty(rows, dtype=torch.float32, device=z.device)
    quads = tiles.QUADS.value
    launch(_swiglu_backward, ceil_div(rows, quads))(
        dh, z, prob, offs, dz, h, dprob, rows, hidden, dh.stride(0), z.stride(0), offs.shape[0],
        OUT=DTYPES[z.dtype], INTERLEAVED=gate_up == "interleaved", ROWS=quads, BLOCK=_BLOCK,
        HARDWARE=casts.casts_in_hardware(z.device), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return dz, h, dprob


@triton.jit(do_not_specialize=["M"])
def _swiglu_backward(
    dh_ptr,  # (M, I), strides (dh_stride, 1)
    z_ptr,  # (M, 2 I), strides (z_stride, 1)
    prob_ptr,  # (M,) float32
    offs_ptr,  # (num_groups,) int32
    dz_ptr,  # (M, 2 I), contiguous
    h_ptr,  # (M, I), contiguous
    dprob_ptr,  # (M,) float32
    M,
    I,  # noqa: E741
    dh_stride,
    z_stride,
    num_groups,
    OUT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """32 rows; dprob's blocks of 128 columns are added one after the other."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < M
    long_row = row.to(tl.int64)[:, None]
    prob = tl.load(prob_ptr + row, mask=there, other=0.0)[:, None]
    total = tl.zeros((ROWS,), tl.float32)
    start = tl.program_id(0) * 0
    while start < I:
        column = start + tl.arange(0, BLOCK)
        inside = there[:, None] & (column < I)[None, :]
        if INTERLEAVED:
            of_gate = column // _INTERLEAVE * (2 * _INTERLEAVE) + column % _INTERLEAVE
            to_up = _INTERLEAVE
        else:
            of_gate = column
            to_up = I
        z = z_ptr + long_row * z_stride + of_gate[None, :]
        gate = arithmetic.bounded(casts.to_float32(tl.load(z, mask=inside, other=0.0)))
        up = casts.to_float32(tl.load(z + to_up, mask=inside, other=0.0))
        dh = tl.load(dh_ptr + long_row * dh_stride + column[None, :], mask=inside, other=0.0)
        dh = casts.to_float32(dh)
        s = arithmetic.sigmoid(gate, HARDWARE)
        silu = gate * s
        h0 = silu * up
        total += arithmetic.pairwise_sum(tl.where(inside, h0 * dh, 0.0))
        dh0 = dh * prob
        dz = dz_ptr + long_row * (2 * I) + of_gate[None, :]
        d_gate = (dh0 * up) * arithmetic.slope(s, silu, HARDWARE)
        tl.store(dz, rounded(d_gate, OUT), mask=inside)
        tl.store(dz + to_up, rounded(dh0 * silu, OUT), mask=inside)
        tl.store(h_ptr + long_row * I + column[None, :], rounded(h0 * prob, OUT), mask=inside)
        start += BLOCK
    total = tl.where(row < tl.load(offs_ptr + num_groups - 1), total, 0.0)
    nan = tl.full((ROWS,), casts.NAN_BITS, tl.int32).to(tl.float32, bitcast=True)
    tl.store(dprob_ptr + row, tl.where(total == total, total, nan), mask=there)
