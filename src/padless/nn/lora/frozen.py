"""The product with a frozen weight and low-rank adapters under autograd: `adapted_product`, and its gradients.

Quantization of the rows counts as the identity. FP8_BLOCK weights are multiplied in FP8_BLOCK in the backward pass too:
the gradient's rows are lifted and quantized, the codes transposed. MXFP4 and NVFP4 codes are read along N by a kernel on
Hopper. Where none does, `input_gradient` dequantizes as many experts as `WORKSPACE_BYTES` hold, one run of experts after
the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import dropout

from padless.formats import FORMAT_BY_NAME, FP8_BLOCK, BlockScaledFormat, BlockScaledTensor
from padless.gradients import once_differentiable
from padless.moe import ops
from padless.moe.activation import Activation
from padless.moe.backward import transposed
from padless.moe.checks import on_device_of, runs_triton
from padless.moe.layer import Projection
from padless.nn.calls import call
from padless.nn.lora import inside
from padless.nn.lora.low_rank import Factors, LowRank, activates_up, factor_gradients
from padless.nn.lora.tokens import activated
from padless.nn.rows import groups_from_front, groups_to_front
from padless.ops.fp4_input_gradient import fp4_input_gradient, reads_codes
from padless.ops.grouped_gemm import grouped_gemm
from padless.quantization.lifting import lowered_by_lift, quantize_lifted
from padless.quantization.quantize import dequantize

WORKSPACE_BYTES = 1 << 30


class Frozen(NamedTuple):
    """Both projections' codes and biases, the activation between them, and what `format_of_rows` says of rows."""

    w13: BlockScaledTensor
    w2: BlockScaledTensor
    bias13: torch.Tensor | None
    bias2: torch.Tensor | None
    activation: Activation
    how: tuple[BlockScaledFormat | None, torch.Tensor | None]


def adapted_product(
    rows: torch.Tensor,
    operand: BlockScaledTensor | torch.Tensor,
    weights: BlockScaledTensor,
    bias: torch.Tensor | None,
    offs: torch.Tensor,
    low: LowRank | None,
    *,
    zero_tail: bool = False,
) -> torch.Tensor:
    """rows @ weights[g].T + bias[g] for the rows of each group, and low's added to it; (M, N) bfloat16.

    Where `inside.adds_inside` the sum is rounded once; else the product is rounded, and the sum again.

    rows: (M, K), what the gradient is of. operand: what the product reads for them, codes or bfloat16 rows, made of
    tensors that do not require grad. weights: (G, N, K). bias: (G, N), which may require grad. offs: (G,) int32. Rows
    from offs[-1] on hold anything, also in the gradient; with zero_tail the gradient has zeros there.
    """
    codes: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)  # what a product that adds low's reads
    y = None  # else the product
    if low is not None and inside.adds_inside(operand, weights, low):
        assert isinstance(operand, BlockScaledTensor)
        codes = (operand.data.view(torch.uint8), operand.scale)
    else:
        y = Projection(weights, None if bias is None else bias.detach(), None).product(operand, offs)
    read = None  # what A reads, where it is not rows
    groups, factors = None, Factors((), (), 1, 1.0)
    if low is not None:
        factors = low.factors
        groups = None if low.offs is offs else low.offs  # Dynamo takes no tensor twice
        if rows.dtype != torch.bfloat16 or low.dropout > 0.0:
            read = dropout(rows.to(torch.bfloat16), low.dropout)
    out: torch.Tensor = _Product.apply(  # type: ignore[no-untyped-call]
        rows, read, bias, y, *codes, offs, groups, (factors.per_expert, factors.scaling), zero_tail,
        *ops.packed(weights), *factors.a, *factors.b,
    )  # fmt: skip
    return out


def added_product(
    operand: BlockScaledTensor | torch.Tensor, weights: BlockScaledTensor, bias: torch.Tensor | None, offs: torch.Tensor,
    t: torch.Tensor, low: LowRank,
) -> torch.Tensor:  # fmt: skip
    """`adapted_product` of rows of which A makes t (M, `width_of` (r)), outside of autograd."""
    of = low.factors
    if inside.adds_inside(operand, weights, low):
        assert isinstance(operand, BlockScaledTensor)
        return inside.product(operand, weights, bias, offs, t, of.b[0], of.scaling)
    y = Projection(weights, bias, None).product(operand, offs)
    out: torch.Tensor = call("low_rank_up", t, list(of.b), low.offs, of.per_expert, of.scaling, y)
    return out


