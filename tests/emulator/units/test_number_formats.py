"""Number formats, exhaustively where they are small, against their bit fields read as fractions and against torch."""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from padless.emulator.units import number_formats
from padless.emulator.units.number_formats import decode, encode

# name: sign bits, exponent bits, mantissa bits, bias, top codes. From the OCP and IEEE definitions.
FIELDS = {
    "e4m3": (1, 4, 3, 7, "nan"),
    "e5m2": (1, 5, 2, 15, "ieee"),
    "e2m1": (1, 2, 1, 1, ""),
    "e3m2": (1, 3, 2, 3, ""),
    "e2m3": (1, 2, 3, 1, ""),
    "ue4m3": (0, 4, 3, 7, "nan"),
    "bf16": (1, 8, 7, 127, "ieee"),
    "f16": (1, 5, 10, 15, "ieee"),
}


def value_of(code: int, name: str) -> Fraction | float:
    signs, e, m, bias, top = FIELDS[name]
    sign = -1 if signs and code >> (e + m) & 1 else 1
    field, mantissa = code >> m & ((1 << e) - 1), code & ((1 << m) - 1)
    if top == "ieee" and field == (1 << e) - 1:
        return sign * float("inf") if mantissa == 0 else float("nan")
    if top == "nan" and field == (1 << e) - 1 and mantissa == (1 << m) - 1:
        return float("nan")
    if field == 0:
        return sign * Fraction(mantissa, 1 << m) * Fraction(2) ** (1 - bias)
    return sign * (1 + Fraction(mantissa, 1 << m)) * Fraction(2) ** (field - bias)


@pytest.mark.parametrize("name", FIELDS)
def test_every_code_decodes(name: str) -> None:
    signs, e, m, _, _ = FIELDS[name]
    width = signs + e + m
    got = decode(np.arange(1 << width), name)
    for code in range(1 << width):
        want = value_of(code, name)
        if isinstance(want, float):
            assert np.isnan(got[code]) if want != want else got[code] == want
        else:
            assert Fraction(got[code]) == want, code
            assert np.signbit(got[code]) == bool(signs and code >> (e + m) & 1)
    # the values that everybody knows
    known = {"e4m3": (0x7E, 448), "e5m2": (0x7B, 57344), "e2m1": (0x7, 6), "e3m2": (0x1F, 28), "e2m3": (0x1F, 7.5),
             "ue4m3": (0x38, 1), "bf16": (0x3FC0, 1.5), "f16": (0x7BFF, 65504)}  # fmt: skip
    assert got[known[name][0]] == known[name][1]


def test_wide_and_unsigned_codes() -> None:
    assert decode(np.array([0, 127, 254]), "ue8m0").tolist() == [2.0**-127, 1.0, 2.0**127]
    assert np.isnan(decode(np.array([255]), "ue8m0")[0])
    assert decode(np.array([0xB8, 0xFF]), "ue4m3")[0] == 1.0
    assert np.isnan(decode(np.array([0xB8, 0xFF]), "ue4m3")[1])
    assert decode(np.array([0x3F801FFF], np.uint32), "tf32")[0] == 1.0
    assert decode(np.array([0x3F802000], np.uint32), "tf32")[0] == 1 + 2.0**-10
    assert decode(np.array([0x00000001], np.uint32), "f32")[0] == 2.0**-149
    assert decode(np.array([0xFA]), "e2m1")[0] == -1.0  # the low four bits count


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "e3m2", "e2m3", "bf16", "f16", "ue8m0"])
def test_split_is_the_value(name: str) -> None:
    width = 16 if name in ("bf16", "f16") else 8 if name in ("e4m3", "e5m2", "ue8m0") else 6 if "3" in name else 4
    codes = np.arange(1 << width)
    sign, exponent, significand = number_formats.split(codes, name)
    mantissa = 0 if name == "ue8m0" else FIELDS[name][2]
    values = decode(codes, name)
    good = np.isfinite(values)
    np.testing.assert_array_equal(
        ((-1.0) ** sign * significand * 2.0 ** (exponent.astype(float) - mantissa))[good], values[good]
    )


@cache
def neighbours(name: str) -> list[tuple[Fraction, int]]:
    """(value, code) of the finite non-negative codes, ascending."""
    _, e, m, _, _ = FIELDS[name]
    pairs = [(value_of(c, name), c) for c in range(1 << (e + m))]
    return [(v, c) for v, c in pairs if isinstance(v, Fraction)]


