"""The gradient of an expert's activation as a Triton kernel: reads the gradient and the rows once, writes once.

The arithmetic of `padless.nn.lora.tokens.activation_gradient`, bit for bit.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from padless.formats import ceil_div
from padless.moe.activation import GELU_CUBIC, GELU_SLOPE, Activation
from padless.moe.triton import arithmetic
from padless.quantization.triton import casts
from padless.quantization.triton.launches import launch

_ROWS, _COLUMNS = 4, 512
ARRANGEMENTS = {"concatenated": 0, "interleaved": 1, "alternating": 2}
_GELU_SLOPE = tl.constexpr(GELU_SLOPE)
_GELU_CUBIC = tl.constexpr(GELU_CUBIC)
_GELU_CUBIC_3 = tl.constexpr(3.0 * GELU_CUBIC)


def activation_gradient(dout: torch.Tensor, h: torch.Tensor, activation: Activation) -> torch.Tensor:
    """(M, N) in h's dtype of dout (M, I) and h (M, N), both contiguous; neither is empty."""
    rows, columns = dout.shape
    out = torch.empty_like(h)
    chunks = ceil_div(columns, _COLUMNS)
    launch(_activation_gradient, ceil_div(rows, _ROWS) * chunks)(
        dout, h, out, rows, columns, chunks, activation.alpha, activation.up_offset, activation.limit or 0.0,
        KIND=activation.kind, GATED=activation.is_gated, ARRANGEMENT=ARRANGEMENTS[activation.gate_up],
        HAS_LIMIT=activation.limit is not None, ROWS=_ROWS, COLUMNS=_COLUMNS,
        HARDWARE=casts.casts_in_hardware(h.device), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _function_and_slope(x, KIND: tl.constexpr, alpha, HARDWARE: tl.constexpr):
    """x * sigmoid(inner(x)) and its derivative."""
    if KIND == "gelu" or KIND == "geglu":
        inner = _GELU_SLOPE * (x + ((_GELU_CUBIC * x) * x) * x)
        inner_slope = _GELU_SLOPE * (1.0 + (_GELU_CUBIC_3 * x) * x)
    else:
        inner = x * alpha
        inner_slope = alpha
    s = arithmetic.sigmoid(inner, HARDWARE)
    return x * s, s + ((x * s) * (1.0 - s)) * inner_slope


@triton.jit(do_not_specialize=["M"])
def _activation_gradient(
    dout_ptr,  # (M, I)
    h_ptr,  # (M, N): I columns, or 2 I of gate and up
    out_ptr,  # (M, N)
    M,
    I,  # noqa: E741
    chunks,
    alpha,
    up_offset,
    limit,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ARRANGEMENT: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    row = (tl.program_id(0) // chunks * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(0) % chunks * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < M) & (column < I)
    d = casts.to_float32(tl.load(dout_ptr + row * I + column, mask=inside, other=0.0))
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    if not GATED:
        place = row * I + column
        x = casts.to_float32(tl.load(h_ptr + place, mask=inside, other=0.0))
        if KIND == "relu2":
            # As torch clamps: NaN stays.
            dx = (d * 2.0) * tl.where(x < 0.0, 0.0, x)
        else:
            value, slope = _function_and_slope(x, KIND, 1.0, HARDWARE)
            dx = d * slope
        tl.store(out_ptr + place, arithmetic.rounded(dx, OUT), mask=inside)
    else:
        of_gate, of_up = arithmetic.gate_up_columns(column, I, ARRANGEMENT)
        if ARRANGEMENT == 2:  # pairs are read and written together
            wide = (tl.program_id(0) % chunks * (2 * COLUMNS) + tl.arange(0, 2 * COLUMNS))[None, :]
            in_wide = (row < M) & (wide < 2 * I)
            both = casts.to_float32(tl.load(h_ptr + row * (2 * I) + wide, mask=in_wide, other=0.0))
            gate, up = tl.split(tl.reshape(both, (ROWS, COLUMNS, 2)))
        else:
            row_start = row * (2 * I)
            gate = casts.to_float32(tl.load(h_ptr + row_start + of_gate, mask=inside, other=0.0))
            up = casts.to_float32(tl.load(h_ptr + row_start + of_up, mask=inside, other=0.0))
        open_gate = 1.0
        open_up = 1.0
        if HAS_LIMIT:
            open_gate = tl.where(gate <= limit, 1.0, 0.0)
            open_up = tl.where(tl.abs(up) <= limit, 1.0, 0.0)
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        value, slope = _function_and_slope(gate, KIND, alpha, HARDWARE)
        d_gate = ((d * (up + up_offset)) * slope) * open_gate
        d_up = (d * value) * open_up
        if ARRANGEMENT == 2:
            pairs = tl.reshape(tl.join(d_gate, d_up), (ROWS, 2 * COLUMNS))
            tl.store(out_ptr + row * (2 * I) + wide, arithmetic.rounded(pairs, OUT), mask=in_wide)
        else:
            tl.store(out_ptr + row_start + of_gate, arithmetic.rounded(d_gate, OUT), mask=inside)
            tl.store(out_ptr + row_start + of_up, arithmetic.rounded(d_up, OUT), mask=inside)