def activated_product(
    operand: BlockScaledTensor | torch.Tensor, weights: BlockScaledTensor, bias: torch.Tensor | None, offs: torch.Tensor,
    t: torch.Tensor, low: LowRank, activation: Activation,
    how: tuple[BlockScaledFormat | None, torch.Tensor | None],
) -> tuple[torch.Tensor, BlockScaledTensor | torch.Tensor]:  # fmt: skip
    """`activated` of what `added_product` gives; how: the format of rows, and NVFP4's global scale of them."""
    of, (format, _) = low.factors, how
    in_one_pass = format in (None, FP8_BLOCK) and activates_up(activation, of.b)
    if not in_one_pass or inside.adds_inside(operand, weights, low):
        return activated(added_product(operand, weights, bias, offs, t, low), activation, *how)
    y, a = Projection(weights, bias, None).product(operand, offs), activation
    name = "BF16" if format is None else format.name
    of_activation = (a.kind, a.gate_up, a.alpha, a.limit, a.up_offset, name)
    given = (list(of.b), low.offs, of.per_expert, of.scaling, y, *of_activation)
    hidden, codes, scale = call("low_rank_up_activated", t, *given)
    if format is None:
        return hidden, hidden
    return hidden, BlockScaledTensor(codes.view(format.data_dtype), scale, format)


_PACKED = 5  # arguments that are a weight


