"""Device functions of SwiGLU's backward: the float32 arithmetic of `padless.quantization.swiglu_rules`.

Compiled without contraction (``enable_fp_fusion=False``): every fma is written.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from padless.quantization import swiglu_rules as rules
from padless.quantization.triton import casts, tiles

_MINUS_LOG2E, _LN2, _LN2_LOW = (tl.constexpr(-rules.LOG2E), tl.constexpr(rules.LN2), tl.constexpr(rules.LN2_LOW))
_C2, _MINUS_C3 = tl.constexpr(rules.C2), tl.constexpr(-rules.C3)
_C4, _MINUS_C5 = tl.constexpr(rules.C4), tl.constexpr(-rules.C5)
_ROUNDING = tl.constexpr(rules.ROUNDING)
_SMALLEST, _LARGEST = tl.constexpr(rules.SMALLEST), tl.constexpr(rules.LARGEST)


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
def _number(value: tl.constexpr, like):
    return tl.full(like.shape, value, tl.float32)


@triton.jit
def bounded(gate):
    """y: gate, or the smallest number that sigmoid takes. NaN stays NaN."""
    return tl.maximum(gate, _number(_SMALLEST, gate), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sigmoid(y, HARDWARE: tl.constexpr):
    """fl(1 / fl(1 + exp(-y)))."""
    e = exp_minus(y, HARDWARE)
    if HARDWARE:
        return casts.usual_reciprocal(e + 1.0)
    return casts.quotient(1.0, e + 1.0)


@triton.jit
def exp_minus(y, HARDWARE: tl.constexpr):
    """exp(-y) of y, at least the bound; above LARGEST that of LARGEST."""
    x = tl.minimum(y, _number(_LARGEST, y))
    t = _fma(x, _number(_MINUS_LOG2E, x), _number(_ROUNDING, x), HARDWARE)
    n = t - _ROUNDING
    r = _fma(n, _number(_LN2_LOW, x), _fma(n, _number(_LN2, x), x, HARDWARE), HARDWARE)
    p = _fma(_number(_MINUS_C5, x), r, _number(_C4, x), HARDWARE)
    p = _fma(p, r, _number(_MINUS_C3, x), HARDWARE)
    p = _fma(p, r, _number(_C2, x), HARDWARE)
    p = _fma(p, r, _number(-1.0, x), HARDWARE)
    p = _fma(p, r, _number(1.0, x), HARDWARE)
    return (p.to(tl.int32, bitcast=True) + (t.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def slope(s, silu, HARDWARE: tl.constexpr):
    """The derivative of silu."""
    return _fma(silu, 1.0 - s, s, HARDWARE)


@triton.jit
def pairwise_sum(x):
    """(32,) sums of the rows of (32, 128): neighbours first, then the sums of neighbours, up to one."""
    for step in tl.static_range(7):
        x = _sums_of_neighbours(x, 64 >> step)
    return tl.reshape(x, (tiles.QUADS,))


@triton.jit
def _sums_of_neighbours(x, HALF: tl.constexpr):
    even, odd = tl.split(tl.reshape(x, (tiles.QUADS, HALF, 2)))
    return even + odd
