"""Products with frozen FP8_BLOCK weights that add B t in their own launch: for one adapter of all rows.

The sum of product, scaling * B t and bias is in float32 and rounded once; a CPU computes the same. What `adds_inside`
refuses, Blackwell too, rounds the product first and adds by `padless.nn.lora.low_rank.up`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from padless.epilogue import Epilogue, EpilogueTensors
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.kernels.sm90_fp8.host_quant import LowRankProduct
from padless.moe import ops
from padless.moe.activation import Activation
from padless.moe.fused import epilogue_of, gate_rule_of
from padless.nn.calls import call
from padless.nn.lora.low_rank import LowRank
from padless.ops.epilogue_run import with_outputs
from padless.ops.grouped_gemm_low_rank import grouped_gemm_low_rank, takes_low_rank
from padless.runtime.choices import GateUp

_ARGUMENTS = (
    "(Tensor a, Tensor a_scale, Tensor w, Tensor w_scale, Tensor? bias, Tensor offs, Tensor t, Tensor factor, "
    "float scaling"
)


def adds_inside(operand: BlockScaledTensor | torch.Tensor, weights: BlockScaledTensor, low: LowRank) -> bool:
    """Whether the product of these operands adds what low does."""
    is_fp8 = isinstance(operand, BlockScaledTensor) and operand.format == FP8_BLOCK
    return is_fp8 and low.factors.per_expert == 1 and takes_low_rank(weights, low.factors.a[0].shape[1])


def product(
    a: BlockScaledTensor, weights: BlockScaledTensor, bias: torch.Tensor | None, offs: torch.Tensor, t: torch.Tensor,
    factor: torch.Tensor, scaling: float,
) -> torch.Tensor:  # fmt: skip
    """a @ weights[g].T + scaling * t @ factor[g].T + bias[g], rounded once to bfloat16; (M, N).

    a: (M, K), weights: (G, N, K), in FP8_BLOCK. bias: (G, N). t: (M, `width_of` (r)), factor: (G, N, r), any strides.
    """
    operands = (a.data.view(torch.uint8), a.scale, *ops.packed(weights)[:2])
    found: torch.Tensor = call("low_rank_product", *operands, bias, offs, t, factor, scaling)
    return found


def swiglu(
    a: BlockScaledTensor, weights: BlockScaledTensor, bias: torch.Tensor | None, offs: torch.Tensor, t: torch.Tensor,
    factor: torch.Tensor, scaling: float, activation: Activation,
) -> tuple[torch.Tensor, BlockScaledTensor]:  # fmt: skip
    """The activation of `product`, in bfloat16 and quantized to FP8_BLOCK, in the same launch; (M, N / 2)."""
    operands = (a.data.view(torch.uint8), a.scale, *ops.packed(weights)[:2])
    how = (activation.gate_up, activation.alpha, activation.limit, activation.up_offset)
    values, codes, scale = call("low_rank_swiglu", *operands, bias, offs, t, factor, scaling, *how)
    return values, BlockScaledTensor(codes.view(FP8_BLOCK.data_dtype), scale, FP8_BLOCK)


def _product_fake(a: torch.Tensor, a_scale: Any, w: torch.Tensor, *others: Any) -> torch.Tensor:
    return a.new_empty((a.shape[0], w.shape[1]), dtype=torch.bfloat16)


@ops.operator("low_rank_product", _ARGUMENTS + ") -> Tensor", _product_fake)
def _product(
    a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None,
    offs: torch.Tensor, t: torch.Tensor, factor: torch.Tensor, scaling: float,
) -> torch.Tensor:  # fmt: skip
    epilogue = Epilogue(bias=bias is not None, d_dtype=torch.bfloat16)
    found = _computed(epilogue, a, a_scale, w, w_scale, bias, offs, t, factor, scaling)
    assert found.d is not None
    return found.d


def _swiglu_fake(
    a: torch.Tensor, a_scale: Any, w: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = a.shape[0], w.shape[1] // 2
    codes, scale = ops._quantized_fake(rows, columns, FP8_BLOCK.name, "plain", a)
    return a.new_empty((rows, columns), dtype=torch.bfloat16), codes, scale


@ops.operator(
    "low_rank_swiglu",
    _ARGUMENTS + ", str gate_up, float alpha, float? limit, float up_offset) -> (Tensor, Tensor, Tensor)",
    _swiglu_fake,
)
def _swiglu(
    a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None,
    offs: torch.Tensor, t: torch.Tensor, factor: torch.Tensor, scaling: float,
    gate_up: GateUp, alpha: float, limit: float | None, up_offset: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    rule = gate_rule_of(Activation("swiglu", gate_up, alpha, limit, up_offset))
    epilogue = replace(epilogue_of(gate_up, bias is not None, FP8_BLOCK, rule), d_dtype=torch.bfloat16)
    found = _computed(epilogue, a, a_scale, w, w_scale, bias, offs, t, factor, scaling)
    assert found.d is not None
    assert found.row_codes is not None
    assert found.row_scale is not None
    return found.d, found.row_codes.view(torch.uint8), found.row_scale


def _computed(
    epilogue: Epilogue, a: torch.Tensor, a_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor,
    bias: torch.Tensor | None, offs: torch.Tensor, t: torch.Tensor, factor: torch.Tensor, scaling: float,
) -> EpilogueTensors:  # fmt: skip
    rows, weights = (ops.unpacked(x, s, None, FP8_BLOCK.name, "plain") for x, s in ((a, a_scale), (w, w_scale)))
    given = EpilogueTensors(bias=None if bias is None else bias.detach().to(torch.float32).contiguous())
    tensors = with_outputs(epilogue, given, a.shape[0], w.shape[1], w.shape[0], a.device)
    factor = factor.detach().to(torch.bfloat16).contiguous()
    factor = factor.clone() if factor.data_ptr() % 16 != 0 else factor  # as TMA reads it
    low = LowRankProduct(t.contiguous(), factor, scaling)
    grouped_gemm_low_rank(rows, weights, offs, low, epilogue, tensors)
    return tensors
