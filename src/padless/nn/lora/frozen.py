"""The product with a frozen weight under autograd: `frozen_product`, and its gradient through the same codes.

Quantization of the rows counts as the identity. FP8_BLOCK weights are multiplied in FP8_BLOCK in the backward pass too:
the gradient's rows are lifted and quantized, the codes transposed. For the others no kernel reads codes along N, so that
`input_gradient` dequantizes as many experts as `WORKSPACE_BYTES` hold, one run of experts after the other.
"""

from __future__ import annotations

from typing import Any

import torch

from padless.formats import FORMAT_BY_NAME, FP8_BLOCK, BlockScaledTensor
from padless.gradients import once_differentiable
from padless.moe import ops
from padless.moe.backward import transposed
from padless.moe.layer import Projection
from padless.nn.calls import call
from padless.ops.grouped_gemm import grouped_gemm
from padless.quantization.lifting import lift, lowered_by_lift
from padless.quantization.quantize import dequantize, quantize

WORKSPACE_BYTES = 1 << 30
# A value dequantized: float32 codes, scales and products at the same time, and what it becomes in bfloat16.
_BYTES_OF_A_VALUE = 24


def frozen_product(
    rows: torch.Tensor,
    operand: BlockScaledTensor | torch.Tensor,
    weights: BlockScaledTensor,
    bias: torch.Tensor | None,
    offs: torch.Tensor,
) -> torch.Tensor:
    """rows @ weights[g].T + bias[g] for the rows of each group, rounded once to bfloat16; (M, N).

    rows: (M, K), what the gradient is of. operand: what the product reads for them, codes or bfloat16 rows, made of
    tensors that do not require grad. weights: (G, N, K). bias: (G, N), which may require grad. offs: (G,) int32. Rows
    from offs[-1] on hold anything, also in the gradient.
    """
    y = Projection(weights, None if bias is None else bias.detach(), None).product(operand, offs)
    out: torch.Tensor = _FrozenProduct.apply(rows, bias, y, offs, *ops.packed(weights))  # type: ignore[no-untyped-call]
    return out


class _FrozenProduct(torch.autograd.Function):
    """Passes on the product y, and has its gradients for the rows and the bias."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, offs: torch.Tensor, *weights: Any
    ) -> torch.Tensor:
        data, scale, global_scale, *names = weights
        ctx.save_for_backward(offs, data, scale, global_scale)
        ctx.names, ctx.dtype, ctx.bias_dtype = names, rows.dtype, None if bias is None else bias.dtype
        return y.view(y.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        offs, *weights = ctx.saved_tensors
        dx = dbias = None
        if ctx.needs_input_grad[0]:
            dx = call("frozen_input_gradient", dy.contiguous(), offs, *weights, *ctx.names).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            # The sums over a group's rows, as a weight gradient of rows of ones: in a fixed order, and without a wait.
            ones = torch.ones((dy.shape[0], 16), dtype=dy.dtype, device=dy.device)
            sums = call("bf16_grouped_gemm_wgrad", dy.contiguous(), ones, offs, torch.float32)
            dbias = sums[:, :, 0].to(ctx.bias_dtype)
        return dx, dbias, *(None,) * 7


def _input_gradient_fake(dy: torch.Tensor, offs: Any, data: torch.Tensor, *others: Any) -> torch.Tensor:
    return dy.new_empty((dy.shape[0], data.shape[2] * FORMAT_BY_NAME[others[2]].codes_per_byte))


@ops.operator(
    "frozen_input_gradient",
    "(Tensor dy, Tensor offs, Tensor w, Tensor w_scale, Tensor? w_global_scale, str w_format, str w_layout) -> Tensor",
    _input_gradient_fake,
)
def _input_gradient(
    dy: torch.Tensor, offs: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None,
    format: str, layout: str,
) -> torch.Tensor:  # fmt: skip
    return input_gradient(dy, ops.unpacked(w, scale, global_scale, format, layout), offs)


def input_gradient(dy: torch.Tensor, weights: BlockScaledTensor, offs: torch.Tensor) -> torch.Tensor:
    """dy @ weights[g] for the rows of each group; (M, K) bfloat16. Rows from offs[-1] on hold anything.

    dy: (M, N) bfloat16, contiguous. weights: (G, N, K) codes. Memory beyond the result: a copy of FP8_BLOCK codes; for
    the other formats at most `WORKSPACE_BYTES` of dequantized weights, or one expert where that is more, and where the
    weights do not fit in them also rows of dy and of the result once more.
    """
    if weights.format == FP8_BLOCK and weights.scale_layout == "plain":
        rows = quantize(lift(dy), FP8_BLOCK)
        return grouped_gemm(rows, transposed(weights.data, lowered_by_lift(weights.scale)), offs)
    groups, n, k = weights.logical_shape
    run = min(groups, max(1, WORKSPACE_BYTES // (n * k * _BYTES_OF_A_VALUE)))
    if run == groups:
        return _product_of(dy, weights, offs, zero_tail=False)
    out = torch.zeros((dy.shape[0], k), dtype=dy.dtype, device=dy.device)
    rows_of = torch.arange(dy.shape[0], device=dy.device)
    for first in range(0, groups, run):
        # Groups begin at row 0 and their ends are known to the device alone: the run's rows are rotated to the front.
        start = offs[first - 1] if first else offs.new_zeros(())
        rotated = dy[(rows_of + start) % max(dy.shape[0], 1)]
        found = _product_of(rotated, weights[first : first + run], offs[first : first + run] - start, zero_tail=True)
        out += found[(rows_of - start) % max(dy.shape[0], 1)]
    return out


def _product_of(dy: torch.Tensor, weights: BlockScaledTensor, offs: torch.Tensor, *, zero_tail: bool) -> torch.Tensor:
    """dy @ the dequantized weights of each group, rounded to bfloat16."""
    found: torch.Tensor = call("bf16_grouped_gemm", dy, dequantize(weights, torch.bfloat16), offs, True, zero_tail)
    return found
