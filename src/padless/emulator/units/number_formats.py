"""Number formats by their bit fields: codes to values, values to codes with every rounding PTX knows.

A format is sign (0 or 1 bit), exponent and mantissa fields; subnormals have exponent ``emin`` and no hidden
bit. Values travel as float64, which holds every format here exactly. Sources: OCP MX specification 1.0 (e4m3, e5m2,
e2m1, e3m2, e2m3, e8m0), PTX ISA "cvt" (rounding, saturation, NaN).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
CODES = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # by bytes of an element
ROUNDINGS = ("rn", "rna", "rz", "rp", "rm")


@dataclass(frozen=True)
class NumberFormat:
    """Bit fields of one format.

    Attributes:
        bits: width of a code, sign included; tf32 codes are 32 bits wide with ``padding`` unused low bits.
        specials: "ieee" (Inf and NaN in the top exponent), "nan" (only the all-ones code is NaN), "none".
        nan: what a conversion to the format makes of NaN; "none" formats give their largest value.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str
    nan: int
    signed: bool = True
    padding: int = 0

    @property
    def bits(self) -> int:
        return self.signed + self.exponent_bits + self.mantissa_bits + self.padding

    @property
    def sign(self) -> int:
        """The code's sign bit as a mask, 0 for an unsigned format."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def emin(self) -> int:
        return 1 - self.bias

    @property
    def max_code(self) -> int:
        """The largest finite magnitude, without sign and padding."""
        top = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        if self.specials == "ieee":
            return top - (1 << self.mantissa_bits)
        return top - (self.specials == "nan")

    @property
    def overflow_code(self) -> int:
        """What an overflow without saturation gives: Inf, else NaN, else the largest value."""
        return self.max_code + 1 if self.specials != "none" else self.max_code

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        return np.uint8 if self.bits <= 8 else np.uint16 if self.bits <= 16 else np.uint32


FORMATS = {
    f.name: f
    for f in (
        NumberFormat("e4m3", 4, 3, 7, "nan", 0x7F),
        NumberFormat("e5m2", 5, 2, 15, "ieee", 0x7F),
        NumberFormat("e2m1", 2, 1, 1, "none", 0x7),
        NumberFormat("e3m2", 3, 2, 3, "none", 0x1F),
        NumberFormat("e2m3", 2, 3, 1, "none", 0x1F),
        NumberFormat("ue8m0", 8, 0, 127, "nan", 0xFF, signed=False),
        NumberFormat("ue4m3", 4, 3, 7, "nan", 0x7F, signed=False),
        NumberFormat("bf16", 8, 7, 127, "ieee", 0x7FFF),
        NumberFormat("f16", 5, 10, 15, "ieee", 0x7FFF),
        NumberFormat("tf32", 8, 10, 127, "ieee", 0x7FFFFFFF, padding=13),
        NumberFormat("f32", 8, 23, 127, "ieee", 0x7FFFFFFF),
    )
}


def number_format(name: str) -> NumberFormat:
    """The format called ``name``; a trailing "x2" or "x4" and "fn" are dropped. Raises ValueError for others."""
    plain = name.removesuffix("x4").removesuffix("x2").removesuffix("fn")
    if plain not in FORMATS:
        raise ValueError(f"name: {name!r} is not a number format; known are {', '.join(FORMATS)}")
    return FORMATS[plain]


def split(codes: Array, name: str) -> tuple[Array, Array, Array]:
    """(sign, exponent, significand) of each code as int32.

    The value is (-1)^sign * significand * 2^(exponent - mantissa bits). Subnormals have exponent ``emin`` and
    significand < 2^mantissa_bits. Inf and NaN are not told apart from numbers: ask ``decode``. ue8m0 has significand 1
    and exponents -127..127.
    """
    f = number_format(name)
    bits = np.asarray(codes).astype(np.int64) >> f.padding
    if f.name == "ue4m3":
        bits = bits & 0x7F
    mantissa = bits & ((1 << f.mantissa_bits) - 1)
    field = (bits >> f.mantissa_bits) & ((1 << f.exponent_bits) - 1)
    sign = (bits >> (f.exponent_bits + f.mantissa_bits)) & 1 if f.signed else np.zeros_like(bits)
    if f.name == "ue8m0":
        return sign.astype(np.int32), (field - 127).astype(np.int32), np.ones_like(field, np.int32)
    exponent = np.maximum(field, 1) - f.bias
    significand = mantissa + np.where(field > 0, 1 << f.mantissa_bits, 0)
    return sign.astype(np.int32), exponent.astype(np.int32), significand.astype(np.int32)


def _decode(codes: Array, f: NumberFormat) -> Array:
    sign, exponent, significand = split(codes, f.name)
    value = np.ldexp(significand.astype(np.float64), exponent - f.mantissa_bits)
    magnitude = (np.asarray(codes).astype(np.int64) & ~f.sign) >> f.padding
    if f.name == "ue4m3":
        magnitude = magnitude & 0x7F
    if f.specials == "ieee":
        value = np.where(magnitude == f.overflow_code, np.inf, value)
    if f.specials != "none":
        value = np.where(magnitude > f.max_code + (f.specials == "ieee"), np.nan, value)
    return np.where(sign == 1, -value, value)


@cache
def table(name: str) -> Array:
    """float64 value of every code of a format of at most 16 bits; index = code. Read-only."""
    f = number_format(name)
    if f.bits > 16:
        raise ValueError(f"name: {name!r} has too many codes for a table; use decode")
    size = 1 << (8 if f.bits <= 8 else 16)
    values = _decode(np.arange(size) & ((1 << max(f.bits, 8 if f.name == "ue4m3" else 0)) - 1), f)
    values.flags.writeable = False
    return values


def decode(codes: Array, name: str) -> Array:
    """float64 values of integer codes, any shape. Bits above the format's width are ignored; tf32 ignores its low 13."""
    f = number_format(name)
    codes = np.asarray(codes)
    if f.bits <= 16:
        return table(f.name)[codes.astype(np.int64) & (0xFF if f.bits <= 8 else 0xFFFF)]
    if f.name == "tf32":
        codes = codes.astype(np.uint32) & np.uint32(0xFFFFE000)
    return np.ascontiguousarray(codes, np.uint32).view(np.float32).astype(np.float64).reshape(codes.shape)


