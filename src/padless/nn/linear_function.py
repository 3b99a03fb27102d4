"""A grouped linear layer under autograd: `grouped_linear`."""

from __future__ import annotations

from typing import Any

import torch

from padless.arguments import refuse_kinds
from padless.formats import FP8_BLOCK, MXFP8, NVFP4, BlockScaledTensor
from padless.gradients import asked_for, once_differentiable
from padless.kernels.config import MAX_GROUPS
from padless.layouts import GroupedColumns
from padless.nn.lifted import lowered
from padless.nn.nvfp4 import padded_offs
from padless.nn.products import Columns, Rows, product
from padless.nn.quantizers import (
    joined_nvfp4_columns,
    mx_rows_and_columns,
    nvfp4_columns,
    nvfp4_rows,
    quantize_rows,
    rows_and_columns,
)
from padless.nn.recipe import Format, Recipe, as_recipe, is_block_scaled
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
from padless.ops.checks import describe
from padless.quantization.lifting import lift
from padless.quantization.quantize import INPUT_DTYPES
from padless.quantization.rows_columns import checked_offs

MULTIPLE = 16  # of N and K: rows of 16 bytes in every operand


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    recipe: Recipe | str = "fp8",
    operands: WeightOperands | None = None,
    *,
    delayed_wgrad: DelayedWgrad | None = None,
) -> torch.Tensor:
    """y[rows of g] = x[rows of g] @ weight[g].T, differentiable for x and weight.

    x: (M, K) bfloat16, float16 or float32; float64 with a bfloat16 recipe on a CPU is computed in float64.
    weight: (G, N, K), the same dtypes; N and K multiples of 16, of 32 with MXFP8 or NVFP4.
    offs: (G,) int32 cumulative END rows of the groups, on x's device, never read by the host. Rows past the last group
        take part in nothing, whatever they hold: y and the gradient of x are zeros there.
    recipe: a `padless.nn.Recipe` or the name of one. ``save`` has no meaning here.
    operands: of `padless.nn.weight_codes.weight_operands` for this weight and recipe, to be used again while the weight
        is unchanged; None makes them.
    delayed_wgrad: where the weight gradient is left for later; None computes it in the backward pass.

    Returns (M, N) in x's dtype, rounded from bfloat16 products.

    Backward: dx = dy @ weight, the weights' codes transposed and not quantized again; dw[g] = dy[rows of g].T @ x[rows
    of g], added to ``weight.main_grad`` where that attribute exists (`padless.nn.weight_gradient.computed`). dy is read
    once and quantized along its rows and along the tokens. No synchronization. It can be differentiated once.

    Raises ValueError for what is not allowed above.
    """
    recipe = as_recipe(recipe)
    check_rows("x", x, recipe)
    check_weight("weight", weight, x.shape[1], recipe)
    if weight.device != x.device:
        raise ValueError(f"weight is on {weight.device} and x on {x.device}; they must be on one device")
    offs = checked_offs(offs, x, "x")
    if offs.shape[0] != weight.shape[0]:
        raise ValueError(f"offs has {offs.shape[0]} groups and weight {weight.shape[0]}; they must be as many")
    check_delayed(delayed_wgrad, weight=weight)
    backward = has_backward(x, weight)
    check_operands("operands", operands, recipe, backward)
    made = weight_operands(weight, recipe, backward=backward) if operands is None else operands
    y: torch.Tensor = _GroupedLinear.apply(  # type: ignore[no-untyped-call]
        x, weight, offs, recipe, delayed_wgrad, *flat_operands(made)
    )
    return y


def check_rows(name: str, x: object, recipe: Recipe) -> None:
    """Raises ValueError unless x is a matrix that the recipe can take."""
    allowed: tuple[torch.dtype, ...] = INPUT_DTYPES
    if recipe.forward == recipe.dgrad == recipe.wgrad == torch.bfloat16:
        allowed = (*INPUT_DTYPES, torch.float64)
    refuse_kinds(**{name: x})
    if not isinstance(x, torch.Tensor) or x.dim() != 2 or x.dtype not in allowed:
        raise ValueError(f"{name} must be a matrix in bfloat16, float16 or float32, got {describe(x)}")


def check_weight(name: str, weight: object, k: int, recipe: Recipe) -> None:
    """Raises ValueError unless weight is (G, N, k) in a dtype that the recipe can take."""
    refuse_kinds(**{name: weight})
    if not isinstance(weight, torch.Tensor) or weight.dim() != 3 or weight.shape[2] != k:
        raise ValueError(f"{name} must be (num_groups, N, K) with K = {k}, got {describe(weight)}")
    check_rows(name, weight[0] if weight.shape[0] else weight.flatten(1), recipe)
    check_sizes(name, tuple(weight.shape), recipe)


