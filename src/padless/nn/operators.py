"""Products of training as torch.library operators `padless::*` with fake tensors; codes are bytes in their schemas.

Eager calls go around the dispatcher (`padless.moe.ops.call`).
"""

from __future__ import annotations

from typing import Any

import torch

from padless.formats import FORMAT_BY_NAME, FP8_BLOCK, BlockScaledTensor
from padless.layouts import GroupedColumns, empty_mn_major
from padless.moe import slots
from padless.moe.fused import swiglu
from padless.moe.ops import _quantized_fake, operator, unpacked
from padless.nn import rows
from padless.ops.grouped_gemm import grouped_gemm
from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad
from padless.quantization.quantize import quantize
from padless.runtime.devices import hopper_driver

E4M3 = torch.float8_e4m3fn


def bytes_of(t: BlockScaledTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as bytes, and scales, one-byte ones as bytes too."""
    return t.data.view(torch.uint8), t.scale if t.scale.dtype == torch.float32 else t.scale.view(torch.uint8)


def columns_of(t: GroupedColumns) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[int], int]:
    """What an operator takes for a `GroupedColumns` beside offs."""
    return t.data.view(torch.uint8), t.scale, t.starts, t.block_starts, list(t.block), t.alignment


def _fp8(codes: torch.Tensor, scale: torch.Tensor) -> BlockScaledTensor:
    return BlockScaledTensor(codes.view(E4M3), scale, FP8_BLOCK)


# --- rows times weights ----------------------------------------------------------------------------------


def _grouped_gemm_fake(
    a: torch.Tensor, a_scale: Any, b: torch.Tensor, b_scale: Any, offs: Any, out_dtype: torch.dtype, zero_tail: bool,
    format: str = "FP8_BLOCK",
) -> torch.Tensor:  # fmt: skip
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


@operator(
    "grouped_gemm",
    "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor offs, ScalarType out_dtype, bool zero_tail, "
    'str format="FP8_BLOCK") -> Tensor',
    _grouped_gemm_fake,
)
def _grouped_gemm(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, offs: torch.Tensor,
    out_dtype: torch.dtype, zero_tail: bool, format: str = "FP8_BLOCK",
) -> torch.Tensor:  # fmt: skip
    left, right = unpacked(a, a_scale, None, format, "plain"), unpacked(b, b_scale, None, format, "plain")
    return scaled_product(left, right, offs, out_dtype, zero_tail)


def scaled_product(
    a: BlockScaledTensor, b: BlockScaledTensor, offs: torch.Tensor, out_dtype: torch.dtype, zero_tail: bool
) -> torch.Tensor:
    """a (M, K) @ b[g].T of its group, (M, N); zero_tail: rows past the last group are zeros, else anything."""
    out = grouped_gemm(a, b, offs, out_dtype=out_dtype)
    return rows.zero_tail(out, offs) if zero_tail else out


def _grouped_gemm_swiglu_fake(
    a: torch.Tensor, a_scale: Any, b: torch.Tensor, b_scale: Any, offs: Any, gate_up: str, row_weights: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    m, hidden = a.shape[0], b.shape[1] // 2
    return a.new_empty((m, hidden)), empty_mn_major(m, -(-hidden // 128), a.device)


@operator(
    "grouped_gemm_swiglu",
    "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor offs, str gate_up, Tensor? row_weights=None) "
    "-> (Tensor, Tensor)",
    _grouped_gemm_swiglu_fake,
)
def _grouped_gemm_swiglu(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, offs: torch.Tensor, gate_up: str,
    row_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return bytes_of(fp8_swiglu(_fp8(a, a_scale), _fp8(b, b_scale), offs, gate_up, row_weights))


def fp8_swiglu(
    a: BlockScaledTensor, b: BlockScaledTensor, offs: torch.Tensor, gate_up: str, row_weights: torch.Tensor | None
) -> BlockScaledTensor:
    """silu(gate) * up of the product, times row_weights (M,) if given, quantized in its epilogue; (M, N / 2)."""
    found = swiglu(
        a, b, offs, gate_up=gate_up, bias=None, format=FP8_BLOCK, global_scale=None, backend=None,
        row_weights=row_weights,
    )  # fmt: skip
    assert isinstance(found, BlockScaledTensor)
    return found


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

_WGRAD = (
    "Tensor dy, Tensor dy_scale, Tensor dy_starts, Tensor dy_block_starts, int[] dy_block, int dy_alignment, "
    "Tensor x, Tensor x_scale, Tensor x_starts, Tensor x_block_starts, int[] x_block, int x_alignment, Tensor offs"
)


def _columns(
    offs: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, starts: torch.Tensor, block_starts: torch.Tensor,
    block: list[int], alignment: int,
) -> GroupedColumns:  # fmt: skip
    return GroupedColumns(data.view(E4M3), scale, offs, starts, block_starts, (block[0], block[1]), alignment)


def _wgrad_fake(*arguments: Any) -> torch.Tensor:
    dy, x, offs, out_dtype = arguments[0], arguments[6], arguments[12], arguments[13]
    shape = (offs.shape[0], dy.shape[0], x.shape[0])
    return dy.new_empty(shape, dtype=out_dtype)  # type: ignore[no-any-return]


@operator("grouped_gemm_wgrad", f"({_WGRAD}, ScalarType out_dtype) -> Tensor", _wgrad_fake)
def _wgrad(*arguments: Any) -> torch.Tensor:
    offs, out_dtype = arguments[12], arguments[13]
    dy, x = _columns(offs, *arguments[0:6]), _columns(offs, *arguments[6:12])
    return grouped_gemm_wgrad(dy, x, out_dtype=out_dtype)


@operator("grouped_gemm_wgrad_", f"(Tensor(a!) out, {_WGRAD}, bool accumulate) -> ()", lambda *arguments: None)
def _wgrad_into(out: torch.Tensor, *arguments: Any) -> None:
    offs, accumulate = arguments[12], arguments[13]
    dy, x = _columns(offs, *arguments[0:6]), _columns(offs, *arguments[6:12])
    grouped_gemm_wgrad(dy, x, out=out, accumulate=accumulate)


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


def _has_bf16_kernels(t: torch.Tensor) -> bool:
    """Whether products of plain tensors like ``t`` are this library's: bfloat16 on Hopper."""
    return t.dtype == torch.bfloat16 and hopper_driver(t) is not None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What products of dtype are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- rows ------------------------------------------------------------------------------------------------


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
