"""The tensor core's fused dot-product-add, bit for bit, over a whole M x N tile at once.

One instruction adds its K products and the accumulator in one step: every term is shifted to the largest
exponent, truncated toward zero to F fractional bits, the truncated terms are added exactly, and the sum is
truncated to a float32 with R fractional bits. A product's exponent is the sum of its factors' exponents and
is not renormalised; subnormals have their format's smallest exponent; zero products do not take part in the
maximum. Model: MMA-Sim (arXiv 2511.10909); F = 13 and 25 of Hopper's wgmma were confirmed on an H200.

The aligned terms are integers below 2^53, so float64 does it exactly: term = trunc(a * b * 2^(F - largest)).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from padless.emulator.units import number_formats
from padless.emulator.units.exact_sum import round_sum
from padless.emulator.units.number_formats import Array

MODES = ("truncate", "exact", "separate_add", "fast")
CANONICAL_NAN = np.uint32(0x7FFFFFFF)
NO_EXPONENT = -8000  # of a zero: below every exponent, and twice it still fits int16
_CHUNK = 1 << 15  # elements of a working tile: a few such float64 arrays stay in the second-level cache


@dataclass(frozen=True)
class Rule:
    """How one kind of instruction rounds.

    Attributes:
        fraction_bits: F, kept of each term below the largest exponent.
        result_bits: R, fraction bits of the float32 result; unused for a float16 result, which is rounded to nearest.
        group: 0, or products per exact group (16 for the FP4 kinds): a term is then a group's exact sum times its
            scales' significands, and the scales' exponents alone align it.
    """

    name: str
    fraction_bits: int
    result_bits: int = 23
    group: int = 0


HOPPER_FP8 = Rule("wgmma FP8", 13, 13)
WIDE = Rule("wgmma bf16, f16, tf32; tcgen05 f16, tf32, f8f6f4, mxf8f6f4", 25)
FP4_BLOCK = Rule("tcgen05 mxf4, mxf4nvf4", 35, group=16)


@dataclass(frozen=True)
class Operand:
    """Decoded rows x K elements.

    Attributes:
        values: float64 (rows, K); NaN and Inf as they are.
        exponents: int16 (rows, K), the exponent that aligns; NO_EXPONENT for zeros.
        special: whether a value is NaN or Inf.
        narrow: whether the format has 8 bits or fewer and no scale was applied.
    """

    values: Array
    exponents: Array
    special: bool
    narrow: bool

    def negated(self) -> Operand:
        return replace(self, values=-self.values)

    def scaled(self, codes: Array) -> Operand:
        """Apply ue8m0 scale codes, uint8 (rows, K / block): exact, as they only move the exponent. 0xFF is NaN."""
        codes = np.asarray(codes)
        block = self.values.shape[1] // codes.shape[1]
        if codes.shape[0] != self.values.shape[0] or block * codes.shape[1] != self.values.shape[1]:
            raise ValueError(f"codes: shape {codes.shape} does not divide an operand of {self.values.shape}")
        shift = np.repeat(codes.astype(np.int32) - 127, block, axis=1)
        values = np.ldexp(self.values, shift)
        nan = np.repeat(codes == 0xFF, block, axis=1)
        if nan.any():
            values = np.where(nan, np.nan, values)
        exponents = np.where(self.exponents == NO_EXPONENT, NO_EXPONENT, self.exponents + shift)
        return Operand(values, exponents.astype(np.int16), self.special or bool(nan.any()), False)


def decode_operand(codes: Array, name: str) -> Operand:
    """Codes (rows, K) of a number format to an Operand."""
    f = number_formats.number_format(name)
    values = number_formats.decode(codes, name)
    special = f.specials != "none" and not np.isfinite(values).all()
    if f.bits <= 16:
        exponents = _exponent_table(f.name)[np.asarray(codes).astype(np.int64) & (0xFF if f.bits <= 8 else 0xFFFF)]
    else:
        exponents = _exponents(values, f.emin)
    return Operand(values, exponents, bool(special), f.bits <= 8)


@cache
def _exponent_table(name: str) -> Array:
    return _exponents(number_formats.table(name), number_formats.number_format(name).emin)


def _exponents(values: Array, emin: int) -> Array:
    exponents = np.maximum(np.frexp(values)[1] - 1, emin)
    return np.where((values == 0) | ~np.isfinite(values), NO_EXPONENT, exponents).astype(np.int16)


def dot_product_add(
    a: Operand,
    b: Operand,
    c: Array | None,
    rule: Rule,
    *,
    mode: str = "truncate",
    result: str = "f32",
    scale_a: Array | None = None,
    scale_b: Array | None = None,
    scale_format: str = "ue8m0",
) -> Array:
    """One instruction: sum over K of a[m, k] * b[n, k], plus c[m, n].

    Args:
        a, b: operands of M x K and N x K, with any ue8m0 scales of a rule without groups already applied.
        c: float32 (float16 values as float32 where ``result`` is "f16") of M x N, or None for no accumulator.
        mode: "truncate" is the published model of the hardware; "exact" sums with infinite precision and
            rounds once to nearest; "separate_add" truncates the products' sum to float32, then does an
            ordinary float32 addition of c; "fast" is a float64 matrix product rounded to float32.
        result: "f32", or "f16": rounded to nearest float16.
        scale_a, scale_b: codes (M, K / 16) and (N, K / 16), for a rule with groups only.
        scale_format: "ue8m0" or "ue4m3" of those codes.

    Returns:
        float32 (M, N). Any NaN, Inf - Inf or 0 * Inf gives the bits 0x7FFFFFFF. A zero sum is +0.
    """
    if mode not in MODES:
        raise ValueError(f"mode: {mode!r} is not one of {', '.join(MODES)}")
    if a.values.shape[1] != b.values.shape[1]:
        raise ValueError(f"a, b: K differs, {a.values.shape} and {b.values.shape}")
    if bool(rule.group) != (scale_a is not None) or (scale_a is None) != (scale_b is None):
        raise ValueError(f"scale_a, scale_b: both are needed by {rule.name!r} exactly if it has groups")
    m, n = a.values.shape[0], b.values.shape[0]
    out = np.empty((m, n), np.float32)
    special = a.special or b.special or (c is not None and not np.isfinite(c).all())
    step = max(1, _CHUNK // n)
    scales = None
    if rule.group:
        assert scale_a is not None
        assert scale_b is not None
        scales = _decode_scales(scale_a, scale_format), _decode_scales(scale_b, scale_format)
        special = special or scales[0].nan or scales[1].nan
    with np.errstate(all="ignore"):
        for first in range(0, m, step):
            rows = slice(first, first + step)
            part = Operand(a.values[rows], a.exponents[rows], a.special, a.narrow)
            c_rows = None if c is None else np.asarray(c[rows], np.float64)
            terms = _Groups(part, b, scales[0].rows(rows), scales[1]) if scales else _Products(part, b)
            out[rows] = _finish(terms, c_rows, rule, mode, result)
            if special:
                _set_specials(out[rows], terms.plain_sum(), c_rows)
    return out


def _finish(terms: _Products | _Groups, c: Array | None, rule: Rule, mode: str, result: str) -> Array:
    if mode == "fast":
        total = terms.plain_sum() if c is None else terms.plain_sum() + c
        return _round(total, result)
    if mode == "exact":
        return _round(round_sum([*terms.exact_parts(), *([] if c is None else [c])]), result)
    if mode == "truncate":
        return truncate(terms.aligned_sum(rule.fraction_bits, c), rule.result_bits, result)
    products = truncate(terms.aligned_sum(rule.fraction_bits, None), 23, "f32")
    if c is None:
        return _round(products.astype(np.float64), result)
    return _round((products + c.astype(np.float32)).astype(np.float64), result)


def _round(total: Array, result: str) -> Array:
    """Nearest float32 or float16 (as float32) of float64; -0 becomes +0, as everywhere here."""
    if result == "f16":
        total = number_formats.decode(number_formats.encode(total, "f16"), "f16")
    return (total + 0.0).astype(np.float32)


def truncate(total: Array, result_bits: int, result: str = "f32") -> Array:
    """float64 to float32 toward zero with ``result_bits`` fraction bits (subnormals keep exponent -126)."""
    if result == "f16":
        return _round(total, result)
    near = total.astype(np.float32)
    bits = near.view(np.uint32)
    bits = bits - (np.abs(near) > np.abs(total)).astype(np.uint32)
    bits &= np.uint32(0xFFFFFFFF << (23 - result_bits) & 0xFFFFFFFF)
    overflow = np.abs(total) >= 2.0**128
    if overflow.any():
        bits[overflow] = np.where(total[overflow] < 0, np.uint32(0xFF800000), np.uint32(0x7F800000))
    out = bits.view(np.float32)
    out += np.float32(0)  # -0 + 0 is +0
    return out


def _set_specials(out: Array, plain: Array, c: Array | None) -> None:
    total = plain if c is None else plain + c
    nan, inf = np.isnan(total), np.isinf(total)
    out[inf] = total[inf]
    out.view(np.uint32)[nan] = CANONICAL_NAN


class _Products:
    """The terms of an instruction without groups: one per k."""

    def __init__(self, a: Operand, b: Operand) -> None:
        # (K, rows): one k is then a contiguous row; specials are set apart and must not disturb the rest.
        finite = (np.where(np.isfinite(x.values), x.values, 0.0) if x.special else x.values for x in (a, b))
        self.a, self.b = (np.ascontiguousarray(x.T) for x in finite)
        self.ea, self.eb = (np.ascontiguousarray(x.exponents.T) for x in (a, b))
        self.operands = a, b
        self.shape = a.values.shape[0], b.values.shape[0]

    def largest(self) -> Array:
        largest = np.full(self.shape, 2 * NO_EXPONENT, np.int16)
        one = np.empty_like(largest)
        for ea, eb in zip(self.ea, self.eb, strict=True):
            np.add(ea[:, None], eb, out=one)
            np.maximum(largest, one, out=largest)
        return largest

    def aligned_sum(self, fraction_bits: int, c: Array | None) -> Array:
        largest = self.largest()
        if c is not None:
            np.maximum(largest, _exponents(c, -126), out=largest)
        largest = np.where(largest < NO_EXPONENT // 2, 0, largest).astype(np.int32)
        # The 8-bit formats fit float32: products have 8 bits and a sum of 33 terms of F = 13 has 21.
        small = fraction_bits <= 13 and len(self.a) <= 64 and all(x.narrow for x in self.operands)
        kind = np.float32 if small else np.float64
        shift = fraction_bits - largest
        if small:  # past float32's range only where an accumulator aligns and all products are zero
            shift = np.minimum(shift, 127)
        factor = np.ldexp(np.ones(self.shape, kind), shift)
        a, b = self.a.astype(kind), self.b.astype(kind)
        total = np.zeros(self.shape, kind)
        one = np.empty_like(total)
        for ak, bk in zip(a, b, strict=True):
            np.multiply(ak[:, None], bk, out=one)
            np.multiply(one, factor, out=one)
            np.trunc(one, out=one)
            np.add(total, one, out=total)
        wide = total.astype(np.float64)
        if c is not None:
            wide += np.trunc(np.ldexp(np.where(np.isfinite(c), c, 0.0), fraction_bits - largest))
        return np.ldexp(wide, largest - fraction_bits)

    def exact_parts(self) -> list[Array]:
        """A few float64 arrays whose exact sum is the exact sum of the products: 40-bit slices of the aligned terms."""
        width = 40
        largest = self.largest().astype(np.int32)
        largest = np.where(largest < NO_EXPONENT // 2, 0, largest)
        terms = self.a[:, :, None] * self.b[:, None, :]
        parts = []
        quantum = largest
        while True:
            quantum = quantum - width
            whole = np.trunc(np.ldexp(terms, -quantum))
            parts.append(np.ldexp(whole.sum(axis=0), quantum))
            terms = terms - np.ldexp(whole, quantum)
            if not terms.any():
                return parts

    def plain_sum(self) -> Array:
        a, b = self.operands
        if not (a.special or b.special):
            return np.asarray(a.values @ b.values.T)
        total = np.zeros(self.shape)
        for k in range(a.values.shape[1]):
            total += a.values[:, k, None] * b.values[:, k]
        return total


@dataclass(frozen=True)
class _Scales:
    """Scale factors of one operand, (rows, groups)."""

    values: Array
    exponents: Array
    significands: Array
    nan: bool

    def rows(self, rows: slice) -> _Scales:
        return _Scales(self.values[rows], self.exponents[rows], self.significands[rows], self.nan)


def _decode_scales(codes: Array, name: str) -> _Scales:
    values = number_formats.decode(codes, name)
    exponents = _exponents(values, -127 if name == "ue8m0" else -6).astype(np.int32)
    zero = exponents == NO_EXPONENT
    significands = np.where(zero, 0.0, np.ldexp(values, np.where(zero, 0, -exponents)))
    return _Scales(values, exponents, significands, bool(np.isnan(values).any()))


class _Groups:
    """The terms of an FP4 instruction: one per 16 products."""

    def __init__(self, a: Operand, b: Operand, sa: _Scales, sb: _Scales) -> None:
        groups = a.values.shape[1] // 16
        if sa.values.shape != (a.values.shape[0], groups) or sb.values.shape != (b.values.shape[0], groups):
            raise ValueError(
                f"scale_a, scale_b: shapes {sa.values.shape}, {sb.values.shape} do not give one scale to each 16 "
                f"of K in operands of {a.values.shape} and {b.values.shape}"
            )
        self.significands, self.exponents, self.values = [], [], []
        for g in range(groups):
            k = slice(16 * g, 16 * g + 16)
            dot = a.values[:, k] @ b.values[:, k].T  # multiples of 1/4 below 2^10: exact
            self.significands.append(dot * sa.significands[:, g, None] * sb.significands[:, g])
            exponent = sa.exponents[:, g, None] + sb.exponents[:, g]
            self.exponents.append(np.where(exponent < NO_EXPONENT // 2, 2 * NO_EXPONENT, exponent))
            self.values.append(dot * sa.values[:, g, None] * sb.values[:, g])

    def aligned_sum(self, fraction_bits: int, c: Array | None) -> Array:
        # A group's exponent is its scales', whether or not its 16 products cancel.
        largest = np.maximum.reduce(self.exponents)
        if c is not None:
            largest = np.maximum(largest, _exponents(c, -126))
        largest = np.where(largest < NO_EXPONENT // 2, 0, largest)
        total = np.zeros(largest.shape)
        for significand, exponent in zip(self.significands, self.exponents, strict=True):
            total += np.trunc(np.ldexp(significand, np.maximum(fraction_bits + exponent - largest, -1000)))
        if c is not None:
            total += np.trunc(np.ldexp(np.where(np.isfinite(c), c, 0.0), fraction_bits - largest))
        return np.ldexp(total, largest - fraction_bits)

    def exact_parts(self) -> list[Array]:
        return [np.where(np.isfinite(v), v, 0.0) for v in self.values]

    def plain_sum(self) -> Array:
        return np.asarray(sum(self.values))


def multiply(
    a: Array, b: Array, c: Array | None, types: tuple[str, str, str], rule: Rule, *, mode: str = "truncate",
    negate: tuple[bool, bool] = (False, False), saturate: bool = False,
) -> Array:  # fmt: skip
    """Codes (M, K) times codes (N, K) plus c, of ``types`` D, A and B: `dot_product_add`, or for s32 the int32 sum
    modulo 2^32, clamped with ``saturate`` (.satfinite)."""
    if types[0] != "s32":
        operands = [decode_operand(codes, name) for codes, name in zip((a, b), types[1:], strict=True)]
        x, y = (o.negated() if minus else o for o, minus in zip(operands, negate, strict=True))
        return dot_product_add(x, y, c, rule, mode=mode, result=types[0])
    i, j = (codes.view(np.int8 if name == "s8" else np.uint8) for codes, name in zip((a, b), types[1:], strict=True))
    total = i.astype(np.int64) @ j.astype(np.int64).T
    if c is not None:
        total = total + c
    if saturate:
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    return total.astype(np.int32)  # keeps the low 32 bits
