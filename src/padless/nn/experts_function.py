"""The experts of a Mixture-of-Experts layer under autograd: `experts`.

Forward:  route -> gather, quantize -> w13 -> SwiGLU, quantize -> w2 -> weighted sum.
Backward: gather dout, quantize -> dH by w2 -> SwiGLU's gradients, quantized -> dx by w13 -> sum of a token's rows, and
the two weight gradients.

The routing weights multiply rows after w2 in the forward pass and H before it in the backward pass, which is the same
derivative: so nothing of w2's size is kept for their gradient, and dout needs no pass of its own.

`padless.nn.experts_of_rows` (`padless.nn.rows_function`) is the same without gathers and sums, for rows that are
sorted by expert already; their weights, if any, multiply H in both passes.

With experts on several ranks `padless.distributed.ExpertParallel` takes the place of the gathers and the sums: rows of a
group are in the order of (rank, token, slot), which is that of one process with the tokens of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from padless.arguments import check_tensor_type, is_one_of, shown
from padless.distributed import ExpertParallel, ExpertPlan
from padless.distributed.functions import gradients_of_dispatch, gradients_of_rows, summed
from padless.epilogue import INTERLEAVE
from padless.formats import FORMAT_BY_NAME, NVFP4, BlockScaledTensor
from padless.gradients import asked_for, once_differentiable
from padless.moe.checks import check_matrix
from padless.moe.layer import BF16
from padless.moe.routing import check_ids
from padless.nn.calls import call
from padless.nn.lifted import lowered
from padless.nn.linear_function import (
    check_weight,
    columns_facts,
    flat_columns,
    joined_columns,
    offs_of_columns,
    operands_of_rows,
)
from padless.nn.products import Columns, Rows, product, swiglu_product
from padless.nn.quantizers import activation_gradients, nvfp4_rows, quantized
from padless.nn.recipe import RULES, Recipe, as_recipe, format_name, is_block_scaled
from padless.nn.weight_codes import (
    PARTS,
    WeightOperands,
    check_operands,
    flat,
    flat_operands,
    has_backward,
    joined,
    joined_operands,
    weight_operands,
)
from padless.nn.weight_gradient import DelayedWgrad, check_delayed, deliver
from padless.quantization.lifting import lowered_by_lift
from padless.quantization.swiglu_backward import GATE_UP
from padless.runtime.choices import SwigluGateUp

_FUSED_MULTIPLE = 128  # of 2 I: columns of a tile of the epilogue
_COMPACT_ALIGNMENT = 32  # tokens: the least slack between groups, where little is to be kept


def experts(
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    recipe: Recipe | str = "fp8",
    *,
    shared: torch.Tensor | None = None,
    gate_up: SwigluGateUp = "concatenated",
    operands13: WeightOperands | None = None,
    operands2: WeightOperands | None = None,
    delayed_wgrad: DelayedWgrad | None = None,
) -> torch.Tensor:
    """out[t] = sum over j of top_k_weights[t, j] * expert(top_k_index[t, j], x[t]), plus shared[t]; (T, H) in x's dtype.

    expert(e, x) = w2[e] @ (silu(gate) * up), gate and up being the halves of w13[e] @ x. Differentiable for x,
    top_k_weights, w13, w2 and shared.

    x: (T, H) bfloat16, float16 or float32; T may be 0.
    top_k_index: (T, k) int32 or int64, k from 1 to 16. Ids below 0 or from E on are no expert and add nothing.
    top_k_weights: (T, k) bfloat16, float16 or float32.
    w13: (E, 2 I, H), the same dtypes; H and I multiples of 16. w2: (E, H, I).
    recipe: a `padless.nn.Recipe` or the name of one.
    shared: (T, H), added to the result.
    gate_up: which rows of w13 make gate and up, "concatenated" or "interleaved" by 32 (then I is a multiple of 32).
    operands13, operands2: as ``operands`` of `padless.autograd.grouped_linear`.
    delayed_wgrad: where the weight gradients are left for later; None computes them in the backward pass.

    Kept for the backward pass, in bytes a row (T * k rows): of an FP8 weight gradient H codes of x and H / 32 of scales
    (H / 4096 in mode "1d2d"), of a bfloat16 one nothing but x itself; and of the values before the activation 4 I
    ("bf16"), 2 I codes and I / 16 of scales ("fp8"), or the first product's operand ("recompute"). No synchronization.
    It can be differentiated once. Raises ValueError.
    """
    recipe = as_recipe(recipe)
    for name, weight in (("w13", w13), ("w2", w2)):
        check_tensor_type(name, weight)
        if weight.dim() != 3:
            raise ValueError(f"{name} must be (E, N, K), got {shown(weight)}")
    check_tokens(x, top_k_index, top_k_weights, shared, w13.shape[0])
    check_weight("w13", w13, x.shape[1], recipe)
    check_weight("w2", w2, w13.shape[1] // 2, recipe)
    if tuple(w2.shape) != (w13.shape[0], x.shape[1], w13.shape[1] // 2) or w13.shape[1] % 32:
        raise ValueError(
            f"w13 is {tuple(w13.shape)} and w2 {tuple(w2.shape)}; they must be (E, 2 I, H) and (E, H, I), H and I "
            "multiples of 16"
        )
    check_gate_up(gate_up, w13.shape[1] // 2)
    backward = has_backward(x, top_k_weights, w13, w2)
    check_operands("operands13", operands13, recipe, backward)
    check_operands("operands2", operands2, recipe, backward)
    check_delayed(delayed_wgrad, w13=w13, w2=w2)
    made13 = weight_operands(w13, recipe, backward=backward) if operands13 is None else operands13
    made2 = weight_operands(w2, recipe, backward=backward) if operands2 is None else operands2
    plan = Plan(recipe, gate_up, delayed_wgrad)
    return apply_experts(x, top_k_index, top_k_weights, w13, w2, shared, plan, made13, made2)


def check_tokens(
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    shared: torch.Tensor | None,
    num_experts: int,
) -> None:
    """Raises ValueError for tokens, ids and weights that do not fit together."""
    check_ids(top_k_index, num_experts)
    tokens, top_k = top_k_index.shape
    check_matrix("x", x, tokens, None, top_k_index.device)
    check_matrix("top_k_weights", top_k_weights, tokens, top_k, x.device)
    if shared is not None:
        check_matrix("shared", shared, tokens, x.shape[1], x.device)


def check_gate_up(gate_up: str, intermediate: int) -> None:
    """Raises ValueError for an order of gate and up that I columns cannot have."""
    if not is_one_of(gate_up, GATE_UP) or (gate_up == "interleaved" and intermediate % INTERLEAVE):
        raise ValueError(
            f"gate_up is {shown(gate_up)} and I {intermediate}; allowed: {', '.join(map(repr, GATE_UP))}, the latter "
            f"for multiples of {INTERLEAVE}"
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """The arguments of `experts` beside its tensors, by their names.

    ep: the exchange with other ranks' experts; None where all experts are here.
    of_rows: x has a row for every row, sorted by expert: in the places of top_k_index and top_k_weights are offs and the
        rows' weights or None.
    input_major: weights are (E, H, 2 I) and (E, I, H).
    """

    recipe: Recipe
    gate_up: SwigluGateUp
    delayed_wgrad: DelayedWgrad | None
    ep: ExpertParallel | None = None
    of_rows: bool = False
    input_major: bool = False


def apply_experts(
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor | None,
    w13: torch.Tensor,
    w2: torch.Tensor,
    shared: torch.Tensor | None,
    plan: Plan,
    operands13: WeightOperands,
    operands2: WeightOperands,
) -> torch.Tensor:
    """`experts` of checked arguments."""
    out: torch.Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
        x, top_k_weights, w13, w2, shared, top_k_index, plan, *flat_operands(operands13), *flat_operands(operands2)
    )
    return out


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        top_k_weights: torch.Tensor | None,
        w13: torch.Tensor,
        w2: torch.Tensor,
        shared: torch.Tensor | None,
        top_k_index: torch.Tensor,
        plan: Plan,
        *operands: Any,
    ) -> torch.Tensor:
        recipe, ep = plan.recipe, plan.ep
        dtypes = x.dtype, None if top_k_weights is None else top_k_weights.dtype
        made13, made2 = (joined_operands(recipe, *of) for of in (operands[: 2 * PARTS], operands[2 * PARTS :]))
        needs_x, needs_prob, needs13, needs2 = ctx.needs_input_grad[:4]
        trains = needs_x or needs_prob or needs13 or needs2
        prob, tokens, inverse, where = top_k_weights, None, None, None
        if plan.of_rows:
            offs = top_k_index
        elif ep is None:
            offs, tokens, inverse = call("route", top_k_index, w13.shape[0])
        else:
            assert top_k_weights is not None
            x, where = ep._dispatch(x, top_k_index, top_k_weights)  # type: ignore[assignment]
            offs, prob, inverse = where.offs, where.prob, where.inverse

        # First product: rows for it, and what its weight's gradient reads.
        rows, columns = _gathered(x, tokens, inverse, offs, recipe, needs13)
        z, hidden = _hidden(rows, made13.forward, offs, plan, prob if plan.of_rows else None)
        y = product(hidden, made2.forward, offs, transposed=False, zero_tail=plan.of_rows)
        out: torch.Tensor
        if plan.of_rows:
            out = y if y.dtype == x.dtype else y.to(x.dtype)
        elif ep is None or where is None:
            out = call("combine", y, inverse, top_k_weights, shared, dtypes[0])
        else:
            out = summed(ep, y.to(dtypes[0]), where, shared, dtypes[0])

        ctx.plan = plan
        ctx.dtypes = dtypes
        ctx.weights = (w13 if needs13 else None, w2 if needs2 else None)
        ctx.facts = None
        if trains:
            kept: tuple[torch.Tensor | None, ...] = (None,) * PARTS
            if recipe.save == "bf16":
                kept = (z, None, None)
            elif recipe.save == "fp8":
                assert z is not None
                kept = (*call("quantize_rows", z), None)
            elif is_block_scaled(recipe.forward):
                kept = flat(rows)
            saved_columns: tuple[torch.Tensor | None, ...] = (None,) * 4
            if columns is not None:
                ctx.facts, saved_columns = columns_facts(columns), flat_columns(columns)
            keeps_x = (needs13 and not recipe.fp8_wgrad) or (
                recipe.save == "recompute" and not is_block_scaled(recipe.forward)
            )
            again = flat(made13.forward) if recipe.save == "recompute" else (None,) * PARTS
            more = () if where is None else (where.ids, where.overflow)
            ctx.save_for_backward(
                offs, tokens, inverse, prob, x if keeps_x else None,
                *kept, *saved_columns, *flat(made13.dgrad), *flat(made2.dgrad), *again, *more,
            )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs_x, needs_prob, needs13, needs2, needs_shared = ctx.needs_input_grad[:5]
        dx = dprob = dw13 = dw2 = None
        if needs_x or needs_prob or needs13 or needs2:
            dx, dprob, dw13, dw2 = _gradients(ctx, dout)
        dshared = dout if needs_shared else None
        return dx, dprob, dw13, dw2, dshared, None, None, *(None,) * (4 * PARTS)


def _gathered(
    x: torch.Tensor,
    tokens: torch.Tensor | None,
    inverse: torch.Tensor | None,
    offs: torch.Tensor,
    recipe: Recipe,
    needs_wgrad: bool,
) -> tuple[Rows, Columns | None]:
    """x by experts: the operand of the first product, and that of its weight's gradient where it is quantized.

    tokens: None where x has a row for every row, as it comes from other ranks or from `experts_of_rows`' caller.
    """
    rows: Rows | None = None
    fp8_columns = recipe.fp8_wgrad and needs_wgrad
    name = format_name(recipe.forward)
    if tokens is not None and name in RULES and not (recipe.fp8_forward and fp8_columns):
        found = call("gather_quantize", x, inverse, name, RULES[name], "plain", None)
        rows = quantized(*found, format=FORMAT_BY_NAME[name])
        if not fp8_columns:
            return rows, None
    of_rows, of_columns = operands_of_rows(
        x,
        offs,
        recipe.forward if rows is None else None,
        recipe.wgrad if fp8_columns else None,
        recipe.column_block,
        tokens=tokens,
        alignment=_COMPACT_ALIGNMENT if recipe.save == "fp8" else None,
    )
    return of_rows if rows is None else rows, of_columns if fp8_columns else None


def _hidden(
    rows: Rows, w13: Rows, offs: torch.Tensor, plan: Plan, row_weights: torch.Tensor | None
) -> tuple[torch.Tensor | None, Rows]:
    """(values before the activation, the operand of the second product); in one launch where the former are not kept.

    row_weights: what rows are multiplied by behind the activation, in float32.
    """
    recipe = plan.recipe
    if recipe.fp8_forward and recipe.save == "recompute" and w13.shape[1] % _FUSED_MULTIPLE == 0:
        assert isinstance(rows, BlockScaledTensor)
        assert isinstance(w13, BlockScaledTensor)
        return None, swiglu_product(rows, w13, offs, plan.gate_up, row_weights)
    z = product(rows, w13, offs, transposed=False, zero_tail=False)
    name = format_name(recipe.forward) if format_name(recipe.forward) in RULES else BF16
    rule = RULES.get(name, "")
    data, scale = call(
        "activate_quantize", z, "swiglu", plan.gate_up, 1.0, None, 0.0, name, rule, "plain", None, None, row_weights
    )
    if name in RULES:
        return z, quantized(data, scale, format=FORMAT_BY_NAME[name])
    return z, nvfp4_rows(data, offs, False) if recipe.forward == NVFP4 else data


def _gradients(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, top_k_weights, w13 and w2, None where they are not needed."""
    plan: Plan = ctx.plan
    recipe, ep = plan.recipe, plan.ep
    needs_x, needs_prob = ctx.needs_input_grad[:2]  # with ep they say what all ranks exchange
    needs13, needs2 = asked_for(ctx)[2:4]
    offs, tokens, inverse, prob, x, *saved = ctx.saved_tensors
    lengths = (PARTS, 4, PARTS, PARTS, PARTS)
    kept, saved_columns, dgrad13, dgrad2, again = (
        saved[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)
    )
    more = saved[sum(lengths) :]
    z = _values_before_activation(plan, kept, x, tokens, again, offs)
    where = None if ep is None else ExpertPlan(offs, prob, inverse, *more)
    if plan.of_rows:
        prob = dout.new_ones(dout.shape[0], dtype=torch.float32) if prob is None else prob
    elif where is None:
        prob = call("slots_to_rows", prob, inverse)
    else:
        dout = gradients_of_rows(ep, dout, where)

    # Second product.
    dy_rows, dy_columns = operands_of_rows(
        dout, offs, recipe.dgrad, recipe.wgrad if needs2 else None, (1, 128), tokens=tokens, is_gradient=True
    )
    w2_rows = joined(*dgrad2, format=recipe.dgrad)
    if not (recipe.fp8_dgrad and recipe.fp8_wgrad):  # else dH is quantized by one kernel, which wants it lifted
        w2_rows = lowered(w2_rows)
    dh = product(dy_rows, w2_rows, offs, transposed=True, zero_tail=False)
    dz_rows, dz_columns, h_columns, dprob_rows = _activation_gradients(dh, z, offs, prob, plan, needs13, needs2)
    del dh, z, dy_rows
    w13, w2 = ctx.weights
    along = offs_of_columns(offs, recipe) if needs13 or needs2 else offs
    dw2 = _weight_gradient(w2, plan, dy_columns, lowered(h_columns), along) if needs2 else None
    del dy_columns, h_columns

    # First product.
    dx = dprob = dw13 = None
    if needs_x or (needs_prob and where is not None):
        w13_rows = lowered(joined(*dgrad13, format=recipe.dgrad))
        dx_rows = product(dz_rows, w13_rows, offs, transposed=True, zero_tail=plan.of_rows)
        if plan.of_rows:
            dx = dx_rows.to(ctx.dtypes[0])
        elif where is None:
            dx = call("combine", dx_rows, inverse, None, None, ctx.dtypes[0])
        else:
            dx, dprob = gradients_of_dispatch(ep, dx_rows.to(ctx.dtypes[0]), dprob_rows, where)
            dprob = dprob.to(ctx.dtypes[1])
        del dx_rows
    if plan.of_rows:
        dprob = dprob_rows if needs_prob else None
    elif needs_prob and where is None:
        dprob = call("rows_to_slots", dprob_rows, inverse, ctx.dtypes[1])
    if needs13:
        x_columns: Columns
        if ctx.facts is None:
            x_columns = operands_of_rows(x, offs, None, recipe.wgrad, (1, 128), tokens=tokens)[1]
        else:
            x_columns = joined_columns(saved_columns, ctx.facts, offs)
        dw13 = _weight_gradient(w13, plan, dz_columns, lowered(x_columns), along)
    return dx, dprob, dw13, dw2


