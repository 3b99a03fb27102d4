"""The values of floating-point instructions: numpy functions that generated code calls by name.

f32 and f64 are computed in their own type, 16-bit types in float64 and rounded once on the way back.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from padless.emulator.prepare.registry import HELPERS, helper
from padless.emulator.units.number_formats import Array, narrow_bf16, narrow_f16, widen_bf16, widen_f16

NAN = np.uint32(0x7FFFFFFF).view(np.float32)


for _conversion in (widen_f16, widen_bf16, narrow_f16, narrow_bf16):
    helper(_conversion)


@helper
def canonical(value: Array) -> Array:
    """float32 results: every NaN is 0x7FFFFFFF, whatever the operands' payloads (PTX ISA, floating point)."""
    wrong = value != value
    return np.where(wrong, NAN, value) if wrong.any() else value


@helper
def canonicalise(row: Array, m: Any) -> None:
    """The same for a register that has just been written in the lanes `m`."""
    wrong = row != row
    if wrong.any():
        row[wrong & m] = NAN


@helper
def flush_sixteen(value: Array) -> Array:
    """Subnormal f16 numbers, held as float64, to zero of the same sign."""
    return np.where(np.abs(value) < 2.0**-14, np.copysign(0.0, value), value)


@helper
def rectify(value: Array) -> Array:
    """Negative values to +0; NaN stays."""
    return np.where((value < 0) | (value == 0), np.zeros_like(value), value)


@helper
def saturate(value: Array) -> Array:
    return np.where(np.isnan(value), 0, np.clip(value, 0, 1)).astype(value.dtype)


@helper
def flush(value: Array) -> Array:
    """Subnormal float32, or bf16 held as float64, to zero of the same sign."""
    tiny = np.abs(value) < np.float32(1.17549435e-38)
    return np.where(tiny, np.copysign(np.float32(0), value), value)


@helper
def out_of_bounds(bits: Array) -> Array:
    """The NaN that copies fill with (PTX ISA, "fma": OOB-NaN is 0xFFFF)."""
    return np.asarray(bits.view(np.uint16) == 0xFFFF)


@helper
def sum_to_odd(product: Array, c: Array) -> Array:
    """product + c in float64, an inexact sum forced to an odd last bit, so that the rounding to a narrower type that
    follows is the only one (Boldo and Melquiond)."""
    total = product + c
    virtual = total - product
    error = (product - (total - virtual)) + (c - virtual)
    bits = total.view(np.int64)
    fix = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    if not np.any(fix):
        return total
    direction = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(fix, bits + direction, bits).view(np.float64)


