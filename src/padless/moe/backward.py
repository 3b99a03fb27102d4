"""Gradients of `padless.moe.moe` for x, top_k_weights and shared; the quantized weights are constants.

In the backward pass x is gathered and multiplied again, so that nothing of a row's size is kept from the forward pass.
Products are FP8_BLOCK: the gradients have a scale per 128 columns of a row, the weights the codes and scales that they
have, transposed; gradients are lifted (`padless.quantization.lifting`). Quantization counts as the identity, as in
`padless.nn`. Weights multiply rows behind the second product in the forward pass and in front of it in the backward
pass, which is the same derivative.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.moe import ops
from padless.moe.activation import Activation
from padless.moe.checks import on_device_of, runs_triton
from padless.moe.combining import combine
from padless.moe.gather import gather_quantize, route_quantize
from padless.moe.slots import rows_to_slots, slots_to_rows
from padless.ops.grouped_gemm import grouped_gemm
from padless.quantization.lifting import lift, lowered_by_lift
from padless.quantization.swiglu_backward import SwigluGradients, swiglu_backward_quantize
from padless.runtime.choices import BackendName, SwigluGateUp
from padless.runtime.operators import register_autograd


def wanted(**arguments: torch.Tensor | None) -> str | None:
    """The name of the first argument that requires grad, None where grad mode is off or none does."""
    if torch.is_grad_enabled():
        for name, t in arguments.items():
            if t is not None and t.requires_grad:
                return name
    return None


def check_differentiable(
    name: str, w13: BlockScaledTensor, w2: BlockScaledTensor, activation: Activation, activations: str, has_bias: bool
) -> None:
    """Raises ValueError, which names the argument that requires grad, for a layer that has no backward pass."""
    if not is_differentiable(w13, w2, activation, activations, has_bias):
        raise ValueError(
            f"{name} requires grad, and moe has gradients for FP8_BLOCK weights and activations, plain SwiGLU, "
            "concatenated or interleaved, and no bias; train with padless.nn.Experts or padless.autograd.experts, pass "
            f"{name}.detach() or call under torch.no_grad()"
        )


def is_differentiable(
    w13: BlockScaledTensor, w2: BlockScaledTensor, activation: Activation, activations: str, has_bias: bool
) -> bool:
    """Whether a layer has a backward pass. activations: the name of their format."""
    formats = {w13.format.name, w2.format.name, activations}
    plain = {w13.scale_layout, w2.scale_layout} == {"plain"}
    swiglu = activation.is_plain_swiglu and activation.gate_up != "alternating"
    return formats == {FP8_BLOCK.name} and plain and swiglu and not has_bias


def _fake(
    dout: torch.Tensor, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape if others[-1] else (0,)), top_k_weights.new_empty(top_k_weights.shape)


@ops.operator(
    "moe_backward",
    "(Tensor dout, Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor w13, Tensor w13_scale, Tensor w2, "
    "Tensor w2_scale, str gate_up, str? backend, bool needs_x) -> (Tensor, Tensor)",
    _fake,
)
def _moe_backward(
    dout: torch.Tensor, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor,
    w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor,
    gate_up: SwigluGateUp, backend: BackendName | None, needs_x: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dx, or nothing without needs_x; dweights)."""
    if top_k_index.shape[0] == 0:
        return torch.empty_like(x) if needs_x else x.new_empty(0), torch.empty_like(top_k_weights)
    first = ops.unpacked(w13, w13_scale, None, FP8_BLOCK.name, "plain")
    (offs, _, inverse), rows = route_quantize(x, top_k_index, w13.shape[0], FP8_BLOCK)
    dy = gather_quantize(lift(dout), inverse, FP8_BLOCK)
    prob = slots_to_rows(top_k_weights, inverse)
    second = ops.unpacked(w2, w2_scale, None, FP8_BLOCK.name, "plain")
    found = gradients_of_experts(rows, dy, prob, offs, first, second, gate_up, backend)
    assert found.dprob is not None
    dweights = rows_to_slots(found.dprob, inverse, top_k_weights.dtype)
    if not needs_x:
        return x.new_empty(0), dweights
    dx_rows = grouped_gemm(found.dz_rows, transposed(w13, lowered_by_lift(w13_scale)), offs, backend=backend)
    return combine(dx_rows, inverse, None, out_dtype=x.dtype), dweights


def gradients_of_experts(
    rows: BlockScaledTensor,
    dy: BlockScaledTensor,
    prob: torch.Tensor,
    offs: torch.Tensor,
    w13: BlockScaledTensor,
    w2: BlockScaledTensor,
    gate_up: SwigluGateUp,
    backend: BackendName | None,
) -> SwigluGradients:
    """Gradients of what the first product gives and of the rows' weights prob (M,): of rows (M, H), which are
    multiplied again, and the unweighted gradient dy (M, H) of what the second product gives. dy and what the result has
    of the first product are pre-scaled; its dprob is not.
    """
    z = grouped_gemm(rows, w13, offs, backend=backend)
    dh = grouped_gemm(dy, transposed(w2.data, w2.scale), offs, backend=backend)
    found = swiglu_backward_quantize(dh, z, offs, prob, gate_up=gate_up)
    assert found.dprob is not None
    return replace(found, dprob=lowered_by_lift(found.dprob))


def transposed(codes: torch.Tensor, scale: torch.Tensor) -> BlockScaledTensor:
    """FP8_BLOCK weights (G, K, N) from the codes, or their bytes, and scales of (G, N, K): the same values."""
    codes = codes.view(torch.uint8)
    if runs_triton(codes) and codes.is_contiguous():
        from padless.moe.triton.transpose import transpose

        with on_device_of(codes):
            turned = transpose(codes)
    else:
        turned = codes.transpose(1, 2).contiguous()
    return BlockScaledTensor(turned.view(FP8_BLOCK.data_dtype), scale.transpose(1, 2).contiguous(), FP8_BLOCK)


# Places of arguments of padless::moe.
_X, _IDS, _WEIGHTS, _W13, _W2, _SHARED, _GATE_UP, _BACKEND = 0, 1, 2, 3, 8, 15, 20, 25


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    places = (_X, _IDS, _WEIGHTS, _W13, _W13 + 1, _W2, _W2 + 1)
    ctx.save_for_backward(*(inputs[i] for i in places))
    ctx.how = inputs[_GATE_UP], inputs[_BACKEND]
    ctx.count = len(inputs)
    ctx.shared_dtype = None if inputs[_SHARED] is None else inputs[_SHARED].dtype


def _backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    found: list[torch.Tensor | None] = [None] * ctx.count
    needs_x, needs_weights = ctx.needs_input_grad[_X], ctx.needs_input_grad[_WEIGHTS]
    if needs_x or needs_weights:
        dx, dweights = torch.ops.padless.moe_backward(dout, *ctx.saved_tensors, *ctx.how, needs_x)
        found[_X], found[_WEIGHTS] = dx if needs_x else None, dweights if needs_weights else None
    if ctx.needs_input_grad[_SHARED]:
        found[_SHARED] = dout.to(ctx.shared_dtype)
    return tuple(found)


def register() -> None:
    """Gives padless::moe, once it is defined, its derivative."""
    register_autograd("moe", _backward, _setup_context)
