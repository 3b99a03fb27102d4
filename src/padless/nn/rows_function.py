"""Experts of rows that a trainer has already sorted by expert, under autograd: `experts_of_rows`."""

from __future__ import annotations

import torch

from padless.arguments import check_flag, check_tensor_type, shown
from padless.moe.checks import check_matrix
from padless.nn.experts_function import Plan, apply_experts, check_gate_up
from padless.nn.linear_function import check_weight
from padless.nn.recipe import Recipe, as_recipe
from padless.nn.weight_codes import WeightOperands, check_operands, has_backward, weight_operands
from padless.nn.weight_gradient import DelayedWgrad, check_delayed
from padless.ops.checks import describe
from padless.quantization.quantize import INPUT_DTYPES
from padless.quantization.rows_columns import checked_offs
from padless.runtime.choices import SwigluGateUp


def experts_of_rows(
    x: torch.Tensor,
    offs: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    row_weights: torch.Tensor | None = None,
    recipe: Recipe | str = "fp8",
    *,
    gate_up: SwigluGateUp = "concatenated",
    input_major: bool = False,
    operands13: WeightOperands | None = None,
    operands2: WeightOperands | None = None,
    delayed_wgrad: DelayedWgrad | None = None,
) -> torch.Tensor:
    """out[r] = w2[e] @ (row_weights[r] * (silu(gate) * up)) of the expert e that row r belongs to; (R, H) in x's dtype.

    gate and up are the halves of w13[e] @ x[r]. Differentiable for x, row_weights, w13 and w2.

    x: (R, H) bfloat16, float16 or float32, rows sorted by expert; R may be 0, and a capacity.
    offs: (E,) int32 or int64 cumulative END rows of the experts on x's device, never read by the host: of counts,
        `padless.group_offsets`. Rows from offs[-1] on take part in nothing, whatever they hold: the output and the
        gradients of x and row_weights are zeros there.
    w13: (E, 2 I, H) of one of x's dtypes; H and I multiples of 16, of 32 with MXFP8. w2: (E, H, I).
    row_weights: (R,) of one of x's dtypes, such as routing weights. They multiply the activation in float32, before it
        is rounded to the second product's format; their gradient is computed in float32. None is the layer without.
    recipe, gate_up, operands13, operands2, delayed_wgrad: as for `padless.autograd.experts`; operands of input-major
        weights are made with input_major=True too.
    input_major: w13 is (E, H, 2 I) and w2 (E, I, H), as ``x @ w`` would have them. Nothing transposed is kept; weight
        gradients and ``main_grad`` are in the weights' own order, which takes a copy of each with wgrad_mode "1d2d".

    Without row_weights a row has the bits that it has in `padless.nn.Experts` before the weighted sum. Gradients of the
    weights have the bits of `padless.nn.Experts` for rows in the same order, dout being that of each row's token, and
    row_weights its routing weights. No synchronization. It can be differentiated once. Raises ValueError.
    """
    recipe = as_recipe(recipe)
    check_flag("input_major", input_major)
    for name, weight in (("x", x), ("w13", w13), ("w2", w2)):
        check_tensor_type(name, weight)
    check_matrix("x", x, None, None, x.device)
    offs = checked_offs(offs, x, "x")
    for name, weight in (("w13", w13), ("w2", w2)):
        if weight.dim() != 3 or weight.device != x.device:
            raise ValueError(f"{name} must be a tensor of three dimensions on {x.device}, got {describe(weight)}")
    of13, of2 = (w13.mT, w2.mT) if input_major else (w13, w2)
    check_weight("w13", of13, x.shape[1], recipe)
    check_weight("w2", of2, of13.shape[1] // 2, recipe)
    if tuple(of2.shape) != (of13.shape[0], x.shape[1], of13.shape[1] // 2) or of13.shape[1] % 32:
        wanted = "(E, H, 2 I) and (E, I, H)" if input_major else "(E, 2 I, H) and (E, H, I)"
        raise ValueError(
            f"w13 is {tuple(w13.shape)} and w2 {tuple(w2.shape)}; they must be {wanted}, H {x.shape[1]} and I a "
            "multiple of 16"
        )
    if offs.shape[0] != w13.shape[0]:
        raise ValueError(f"offs has {offs.shape[0]} groups and w13 {w13.shape[0]} experts; they must be as many")
    check_gate_up(gate_up, of2.shape[2])
    prob = None if row_weights is None else _checked_weights(row_weights, x).to(torch.float32).contiguous()
    backward = has_backward(x, prob, w13, w2)
    check_operands("operands13", operands13, recipe, backward)
    check_operands("operands2", operands2, recipe, backward)
    check_delayed(delayed_wgrad, w13=w13, w2=w2)
    made13, made2 = (
        weight_operands(weight, recipe, backward=backward, input_major=input_major) if operands is None else operands
        for weight, operands in ((w13, operands13), (w2, operands2))
    )
    plan = Plan(recipe, gate_up, delayed_wgrad, of_rows=True, input_major=input_major)
    return apply_experts(x, offs, prob, w13, w2, None, plan, made13, made2)


def _checked_weights(row_weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """row_weights. Raises ValueError unless they are (R,) values on x's device."""
    check_tensor_type("row_weights", row_weights)
    right = row_weights.dtype in INPUT_DTYPES and tuple(row_weights.shape) == (x.shape[0],)
    if not right or row_weights.device != x.device:
        raise ValueError(
            f"row_weights must be ({x.shape[0]},) bfloat16, float16 or float32 on {x.device}, got {shown(row_weights)}"
        )
    return row_weights
