"""Differentiates SwiGLU and quantizes all that comes of it, in one read, for the products behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from padless.arguments import check_readable, is_one_of, shown
from padless.epilogue import INTERLEAVE
from padless.formats import FP8_BLOCK, BlockScaledTensor, ceil_div
from padless.layouts import GroupedColumns, empty_mn_major, to_mn_major
from padless.quantization import columns_rules, swiglu_rules
from padless.quantization import rules as quantize_rules
from padless.quantization.quantize import has_triton
from padless.quantization.rows_columns import (
    check_column_block,
    check_values,
    checked_offs,
    chosen_alignment,
    fake_columns,
)
from padless.runtime.choices import SwigluGateUp
from padless.runtime.devices import hopper_driver, on_device_of
from padless.runtime.operators import register_operator

GATE_UP = ("concatenated", "interleaved")


@dataclass(frozen=True, eq=False)
class SwigluGradients:
    """The result of `swiglu_backward_quantize`.

    dz_rows: FP8_BLOCK (M, 2 I), scales MN-major: the operand of the input's gradient.
    dz_columns: GroupedColumns of 2 I features, scales (1, 128): the gradient's operand of the first weight's gradient.
    hidden_columns: GroupedColumns of I features, H: the input's operand of the second weight's gradient.
    dprob: (M,) float32, None without prob.
    """

    dz_rows: BlockScaledTensor
    dz_columns: GroupedColumns
    hidden_columns: GroupedColumns
    dprob: torch.Tensor | None


def swiglu_backward_quantize(
    dh: torch.Tensor,
    z: torch.Tensor,
    offs: torch.Tensor,
    prob: torch.Tensor | None = None,
    *,
    gate_up: SwigluGateUp,
    hidden_block: tuple[int, int] = (1, 128),
    alignment: int | None = None,
) -> SwigluGradients:
    """Gradients of H = prob * silu(gate) * up for the gradient dh of H, quantized as the products behind need them.

    dh: (M, I) bfloat16, float16 or float32, any strides.
    z: (M, 2 I), the same dtypes: gate and up before the activation.
    offs: (G,) int32 or int64 cumulative END rows of the groups, on z's device, never read by the host.
    prob: (M,) float32 that multiplied the SwiGLU output, or None.
    gate_up: where gate and up lie in z, without a default, since no error could tell the wrong one: "concatenated",
        gate in the first I columns; or "interleaved", 32 columns of gate, 32 of up, 32 of gate, ..: then I is a
        multiple of 32.
    hidden_block: (features, tokens) that share a scale of H's columns, (1, 128) or (128, 128).
    alignment: as for ``quantize_rows_columns``.

    Returns SwigluGradients: dZ as rows and as columns, H recomputed as columns, dprob. The float32 arithmetic, rounding
        by rounding, is in `padless.quantization.swiglu_rules`; what is quantized is never rounded to 16 bits first.
        Rows past the last group: their dZ rows are as computed, they are in no column, and their dprob is 0.

    On a GPU one kernel that reads 6 I bytes and writes 5 I a row of 16-bit values, and one or two small ones; no
    synchronisation; the same bits each time. Raises ValueError for what is not allowed above.
    """
    check_readable(dh=dh, z=z, offs=offs, prob=prob)
    check_values("dh", dh, "(M, I)")
    check_values("z", z, "(M, 2 I)")
    num_rows, hidden = dh.shape
    if tuple(z.shape) != (num_rows, 2 * hidden) or z.device != dh.device:
        raise ValueError(
            f"z must be (M, 2 I) = {(num_rows, 2 * hidden)} on {dh.device}, got shape {tuple(z.shape)} on {z.device}"
        )
    offs = checked_offs(offs, z, "z")
    if prob is not None and (
        not isinstance(prob, torch.Tensor)
        or prob.dtype != torch.float32
        or tuple(prob.shape) != (num_rows,)
        or prob.device != z.device
    ):
        got = f"{shown(prob)} on {prob.device}" if isinstance(prob, torch.Tensor) else shown(prob)
        raise ValueError(f"prob must be ({num_rows},) float32 on {z.device} or None, got {got}")
    if not is_one_of(gate_up, GATE_UP):
        raise ValueError(f"gate_up must be one of {GATE_UP}, got {shown(gate_up)}")
    if gate_up == "interleaved" and hidden % INTERLEAVE != 0:
        raise ValueError(f"dh must have a multiple of {INTERLEAVE} columns for gate_up 'interleaved', got {hidden}")
    check_column_block("hidden_block", hidden_block)
    alignment = chosen_alignment(alignment, num_rows, offs.shape[0])
    row_codes, row_scale, dz, dz_scale, h, h_scale, starts, block_starts, dprob = _operator(
        dh, z, offs, prob, gate_up, list(hidden_block), alignment
    )

    def columns(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> GroupedColumns:
        data = codes.view(torch.float8_e4m3fn)
        return GroupedColumns(data, scale, offs, starts, block_starts, block, alignment)

    return SwigluGradients(
        BlockScaledTensor(row_codes.view(torch.float8_e4m3fn), row_scale, FP8_BLOCK),
        columns(dz, dz_scale, (1, 128)),
        columns(h, h_scale, (hidden_block[0], hidden_block[1])),
        None if prob is None else dprob,
    )


# --- the operator ----------------------------------------------------------------------------------------

_Tensors = tuple[torch.Tensor, ...]


def _run(
    dh: torch.Tensor,
    z: torch.Tensor,
    offs: torch.Tensor,
    prob: torch.Tensor | None,
    gate_up: str,
    hidden_block: list[int],
    alignment: int,
) -> _Tensors:
    block = (hidden_block[0], hidden_block[1])
    on_gpu = z.is_cuda and has_triton()
    with on_device_of(z):
        if on_gpu:
            from padless.quantization.triton import swiglu_backward

            driver = hopper_driver(z)
            return swiglu_backward.swiglu_backward(dh, z, offs, prob, gate_up, block, alignment, driver)
        return swiglu_backward_torch(dh, z, offs, prob, gate_up, block, alignment)


def swiglu_backward_torch(
    dh: torch.Tensor,
    z: torch.Tensor,
    offs: torch.Tensor,
    prob: torch.Tensor | None,
    gate_up: str,
    hidden_block: tuple[int, int],
    alignment: int,
) -> _Tensors:
    """The Triton kernel's outputs, in plain torch."""
    found = swiglu_rules.backward(dh, *swiglu_rules.gate_and_up(z, gate_up), prob)
    dz = swiglu_rules.merge_gate_and_up(found.gate, found.up, gate_up)
    row_codes, row_scale = quantize_rules.fp8_block(dz, "activation")
    dz_codes, dz_scale, starts, block_starts = columns_rules.columns(dz, offs, (1, 128), alignment)
    codes, scale, _, _ = columns_rules.columns(found.hidden, offs, hidden_block, alignment)
    dprob = dz.new_zeros(0)
    if prob is not None:
        in_a_group = torch.arange(len(dh), device=dh.device) < offs.max()
        dprob = torch.where(in_a_group, swiglu_rules.dprob(found.products), 0.0)
    return row_codes, to_mn_major(row_scale), dz_codes, dz_scale, codes, scale, starts, block_starts, dprob


def _fake(
    dh: torch.Tensor,
    z: torch.Tensor,
    offs: torch.Tensor,
    prob: torch.Tensor | None,
    gate_up: str,
    hidden_block: list[int],
    alignment: int,
) -> _Tensors:
    num_rows, features = z.shape
    block = (hidden_block[0], hidden_block[1])
    dz_codes, dz_scale, starts, block_starts = fake_columns(z, offs, features, (1, 128), alignment)
    codes, scale, _, _ = fake_columns(z, offs, dh.shape[1], block, alignment)
    return (
        z.new_empty((num_rows, features), dtype=torch.uint8),
        empty_mn_major(num_rows, ceil_div(features, 128), z.device),
        *(dz_codes, dz_scale, codes, scale, starts, block_starts),
        z.new_empty(0 if prob is None else num_rows, dtype=torch.float32),
    )


_operator = register_operator(
    "swiglu_backward_quantize(Tensor dh, Tensor z, Tensor offs, Tensor? prob, str gate_up, int[] hidden_block, "
    "int alignment) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