@helper
def fused_multiply_add(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    """float32 a*b + c with one rounding. The product is exact in float64; the sum is rounded twice only where that
    can matter, and there to odd first."""
    product = np.multiply(a, b, dtype=np.float64)
    wide_c = np.asarray(c, np.float64)
    total = product + wide_c
    if mode == "rn":
        low = total.view(np.int64) & 0x1FFFFFFF
        # A float64 sum on the midpoint of two float32, or in the subnormal range, may have been rounded onto it.
        doubtful = (low == 0x10000000) | (np.abs(total) < 1.2e-38)
        if not doubtful.any():
            return canonical(total.astype(np.float32))
    odd = sum_to_odd(product, np.broadcast_to(wide_c, product.shape))
    return canonical(odd.astype(np.float32) if mode == "rn" else round_directed(odd, mode))


def round_directed(value: Array, mode: str) -> Array:
    near = value.astype(np.float32)
    back = near.astype(np.float64)
    if mode == "rz":
        wrong, to = np.abs(back) > np.abs(value), np.float32(0)
    elif mode == "rm":
        wrong, to = back > value, np.float32(-np.inf)
    else:
        wrong, to = back < value, np.float32(np.inf)
    return np.where(wrong & ~np.isnan(value), np.nextafter(near, to), near)


@helper
def fused_multiply_add_f64(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    out = np.empty(a.shape, np.float64)
    for i, (x, y, z) in enumerate(zip(*(np.broadcast_to(o, a.shape).tolist() for o in (a, b, c)), strict=True)):
        if np.isfinite(x) and np.isfinite(y) and np.isfinite(z):
            exact = Fraction(x) * Fraction(y) + Fraction(z)
            out[i] = round_fraction(exact, mode) if exact else exact_zero(x * y, z, mode)
        else:
            out[i] = x * y + z
    return out


def round_fraction(exact: Any, mode: str) -> float:
    """A rational number to float64."""
    try:
        near = float(exact)
    except OverflowError:
        near = float("inf") if exact > 0 else float("-inf")
    if mode == "rn":
        return near
    infinite = np.isinf(near)
    above = near > 0 if infinite else near > exact
    below = near < 0 if infinite else near < exact
    if (above and (mode == "rm" or (mode == "rz" and near > 0))) or (
        below and (mode == "rp" or (mode == "rz" and near < 0))
    ):
        return float(np.nextafter(near, -np.inf if above else np.inf))
    return near


def exact_zero(x: float, z: float, mode: str) -> float:
    """The sign of a sum that is exactly zero: that of both terms, else minus only when rounding down."""
    if np.signbit(x) == np.signbit(z) and x == 0 and z == 0:
        return x
    return -0.0 if mode == "rm" else 0.0


@helper
def directed_quotient(a: Array, b: Array, mode: str) -> Array:
    return directed_by_fractions(a / b, mode, lambda i: (a[i], b[i]), lambda x, y: x / y)


@helper
def directed_root(a: Array, mode: str) -> Array:
    """The neighbours of the rounded root are judged by their exact squares."""
    near = np.sqrt(a)
    out = near.copy()
    for i in np.flatnonzero(np.isfinite(near) & (near > 0)).tolist():
        exact, square = Fraction(float(a[i])), Fraction(float(near[i])) ** 2
        if square > exact and mode in ("rz", "rm"):
            out[i] = np.nextafter(near[i], near.dtype.type(0))
        elif square < exact and mode == "rp":
            out[i] = np.nextafter(near[i], near.dtype.type(np.inf))
    return out


def directed_by_fractions(near: Array, mode: str, operands: Any, function: Any) -> Array:
    """Move a correctly rounded result to its neighbour where the exact value lies on the other side."""
    out = near.copy()
    for i in range(len(near)):
        values = operands(i)
        if not all(np.isfinite(x) for x in values) or values[-1] == 0 or np.isnan(near[i]):
            continue
        exact = function(*(Fraction(float(x)) for x in values))
        infinite = np.isinf(near[i])
        above = near[i] > 0 if infinite else Fraction(float(near[i])) > exact
        below = near[i] < 0 if infinite else Fraction(float(near[i])) < exact
        if above and (mode == "rm" or (mode == "rz" and exact > 0)):
            out[i] = np.nextafter(near[i], near.dtype.type(-np.inf))
        elif below and (mode == "rp" or (mode == "rz" and exact < 0)):
            out[i] = np.nextafter(near[i], near.dtype.type(np.inf))
    return out


@helper
def extreme(a: Array, b: Array, largest: bool, keep_nan: bool) -> Array:
    if keep_nan:
        value = np.maximum(a, b) if largest else np.minimum(a, b)
    else:
        value = np.fmax(a, b) if largest else np.fmin(a, b)
    zeros = (a == 0) & (b == 0)
    if zeros.any():
        negative = np.signbit(a) & np.signbit(b) if largest else np.signbit(a) | np.signbit(b)
        zero = np.zeros_like(value)
        value = np.where(zeros, np.where(negative, -zero, zero), value)
    return np.asarray(value)


@helper
def multiply_signs(value: Array, a: Array, b: Array) -> Array:
    one = np.ones_like(value)
    return np.copysign(value, np.where(np.signbit(a) != np.signbit(b), -one, one))


HELPERS |= {
    "add_f32": lambda a, b: canonical(a + b),
    "sub_f32": lambda a, b: canonical(a - b),
    "mul_f32": lambda a, b: canonical(a * b),
    "transcendental_rcp": lambda x: 1.0 / x,
    "transcendental_sqrt": np.sqrt,
    "transcendental_rsqrt": lambda x: 1.0 / np.sqrt(x),
    "transcendental_ex2": np.exp2,
    "transcendental_lg2": np.log2,
    "transcendental_sin": np.sin,
    "transcendental_cos": np.cos,
    "transcendental_tanh": np.tanh,
}
