"""Less common forms of the ISA's instructions, each against a reference in exact Python numbers, operand by operand."""

# ruff: noqa: E501  (a case a line)

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from padless.emulator.units import number_formats
from support.emulator_kernels import NUMPY, bfe, kernel, round_float32, run, u, values, wrap


def signed(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def clamp(x: int) -> int:
    return max(-(2**31), min(2**31 - 1, x))


def halves(x: int, is_signed: bool) -> list[int]:
    return [signed(x >> s, 16) if is_signed else x >> s & 0xFFFF for s in (0, 16)]


def join(low: int, high: int) -> int:
    return (low & 0xFFFF) | (high & 0xFFFF) << 16


def by_halves(function: Callable[[int, int], int], is_signed: bool) -> Callable[[int, int], int]:
    return lambda a, b: join(*(function(x, y) for x, y in zip(halves(a, is_signed), halves(b, is_signed), strict=True)))


def dp2a(a: int, b: int, c: int, high: bool) -> int:
    return c + sum(signed(a >> 16 * i, 16) * (b >> 8 * (i + 2 * high) & 0xFF) for i in range(2))


def selector(mode: str, c: int) -> list[int]:
    """Which of the eight bytes goes to each place, from the ISA's description in words."""
    c &= 3
    return {
        "f4e": [c + i for i in range(4)],  # four bytes forward from c
        "b4e": [(c - i) % 8 for i in range(4)],  # four bytes backward from c
        "rc8": [c] * 4,
        "ecl": [max(i, c) for i in range(4)],
        "ecr": [min(i, c) for i in range(4)],
        "rc16": [2 * (c & 1) + i % 2 for i in range(4)],
    }[mode]


def permuted(mode: str) -> Callable[[int, int, int], int]:
    return lambda a, b, c: sum((a | b << 32) >> 8 * s & 0xFF and ((a | b << 32) >> 8 * s & 0xFF) << 8 * i
                               for i, s in enumerate(selector(mode, c)))  # fmt: skip


def nth_set(mask: int, base: int, n: int) -> int:
    if n == 0:
        return base if mask >> base & 1 else 0xFFFFFFFF
    step, left, at = (1 if n > 0 else -1), abs(n), base
    while 0 <= at < 32:
        left -= mask >> at & 1
        if left == 0:
            return at
        at += step
    return 0xFFFFFFFF


W = ["u32"] * 3
INTEGER: list[tuple[str, list[str], str, Callable[..., int]]] = [
    ("add.sat.s32 %d, %a, %b;", ["s32", "s32"], "s32", lambda a, b: clamp(a + b)),
    ("sub.sat.s32 %d, %a, %b;", ["s32", "s32"], "s32", lambda a, b: clamp(a - b)),
    ("mad.hi.sat.s32 %d, %a, %b, %c;", ["s32"] * 3, "s32", lambda a, b, c: clamp((a * b >> 32) + c)),
    ("mad.lo.cc.u32 %x1, %a, %b, %c; madc.hi.u32 %d, %a, %b, 5;", W, "u32", lambda a, b, c: (a * b + c + (5 << 32)) >> 32),
    ("mad.lo.cc.u32 %x1, %a, %b, %c; madc.lo.cc.u32 %x2, %a, %b, %x1; addc.u32 %d, 0, 0;", W, "u32",
     lambda a, b, c: ((a * b & 0xFFFFFFFF) + ((a * b + c) & 0xFFFFFFFF) + ((a * b & 0xFFFFFFFF) + c >> 32)) >> 32),
    ("mul24.hi.u32 %d, %a, %b;", ["u32", "u32"], "u32", lambda a, b: ((a & 0xFFFFFF) * (b & 0xFFFFFF)) >> 16),
    ("mul24.lo.s32 %d, %a, %b;", ["s32", "s32"], "s32", lambda a, b: signed(a, 24) * signed(b, 24)),
    ("mad24.hi.sat.s32 %d, %a, %b, %c;", ["s32"] * 3, "s32", lambda a, b, c: clamp(signed(signed(a, 24) * signed(b, 24) >> 16, 32) + c)),
    ("add.u16x2 %d, %a, %b;", ["u32", "u32"], "u32", by_halves(lambda x, y: x + y, False)),
    ("add.s16x2 %d, %a, %b;", ["u32", "u32"], "u32", by_halves(lambda x, y: x + y, True)),
    ("min.u16x2 %d, %a, %b;", ["u32", "u32"], "u32", by_halves(min, False)),
    ("max.s16x2 %d, %a, %b;", ["u32", "u32"], "u32", by_halves(max, True)),
    ("max.relu.s16x2 %d, %a, %b;", ["u32", "u32"], "u32", by_halves(lambda x, y: max(x, y, 0), True)),
    ("min.relu.s32 %d, %a, %b;", ["s32", "s32"], "s32", lambda a, b: max(min(a, b), 0)),
    ("dp4a.u32.u32 %d, %a, %b, %c;", W, "u32", lambda a, b, c: c + sum((a >> s & 255) * (b >> s & 255) for s in (0, 8, 16, 24))),
    ("dp2a.lo.s32.u32 %d, %a, %b, %c;", ["u32", "u32", "s32"], "s32", lambda a, b, c: dp2a(a, b, c, False)),
    ("dp2a.hi.s32.u32 %d, %a, %b, %c;", ["u32", "u32", "s32"], "s32", lambda a, b, c: dp2a(a, b, c, True)),
    ("and.b32 %x1, %b, 31; rem.s32 %x2, %c, 7; fns.b32 %d, %a, %x1, %x2;", ["u32", "u32", "s32"], "u32",
     lambda a, b, c: nth_set(a, b & 31, int(math.fmod(c, 7)))),
    ("szext.wrap.s32 %d, %a, %b;", ["s32", "u32"], "s32", lambda a, b: signed(a, b & 31) if b & 31 else 0),
    ("szext.clamp.u32 %d, %a, %b;", ["u32", "u32"], "u32", lambda a, b: a & ((1 << min(b, 32)) - 1)),
    ("bmsk.clamp.b32 %d, %a, %b;", ["u32", "u32"], "u32", lambda a, b: ((1 << min(b, 32)) - 1) << min(a, 32)),
    ("bmsk.wrap.b32 %d, %a, %b;", ["u32", "u32"], "u32", lambda a, b: ((1 << (b & 31)) - 1) << (a & 31)),
    ("bfe.s32 %d, %a, 28, %b;", ["s32", "u32"], "s32", lambda a, b: bfe("s32")(a, 28, b)),
    ("setp.eq.u32 %q2, %t, 3; lop3.or.b32 %x1|%q1, %a, %b, %c, 0x80, %q2; selp.u32 %d, %x1, 1, %q1;", W, "u32", None),
    ("setp.ne.u32 %q2, %t, 3; lop3.and.b32 _|%q1, %a, %b, %c, 0x80, %q2; selp.u32 %d, 1, 0, %q1;", W, "u32", None),
    ("cvt.pack.sat.s8.s32.b32 %d, %a, %b, %c;", ["s32", "s32", "u32"], "u32",
     lambda a, b, c: c << 16 | (max(-128, min(127, a)) & 255) << 8 | max(-128, min(127, b)) & 255),
    ("cvt.pack.sat.u4.s32.b32 %d, %a, %b, %c;", ["s32", "s32", "u32"], "u32",
     lambda a, b, c: c << 8 | max(0, min(15, a)) << 4 | max(0, min(15, b))),
    ("redux.sync.xor.b32 %d, %a, 0xFFFFFFFF;", ["u32"], "u32", None),
]  # fmt: skip
INTEGER += [
    (f"prmt.b32.{m} %d, %a, %b, %c;", W, "u32", permuted(m)) for m in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
]


@pytest.mark.parametrize(
    ("body", "inputs", "output", "reference"), INTEGER, ids=lambda v: v if isinstance(v, str) else ""
)
def test_integer(body: str, inputs: list[str], output: str, reference: Callable[..., int] | None) -> None:
    arrays = [values(kind, i + 11) for i, kind in enumerate(inputs)]
    if any(name in body for name in ("szext", "bmsk", "bfe")):
        arrays[-1] %= np.uint32(70)
        if "bmsk" in body:
            arrays[0] %= np.uint32(40)
    if "lop3" in body:
        arrays[0][::2] = 0
    got = run(kernel(body, inputs, output), arrays, NUMPY[output])
    for i in range(32):
        x = [int(array[i]) for array in arrays]
        if "lop3.or" in body:
            both = x[0] & x[1] & x[2]
            expected = both if both or i == 3 else 1
        elif "lop3.and" in body:
            expected = int(x[0] & x[1] & x[2] != 0 and i != 3)
        elif reference is None:
            expected = int(np.bitwise_xor.reduce(arrays[0]))
        else:
            expected = reference(*x)
        assert int(got[i]) == wrap(output, expected), (i, [hex(u(k, v)) for k, v in zip(inputs, x, strict=True)])


# ---- NaN, signed zeros, rounding
@pytest.mark.parametrize(
    "body",
    ["add.f32 %d, %a, %b;", "sub.f32 %d, %a, %b;", "mul.f32 %d, %a, %b;", "fma.rn.f32 %d, %a, %b, %a;", "fma.rz.f32 %d, %a, %b, %a;",
     "div.rn.f32 %d, %a, %b;", "sqrt.rn.f32 %d, %a;", "rcp.approx.f32 %d, %a;", "ex2.approx.f32 %d, %a;", "min.NaN.f32 %d, %a, %b;",
     "max.f32 %d, %a, %a;"],
)  # fmt: skip
def test_every_nan_is_the_canonical_one(body: str) -> None:
    """Payloads and signs of the operands do not survive."""
    a = np.full(32, 0xFFC12345, np.uint32).view(np.float32)
    a[16:] = np.uint32(0x7F800001).view(np.float32)
    b = np.linspace(1, 2, 32).astype(np.float32)
    got = run(kernel(body, ["f32", "f32"], "f32"), [a, b], np.float32)
    assert (got.view(np.uint32) == 0x7FFFFFFF).all()


@pytest.mark.parametrize("repeat", [1, 6])
def test_made_nans_are_canonical_too(repeat: int) -> None:
    """Inf - Inf, 0 * Inf; also where several instructions are computed at once, and not in lanes that do not take part."""
    body = "setp.lt.u32 %q0, %t, 8;" + "".join(f"@%q0 sub.f32 %x{i}, %a, %b;" for i in range(repeat))
    body = "".join(f"mov.f32 %x{i}, 0fFFC00001;" for i in range(repeat)) + body + f"mov.b32 %d, %x{repeat - 1};"
    infinite = np.full(32, np.inf, np.float32)
    got = run(kernel(body, ["f32", "f32"], "f32"), [infinite, infinite], np.float32).view(np.uint32)
    assert (got[:8] == 0x7FFFFFFF).all()
    assert (got[8:] == 0xFFC00001).all()
    body = "".join(f"mul.f32 %x{i}, %a, %b;" for i in range(repeat)) + f"mov.b32 %d, %x{repeat - 1};"
    got = run(kernel(body, ["f32", "f32"], "f32"), [infinite, 0 * np.ones(32, np.float32)], np.float32)
    assert (got.view(np.uint32) == 0x7FFFFFFF).all()


def bits32(x: np.ndarray) -> list[int]:
    return [int(v) for v in np.asarray(x, np.float32).view(np.uint32)]


def test_minimum_and_maximum_know_the_sign_of_zero() -> None:
    a, b = (np.tile(np.array(x, np.float32), 8) for x in ([0.0, -0.0, 0.0, -0.0], [-0.0, 0.0, 0.0, -0.0]))
    low = run(kernel("min.f32 %d, %a, %b;", ["f32", "f32"], "f32"), [a, b], np.float32)
    high = run(kernel("max.f32 %d, %a, %b;", ["f32", "f32"], "f32"), [a, b], np.float32)
    assert np.signbit(low).tolist() == [True, True, False, True] * 8
    assert np.signbit(high).tolist() == [False, False, False, True] * 8


def test_minimum_of_magnitudes_with_the_product_of_the_signs() -> None:
    rng = np.random.default_rng(4)
    a, b = (rng.standard_normal(32).astype(np.float32) for _ in "ab")
    got = run(kernel("min.xorsign.abs.f32 %d, %a, %b;", ["f32", "f32"], "f32"), [a, b], np.float32)
    assert bits32(got) == bits32(np.sign(a) * np.sign(b) * np.minimum(np.abs(a), np.abs(b)))
    got = run(kernel("max.abs.f32 %d, %a, %b, %c;", ["f32"] * 3, "f32"), [a, b, -a * 2], np.float32)
    assert bits32(got) == bits32(np.maximum(np.abs(a) * 2, np.abs(b)))


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["div", "rcp", "sqrt"])
def test_directed_division_and_root(name: str, mode: str) -> None:
    rng = np.random.default_rng(5)
    a, b = ((rng.uniform(0.1, 9, 32) * 2.0 ** rng.integers(-70, 70, 32)).astype(np.float32) for _ in "ab")
    if name != "sqrt":
        b *= rng.choice(np.array([1, -1], np.float32), 32)
    text = {"div": f"div.{mode}.f32 %d, %a, %b;", "rcp": f"rcp.{mode}.f32 %d, %b;", "sqrt": f"sqrt.{mode}.f32 %d, %b;"}[
        name
    ]
    got = run(kernel(text, ["f32", "f32"], "f32"), [a, b], np.float32)
    for x, y, z in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        if name == "sqrt":  # the last number whose square is not above, or the first not below
            up = float(np.nextafter(np.float32(z), np.float32(np.inf)))
            down = float(np.nextafter(np.float32(z), np.float32(0)))
            square, exact = Fraction(z) ** 2, Fraction(y)
            assert square >= exact > Fraction(down) ** 2 if mode == "rp" else square <= exact < Fraction(up) ** 2
        else:
            assert z == round_float32((Fraction(x) if name == "div" else 1) / Fraction(y), mode)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_directed_double_precision(mode: str) -> None:
    rng = np.random.default_rng(6)
    a, b = (rng.standard_normal(32) for _ in "ab")
    b[::2] *= 2.0**-40
    add = run(kernel(f"add.{mode}.f64 %d, %a, %b;", ["f64", "f64"], "f64"), [a, b], np.float64)
    mul = run(kernel(f"mul.{mode}.f64 %d, %a, %b;", ["f64", "f64"], "f64"), [a, b], np.float64)
    inexact = 0
    for x, y, s, p in zip(a.tolist(), b.tolist(), add.tolist(), mul.tolist(), strict=True):
        for got, exact in ((s, Fraction(x) + Fraction(y)), (p, Fraction(x) * Fraction(y))):
            inexact += Fraction(got) != exact
            up, down = (Fraction(float(np.nextafter(got, d))) for d in (np.inf, -np.inf))
            toward = "rm" if exact > 0 else "rp"
            if mode == "rn":
                assert abs(Fraction(got) - exact) <= min(abs(up - exact), abs(down - exact))
            elif (toward if mode == "rz" else mode) == "rm":
                assert Fraction(got) <= exact < up
            else:
                assert down < exact <= Fraction(got)
    assert inexact > 20


