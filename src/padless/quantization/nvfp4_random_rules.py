"""Random numbers, stochastic rounding to e2m1 and the 16-wide Hadamard transform, in plain torch: the definitions.

Random numbers are a function of a seed and of the place of the element, not of an order: Philox4x32-10 (Salmon and
others, "Parallel random numbers: as easy as 1, 2, 3", 2011) with the seed as key and (column // 4, row, 0, 0) as
counter makes the four words of columns 4 i .. 4 i + 3 of a row. A word w gives v = (2 (w >> 9) + 1) * 2^-24, one of
2^23 numbers between 0 and 1.

Stochastic rounding of y, with magnitude m = min(|y|, 6) between the codes' values a and b = a + step (0.5 below 2, 1
below 4, then 2): b where v < (m - a) / step, else a. All of it is exact in float32, so the probability of b is that
quotient to within 2^-24, and the expectation of the result is within 2^-24 of a step of y, unless y is above 6.

The transform of 16 neighbours is H s / 4, s the values with some signs changed: four rounds of sums and differences, of
elements 1, 2, 4 and 8 apart, each rounded to float32, and an exact quarter. H / 4 is orthogonal, so two operands that
are both transformed along the summed dimension, with the same signs, have the product that they had.
"""

from __future__ import annotations

import torch

from padless.formats import NVFP4
from padless.quantization import rules as quantize_rules

GROUP = 16  # elements that are transformed together
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(seed: torch.Tensor, counter: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Four words (int64, 0 .. 2^32 - 1) for four counters of such words, all of one shape; seed: () int64."""

    def product(multiplier: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(high, low) words, in halves so that nothing overflows."""
        upper, lower = multiplier * (x >> 16), multiplier * (x & 0xFFFF)
        return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & _WORD

    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        high0, low0 = product(_MULTIPLIERS[0], c0)
        high1, low1 = product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """v of the text above, (rows, columns) float32."""
    quads = -(-columns // 4)
    row, quad = torch.meshgrid(
        torch.arange(rows, device=seed.device), torch.arange(quads, device=seed.device), indexing="ij"
    )
    zero = torch.zeros_like(row)
    words = torch.stack(philox(seed, (quad, row, zero, zero)), dim=-1).flatten(1)[:, :columns]
    return (2 * (words >> 9) + 1).to(torch.float32) * 2.0**-24


def to_e2m1(y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """float32 to e2m1 codes (uint8, 0..15), up in magnitude where v is below the part that is cut off; NaN to 0."""
    m = y.abs().clamp(max=6.0)
    steps = torch.where(m < 2.0, m * 2.0, torch.where(m < 4.0, m, m * 0.5))
    below = steps.floor()
    first = torch.where(m < 2.0, 0.0, torch.where(m < 4.0, 2.0, 4.0))
    code = below + first + (v < steps - below).to(torch.float32)
    code = code.nan_to_num(0.0).to(torch.uint8) | (y.signbit().to(torch.uint8) << 3)
    return code.masked_fill(y.isnan(), 0)


def nvfp4_stochastic(x: torch.Tensor, seed: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8, one per element; scale bytes uint8) of x (M, K): NVFP4's rule "te" with stochastic rounding.

    factors: (2,), `quantize_rules.nvfp4_factors`.
    """
    values = x.to(torch.float32)
    amax = quantize_rules.block_amax(values, 1, NVFP4.block_k)
    scale, multiplier = quantize_rules.nvfp4_block_te(amax, factors)
    broken = ~amax.isfinite()
    scale = scale.masked_fill(broken, quantize_rules.FP8_NAN)
    multiplier = multiplier.masked_fill(broken, float("nan"))
    scaled = values * quantize_rules.expand_blocks(multiplier, 1, NVFP4.block_k, tuple(x.shape))
    return to_e2m1(scaled, uniform(seed, *x.shape)), scale


def hadamard(x: torch.Tensor, signs: int) -> torch.Tensor:
    """(M, K) float32: every 16 neighbours of a row transformed. Bit i of signs: element i of the 16 changes its sign."""
    flipped = torch.tensor([signs >> i & 1 for i in range(GROUP)], dtype=torch.bool, device=x.device)
    values = x.to(torch.float32).unflatten(1, (-1, GROUP))
    values = torch.where(flipped, -values, values)
    for apart in (1, 2, 4, 8):
        pairs = values.unflatten(2, (-1, 2, apart))
        a, b = pairs[:, :, :, 0], pairs[:, :, :, 1]
        values = torch.stack([a + b, a - b], dim=3).flatten(2)
    return (values * 0.25).flatten(1)