def slow_encode(x: Fraction, name: str, rounding: str, saturate: bool) -> int:
    """Search the codes."""
    _, e, m, _, top = FIELDS[name]
    table = neighbours(name)
    sign = 1 << (e + m) if x < 0 else 0
    size = abs(x)
    place = bisect_right(table, size, key=lambda p: p[0]) - 1
    below = table[place]
    if below[0] == size:
        return below[1] | sign
    up = rounding == ("rp" if x > 0 else "rm")
    if below is table[-1]:
        # the value that would follow the largest
        step = table[-1][0] - table[-2][0]
        middle = below[0] + step / 2
        goes = up or (rounding == "rn" and (size > middle or (size == middle and below[1] & 1)))
        goes = goes or (rounding == "rna" and size >= middle)
        stays = not goes or saturate or not top
        return (below[1] if stays else below[1] + 1) | sign
    above = table[place + 1]
    middle = (below[0] + above[0]) / 2
    goes = up or (rounding == "rna" and size >= middle)
    goes = goes or (rounding == "rn" and (size > middle or (size == middle and below[1] & 1)))
    return (above if goes else below)[1] | sign


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "e3m2", "e2m3"])
@pytest.mark.parametrize("rounding", ["rn", "rna", "rz", "rp", "rm"])
@pytest.mark.parametrize("saturate", [False, True])
def test_encoding_around_every_boundary(name: str, rounding: str, saturate: bool) -> None:
    """Every value, every midpoint, and both neighbours of each, positive and negative, and far beyond the end."""
    table = [v for v, _ in neighbours(name)]
    table.append(2 * table[-1] - table[-2])
    points = table + [(a + b) / 2 for a, b in pairwise(table)]
    hair = Fraction(1, 1 << 40)
    xs = [s * x * f for x in points for s in (1, -1) for f in (1, 1 - hair, 1 + hair)] + [table[-1] * 5, -table[-1] * 5]
    xs = [x for x in xs if x != 0]
    got = encode(np.array([float(x) for x in xs]), name, rounding=rounding, saturate=saturate)
    for x, code in zip(xs, got, strict=True):
        assert code == slow_encode(x, name, rounding, saturate), (float(x), code)


