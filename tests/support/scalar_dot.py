"""A slow dot-product-add in exact fractions, written from the published description of tensor cores."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

# name: exponent bits, mantissa bits, bias, what the top codes are
FIELDS = {
    "e4m3": (4, 3, 7, "nan"),
    "e5m2": (5, 2, 15, "ieee"),
    "e2m1": (2, 1, 1, ""),
    "e3m2": (3, 2, 3, ""),
    "e2m3": (2, 3, 1, ""),
    "bf16": (8, 7, 127, "ieee"),
    "f16": (5, 10, 15, "ieee"),
    "f32": (8, 23, 127, "ieee"),
}


def scalar(code: int, name: str) -> tuple[Fraction, int] | float:
    """(value, alignment exponent) of a finite code, else a float nan or inf. Zeros have exponent None."""
    e, m, bias, top = FIELDS[name]
    sign = -1 if code >> (e + m) & 1 else 1
    field, mantissa = code >> m & ((1 << e) - 1), code & ((1 << m) - 1)
    if top == "ieee" and field == (1 << e) - 1:
        return sign * float("inf") if mantissa == 0 else float("nan")
    if top == "nan" and field == (1 << e) - 1 and mantissa == (1 << m) - 1:
        return float("nan")
    if field:
        significand, exponent = Fraction(mantissa, 1 << m) + 1, field - bias
    else:
        significand, exponent = Fraction(mantissa, 1 << m), 1 - bias
    return sign * significand * Fraction(2) ** exponent, exponent


def toward_zero(x: Fraction) -> int:
    return abs(x.numerator) // x.denominator * (1 if x >= 0 else -1)


def to_float32(x: Fraction, bits: int) -> float:
    """Truncate to ``bits`` fraction bits of a float32."""
    if x == 0:
        return 0.0
    exponent = -126
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    if exponent > 127:
        return float("inf") if x > 0 else float("-inf")
    quantum = Fraction(2) ** (exponent - bits)
    return float(toward_zero(x / quantum) * quantum)


def scalar_dot(a: list[int], b: list[int], c: int | None, name_a: str, name_b: str, f: int, r: int) -> float:
    """One output of the fused dot-product-add. ``c`` is a float32's bits. NaN stands for the canonical NaN."""
    xs, ys = [scalar(x, name_a) for x in a], [scalar(y, name_b) for y in b]
    z = scalar(c, "f32") if c is not None else (Fraction(0), -126)
    if any(isinstance(v, float) for v in [*xs, *ys, z]):
        as_float = lambda v: v if isinstance(v, float) else float(v[0])  # noqa: E731
        return sum((as_float(x) * as_float(y) for x, y in zip(xs, ys, strict=True)), as_float(z))
    terms = [(x[0] * y[0], x[1] + y[1]) for x, y in zip(xs, ys, strict=True) if x[0] * y[0] != 0]
    if z[0] != 0:
        terms.append(z)
    if not terms:
        return 0.0
    largest = max(e for _, e in terms)
    quantum = Fraction(2) ** (largest - f)
    return to_float32(sum(toward_zero(v / quantum) for v, _ in terms) * quantum, r)


def same_bits(ours: np.ndarray, model: np.ndarray) -> None:
    model = model.astype(np.float32)
    bits = np.where(np.isnan(model), np.uint32(0x7FFFFFFF), (model + np.float32(0)).view(np.uint32))
    wrong = ours.view(np.uint32) != bits
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size}: {ours[wrong][:4]} against {model[wrong][:4]}"


def value_of(code: int) -> float:
    x = scalar(code, "e4m3")
    return x if isinstance(x, float) else float(x[0])


def scalar_fp4(a: list[int], b: list[int], sa: list[float], sb: list[float], c: float) -> float:
    """kind::mxf4nvf4: groups of 16 summed exactly, times scale significands, aligned by scale exponents, F = 35."""
    terms = []
    if c:
        exponent = max(np.frexp(c)[1] - 1, -126)
        terms.append((Fraction(c), int(exponent)))
    for g, (p, q) in enumerate(zip(sa, sb, strict=True)):
        dot = sum(
            (
                scalar(x, "e2m1")[0] * scalar(y, "e2m1")[0]  # type: ignore[index]
                for x, y in zip(a[16 * g : 16 * g + 16], b[16 * g : 16 * g + 16], strict=True)
            ),
            Fraction(0),
        )
        if p and q:
            exponent = sum(max(int(np.frexp(s)[1]) - 1, -6) for s in (p, q))
            terms.append((dot * Fraction(p) * Fraction(q), exponent))
    if not terms:
        return 0.0
    quantum = Fraction(2) ** (max(e for _, e in terms) - 35)
    return to_float32(sum(toward_zero(v / quantum) for v, _ in terms) * quantum, 23)