def check_sizes(name: str, shape: tuple[int, ...], recipe: Recipe) -> None:
    """Raises ValueError for a weight (G, N, K) of sizes that the recipe's products do not have."""
    multiple = MULTIPLE if {recipe.forward, recipe.dgrad}.isdisjoint((MXFP8, NVFP4)) else 2 * MULTIPLE
    if shape[0] > MAX_GROUPS or any(size == 0 or size % multiple for size in shape[1:]):
        raise ValueError(
            f"{name} is (num_groups, N, K) = {shape}; num_groups must be {MAX_GROUPS} at most, and N and K positive "
            f"multiples of {multiple} in this recipe"
        )


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        offs: torch.Tensor,
        recipe: Recipe,
        delayed_wgrad: DelayedWgrad | None,
        *operands: Any,
    ) -> torch.Tensor:
        needs_wgrad = ctx.needs_input_grad[1]
        rows, columns = operands_of_rows(
            x, offs, recipe.forward, recipe.wgrad if needs_wgrad else None, recipe.column_block
        )
        made = joined_operands(recipe, *operands)
        y = product(rows, made.forward, offs, transposed=False, zero_tail=True)
        saved = flat_columns(columns) if needs_wgrad else (None,) * 4
        ctx.save_for_backward(offs, *flat(made.dgrad), *saved)
        ctx.how = (recipe, x.dtype, columns_facts(columns))
        ctx.weight, ctx.delayed_wgrad = weight if needs_wgrad else None, delayed_wgrad
        # Not y.to() where that is y itself: then gradients were zeros in graphs that torch 2.11's Dynamo makes.
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        offs, *kept = ctx.saved_tensors
        of_dgrad, saved = kept[:PARTS], kept[PARTS:]
        recipe, dtype, facts = ctx.how
        needs_dgrad, needs_wgrad = asked_for(ctx)[:2]
        dx = dw = None
        rows, columns = operands_of_rows(
            dy, offs, recipe.dgrad if needs_dgrad else None, recipe.wgrad if needs_wgrad else None, (1, 128),
            is_gradient=True,
        )  # fmt: skip
        if needs_dgrad:
            w = lowered(joined(*of_dgrad, format=recipe.dgrad))
            dx = product(rows, w, offs, transposed=True, zero_tail=True).to(dtype)
        if needs_wgrad:
            x_columns = lowered(joined_columns(saved, facts, offs))
            dw = deliver(ctx.weight, ctx.delayed_wgrad, columns, x_columns, offs_of_columns(offs, recipe))
        return dx, dw, None, None, None, *(None,) * (2 * PARTS)


# --- operands of rows ------------------------------------------------------------------------------------


def operands_of_rows(
    x: torch.Tensor,
    offs: torch.Tensor,
    rows_format: Format | None,
    columns_format: Format | None,
    block: tuple[int, int],
    *,
    tokens: torch.Tensor | None = None,
    alignment: int | None = None,
    is_gradient: bool = False,
) -> tuple[Rows, Columns]:
    """x (M, N) for a product along N and for one along the tokens, in the formats of these; plain for None.

    tokens: (M,) int32, where the rows are x[tokens]. alignment: of FP8_BLOCK columns; None leaves it to the quantizer.
    is_gradient: NVFP4 is rounded by chance, and what is FP8_BLOCK is lifted.
    """
    both = rows_format == columns_format == FP8_BLOCK
    if tokens is not None and not both:
        x, tokens = x.index_select(0, tokens), None
    plain = x if x.dtype == torch.float64 or both else x.to(torch.bfloat16)
    of_blocks = lift(x) if is_gradient and FP8_BLOCK in (rows_format, columns_format) else x
    rows: Rows = plain
    columns: Columns = plain
    if columns_format == FP8_BLOCK:
        quantized, columns = rows_and_columns(of_blocks, offs, block, both, tokens, alignment)
        rows = rows if quantized is None else quantized
    elif columns_format == MXFP8:
        of_rows, columns = mx_rows_and_columns(x, offs, rows_format == MXFP8)
        if of_rows is not None:
            return of_rows, columns
    elif columns_format == NVFP4:
        columns = nvfp4_columns(plain, offs, is_gradient)
    if rows_format == NVFP4:
        rows = nvfp4_rows(plain, offs, is_gradient)
    elif rows_format is not None and is_block_scaled(rows_format) and not both:
        rows = quantize_rows(of_blocks if rows_format == FP8_BLOCK else x, rows_format)
    return rows, columns


def offs_of_columns(offs: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """End rows of the groups of columns: NVFP4's are padded."""
    return padded_offs(offs) if recipe.wgrad == NVFP4 else offs


def flat_columns(columns: Columns) -> tuple[torch.Tensor | None, ...]:
    """The tensors that autograd saves of an operand along the tokens."""
    if isinstance(columns, GroupedColumns):
        return columns.data, columns.scale, columns.starts, columns.block_starts
    if isinstance(columns, BlockScaledTensor):
        return columns.data, columns.scale, columns.global_scale, None
    if isinstance(columns, tuple):
        return *columns, None, None
    return columns, None, None, None


def columns_facts(columns: Columns) -> tuple[tuple[int, int], int] | None:
    """(block, alignment) of a quantized operand along the tokens, else None."""
    return (columns.block, columns.alignment) if isinstance(columns, GroupedColumns) else None


def joined_columns(saved: Any, facts: tuple[tuple[int, int], int] | None, offs: torch.Tensor) -> Columns:
    """The inverse of `flat_columns` and `columns_facts`."""
    if facts is None:
        data, scale, global_scale, _ = saved
        if global_scale is not None:
            return joined_nvfp4_columns(data, scale, global_scale)
        found: Columns = data if scale is None else (data, scale)
        return found
    data, scale, starts, block_starts = saved
    return GroupedColumns(data, scale, offs, starts, block_starts, *facts)
