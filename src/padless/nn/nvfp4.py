"""NVFP4 operands of training.

The recipe is NVIDIA's (arXiv 2509.25149): weights have a scale per 16 x 16, so that the weight of dgrad is that of the
forward product; rows and columns one per 16, and a global scale a tensor; gradients are rounded by chance, without bias;
and what is summed along tokens is first transformed, 16 tokens at a time, by a Hadamard matrix with random signs.

The seed of the chances is the sum of the tensor's bits: another one in every step, the same for the same values, with
nothing to keep or to wait for.
"""

from __future__ import annotations

import torch

from padless import layouts
from padless.formats import NVFP4, BlockScaledTensor, blocked_size, ceil_div
from padless.moe.ops import operator
from padless.ops.grouped_gemm_wgrad_nvfp4 import ALIGNMENT
from padless.quantization import rules
from padless.quantization.nvfp4_random import quantize_nvfp4_stochastic, random_hadamard
from padless.quantization.quantize import quantize

BLOCK = 16
SIGNS = 0b0110_1010_0011_1001  # of the transform; any will do
_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def padded_offs(offs: torch.Tensor) -> torch.Tensor:
    """End columns (G,) int32 of the groups of `columns`."""
    return _padded_sizes(offs).cumsum(0, dtype=torch.int32)


def _padded_sizes(offs: torch.Tensor) -> torch.Tensor:
    return (offs.diff(prepend=offs.new_zeros(1)) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _quantized(x: torch.Tensor, by_chance: bool) -> BlockScaledTensor:
    """x (M, N) bfloat16 or float32, plain scales along its rows."""
    if not by_chance:
        return quantize(x, NVFP4)
    bits = x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)
    return quantize_nvfp4_stochastic(x, seed=bits.sum(dtype=torch.int64))


def _parts(t: BlockScaledTensor, scale: torch.Tensor) -> _Three:
    assert t.global_scale is not None
    return t.data.view(torch.uint8), scale.view(torch.uint8), t.global_scale


def _rows_fake(x: torch.Tensor, offs: torch.Tensor, by_chance: bool) -> _Three:
    m, n = x.shape
    data, scale = (x.new_empty((m, width), dtype=torch.uint8) for width in (n // 2, ceil_div(n, BLOCK)))
    return data, scale, x.new_empty((), dtype=torch.float32)


@operator("nvfp4_rows", "(Tensor x, Tensor offs, bool by_chance) -> (Tensor, Tensor, Tensor)", _rows_fake)
def rows(x: torch.Tensor, offs: torch.Tensor, by_chance: bool) -> _Three:
    """x (M, N) along its rows, those of no group as zeros: codes (M, N / 2), scales (M, N / 16), global scale."""
    in_a_group = torch.arange(x.shape[0], device=x.device) < offs[-1]
    t = _quantized(torch.where(in_a_group[:, None], x, 0.0), by_chance)
    return _parts(t, t.scale)


def _columns_fake(x: torch.Tensor, offs: torch.Tensor, by_chance: bool) -> _Three:
    features, tokens = x.shape[1], _padded_rows(x, offs)
    data = x.new_empty((features, tokens // 2), dtype=torch.uint8)
    scale = x.new_empty((blocked_size(features, tokens // BLOCK),), dtype=torch.uint8)
    return data, scale, x.new_empty((), dtype=torch.float32)


def _padded_rows(x: torch.Tensor, offs: torch.Tensor) -> int:
    return ceil_div(x.shape[0] + (ALIGNMENT - 1) * offs.shape[0], ALIGNMENT) * ALIGNMENT


@operator("nvfp4_columns", "(Tensor x, Tensor offs, bool by_chance) -> (Tensor, Tensor, Tensor)", _columns_fake)
def columns(x: torch.Tensor, offs: torch.Tensor, by_chance: bool) -> _Three:
    """x (M, N) transposed, transformed, with scales along the tokens: codes (N, T / 2), scales in tiles, global scale.

    T = M + 63 G rounded up to 64. Groups end at `padded_offs`; what they are longer by, and what is behind them, are
    zeros before the transform. The product of two of these along the tokens of a group is that of their origins.
    """
    m, total = x.shape[0], _padded_rows(x, offs)
    group = layouts.group_of_rows(offs, m)
    sizes = _padded_sizes(offs)
    moved = torch.cat([sizes.cumsum(0) - sizes - offs + offs.diff(prepend=offs.new_zeros(1)), offs.new_zeros(1)])
    to = torch.arange(m, device=x.device) + moved[group]
    to = torch.where(group < offs.shape[0], to, total).clamp(0, total)  # rows of no group go to a row behind all
    padded = x.new_zeros((total + 1, x.shape[1])).index_copy_(0, to, x)[:total]
    t = _quantized(random_hadamard(padded.T, SIGNS), by_chance)
    return _parts(t, layouts.to_blocked(t.scale))


def _weight_fake(w: torch.Tensor, transposed: bool) -> _Five:
    groups, n, k = w.shape
    rows_of_transposed = k if transposed else 0
    shapes = ((n, k // 2), (n, k // BLOCK), (rows_of_transposed, n // 2), (rows_of_transposed, n // BLOCK))
    made = tuple(w.new_empty((groups, *shape), dtype=torch.uint8) for shape in shapes)
    return *made, w.new_empty((groups,), dtype=torch.float32)  # type: ignore[return-value]


@operator("nvfp4_weight", "(Tensor w, bool transposed) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _weight_fake)
def weight(w: torch.Tensor, transposed: bool) -> _Five:
    """w (G, N, K) with a scale per 16 x 16 and a global one a group: codes, scales, both of (G, K, N), global scales.

    Codes and scales are bytes, a scale to 16 of a row. N, K multiples of 16. Without ``transposed`` those have no rows.
    """
    values = w.to(torch.float32)
    largest = rules.finite_amax(values, (1, 2))
    decode = rules.nvfp4_global_scale(largest)
    factors = rules.nvfp4_factors("te", decode, largest)[:, None, None]
    amax = rules.block_amax(values, BLOCK, BLOCK)
    scale, multiplier = rules.nvfp4_block_te(amax, factors)
    scale = scale.masked_fill(~amax.isfinite(), rules.FP8_NAN)  # Inf has no code
    codes = rules.to_e2m1(values * rules.expand_blocks(multiplier, BLOCK, BLOCK, tuple(w.shape)))
    both = []
    for code, of_blocks in ((codes, scale), (codes.mT, scale.mT)):
        kept = slice(None) if transposed or code is codes else slice(0)
        both.append(layouts.pack_fp4(code[:, kept].contiguous()).view(torch.uint8))
        both.append(of_blocks.repeat_interleave(BLOCK, dim=1)[:, kept].contiguous())
    return *both, decode  # type: ignore[return-value]
