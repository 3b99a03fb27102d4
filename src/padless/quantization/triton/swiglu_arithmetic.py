"""Device functions of SwiGLU's backward: the float32 arithmetic of `padless.quantization.swiglu_rules`.

Compiled without contraction (``enable_fp_fusion=False``): every fma is written.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from padless import triton_casts as casts
from padless.quantization import swiglu_rules as rules
from padless.quantization.triton import tiles

_LOG2E, _LN2, _LN2_LOW = (
    tl.constexpr(bits) for bits in (rules.LOG2E_BITS, rules.LN2_BITS, rules.LN2_LOW_BITS)
)
_C2, _C3, _C4, _C5 = (tl.constexpr(bits) for bits in rules.EXP_BITS)
_ROUNDING = tl.constexpr(rules.ROUNDING)
_SMALLEST, _LARGEST = tl.constexpr(rules.SMALLEST), tl.constexpr(rules.LARGEST)
_LARGEST_SUM = tl.constexpr(rules.LARGEST_SUM)


@triton.jit
def _fma(a, b, c, HARDWARE: tl.constexpr):
    """a * b + c, rounded once; without HARDWARE as in `swiglu_rules.fma`, for Triton's interpreter rounds twice."""
    if HARDWARE:
        return tl.fma(a, b, c)
    product = a.to(tl.float64) * b.to(tl.float64)
    addend = c.to(tl.float64)
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    bits = total.to(tl.int64, bitcast=True)
    step = tl.where((lost > 0) == (total > 0), 1, -1).to(tl.int64)
    inexact = (lost != 0) & (lost == lost) & ((bits & 1) == 0)
    return tl.where(inexact, bits + step, bits).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _number(bits: tl.constexpr, like):
    """The float32 of these bits, of like's shape."""
    return tl.full(like.shape, bits, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def sigmoid(gate, HARDWARE: tl.constexpr):
    """fl(1 / fl(1 + exp(-gate))), 0 where the sum is above 2^126."""
    x = tl.minimum(tl.maximum(gate, _SMALLEST), _LARGEST)
    rounding = tl.full(x.shape, _ROUNDING, tl.float32)
    one = tl.full(x.shape, 1.0, tl.float32)
    t = _fma(x, -_number(_LOG2E, x), rounding, HARDWARE)
    n = t - rounding
    r = _fma(n, -_number(_LN2_LOW, x), _fma(n, -_number(_LN2, x), -x, HARDWARE), HARDWARE)
    p = _fma(_number(_C5, x), r, _number(_C4, x), HARDWARE)
    p = _fma(p, r, _number(_C3, x), HARDWARE)
    p = _fma(p, r, _number(_C2, x), HARDWARE)
    p = _fma(p, r, one, HARDWARE)
    p = _fma(p, r, one, HARDWARE)
    e = (p.to(tl.int32, bitcast=True) + (t.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)
    total = e + 1.0
    if HARDWARE:
        s = casts.usual_reciprocal(total)
    else:
        s = casts.quotient(1.0, total)
    return tl.where(total > _LARGEST_SUM, 0.0, s)


@triton.jit
def slope(s, silu, HARDWARE: tl.constexpr):
    """The derivative of silu."""
    return _fma(silu, 1.0 - s, s, HARDWARE)


@triton.jit
def pairwise_sum(x):
    """(32,) sums of the rows of (32, 128): neighbours first, then the sums of neighbours, up to one."""
    for step in tl.static_range(7):
        half: tl.constexpr = 64 >> step
        even, odd = tl.split(tl.reshape(x, (tiles.QUADS, half, 2)))
        x = even + odd
    return tl.reshape(x, (tiles.QUADS,))
