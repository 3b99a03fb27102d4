"""FP8 products with the arguments of the hub's kernel finegrained-fp8, which transformers calls.

Activations are quantized 1 x 128 inside; weights are in 128 x 128 blocks with their reciprocal scales.
"""

from __future__ import annotations

from typing import Any

import torch

from padless.checkpoints import from_deepseek
from padless.formats import FP8_BLOCK
from padless.integrations.operators import dense, project, without_backward
from padless.moe.routing import route

_BLOCK = (128, 128)


def matmul(
    input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale_inv: torch.Tensor,
    block_size: Any,
    output_dtype: torch.dtype,
    activation_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """input (.., K) @ weight (N, K).T in output_dtype; weight_scale_inv (ceil(N / 128), ceil(K / 128))."""
    _check(weight, block_size, activation_scale)
    scale = weight_scale_inv.detach().float()
    codes = weight.detach()

    def run(x: torch.Tensor) -> torch.Tensor:
        return dense(x.reshape(-1, x.shape[-1]).contiguous(), codes, scale, output_dtype)

    return without_backward(run, input).reshape(*input.shape[:-1], weight.shape[0])


def grouped_matmul(
    input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale_inv: torch.Tensor,
    offsets: torch.Tensor | None = None,
    tokens_per_expert: torch.Tensor | None = None,
    block_size: Any = None,
) -> torch.Tensor:
    """input (M, K) @ weight (E, N, K) of its group, (M, N); offsets (E,) end rows. Rows behind hold anything."""
    _check(weight, block_size, None)
    assert offsets is not None
    b = from_deepseek(weight.detach(), weight_scale_inv.detach())
    ends = offsets.to(torch.int32)

    def run(x: torch.Tensor) -> torch.Tensor:
        return project(x.contiguous(), None, ends, b, None, FP8_BLOCK.name).to(x.dtype)

    return without_backward(run, input)


def batched_matmul(
    input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale_inv: torch.Tensor,
    block_size: Any = None,
    expert_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """input[s] (S, K) @ weight[expert_ids[s]].T, (S, N). Rows of ids that are no expert hold anything."""
    _check(weight, block_size, None)
    assert expert_ids is not None
    b = from_deepseek(weight.detach(), weight_scale_inv.detach())
    routing = route(expert_ids.reshape(-1, 1), weight.shape[0])
    row = routing.inverse.reshape(-1)
    row = torch.where(row < 0, -1 - row, row)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = project(x.contiguous(), routing.tokens, routing.offs, b, None, FP8_BLOCK.name)
        return y.index_select(0, row).to(x.dtype)

    return without_backward(run, input)


def _check(weight: torch.Tensor, block_size: Any, activation_scale: torch.Tensor | None) -> None:
    if weight.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"weight is {weight.dtype}; this layer's product by padless takes float8_e4m3fn: choose "
            "experts_implementation='padless' for FP4 experts, or install transformers' kernels"
        )
    if block_size is None or tuple(block_size) != _BLOCK or activation_scale is not None:
        given = "static" if activation_scale is not None else "dynamic"
        raise ValueError(
            f"weight_block_size is {block_size} with {given} activation scales; padless takes (128, 128) and dynamic "
            "ones: install transformers' kernels (pip install kernels)"
        )
