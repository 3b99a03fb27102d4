"""Passes of the layer under autograd: rows of tokens by expert, every activation of `moe`, and the weighted sum."""

from __future__ import annotations

from typing import Any

import torch

from padless.formats import BlockScaledFormat, BlockScaledTensor
from padless.gradients import once_differentiable
from padless.moe.activation import GELU_CUBIC, GELU_SLOPE, RUN, Activation, sigmoid, split_gate_up
from padless.moe.checks import on_device_of, runs_triton
from padless.moe.combining import combine
from padless.moe.gather import activate_quantize, check_format
from padless.nn.calls import call


def gathered_rows(x: torch.Tensor, tokens: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """x[tokens], (S, H); the gradient of a token is the sum of its rows', in the order of its slots, in float32."""
    out: torch.Tensor = _Gather.apply(x, tokens, inverse)  # type: ignore[no-untyped-call]
    return out


def activated(
    h: torch.Tensor, activation: Activation, format: BlockScaledFormat | None, scale: torch.Tensor | None
) -> tuple[torch.Tensor, BlockScaledTensor | torch.Tensor]:
    """The activation of h (M, N) bfloat16, computed in float32: rounded once to bfloat16, (M, I), and as the next
    product reads it, quantized to format with NVFP4's global scale, in the same pass; the first is differentiable.
    """
    out, codes, codes_scale = _Activated.apply(h, activation, format, scale)  # type: ignore[no-untyped-call]
    if format is None:
        return out, out.detach()
    return out, BlockScaledTensor(codes.view(format.data_dtype), codes_scale, format, scale)


def combined(y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`padless.moe.combine` of rows y (S, H) and weights (T, k), differentiable for both."""
    out: torch.Tensor = _Combine.apply(y, weights, inverse, dtype)  # type: ignore[no-untyped-call]
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tokens: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return x[tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return call("combine", drows, inverse, None, None, drows.dtype), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, weights: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(y, weights, inverse)
        return combine(y, inverse, weights, out_dtype=dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, weights, inverse = ctx.saved_tensors
        dy, dweights = call("combine_backward", dout, y, inverse, weights)
        return dy, dweights.to(weights.dtype), None, None


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: torch.Tensor, activation: Activation, format: BlockScaledFormat | None, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        ctx.save_for_backward(h)
        ctx.activation = activation
        if format is None:
            rows = activate_quantize(h, activation, None)
            assert isinstance(rows, torch.Tensor)
            return rows, None, None
        a, rule = activation, check_format(format, activation.out_columns(h.shape[1]), None, "plain", scale)
        how = (a.kind, a.gate_up, a.alpha, a.limit, a.up_offset, format.name, rule, "plain", scale, None)
        rows, codes, codes_scale = call("activate_and_quantize", h, *how)
        ctx.mark_non_differentiable(codes, codes_scale)
        return rows, codes, codes_scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor, *of_codes: Any) -> tuple[torch.Tensor | None, ...]:
        (h,) = ctx.saved_tensors
        return activation_gradient(dout, h, ctx.activation), None, None, None


def activation_gradient(dout: torch.Tensor, h: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The gradient of h (M, N) from that of its activation dout (M, I): float32, rounded once to h's dtype.

    Where gate or up are beyond the limit their gradients are zero.
    """
    if runs_triton(h) and h.numel() > 0:
        from padless.nn.triton import activation as kernels

        with on_device_of(h):
            return kernels.activation_gradient(dout.contiguous(), h.contiguous(), activation)
    values, d = h.to(torch.float32), dout.to(torch.float32)
    if not activation.is_gated:
        if activation.kind == "relu2":
            return (d * 2.0 * values.clamp(min=0.0)).to(h.dtype)
        return (d * _function_and_slope(values, activation.kind, 1.0)[1]).to(h.dtype)
    gate, up = split_gate_up(values, activation)
    open_gate, open_up = torch.ones_like(gate), torch.ones_like(up)
    if (limit := activation.limit) is not None:
        open_gate, open_up = (gate <= limit).float(), (up.abs() <= limit).float()
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    value, slope = _function_and_slope(gate, activation.kind, activation.alpha)
    dgate = d * (up + activation.up_offset) * slope * open_gate
    return _merged(dgate, d * value * open_up, activation.gate_up).to(h.dtype)


def _function_and_slope(x: torch.Tensor, kind: str, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x * sigmoid(inner(x)) and its derivative; inner is alpha x, and for the GELUs a cubic."""
    if kind in ("gelu", "geglu"):
        inner = GELU_SLOPE * (x + GELU_CUBIC * x * x * x)
        inner_slope = GELU_SLOPE * (1.0 + 3.0 * GELU_CUBIC * x * x)
    else:
        inner, inner_slope = x * alpha, torch.full_like(x, alpha)
    s = sigmoid(inner)
    return x * s, s + x * s * (1.0 - s) * inner_slope


def _merged(gate: torch.Tensor, up: torch.Tensor, gate_up: str) -> torch.Tensor:
    """The inverse of `split_gate_up`."""
    if gate_up == "concatenated":
        return torch.cat([gate, up], dim=-1)
    if gate_up == "alternating":
        return torch.stack([gate, up], dim=-1).flatten(-2)
    runs = [t.unflatten(-1, (-1, RUN)) for t in (gate, up)]
    return torch.stack(runs, dim=-2).flatten(-3)