@pytest.mark.parametrize("name", ["bf16", "f16"])
@pytest.mark.parametrize("rounding", ["rn", "rna", "rz", "rp", "rm"])
def test_sixteen_bits_round_trip_and_round(name: str, rounding: str) -> None:
    codes = np.arange(1 << 16)
    values = decode(codes, name)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(encode(values, name, rounding=rounding)[numbers], codes[numbers])
    finite = np.flatnonzero(np.isfinite(values) & (codes < 0x8000))[:-1]
    low, high = values[finite], values[finite + 1]
    quarter = low + (high - low) * 0.25
    middle = low + (high - low) * 0.5
    up = {"rn": (finite, finite + (finite & 1)), "rna": (finite, finite + 1), "rz": (finite, finite),
          "rp": (finite + 1, finite + 1), "rm": (finite, finite)}[rounding]  # fmt: skip
    np.testing.assert_array_equal(encode(quarter, name, rounding=rounding), up[0])
    np.testing.assert_array_equal(encode(middle, name, rounding=rounding), up[1])
    mirrored = {"rp": "rm", "rm": "rp"}.get(rounding, rounding)
    np.testing.assert_array_equal(encode(-middle, name, rounding=mirrored), up[1] | 0x8000)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("e5m2", torch.float8_e5m2), ("bf16", torch.bfloat16), ("f16", torch.float16), ("e4m3", torch.float8_e4m3fn)],
)
def test_torch_agrees(name: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    x = np.concatenate([bits.view(np.float32), rng.standard_normal(100_000).astype(np.float32) * 100])
    x = x[~np.isnan(x)]
    if name == "e4m3":
        x = x[np.abs(x) <= 464]  # beyond, libraries differ
    want = torch.from_numpy(x.copy()).to(dtype)
    want_bits = want.view(torch.uint8 if want.itemsize == 1 else torch.int16).numpy()
    got = encode(x, name, saturate=name == "e4m3")
    np.testing.assert_array_equal(got, want_bits.view(got.dtype))
    back = decode(got, name).astype(np.float32)
    np.testing.assert_array_equal(back, want.to(torch.float32).numpy())


def test_specials() -> None:
    inf, nan = np.inf, np.nan
    x = np.array([inf, -inf, nan, 1e30, -1e30, -0.0])
    assert encode(x, "e4m3", saturate=True).tolist() == [0x7E, 0xFE, 0x7F, 0x7E, 0xFE, 0x80]
    assert encode(x, "e4m3").tolist() == [0x7F, 0xFF, 0x7F, 0x7F, 0xFF, 0x80]
    assert encode(x, "e5m2", saturate=True).tolist() == [0x7B, 0xFB, 0x7F, 0x7B, 0xFB, 0x80]
    assert encode(x, "e5m2").tolist() == [0x7C, 0xFC, 0x7F, 0x7C, 0xFC, 0x80]
    assert encode(x, "e2m1", saturate=True).tolist() == [7, 15, 7, 7, 15, 8]
    assert encode(x, "f16").tolist() == [0x7C00, 0xFC00, 0x7FFF, 0x7C00, 0xFC00, 0x8000]
    assert encode(x, "bf16", saturate=True).tolist()[:3] == [0x7F7F, 0xFF7F, 0x7FFF]
    assert encode(x, "f32").tolist()[:3] == [0x7F800000, 0xFF800000, 0x7FFFFFFF]
    assert encode(np.array([-3.0, nan, -0.0, 2.0]), "e4m3", saturate=True, relu=True).tolist() == [0, 0x7F, 0, 0x40]
    assert encode(np.array([1e39, -1e39]), "f32", rounding="rz").tolist() == [0x7F7FFFFF, 0xFF7FFFFF]
    assert encode(np.array([1e39, -1e39]), "f32", rounding="rp").tolist() == [0x7F800000, 0xFF7FFFFF]


def test_ue8m0() -> None:
    x = np.array(
        [1.0, 1.0000001, 1.9999999, 2.0**-127, 2.0**-149, 1.5 * 2.0**-127, 0.0, -4.0, 2.0**127 * 1.5, np.inf, np.nan]
    )
    assert encode(x, "ue8m0", rounding="rp").tolist() == [127, 128, 128, 0, 0, 1, 0, 129, 255, 255, 255]
    assert encode(x, "ue8m0", rounding="rp", saturate=True).tolist() == [127, 128, 128, 0, 0, 1, 0, 129, 254, 254, 255]
    assert encode(x, "ue8m0", rounding="rz").tolist() == [127, 127, 127, 0, 0, 0, 0, 129, 254, 255, 255]
    with pytest.raises(ValueError, match="'rp' or 'rz'"):
        encode(x, "ue8m0")


def test_tf32_and_f32_of_f64() -> None:
    x = np.array([1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-30, -(1 + 2.0**-11)])
    assert encode(x, "tf32", rounding="rna").tolist() == [0x3F802000, 0x3F802000, 0xBF802000]
    assert encode(x, "tf32", rounding="rn").tolist() == [0x3F800000, 0x3F802000, 0xBF800000]
    rng = np.random.default_rng(2)
    wild = rng.standard_normal(20_000) * 2.0 ** rng.integers(-160, 130, 20_000)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(encode(wild, "f32"), wild.astype(np.float32).view(np.uint32))


def test_pairs_put_the_first_operand_high() -> None:
    high, low = np.array([1.0, -2.0]), np.array([3.0, 0.5])
    assert number_formats.encode_pair(high, low, "e4m3x2", saturate=True).tolist() == [0x3844, 0xC030]
    assert number_formats.encode_pair(high, low, "bf16x2").tolist() == [0x3F804040, 0xC0003F00]
    assert number_formats.encode_pair(high, low, "e2m1x2").tolist() == [0x25, 0xC1]
    assert number_formats.encode_pair(high, low, "ue8m0x2", rounding="rp").tolist() == [0x7F81, 0x807E]
    for name in ("e4m3x2", "e2m1x2", "f16x2"):
        back = number_formats.decode_pair(number_formats.encode_pair(high, low, name), name)
        np.testing.assert_array_equal(back, (high, low))


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="e9m9"):
        decode(np.array([0]), "e9m9")
    with pytest.raises(ValueError, match="ue4m3"):
        encode(np.array([1.0]), "ue4m3")
    with pytest.raises(ValueError, match="rounding"):
        encode(np.array([1.0]), "e4m3", rounding="rs")