def round_magnitude(scaled: Array, negative: Array, rounding: str) -> Array:
    """Integers near non-negative ``scaled``, the sign given apart; exact for every rounding of PTX."""
    if rounding == "rn":
        return np.rint(scaled)
    low = np.floor(scaled)
    rest = scaled - low
    if rounding == "rna":
        return low + (rest >= 0.5)
    if rounding == "rz":
        return low
    if rounding not in ("rp", "rm"):
        raise ValueError(f"rounding: {rounding!r} is not one of {', '.join(ROUNDINGS)}")
    return low + ((rest > 0) & (negative == (rounding == "rm")))


def encode(values: Array, name: str, *, rounding: str = "rn", saturate: bool = False, relu: bool = False) -> Array:
    """Codes of float64 values as cvt rounds them.

    Args:
        rounding: "rn" nearest even, "rna" nearest away, "rz" toward zero, "rp" up, "rm" down.
        saturate: .satfinite: overflow and Inf give the largest finite value. Formats without Inf and NaN always do.
        relu: negative values (and -0) give +0; NaN stays NaN.

    Returns:
        uint8, uint16 or uint32 codes. NaN gives the positive all-ones pattern; in e2m1, e2m3, e3m2 the
        largest value; ue8m0 ignores the sign, sends 0 to code 0 (2^-127) and takes "rp" or "rz" only.
    """
    f = number_format(name)
    values = np.asarray(values, np.float64)
    if f.name == "ue4m3":
        raise ValueError("name: no instruction converts to ue4m3; encode the magnitudes as e4m3")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding: {rounding!r} is not one of {', '.join(ROUNDINGS)}")
    if f.name == "ue8m0":
        return _encode_ue8m0(values, rounding, saturate)
    negative = np.signbit(values)
    if relu:
        values = np.where(negative & ~np.isnan(values), 0.0, values)
        negative = np.signbit(values)
    magnitude = np.abs(values)
    finite = np.isfinite(magnitude)
    safe = np.where(finite, magnitude, 0.0)
    exponent = np.maximum(np.frexp(safe)[1] - 1, f.emin)
    exponent = np.where(safe == 0, f.emin, exponent)
    whole = round_magnitude(np.ldexp(safe, f.mantissa_bits - exponent), negative, rounding)
    # A carry out of the mantissa walks into the exponent field by itself; subnormals have no hidden bit to
    # remove. Exponents far beyond the format are cut before the shift; they overflow either way.
    field = np.minimum(exponent + f.bias - 1, 1 << f.exponent_bits)
    code = (field.astype(np.int64) << f.mantissa_bits) + whole.astype(np.int64)
    stays = saturate | (rounding == "rz") | (~negative & (rounding == "rm")) | (negative & (rounding == "rp"))
    code = np.where(code > f.max_code, np.where(stays, f.max_code, f.overflow_code), code)
    code = np.where(np.isinf(values), f.max_code if saturate else f.overflow_code, code)
    code = (code << f.padding) | np.where(negative, f.sign, 0)
    return np.where(np.isnan(values), f.nan, code).astype(f.dtype)


