"""SwiGLU's backward in float32, every rounding stated, in plain torch: what the Triton kernel must equal in every bit.

The forward is `padless.epilogue`'s: h0 = silu(gate) * up, H = prob * h0. With dH the gradient of H, and fl() marking
the one rounding of each operation (to nearest even, subnormals kept; fma rounds once):

    y     = max(gate, -87.25),  x = min(y, 87)                        max keeps NaN; exp(-x) within 2^-22 of its value:
    n     = fl(fma(x, -log2(e), 1.5 * 2^23) - 1.5 * 2^23)             an integer, to nearest
    r     = fma(n, ln2_low, fma(n, ln2, x))                           |r| < 0.3466
    e     = (1 - r + r^2 (c2 - c3 r + c4 r^2 - c5 r^3)) * 2^n         Horner's rule from c5 on, five fma
    s     = fl(1 / fl(1 + e))
    silu  = fl(y * s)
    h0    = fl(silu * up)           H      = fl(h0 * prob)
    dh0   = fl(dH * prob)           d_up   = fl(dh0 * silu)
    slope = fma(silu, fl(1 - s), s) d_gate = fl(fl(dh0 * up) * slope)
    dprob = sum over I of fl(h0 * dH): in blocks of 128 columns (0 where there are none) neighbours are added in pairs,
            and the sums in pairs again, up to one; the blocks are then added one after the other, starting from 0

Without prob its multiplications are left out. The exponential is a polynomial so that a GPU and this file agree: the
function unit's approximation has no bits of its own that torch could state. The forward pass of `padless.moe` and
`padless.nn` has the same s. Below -87.25, where s would come near float32's subnormals, a gate counts as -87.25: silu is
-1e-36 there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from padless.epilogue import INTERLEAVE

# All are float32 numbers. c2 .. c5: relative error of the polynomial below 2^-23.1, the least with 1 and r given.
LOG2E = float.fromhex("0x1.715476p+0")
LN2 = float.fromhex("0x1.62e430p-1")
LN2_LOW = float.fromhex("-0x1.05c610p-29")
C2, C3, C4, C5 = (float.fromhex(c) for c in ("0x1.fffdfcp-2", "0x1.5557b0p-3", "0x1.572a64p-5", "0x1.106250p-7"))
ROUNDING = 12582912.0  # 1.5 * 2^23: float32 steps are 1 there
SMALLEST, LARGEST = -87.25, 87.0
BLOCK = 128


class Gradients(NamedTuple):
    """gate, up: of the two projections; hidden: H; all (M, I) float32. products: (M, I), what dprob is the sum of."""

    gate: torch.Tensor
    up: torch.Tensor
    hidden: torch.Tensor
    products: torch.Tensor


def gate_and_up(z: torch.Tensor, gate_up: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up), (M, I) each, of z (M, 2 I)."""
    if gate_up == "concatenated":
        columns = z.shape[1] // 2
        return z[:, :columns], z[:, columns:]
    pairs = z.unflatten(1, (-1, 2, INTERLEAVE))
    return pairs[:, :, 0].flatten(1), pairs[:, :, 1].flatten(1)


def merge_gate_and_up(gate: torch.Tensor, up: torch.Tensor, gate_up: str) -> torch.Tensor:
    """The inverse of gate_and_up."""
    if gate_up == "concatenated":
        return torch.cat([gate, up], dim=1)
    return torch.stack([t.unflatten(1, (-1, INTERLEAVE)) for t in (gate, up)], dim=2).flatten(1)


def backward(dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, prob: torch.Tensor | None) -> Gradients:
    """Gradients for dh, gate and up (M, I) of any float dtype and prob (M,) float32."""
    dh, gate, up = (t.to(torch.float32) for t in (dh, gate, up))
    y = gate.clamp(min=SMALLEST)
    s = sigmoid(y)
    silu = y * s
    h0 = silu * up
    slope = fma(silu, 1.0 - s, s)
    dh0, hidden = (dh, h0) if prob is None else (dh * prob[:, None], h0 * prob[:, None])
    return Gradients(dh0 * up * slope, dh0 * silu, hidden, h0 * dh)


def sigmoid(y: torch.Tensor) -> torch.Tensor:
    """s of the text above for y, float32 and at least SMALLEST."""
    one = torch.ones((), dtype=torch.float32, device=y.device)
    return one / (one + exp_minus(y))


def exp_minus(y: torch.Tensor) -> torch.Tensor:
    """e of the text above, exp(-y), for y, float32 and at least SMALLEST; above LARGEST it is that of LARGEST."""

    def number(value: float) -> torch.Tensor:
        return torch.full((), value, dtype=torch.float32, device=y.device)

    x = y.clamp(max=LARGEST)
    t = fma(x, number(-LOG2E), number(ROUNDING))
    n = t - number(ROUNDING)
    r = fma(n, number(LN2_LOW), fma(n, number(LN2), x))
    p = number(-C5)
    for coefficient in (C4, -C3, C2, -1.0, 1.0):
        p = fma(p, r, number(coefficient))
    # n is in the last bits of t: moved into the exponent.
    return (p.view(torch.int32) + (t.view(torch.int32) << 23)).view(torch.float32)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of float32, rounded once.

    In float64 the product is exact; the sum is rounded to odd, after which rounding to float32 is as if it were the
    only one (float64 has more than twice the bits and two).
    """
    product, addend = a.to(torch.float64) * b.to(torch.float64), c.to(torch.float64)
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    step = torch.where((lost > 0) == (total > 0), 1, -1)
    inexact = (lost != 0) & (lost == lost) & (bits & 1 == 0)
    return torch.where(inexact, bits + step, bits).view(torch.float64).to(torch.float32)


def dprob(products: torch.Tensor) -> torch.Tensor:
    """(M,) float32 sums of the rows of products (M, I) in the order of the text above; one bit pattern for NaN."""
    blocks = torch.nn.functional.pad(products, (0, -products.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    while blocks.shape[2] > 1:
        blocks = blocks[..., 0::2] + blocks[..., 1::2]
    total = products.new_zeros(products.shape[0])
    for block in blocks.squeeze(2).unbind(1):
        total = total + block
    return total.masked_fill(total.isnan(), float("nan"))