def test_mixed_precision_sums() -> None:
    """add and fma of 16-bit operands into float32: one rounding."""
    rng = np.random.default_rng(7)
    a, b = (rng.standard_normal(32).astype(np.float16) for _ in "ab")
    c = (rng.standard_normal(32) * 2.0 ** rng.integers(-20, 5, 32)).astype(np.float32)
    got = run(
        kernel("fma.rn.f32.f16 %d, %a, %b, %c;", ["f16", "f16", "f32"], "f32"),
        [a.view(np.uint16), b.view(np.uint16), c],
        np.float32,
    )
    assert got.tolist() == [
        round_float32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    got = run(kernel("sub.rz.f32.f16 %d, %a, %b;", ["f16", "f32"], "f32"), [a.view(np.uint16), c], np.float32)
    assert got.tolist() == [
        round_float32(Fraction(float(x)) - Fraction(float(z)), "rz") for x, z in zip(a, c, strict=True)
    ]


def test_sixteen_bit_modifiers() -> None:
    rng = np.random.default_rng(8)
    a, b, c = (rng.standard_normal(32).astype(np.float16) for _ in "abc")
    a[3] = 2.0**-20  # subnormal
    b[3] = 1
    c[3] = 0
    codes = [x.view(np.uint16) for x in (a, b, c)]
    exact = (a.astype(np.float64) * b + c).astype(np.float16)
    for text, expected in (
        ("fma.rn.relu.f16 %d, %a, %b, %c;", np.where(exact < 0, 0, exact)),
        ("fma.rn.sat.f16 %d, %a, %b, %c;", np.clip(exact, 0, 1)),
        ("fma.rn.ftz.f16 %d, %a, %b, %c;", np.where(np.abs(a) < 2.0**-14, c, exact)),
        ("mul.sat.f16 %d, %a, %b;", np.clip((a.astype(np.float64) * b).astype(np.float16), 0, 1)),
    ):
        got = run(kernel(text, ["f16"] * 3, "f16"), codes, np.uint16).view(np.float16)
        assert (got == expected).all(), text
    codes[0][5] = 0xFFFF
    got = run(kernel("fma.rn.oob.f16 %d, %a, %b, %c;", ["f16"] * 3, "f16"), codes, np.uint16)
    assert got[5] == 0
    assert (np.delete(got.view(np.float16), 5) == np.delete(exact, 5)).all()


def test_packed_comparisons() -> None:
    rng = np.random.default_rng(9)
    a, b = (rng.integers(-3, 4, 64).astype(np.float16) for _ in "ab")
    a[7] = np.nan
    pack = [x.view(np.uint32) for x in (a, b)]
    text = "setp.lt.f16x2 %q0|%q1, %a, %b; selp.u32 %x1, 1, 0, %q0; selp.u32 %x2, 2, 0, %q1; or.b32 %d, %x1, %x2;"
    got = run(kernel(text, ["f16x2", "f16x2"], "u32"), pack, np.uint32)
    less = a < b
    assert got.tolist() == [int(x) + 2 * int(y) for x, y in less.reshape(32, 2)]
    got = run(kernel("set.lt.f16x2.f16x2 %d, %a, %b;", ["f16x2", "f16x2"], "f16x2"), pack, np.uint32)
    assert (got.view(np.float16) == less).all()
    got = run(
        kernel("set.neu.u32.f16 %d, %a, %b;", ["f16", "f16"], "u32"),
        [x.view(np.uint16)[:32].copy() for x in (a, b)],
        np.uint32,
    )
    assert (got == np.where(a[:32] != b[:32], 0xFFFFFFFF, 0)).all()


@pytest.mark.parametrize("mode", ["rn", "rna", "rz"])
def test_tf32(mode: str) -> None:
    x = values("f32", 3)
    got = run(kernel(f"cvt.{mode}.tf32.f32 %d, %a;", ["f32"], "f32"), [x], np.float32)
    for a, b in zip(x.tolist(), got.tolist(), strict=True):
        if not math.isfinite(a) or abs(a) < 2.0**-126 or abs(a) > 2.0**127:
            continue
        unit = Fraction(2) ** (math.frexp(a)[1] - 11)
        scaled = abs(Fraction(a)) / unit
        whole, rest = divmod(scaled, 1)
        up = {
            "rz": False,
            "rna": rest >= Fraction(1, 2),
            "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1),
        }[mode]
        assert abs(Fraction(b)) == (whole + up) * unit
        assert (b < 0) == (a < 0)


def test_directed_halves() -> None:
    x = (np.random.default_rng(2).standard_normal(32) * 100).astype(np.float32)
    low = run(kernel("cvt.rm.f16.f32 %d, %a;", ["f32"], "f16"), [x], np.uint16).view(np.float16)
    high = run(kernel("cvt.rp.f16.f32 %d, %a;", ["f32"], "f16"), [x], np.uint16).view(np.float16)
    assert (low <= x).all()
    assert (high >= x).all()
    assert (np.nextafter(low, np.float16(np.inf)) == high).all()


def test_float_reductions_across_the_warp() -> None:
    x = np.random.default_rng(1).standard_normal(32).astype(np.float32)
    x[9] = np.nan
    got = run(kernel("redux.sync.max.abs.f32 %d, %a, 0xFFFFFFFF;", ["f32"], "f32"), [x], np.float32)
    assert (got == np.nanmax(np.abs(x))).all()
    got = run(kernel("redux.sync.min.NaN.f32 %d, %a, 0xFFFFFFFF;", ["f32"], "f32"), [x], np.float32)
    assert np.isnan(got).all()


@pytest.mark.parametrize("saturate", [False, True])
def test_integer_products_wrap_or_saturate(saturate: bool) -> None:
    """Every sum of 16 products passes 2^31 - 1."""
    rng = np.random.default_rng(11)
    a, b = (rng.integers(1, 128, 128).astype(np.int8).view(np.uint32) for _ in "ab")
    c = np.full(32, (1 << 31) - 5, np.int32)
    form = "mma.sync.aligned.m16n8k16.row.col" + (".satfinite" if saturate else "") + ".s32.s8.s8.s32"
    text = form + " {%d, %x1, %x2, %x3}, {%a, %a}, {%b}, {%c, %c, %c, %c};"
    got = run(kernel(text, ["b32", "b32", "s32"], "s32"), [a, b, c], np.int32)
    rows, columns = a.view(np.int8).reshape(8, 16).astype(int), b.view(np.int8).reshape(8, 16).astype(int)
    sums = (rows @ columns.T)[np.arange(32) // 4, 2 * (np.arange(32) % 4)] + (1 << 31) - 5
    assert got.tolist() == ([(1 << 31) - 1] * 32 if saturate else (sums - (1 << 32)).tolist())


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_atomics_of_one_sixteen_bit_number(kind: str) -> None:
    x, y = (np.random.default_rng(seed).integers(-99, 99, 32) / 4 for seed in (1, 2))
    bits = [number_formats.encode(v, kind) for v in (x, y)]
    memory = bits[1].copy()
    got = run(kernel(f"atom.global.add.noftz.{kind} %d, [%p], %a;", [kind, kind], kind), [bits[0], memory], np.uint16)
    assert (got == bits[1]).all()
    assert (
        number_formats.decode(memory, kind) == number_formats.decode(number_formats.encode(x + y, kind), kind)
    ).all()