def _encode_ue8m0(values: Array, rounding: str, saturate: bool) -> Array:
    if rounding not in ("rp", "rz"):
        raise ValueError(f"rounding: ue8m0 takes 'rp' or 'rz', got {rounding!r}")
    magnitude = np.abs(values)
    finite = np.isfinite(magnitude) & (magnitude > 0)
    fraction, exponent = np.frexp(np.where(finite, magnitude, 1.0))
    code = exponent - 1 + 127 + ((rounding == "rp") & (fraction > 0.5))
    over = 0xFE if saturate or rounding == "rz" else 0xFF
    code = np.where(code > 0xFE, over, np.maximum(code, 0))
    code = np.where(magnitude == 0, 0, code)
    code = np.where(np.isinf(magnitude), 0xFE if saturate else 0xFF, code)
    return np.where(np.isnan(magnitude), 0xFF, code).astype(np.uint8)


def encode_pair(
    high: Array, low: Array, name: str, *, rounding: str = "rn", saturate: bool = False, relu: bool = False
) -> Array:
    """cvt d, a, b to an x2 type: ``high`` (a) goes to the upper half, ``low`` (b) to the lower half.

    bf16x2 and f16x2 give uint32, the 8-bit types and the 6-bit ones (one byte each) uint16, e2m1x2 uint8.
    """
    f = number_format(name)
    a, b = (encode(x, name, rounding=rounding, saturate=saturate, relu=relu).astype(np.uint32) for x in (high, low))
    width, kind = _pair_shape(f)
    return ((a << np.uint32(width)) | b).astype(kind)


def decode_pair(codes: Array, name: str) -> tuple[Array, Array]:
    """(high, low) float64 values of an x2 code."""
    f = number_format(name)
    codes = np.asarray(codes).astype(np.uint32)
    width, _ = _pair_shape(f)
    mask = np.uint32((1 << width) - 1)
    return decode((codes >> np.uint32(width)) & mask, name), decode(codes & mask, name)


def _pair_shape(f: NumberFormat) -> tuple[int, Any]:
    if f.bits > 16:
        raise ValueError(f"name: {f.name!r} has no x2 type")
    return (16, np.uint32) if f.bits == 16 else (8, np.uint16) if f.bits > 4 else (4, np.uint8)


def widen_f16(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float64)


def widen_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def narrow_f16(value: Array) -> Array:
    return np.where(np.isnan(value), np.uint16(0x7FFF), value.astype(np.float16).view(np.uint16)).astype(np.uint16)


def narrow_bf16(value: Array) -> Array:
    """Nearest even, from float64 in one rounding: to odd into float32 first, then to bf16."""
    exact = isinstance(value, np.ndarray) and value.dtype == np.float32
    bits = (value if exact else round_to_odd(np.asarray(value, np.float64))).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(value), 0x7FFF, rounded).astype(np.uint16)


def round_to_odd(value: Array) -> Array:
    """float64 to float32, inexact results forced to an odd last bit, so that a second rounding is still correct."""
    near = value.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.int32)
    # `toward` is the neighbour on the other side of `value`; of the two, one is odd.
    inexact = (back != value) & np.isfinite(value) & (bits & 1 == 0)
    away = (np.abs(back) < np.abs(value)).astype(np.int32) * 2 - 1
    return np.where(inexact, bits + away, bits).view(np.float32)


def nibbles(octets: Array) -> Array:
    """uint8 (rows, n) to 4-bit codes (rows, 2 n), the low nibble first."""
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(octets), -1)


def six_bits(octets: Array) -> Array:
    """uint8 (rows, 3 n) to 6-bit codes (rows, 4 n), little-endian."""
    a, b, c = (octets[:, i::3].astype(np.uint32) for i in range(3))
    word = a | b << np.uint32(8) | c << np.uint32(16)
    codes = np.stack([(word >> np.uint32(6 * i)) & np.uint32(63) for i in range(4)], axis=-1)
    return codes.reshape(len(octets), -1).astype(np.uint8)
