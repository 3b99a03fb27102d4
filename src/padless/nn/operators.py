"""Training's passes, and its products of plain rows, as torch.library operators `padless::*` with fake tensors.

Codes are bytes in their schemas. Eager calls go around the dispatcher (`padless.moe.ops.call`). Products of quantized
operands are no operators of this module: `padless.ops` makes its calls traceable.
"""

from __future__ import annotations

from typing import Any

import torch

from padless.formats import FORMAT_BY_NAME, NVFP4, BlockScaledTensor
from padless.moe import slots
from padless.moe.ops import _quantized_fake, operator
from padless.nn import rows
from padless.ops.grouped_gemm import grouped_gemm
from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad
from padless.ops.grouped_gemm_wgrad_mxfp8 import grouped_gemm_wgrad_mxfp8
from padless.ops.grouped_gemm_wgrad_nvfp4 import grouped_gemm_wgrad_nvfp4
from padless.quantization.mx_rows_columns import values_of_columns
from padless.quantization.quantize import dequantize, quantize
from padless.runtime.architecture import BLACKWELL
from padless.runtime.devices import hopper_driver, kernels_for

E4M3 = torch.float8_e4m3fn


def bytes_of(t: BlockScaledTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as bytes, and scales, one-byte ones as bytes too."""
    return t.data.view(torch.uint8), t.scale if t.scale.dtype == torch.float32 else t.scale.view(torch.uint8)


# --- rows times weights ----------------------------------------------------------------------------------


def _bf16_grouped_gemm_fake(
    a: torch.Tensor, w: torch.Tensor, offs: Any, transposed: bool, zero_tail: bool
) -> torch.Tensor:
    return a.new_empty((a.shape[0], w.shape[2 if transposed else 1]))


@operator(
    "bf16_grouped_gemm",
    "(Tensor a, Tensor w, Tensor offs, bool transposed, bool zero_tail) -> Tensor",
    _bf16_grouped_gemm_fake,
)
def _bf16_grouped_gemm(
    a: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, transposed: bool, zero_tail: bool
) -> torch.Tensor:
    """a (M, K) @ w[g].T, or @ w[g] when transposed; w (G, N, K), in a's dtype."""
    if a.is_cuda and a.shape[0] > 0:
        if _has_bf16_kernels(a):
            out = grouped_gemm(a, w.mT if transposed else w, offs)
        else:
            out = torch._grouped_mm(a.contiguous(), w if transposed else w.mT, offs=offs)
        return rows.zero_tail(out, offs) if zero_tail else out
    out = a.new_full((a.shape[0], w.shape[2 if transposed else 1]), 0.0 if zero_tail else float("nan"))
    wide = _wide(a.dtype)
    for group, (start, end) in enumerate(rows.spans(offs, a.shape[0])):
        if start < end:
            b = w[group].to(wide).contiguous()  # the order in which torch adds up depends on strides
            out[start:end] = (a[start:end].to(wide) @ (b if transposed else b.T)).to(out.dtype)
    return out


# --- along tokens ----------------------------------------------------------------------------------------


def _bf16_wgrad_fake(dy: torch.Tensor, x: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return dy.new_empty((offs.shape[0], dy.shape[1], x.shape[1]), dtype=out_dtype)


@operator(
    "bf16_grouped_gemm_wgrad", "(Tensor dy, Tensor x, Tensor offs, ScalarType out_dtype) -> Tensor", _bf16_wgrad_fake
)
def _bf16_wgrad(dy: torch.Tensor, x: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """dy[rows of g].T @ x[rows of g], (G, N, K); dy (M, N), x (M, K) of one dtype."""
    if dy.is_cuda and dy.shape[0] > 0:
        if _has_bf16_kernels(dy) and out_dtype in (torch.bfloat16, torch.float32):
            return grouped_gemm_wgrad(dy, x, offs=offs, out_dtype=out_dtype)
        out: torch.Tensor = torch._grouped_mm(dy.contiguous().T, x.contiguous(), offs=offs)
        return out.to(out_dtype)
    out = dy.new_zeros((offs.shape[0], dy.shape[1], x.shape[1]), dtype=out_dtype)
    wide = _wide(dy.dtype)
    for group, (start, end) in enumerate(rows.spans(offs, dy.shape[0])):
        if start < end:
            out[group] = (dy[start:end].T.to(wide) @ x[start:end].to(wide)).to(out_dtype)
    return out


@operator(
    "bf16_grouped_gemm_wgrad_",
    "(Tensor(a!) out, Tensor dy, Tensor x, Tensor offs, bool accumulate) -> ()",
    lambda *arguments: None,
)
def _bf16_wgrad_into(
    out: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, offs: torch.Tensor, accumulate: bool
) -> None:
    if dy.shape[0] > 0 and _has_bf16_kernels(dy) and (out.dtype == torch.float32 or not accumulate):
        grouped_gemm_wgrad(dy, x, offs=offs, out=out, accumulate=accumulate)
        return
    found = _bf16_wgrad(dy, x, offs, out.dtype)
    if accumulate:
        out += found
    else:
        out.copy_(found)


def _mxfp8_wgrad_fake(
    dy: torch.Tensor, dy_scale: torch.Tensor, x: torch.Tensor, x_scale: torch.Tensor, offs: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    return dy.new_empty((offs.shape[0], dy.shape[1], x.shape[1]), dtype=out_dtype)


@operator(
    "mxfp8_grouped_gemm_wgrad",
    "(Tensor dy, Tensor dy_scale, Tensor x, Tensor x_scale, Tensor offs, ScalarType out_dtype) -> Tensor",
    _mxfp8_wgrad_fake,
)
def _mxfp8_wgrad(
    dy: torch.Tensor, dy_scale: torch.Tensor, x: torch.Tensor, x_scale: torch.Tensor, offs: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """dy[rows of g].T @ x[rows of g], (G, N, K), of bytes of MXFP8 with scales along the tokens."""
    out = _mxfp8_wgrad_fake(dy, dy_scale, x, x_scale, offs, out_dtype)
    _mxfp8_wgrad_into(out, dy, dy_scale, x, x_scale, offs, False)
    return out


@operator(
    "mxfp8_grouped_gemm_wgrad_",
    "(Tensor(a!) out, Tensor dy, Tensor dy_scale, Tensor x, Tensor x_scale, Tensor offs, bool accumulate) -> ()",
    lambda *arguments: None,
)
def _mxfp8_wgrad_into(
    out: torch.Tensor, dy: torch.Tensor, dy_scale: torch.Tensor, x: torch.Tensor, x_scale: torch.Tensor,
    offs: torch.Tensor, accumulate: bool,
) -> None:  # fmt: skip
    of_dy, of_x = ((t.view(E4M3), s.view(torch.float8_e8m0fnu)) for t, s in ((dy, dy_scale), (x, x_scale)))
    if not dy.is_cuda or kernels_for(dy.device) == BLACKWELL.name:
        grouped_gemm_wgrad_mxfp8(of_dy, of_x, offs, out=out, accumulate=accumulate)
    else:
        _bf16_wgrad_into(out, values_of_columns(of_dy, offs), values_of_columns(of_x, offs), offs, accumulate)


@operator(
    "nvfp4_grouped_gemm_wgrad_",
    "(Tensor(a!) out, Tensor dy, Tensor dy_scale, Tensor dy_global, Tensor x, Tensor x_scale, Tensor x_global, "
    "Tensor ends, bool accumulate) -> ()",
    lambda *arguments: None,
)
def _nvfp4_wgrad_into(
    out: torch.Tensor, dy: torch.Tensor, dy_scale: torch.Tensor, dy_global: torch.Tensor, x: torch.Tensor,
    x_scale: torch.Tensor, x_global: torch.Tensor, ends: torch.Tensor, accumulate: bool,
) -> None:  # fmt: skip
    """dy @ x.T of each group's tokens to ``out`` (G, N, K), of bytes of transposed NVFP4 with scales in tiles.

    Without the kernel the values of codes and block scales, which bfloat16 has exactly, are multiplied.
    """
    on_kernels = not dy.is_cuda or kernels_for(dy.device) == BLACKWELL.name
    globals_ = (dy_global, x_global) if on_kernels else (None, None)
    of_dy, of_x = (
        BlockScaledTensor(codes.view(NVFP4.data_dtype), scale.view(NVFP4.scale_dtype), NVFP4, of_all, "blocked")
        for codes, scale, of_all in ((dy, dy_scale, globals_[0]), (x, x_scale, globals_[1]))
    )
    if on_kernels:
        grouped_gemm_wgrad_nvfp4(of_dy, of_x, ends, out=out, accumulate=accumulate)
        return
    values = (dequantize(t, torch.bfloat16).T.contiguous() for t in (of_dy, of_x))
    found = _bf16_wgrad(*values, ends, torch.float32) * (dy_global * x_global)
    _ = out.add_(found) if accumulate else out.copy_(found)


def _has_bf16_kernels(t: torch.Tensor) -> bool:
    """Whether products of plain tensors like ``t`` are this library's: bfloat16 on Hopper."""
    return t.dtype == torch.bfloat16 and hopper_driver(t) is not None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which products of dtype are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- rows ------------------------------------------------------------------------------------------------


@operator("zero_tail_", "(Tensor(a!) t, Tensor offs) -> ()", lambda *arguments: None)
def _zero_tail(t: torch.Tensor, offs: torch.Tensor) -> None:
    rows.zero_tail(t, offs)


def _quantize_rows_fake(x: torch.Tensor, format: str = "FP8_BLOCK") -> tuple[torch.Tensor, torch.Tensor]:
    data, scale = _quantized_fake(x.shape[0], x.shape[1], format, "plain", x)
    return data, scale if scale.dtype == torch.float32 else scale.view(torch.uint8)


@operator("quantize_rows", '(Tensor x, str format="FP8_BLOCK") -> (Tensor, Tensor)', _quantize_rows_fake)
def _quantize_rows(x: torch.Tensor, format: str = "FP8_BLOCK") -> tuple[torch.Tensor, torch.Tensor]:
    """`padless.quantize`, codes as bytes."""
    return bytes_of(quantize(x, FORMAT_BY_NAME[format]))


def _dequantize_rows_fake(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.new_empty(codes.shape, dtype=torch.bfloat16)


@operator("dequantize_rows", "(Tensor codes, Tensor scale) -> Tensor", _dequantize_rows_fake)
def _dequantize_rows(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return rows.dequantize(codes.view(E4M3), scale)


def _slots_to_rows_fake(values: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return values.new_empty((inverse.numel(),), dtype=torch.float32)


@operator("slots_to_rows", "(Tensor values, Tensor inverse) -> Tensor", _slots_to_rows_fake)
def _slots_to_rows(values: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return slots.slots_to_rows(values, inverse)


def _rows_to_slots_fake(values: torch.Tensor, inverse: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return values.new_empty(inverse.shape, dtype=out_dtype)


@operator("rows_to_slots", "(Tensor values, Tensor inverse, ScalarType out_dtype) -> Tensor", _rows_to_slots_fake)
def _rows_to_slots(values: torch.Tensor, inverse: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return slots.rows_to_slots(values, inverse, out_dtype)


def _swiglu_backward_fake(
    dh: torch.Tensor, z: torch.Tensor, offs: Any, prob: Any, gate_up: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return z.new_empty(z.shape), z.new_empty(dh.shape), z.new_empty((z.shape[0],), dtype=torch.float32)


@operator(
    "swiglu_backward",
    "(Tensor dh, Tensor z, Tensor offs, Tensor prob, str gate_up) -> (Tensor, Tensor, Tensor)",
    _swiglu_backward_fake,
)
def _swiglu_backward(
    dh: torch.Tensor, z: torch.Tensor, offs: torch.Tensor, prob: torch.Tensor, gate_up: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return rows.swiglu_backward(dh, z, offs, prob, gate_up)
