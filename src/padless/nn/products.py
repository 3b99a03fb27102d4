"""The three products of a grouped layer in the format of a recipe: operands quantized, or plain bfloat16.

Eager calls compute directly; compiled ones go through the operators of `padless.nn.operators`.
"""

from __future__ import annotations

from typing import Any

import torch

from padless.formats import BlockScaledTensor
from padless.layouts import GroupedColumns
from padless.nn import operators
from padless.nn.calls import call, is_traced
from padless.nn.operators import bytes_of, columns_of
from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad

Rows = BlockScaledTensor | torch.Tensor
Columns = GroupedColumns | torch.Tensor


def _tensor(found: Any) -> torch.Tensor:
    assert isinstance(found, torch.Tensor)
    return found


def product(a: Rows, w: Rows, offs: torch.Tensor, *, transposed: bool, zero_tail: bool) -> torch.Tensor:
    """a @ w[g].T for the rows of each group, (M, N) bfloat16 for quantized operands, else in a's dtype.

    a: (M, K) FP8_BLOCK, MXFP8 or plain. w: (G, N, K) in a's format; or plain, (G, N, K), and with ``transposed``
        (G, K, N), the weight that the forward product has.
    zero_tail: rows past the last group are zeros; without it they hold anything.
    """
    if isinstance(a, torch.Tensor):
        return _tensor(call("bf16_grouped_gemm", a, w, offs, transposed, zero_tail))
    assert isinstance(w, BlockScaledTensor)
    if is_traced(a.data):
        out_dtype = torch.bfloat16
        operands = *bytes_of(a), *bytes_of(w)
        return _tensor(torch.ops.padless.grouped_gemm(*operands, offs, out_dtype, zero_tail, a.format.name))
    return operators.scaled_product(a, w, offs, torch.bfloat16, zero_tail)


def swiglu_product(
    a: BlockScaledTensor, w: BlockScaledTensor, offs: torch.Tensor, gate_up: str, row_weights: torch.Tensor | None
) -> BlockScaledTensor:
    """silu(gate) * up of a @ w[g].T, times row_weights (M,) if given, quantized in the epilogue: FP8_BLOCK (M, I)."""
    if is_traced(a.data):
        codes, scale = torch.ops.padless.grouped_gemm_swiglu(*bytes_of(a), *bytes_of(w), offs, gate_up, row_weights)
        return BlockScaledTensor(codes.view(operators.E4M3), scale, a.format)
    return operators.fp8_swiglu(a, w, offs, gate_up, row_weights)


def wgrad(dy: Columns, x: Columns, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """dy[rows of g].T @ x[rows of g], (G, N, K): `padless.grouped_gemm_wgrad`, or its like of plain rows.

    For a weight (G, K, N) the two change places. Scales that features share belong to the kernel's second operand
    alone: with them as the first the product is computed transposed, and copied.
    """
    if isinstance(dy, torch.Tensor):
        return _tensor(call("bf16_grouped_gemm_wgrad", dy, x, offs, out_dtype))
    assert isinstance(x, GroupedColumns)
    if _features_share_scales(dy):
        return wgrad(x, dy, offs, out_dtype).mT.contiguous()
    if is_traced(dy.data):
        return _tensor(torch.ops.padless.grouped_gemm_wgrad(*columns_of(dy), *columns_of(x), offs, out_dtype))
    # Launches are remembered for outputs that are given.
    out = torch.empty((offs.shape[0], dy.data.shape[0], x.data.shape[0]), dtype=out_dtype, device=dy.data.device)
    return grouped_gemm_wgrad(dy, x, out=out)


def wgrad_into(out: torch.Tensor, dy: Columns, x: Columns, offs: torch.Tensor, *, accumulate: bool) -> None:
    """Writes `wgrad` to ``out`` (G, N, K), or adds it in float32."""
    if isinstance(dy, torch.Tensor):
        call("bf16_grouped_gemm_wgrad_", out, dy, x, offs, accumulate)
        return
    assert isinstance(x, GroupedColumns)
    if _features_share_scales(dy):
        found = wgrad(x, dy, offs, torch.float32 if accumulate else out.dtype).mT
        _ = out.add_(found) if accumulate else out.copy_(found)
    elif is_traced(out):
        torch.ops.padless.grouped_gemm_wgrad_(out, *columns_of(dy), *columns_of(x), offs, accumulate)
    else:
        grouped_gemm_wgrad(dy, x, out=out, accumulate=accumulate)


def _features_share_scales(t: GroupedColumns) -> bool:
    return t.block[0] != 1