def _weight_gradient(
    weight: torch.Tensor, plan: Plan, dy: Columns, x: Columns, offs: torch.Tensor
) -> torch.Tensor | None:
    """dy.T @ x of each group in the order of the weight's axes, for autograd."""
    left, right = (x, dy) if plan.input_major else (dy, x)
    return deliver(weight, plan.delayed_wgrad, left, right, offs)


def _values_before_activation(
    plan: Plan, kept: Any, x: torch.Tensor | None, tokens: torch.Tensor | None, w13: Any, offs: torch.Tensor
) -> torch.Tensor:
    """(T * k, 2 I) bfloat16: as they were kept, or multiplied again."""
    recipe = plan.recipe
    if recipe.save != "recompute":
        z: torch.Tensor = kept[0] if recipe.save == "bf16" else call("dequantize_rows", *kept[:2])
        return z
    rows: Rows
    if is_block_scaled(recipe.forward):
        rows = joined(*kept, format=recipe.forward)
    else:
        assert x is not None
        rows = operands_of_rows(x, offs, recipe.forward, None, (1, 128), tokens=tokens)[0]
    return product(rows, joined(*w13, format=recipe.forward), offs, transposed=False, zero_tail=False)


def _activation_gradients(
    dh: torch.Tensor, z: torch.Tensor, offs: torch.Tensor, prob: torch.Tensor, plan: Plan, needs13: bool, needs2: bool
) -> tuple[Rows, Columns, Columns, torch.Tensor]:
    """dZ as rows and as columns, H as columns, and the gradient of each row's routing weight. FP8_BLOCK dZ is lifted.

    Columns of a weight that needs no gradient are the plain values, but where one pass makes all in FP8_BLOCK: without
    storing any it would take 13% less time (docs/kernels/sm90_swiglu_backward/ladder.md), which is no second kernel.
    """
    recipe = plan.recipe
    if recipe.fp8_dgrad and recipe.fp8_wgrad:
        found = activation_gradients(dh, z, offs, prob, plan.gate_up, recipe.column_block)
        assert found.dprob is not None
        return found.dz_rows, found.dz_columns, found.hidden_columns, lowered_by_lift(found.dprob)
    dz, h, dprob = call("swiglu_backward", dh, z, offs, prob, plan.gate_up)
    wgrad13 = recipe.wgrad if needs13 else None
    dz_rows, dz_columns = operands_of_rows(dz, offs, recipe.dgrad, wgrad13, (1, 128), is_gradient=True)
    _, h_columns = operands_of_rows(h, offs, None, recipe.wgrad if needs2 else None, recipe.column_block)
    return dz_rows, dz_columns, h_columns, dprob
