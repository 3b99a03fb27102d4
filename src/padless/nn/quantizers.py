"""Quantizers as layers call them: nothing that a layer made itself is checked, and eager calls go around the dispatcher.

What they compute is `padless.quantize_rows_columns`', `padless.swiglu_backward_quantize`'s and `padless.quantize`'s.
"""

from __future__ import annotations

import torch

from padless.formats import FP8_BLOCK, MXFP8, NVFP4, BlockScaledFormat, BlockScaledTensor
from padless.layouts import GroupedColumns
from padless.nn import nvfp4 as nvfp4  # registers operators that are called here
from padless.nn.calls import call, is_traced
from padless.quantization import mx_rows_columns, rows_columns, swiglu_backward, weight_both
from padless.quantization.rows_columns import chosen_alignment, quantize_rows_columns
from padless.quantization.swiglu_backward import SwigluGradients, swiglu_backward_quantize
from padless.quantization.weight_both import quantize_weight_both
from padless.runtime.choices import ScaleLayout, SwigluGateUp

_E4M3 = torch.float8_e4m3fn


def quantized(
    codes: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    *,
    format: BlockScaledFormat = FP8_BLOCK,
    scale_layout: ScaleLayout = "plain",
) -> BlockScaledTensor:
    """Codes and scales that fit them, either perhaps as bytes: not checked, but where a graph is traced."""
    data = codes if codes.dtype == format.data_dtype else codes.view(format.data_dtype)
    scale = scale if scale.dtype == format.scale_dtype else scale.view(format.scale_dtype)
    if torch.compiler.is_compiling():
        return BlockScaledTensor(data, scale, format, global_scale, scale_layout)
    made = object.__new__(BlockScaledTensor)
    made.__dict__.update(
        data=data,
        scale=scale,
        format=format,
        global_scale=global_scale,
        scale_layout=scale_layout,
        offs=None,
        row_groups=None,
    )
    return made


def quantize_rows(x: torch.Tensor, format: BlockScaledFormat = FP8_BLOCK) -> BlockScaledTensor:
    """x (M, N) along its rows, in FP8_BLOCK or MXFP8."""
    return quantized(*call("quantize_rows", x, format.name), format=format)


def rows_and_columns(
    x: torch.Tensor,
    offs: torch.Tensor,
    block: tuple[int, int],
    rows: bool,
    tokens: torch.Tensor | None = None,
    alignment: int | None = None,
) -> tuple[BlockScaledTensor | None, GroupedColumns]:
    """x (M, N), or x[tokens], along its rows, None without ``rows``, and along the tokens of every group."""
    if is_traced(x):
        return quantize_rows_columns(x, offs, column_block=block, alignment=alignment, rows=rows, tokens=tokens)
    alignment = chosen_alignment(alignment, rows_columns.num_rows(x, tokens), offs.shape[0])
    codes, scale, of_columns, column_scale, starts, block_starts = rows_columns._run(
        x, offs, list(block), alignment, rows, tokens
    )
    columns = GroupedColumns(of_columns.view(_E4M3), column_scale, offs, starts, block_starts, block, alignment)
    return (quantized(codes, scale) if rows else None), columns


def mx_rows_and_columns(
    x: torch.Tensor, offs: torch.Tensor, rows: bool
) -> tuple[BlockScaledTensor | None, mx_rows_columns.Columns]:
    """x (M, N) in MXFP8 along its rows, None without ``rows``, and along the tokens of every group."""
    if is_traced(x):
        return mx_rows_columns.quantize_mx_rows_columns(x, offs, rows=rows)
    row_codes, row_scale, codes, scale = mx_rows_columns._run(x, offs, rows, "plain")
    columns = codes.view(_E4M3), scale.view(MXFP8.scale_dtype)
    return (quantized(row_codes, row_scale, format=MXFP8) if rows else None), columns


def activation_gradients(
    dh: torch.Tensor,
    z: torch.Tensor,
    offs: torch.Tensor,
    prob: torch.Tensor,
    gate_up: SwigluGateUp,
    block: tuple[int, int],
) -> SwigluGradients:
    """SwiGLU's gradients for dh (M, I) and z (M, 2 I), and H, all quantized."""
    if is_traced(dh):
        return swiglu_backward_quantize(dh, z, offs, prob, gate_up=gate_up, hidden_block=block)
    alignment = chosen_alignment(None, z.shape[0], offs.shape[0])
    codes, scale, dz, dz_scale, h, h_scale, starts, block_starts, dprob = swiglu_backward._run(
        dh, z, offs, prob, gate_up, list(block), alignment
    )
    return SwigluGradients(
        quantized(codes, scale),
        GroupedColumns(dz.view(_E4M3), dz_scale, offs, starts, block_starts, (1, 128), alignment),
        GroupedColumns(h.view(_E4M3), h_scale, offs, starts, block_starts, block, alignment),
        dprob,
    )


def mx_weight(weight: torch.Tensor) -> BlockScaledTensor:
    """A weight (G, N, K) in MXFP8, with a scale per 32 of K. Raises ValueError."""
    if weight.shape[1] % 32 or weight.shape[2] % 32:
        raise ValueError(f"a weight is {tuple(weight.shape)}; with MXFP8 its last two sizes must be multiples of 32")
    rows = quantize_rows(weight.reshape(-1, weight.shape[2]), MXFP8)
    shape = tuple(weight.shape)
    return quantized(rows.data.view(shape), rows.scale.view(*shape[:2], -1), format=MXFP8)


def nvfp4_rows(x: torch.Tensor, offs: torch.Tensor, by_chance: bool) -> BlockScaledTensor:
    """x (M, N) in NVFP4 along its rows; rows of no group are zeros."""
    return quantized(*call("nvfp4_rows", x, offs, by_chance), format=NVFP4)


def nvfp4_columns(x: torch.Tensor, offs: torch.Tensor, by_chance: bool) -> BlockScaledTensor:
    """x (M, N) transposed, (N, T) in NVFP4 along the tokens of every group, which is Hadamard-transformed."""
    return joined_nvfp4_columns(*call("nvfp4_columns", x, offs, by_chance))


def joined_nvfp4_columns(*parts: torch.Tensor) -> BlockScaledTensor:
    """Codes, scales in tiles and global scale as one."""
    return quantized(*parts, format=NVFP4, scale_layout="blocked")


def nvfp4_weight(weight: torch.Tensor, transposed: bool) -> tuple[BlockScaledTensor, ...]:
    """A weight (G, N, K) in NVFP4 with a scale per 16 x 16; with ``transposed`` also (G, K, N) of the same codes."""
    codes, scale, of_columns, column_scale, decode = call("nvfp4_weight", weight.contiguous(), transposed)
    made = quantized(codes, scale, decode, format=NVFP4)
    if not transposed:
        return (made,)
    # A copy: Dynamo traces no function under autograd that is given a tensor twice.
    return made, quantized(of_columns, column_scale, decode.clone(), format=NVFP4)


def weight_and_transpose(weight: torch.Tensor) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """A weight (G, N, K) and its transpose (G, K, N), whose codes and scales are the first's, transposed."""
    if is_traced(weight):
        return quantize_weight_both(weight)
    codes, scale, transposed, transposed_scale = weight_both._run(weight)
    return quantized(codes, scale), quantized(transposed, transposed_scale)