class _Product(torch.autograd.Function):
    """Adds to the product y, or to that of codes, what the adapters add, and has the gradients of both."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, read: torch.Tensor | None, bias: torch.Tensor | None, y: torch.Tensor | None,
        codes: torch.Tensor | None, codes_scale: torch.Tensor | None, offs: torch.Tensor, groups: torch.Tensor | None,
        how: tuple[int, float], zero_tail: bool, *others: Any,
    ) -> torch.Tensor:  # fmt: skip
        data, scale, global_scale, *ctx.names = others[:_PACKED]
        ctx.dtype, ctx.bias_dtype, ctx.is_apart = rows.dtype, None if bias is None else bias.dtype, read is not None
        ctx.how, ctx.zero_tail = how, zero_tail
        ctx.adds_inside = y is None
        if len(others) == _PACKED:
            assert y is not None
            ctx.save_for_backward(offs, data, scale, global_scale)
            return y.detach()  # a view could not be written to
        given, of = rows if read is None else read, _factors(others[_PACKED:], how)
        ends = offs if groups is None else groups
        t = call("low_rank_down", given, list(of.a), ends, of.per_expert, 1.0)
        ctx.save_for_backward(offs, data, scale, global_scale, groups, given, t, *of.a, *of.b)
        out: torch.Tensor
        if codes is not None:
            out = call("low_rank_product", codes, codes_scale, data, scale, bias, offs, t, of.b[0], of.scaling)
        else:
            out = call("low_rank_up", t, list(of.b), ends, of.per_expert, of.scaling, y)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        offs, data, scale, global_scale, *others = ctx.saved_tensors
        needs_rows, needs_read, needs_bias = ctx.needs_input_grad[:3]
        dy = dy.contiguous()
        drows = dread = dbias = dt = None
        of_factors: list[torch.Tensor | None] = []
        added: tuple[torch.Tensor | None, ...] = (None, None)  # by the launch that multiplies dy
        if others:
            groups, given, t, *factors = others
            groups = offs if groups is None else groups
            of = _factors(factors, ctx.how)
            needs = ctx.needs_input_grad[-len(factors) :]
            needs_a, needs_b = any(needs[: len(of.a)]), any(needs[len(of.a) :])
            if needs_a or (needs_read if ctx.is_apart else needs_rows):
                dt = call("low_rank_down", dy, [b.mT for b in of.b], groups, of.per_expert, of.scaling)
            if ctx.adds_inside and not ctx.is_apart:
                added = (dt, of.a[0].mT)
            of_factors = factor_gradients(dy, given, t, dt if needs_a else None, groups, of, needs_b)
        if needs_rows:
            drows = call("frozen_input_gradient", dy, offs, data, scale, global_scale, *ctx.names, *added)
        if dt is not None and added[0] is None and (needs_read if ctx.is_apart else needs_rows):
            to = None if ctx.is_apart else drows
            found = call("low_rank_up", dt, [a.mT for a in of.a], groups, of.per_expert, 1.0, to)
            drows, dread = (drows, found) if ctx.is_apart else (found, None)
        if ctx.zero_tail and drows is not None:
            call("zero_tail_", drows, offs)
        if needs_bias:
            # The sums over a group's rows, as a weight gradient of rows of ones: in a fixed order, and without a wait.
            ones = torch.ones((dy.shape[0], 16), dtype=dy.dtype, device=dy.device)
            sums = call("bf16_grouped_gemm_wgrad", dy, ones, offs, torch.float32)
            dbias = sums[:, :, 0].to(ctx.bias_dtype)
        drows = None if drows is None else drows.to(ctx.dtype)
        return drows, dread, dbias, *(None,) * (7 + _PACKED), *of_factors


def _factors(tensors: Sequence[torch.Tensor], how: tuple[int, float]) -> Factors:
    count = len(tensors) // 2
    return Factors(tuple(tensors[:count]), tuple(tensors[count:]), *how)


def _input_gradient_fake(dy: torch.Tensor, offs: Any, data: torch.Tensor, *others: Any) -> torch.Tensor:
    return dy.new_empty((dy.shape[0], data.shape[2] * FORMAT_BY_NAME[others[2]].codes_per_byte))


@ops.operator(
    "frozen_input_gradient",
    "(Tensor dy, Tensor offs, Tensor w, Tensor w_scale, Tensor? w_global_scale, str w_format, str w_layout, "
    "Tensor? t=None, Tensor? factor=None) -> Tensor",
    _input_gradient_fake,
)
def _input_gradient(
    dy: torch.Tensor, offs: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None,
    format: str, layout: str, t: torch.Tensor | None = None, factor: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return input_gradient(dy, ops.unpacked(w, scale, global_scale, format, layout), offs, t, factor)


def input_gradient(
    dy: torch.Tensor, weights: BlockScaledTensor, offs: torch.Tensor, t: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """dy @ weights[g] for the rows of each group; (M, K) bfloat16. Rows from offs[-1] on hold anything.

    dy: (M, N) bfloat16, contiguous. weights: (G, N, K) codes. t: (M, `width_of` (r)) and factor: (G, K, r), whose
    t @ factor[g].T is added before rounding; for weights that `inside.adds_inside` takes. Memory beyond the result: a
    copy of FP8_BLOCK codes; of MXFP4 and NVFP4 none on Hopper; else what `dequantized_input_gradient` takes.
    """
    if weights.format == FP8_BLOCK and weights.scale_layout == "plain":
        rows, turned = quantize_lifted(dy), transposed(weights.data, lowered_by_lift(weights.scale))
        if t is None or factor is None:
            return grouped_gemm(rows, turned, offs)
        return inside.product(rows, turned, None, offs, t, factor, 1.0)
    if reads_codes(dy, weights):
        return fp4_input_gradient(dy, weights, offs)
    return dequantized_input_gradient(dy, weights, offs)


def dequantized_input_gradient(dy: torch.Tensor, weights: BlockScaledTensor, offs: torch.Tensor) -> torch.Tensor:
    """`input_gradient` by a bfloat16 product with dequantized weights; an NVFP4 value is rounded.

    Memory beyond the result: at most `WORKSPACE_BYTES` of dequantized weights, or one expert where that is more, and
    where the weights do not fit in them also rows of dy and of the result once more.
    """
    groups, n, k = weights.logical_shape
    run = min(groups, max(1, WORKSPACE_BYTES // (n * k * _bytes_of_a_value(weights))))
    if run == groups:
        return _product_of(dy, weights, offs)
    out = torch.empty((dy.shape[0], k), dtype=dy.dtype, device=dy.device)
    for first in range(0, groups, run):
        # Groups begin at row 0, and where the run's do the device alone knows.
        some = slice(first, first + run)
        start = offs[first - 1] if first else offs.new_zeros(())
        found = _product_of(groups_to_front(dy, offs, some), weights[some], offs[some] - start)
        groups_from_front(found, out, offs, some)
    return out


def _product_of(dy: torch.Tensor, weights: BlockScaledTensor, offs: torch.Tensor) -> torch.Tensor:
    """dy @ the dequantized weights of each group, rounded to bfloat16."""
    if _has_kernel(weights):
        from padless.nn.triton.dequantize import dequantized_weights

        with on_device_of(dy):
            values = dequantized_weights(weights)
    else:
        values = dequantize(weights, torch.bfloat16)
    found: torch.Tensor = call("bf16_grouped_gemm", dy, values, offs, True, False)
    return found


def _has_kernel(weights: BlockScaledTensor) -> bool:
    return runs_triton(weights.data) and weights.format != FP8_BLOCK


def _bytes_of_a_value(weights: BlockScaledTensor) -> int:
    """Of a value dequantized: bfloat16, and in torch float32 codes, scales and products at the same time."""
    return 2 if _has_kernel(weights) else 24
