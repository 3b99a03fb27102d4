"""NVFP4 operands of training as the bfloat16 values that their codes stand for: products of these are emulated NVFP4.

The recipe is NVIDIA's (arXiv 2509.25149): weights have a scale per 16 x 16, so that the weight of dgrad is that of the
forward product; rows and columns one per 16, and a global scale a tensor; gradients are rounded by chance, without bias;
and what is summed along tokens is first transformed, 16 tokens at a time, by a Hadamard matrix with random signs.
Rounding of a decoded value to bfloat16 is 2^-9 of it at most, a hundredth of a code's own.

The seed of the chances is the sum of the tensor's bits: another one in every step, the same for the same values, with
nothing to keep or to wait for.
"""

from __future__ import annotations

import torch

from padless.formats import NVFP4, ceil_div
from padless.layouts import group_of_rows
from padless.moe.ops import operator
from padless.quantization import rules
from padless.quantization.nvfp4_random import quantize_nvfp4_stochastic, random_hadamard
from padless.quantization.quantize import dequantize, quantize

BLOCK = 16
SIGNS = 0b0110_1010_0011_1001  # of the transform; any will do


def padded_offs(offs: torch.Tensor) -> torch.Tensor:
    """End rows (G,) int32 of the groups of `columns`."""
    return _padded_sizes(offs).cumsum(0, dtype=torch.int32)


def _padded_sizes(offs: torch.Tensor) -> torch.Tensor:
    return (offs.diff(prepend=offs.new_zeros(1)) + BLOCK - 1) // BLOCK * BLOCK


def _decoded(x: torch.Tensor, by_chance: bool) -> torch.Tensor:
    """x (M, N) bfloat16 or float32 as NVFP4 keeps it, in bfloat16."""
    if not by_chance:
        return dequantize(quantize(x, NVFP4), torch.bfloat16)
    bits = x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)
    return dequantize(quantize_nvfp4_stochastic(x, seed=bits.sum(dtype=torch.int64)), torch.bfloat16)


def _rows_fake(x: torch.Tensor, offs: torch.Tensor, by_chance: bool) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.bfloat16)


@operator("nvfp4_rows", "(Tensor x, Tensor offs, bool by_chance) -> Tensor", _rows_fake)
def rows(x: torch.Tensor, offs: torch.Tensor, by_chance: bool) -> torch.Tensor:
    """x (M, N) with scales along its rows; (M, N) bfloat16. Rows of no group are zeros."""
    if x.numel() == 0:
        return x.to(torch.bfloat16, copy=True)
    in_a_group = torch.arange(x.shape[0], device=x.device) < offs[-1]
    return _decoded(torch.where(in_a_group[:, None], x, 0.0), by_chance)


def _columns_fake(x: torch.Tensor, offs: torch.Tensor, by_chance: bool) -> torch.Tensor:
    return x.new_empty((_padded_rows(x, offs), x.shape[1]), dtype=torch.bfloat16)


def _padded_rows(x: torch.Tensor, offs: torch.Tensor) -> int:
    return ceil_div(x.shape[0] + (BLOCK - 1) * offs.shape[0], BLOCK) * BLOCK


@operator("nvfp4_columns", "(Tensor x, Tensor offs, bool by_chance) -> Tensor", _columns_fake)
def columns(x: torch.Tensor, offs: torch.Tensor, by_chance: bool) -> torch.Tensor:
    """x (M, N) transformed and with scales along the tokens; (T', N) bfloat16, T' = M + 15 G rounded up to 16.

    Groups end at `padded_offs`; what they are longer by, and what is behind them, are zeros before the transform. The
    product of two of these along the tokens of a group is that of their origins.
    """
    m, total = x.shape[0], _padded_rows(x, offs)
    group = group_of_rows(offs, m)
    sizes = _padded_sizes(offs)
    moved = torch.cat([sizes.cumsum(0) - sizes - offs + offs.diff(prepend=offs.new_zeros(1)), offs.new_zeros(1)])
    to = torch.arange(m, device=x.device) + moved[group]
    to = torch.where(group < offs.shape[0], to, total).clamp(0, total)  # rows of no group go to a row behind all
    padded = x.new_zeros((total + 1, x.shape[1])).index_copy_(0, to, x)[:total]
    return _decoded(random_hadamard(padded.T, SIGNS), by_chance).T.contiguous()


@operator("nvfp4_weight", "(Tensor w) -> Tensor", lambda w: w.new_empty(w.shape, dtype=torch.bfloat16))
def weight(w: torch.Tensor) -> torch.Tensor:
    """w (G, N, K) with a scale per 16 x 16 and a global one a group; (G, N, K) bfloat16. N, K multiples of 16."""
    values = w.to(torch.float32)
    largest = rules.finite_amax(values, (1, 2))
    decode = rules.nvfp4_global_scale(largest)
    factors = rules.nvfp4_factors("te", decode, largest)[:, None, None]
    scale, multiplier = rules.nvfp4_block_te(rules.block_amax(values, BLOCK, BLOCK), factors)
    shape = tuple(w.shape)
    codes = rules.to_e2m1(values * rules.expand_blocks(multiplier, BLOCK, BLOCK, shape))
    scale = scale.view(torch.float8_e4m3fn).to(torch.float32) * decode[:, None, None]
    return (rules.from_e2m1(codes) * rules.expand_blocks(scale, BLOCK, BLOCK, shape)).to(torch.bfloat16)
