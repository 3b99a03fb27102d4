"""The three products of a grouped layer in the format of a recipe: operands quantized, or plain bfloat16.

Of quantized operands they are the public calls, which can be traced; of plain ones operators of `padless.nn.operators`.
"""

from __future__ import annotations

from typing import Any

import torch

from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.layouts import GroupedColumns
from padless.moe.fused import swiglu
from padless.nn import operators as operators  # registers those that are called here
from padless.nn.calls import call
from padless.ops.grouped_gemm import grouped_gemm
from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad
from padless.quantization.mx_rows_columns import Columns as MxColumns

Rows = BlockScaledTensor | torch.Tensor
Columns = GroupedColumns | MxColumns | BlockScaledTensor | torch.Tensor  # a tensor with scales: NVFP4, transposed


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
    out = grouped_gemm(a, w, offs)
    if zero_tail:
        call("zero_tail_", out, offs)
    return out


def swiglu_product(
    a: BlockScaledTensor, w: BlockScaledTensor, offs: torch.Tensor, gate_up: str, row_weights: torch.Tensor | None
) -> BlockScaledTensor:
    """silu(gate) * up of a @ w[g].T, times row_weights (M,) if given, quantized in the epilogue: FP8_BLOCK (M, I)."""
    found = swiglu(
        a, w, offs, gate_up=gate_up, bias=None, format=FP8_BLOCK, global_scale=None, backend=None,
        row_weights=row_weights,
    )  # fmt: skip
    assert isinstance(found, BlockScaledTensor)
    return found


def wgrad(dy: Columns, x: Columns, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """dy[rows of g].T @ x[rows of g], (G, N, K): `padless.grouped_gemm_wgrad`, or its like of plain rows.

    For a weight (G, K, N) the two change places. Scales that features share belong to the kernel's second operand
    alone: with them as the first the product is computed transposed, and copied.
    """
    if isinstance(dy, torch.Tensor):
        return _tensor(call("bf16_grouped_gemm_wgrad", dy, x, offs, out_dtype))
    if isinstance(dy, tuple):
        return _tensor(call("mxfp8_grouped_gemm_wgrad", *_bytes(dy), *_bytes(x), offs, out_dtype))
    if isinstance(dy, BlockScaledTensor):
        assert isinstance(x, BlockScaledTensor)
        out = torch.empty((offs.shape[0], dy.shape[0], x.shape[0]), dtype=out_dtype, device=dy.device)
        wgrad_into(out, dy, x, offs, accumulate=False)
        return out
    assert isinstance(x, GroupedColumns)
    if _features_share_scales(dy):
        return wgrad(x, dy, offs, out_dtype).mT.contiguous()
    # Launches are remembered for outputs that are given.
    out = torch.empty((offs.shape[0], dy.data.shape[0], x.data.shape[0]), dtype=out_dtype, device=dy.data.device)
    return grouped_gemm_wgrad(dy, x, out=out)


def wgrad_into(out: torch.Tensor, dy: Columns, x: Columns, offs: torch.Tensor, *, accumulate: bool) -> None:
    """Writes `wgrad` to ``out`` (G, N, K), or adds it in float32."""
    if isinstance(dy, torch.Tensor):
        call("bf16_grouped_gemm_wgrad_", out, dy, x, offs, accumulate)
        return
    if isinstance(dy, tuple):
        call("mxfp8_grouped_gemm_wgrad_", out, *_bytes(dy), *_bytes(x), offs, accumulate)
        return
    if isinstance(dy, BlockScaledTensor):
        assert isinstance(x, BlockScaledTensor)
        call("nvfp4_grouped_gemm_wgrad_", out, *_parts(dy), *_parts(x), offs, accumulate)
        return
    assert isinstance(x, GroupedColumns)
    if _features_share_scales(dy):
        found = wgrad(x, dy, offs, torch.float32 if accumulate else out.dtype).mT
        _ = out.add_(found) if accumulate else out.copy_(found)
        return
    grouped_gemm_wgrad(dy, x, out=out, accumulate=accumulate)


def _bytes(columns: Columns) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP8 codes and scales along the tokens, as operators take them."""
    assert isinstance(columns, tuple)
    return columns[0].view(torch.uint8), columns[1].view(torch.uint8)


def _parts(t: BlockScaledTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """NVFP4 codes and scales as bytes, and the global scale."""
    assert t.global_scale is not None
    return t.data.view(torch.uint8), t.scale.view(torch.uint8), t.global_scale


def _features_share_scales(t: GroupedColumns) -> bool:
    return t.block[0] != 1
