"""The number formats from their definitions, in Python integers and fractions: what the quantisers are
judged by.

Nothing here calls torch or the package. Finite float values enter as Fraction; non-finite ones as float.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

FLOAT32_MAX = Fraction(2**24 - 1) * Fraction(2) ** 104


def floor_log2(value: Fraction) -> int:
    """Largest e with 2^e <= value, value > 0."""
    e = value.numerator.bit_length() - value.denominator.bit_length()
    return e if value >= Fraction(2) ** e else e - 1


def round_half_even(value: Fraction) -> int:
    whole = math.floor(value)
    rest = value - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1):
        return whole + 1
    return whole


def round_binary(value: Fraction, precision: int, min_exponent: int) -> Fraction:
    """Nearest number with `precision` significant bits, ties to even; coarser below 2^min_exponent."""
    if value == 0:
        return Fraction(0)
    exponent = max(floor_log2(abs(value)), min_exponent)
    quantum = Fraction(2) ** (exponent - precision + 1)
    return round_half_even(value / quantum) * quantum


def fl32(value: Fraction) -> Fraction:
    """Rounded to float32; overflow is an error, as no rule here relies on it."""
    rounded = round_binary(value, 24, -126)
    assert abs(rounded) <= FLOAT32_MAX, "float32 overflow"
    return rounded


@dataclass(frozen=True)
class Element:
    """A small float format: sign, exponent and mantissa bits, bias, largest magnitude."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_value: Fraction

    @property
    def sign_bit(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    def decode(self, code: int) -> Fraction:
        """Value of a finite code."""
        magnitude = code & (self.sign_bit - 1)
        exponent, mantissa = divmod(magnitude, 1 << self.mantissa_bits)
        if exponent == 0:
            value = Fraction(mantissa, 1 << self.mantissa_bits) * Fraction(2) ** (1 - self.bias)
        else:
            value = (1 + Fraction(mantissa, 1 << self.mantissa_bits)) * Fraction(2) ** (exponent - self.bias)
        assert value <= self.max_value, f"code {code:#x} is not finite"
        return -value if code & self.sign_bit else value

    def encode(self, value: Fraction, negative: bool | None = None) -> int:
        """Code nearest to value, ties to even, saturating; `negative` for zeros."""
        negative = value < 0 if negative is None else negative
        rounded = round_binary(abs(value), self.mantissa_bits + 1, 1 - self.bias)
        rounded = min(rounded, self.max_value)
        if rounded < Fraction(2) ** (1 - self.bias):
            magnitude = int(rounded / Fraction(2) ** (1 - self.bias - self.mantissa_bits))
        else:
            e = floor_log2(rounded)
            mantissa = int((rounded / Fraction(2) ** e - 1) * 2**self.mantissa_bits)
            magnitude = ((e + self.bias) << self.mantissa_bits) + mantissa
        return magnitude | (self.sign_bit if negative else 0)


E4M3 = Element(4, 3, 7, Fraction(448))
E5M2 = Element(5, 2, 15, Fraction(57344))
E2M1 = Element(2, 1, 1, Fraction(6))


def is_negative(value: float) -> bool:
    """Sign bit of a float, zeros and NaN included."""
    return math.copysign(1.0, value) < 0


def fp8_block(values: Sequence[float]) -> tuple[float, list[int]]:
    """(scale, codes) of one block of finite float32 values, by the definition of FP8_BLOCK."""
    amax = max(abs(Fraction(v)) for v in values)
    scale = fl32(max(amax, fl32(Fraction("1e-4"))) / 448)
    inverse = fl32(1 / scale)
    codes = [E4M3.encode(fl32(Fraction(v) * inverse), is_negative(v)) for v in values]
    return float(scale), codes


MX_ELEMENTS = {"MXFP8": (E4M3, 8), "MXFP8_E5M2": (E5M2, 15), "MXFP4": (E2M1, 2)}


def mx_byte(amax: Fraction, name: str, rule: str) -> int:
    """E8M0 byte of a block with a finite amax."""
    element, emax = MX_ELEMENTS[name]
    if rule == "floor":
        exponent = floor_log2(amax) if amax >= Fraction(2) ** -126 else -127
        return min(max(exponent - emax, -127), 127) + 127
    quotient = fl32(amax / element.max_value)
    byte = 0
    while Fraction(2) ** (byte - 127) < quotient:
        byte += 1
    return byte


def mx_block(values: Sequence[float], name: str, rule: str) -> tuple[int, list[int]]:
    """(E8M0 byte, codes) of one block of finite float32 values."""
    element, _ = MX_ELEMENTS[name]
    byte = mx_byte(max(abs(Fraction(v)) for v in values), name, rule)
    multiplier = Fraction(2) ** (127 - byte)
    return byte, [element.encode(fl32(Fraction(v) * multiplier), is_negative(v)) for v in values]


def fl32_capped(value: Fraction) -> Fraction:
    """Rounded to float32, and no larger than its largest number."""
    return min(round_binary(value, 24, -126), FLOAT32_MAX)


def capped_quotient(numerator: Fraction | int, denominator: Fraction) -> Fraction:
    """min(numerator / denominator, largest float32), in float32; a zero denominator counts as tiny."""
    return FLOAT32_MAX if denominator == 0 else fl32_capped(Fraction(numerator) / denominator)


def nvfp4_global(amax: Fraction) -> Fraction:
    """Decode scale of a tensor with this finite amax."""
    return max(fl32(amax / 2688), Fraction(2) ** -128) if amax else Fraction(1)


def nvfp4_block(
    values: Sequence[float], rule: str, global_scale: Fraction, amax: Fraction | None
) -> tuple[int, list[int]]:
    """(e4m3 byte, codes) of one block of finite values; amax: of the tensor, None where global_scale was
    given.
    """
    block_max = max(abs(Fraction(v)) for v in values)
    if rule == "te":
        if amax is None:
            encode = capped_quotient(1, global_scale)
        else:
            encode = capped_quotient(2688, amax) if amax else Fraction(1)
        byte = E4M3.encode(fl32_capped(block_max * fl32(encode * fl32(Fraction(1, 6)))))
        multiplier = capped_quotient(1, fl32(E4M3.decode(byte) * capped_quotient(1, encode)))
    else:
        wanted = fl32_capped(fl32(block_max / 6) / global_scale)
        byte = E4M3.encode(min(max(wanted, Fraction(1, 64)), Fraction(448)))
        multiplier = capped_quotient(capped_quotient(1, global_scale), E4M3.decode(byte))
    # What overflows float32 saturates all the same.
    return byte, [E2M1.encode(round_binary(Fraction(v) * multiplier, 24, -126), is_negative(v)) for v in values]
