"""Floating-point arithmetic and conversions against exact rational numbers."""

# ruff: noqa: E501  (lines of PTX and CUDA are kept whole)

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from support.emulator_kernels import NUMPY, kernel, round_float32, run, values


def exact_fma(a: float, b: float, c: float, mode: str) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        with np.errstate(all="ignore"):
            return float(np.float32(a) * np.float32(b) + np.float32(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return round_float32(exact, mode) if exact else a * b + c


def same(got: np.ndarray, expected: list[float]) -> None:
    for i, (x, y) in enumerate(zip(got.tolist(), expected, strict=True)):
        assert (math.isnan(x) and math.isnan(y)) or (x == y and math.copysign(1, x) == math.copysign(1, y)), (i, x, y)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_fma_is_rounded_once(mode: str) -> None:
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(32).astype(np.float32) for _ in "ab")
    # Sums that fall next to, and onto, midpoints: where a float64 detour would round twice.
    c = (-(a.astype(np.float64) * b)).astype(np.float32)
    c[::3] = np.float32(2.0**24) + rng.integers(0, 9, len(c[::3]))
    a[::4], b[::4] = np.float32(1 + 2**-12), np.float32(1 + 2**-12)
    c[::4] = np.float32(2.0**23 + 1) * np.float32(2.0**-24) * rng.choice([1, -1, 3], len(c[::4]))
    c[1::8] = np.float32(2.0**-140)
    a[1::8] = np.float32(2.0**-100)
    got = run(kernel(f"fma.{mode}.f32 %d, %a, %b, %c;", ["f32"] * 3, "f32"), [a, b, c], np.float32)
    expected = [exact_fma(float(x), float(y), float(z), mode) for x, y, z in zip(a, b, c, strict=True)]
    for x, y in zip(got.tolist(), expected, strict=True):
        assert x == y


@pytest.mark.parametrize("seed", range(4))
def test_fma_special_values(seed: int) -> None:
    a, b, c = (values("f32", seed + 10 * i) for i in range(3))
    rng = np.random.default_rng(seed)
    for x in (a, b, c):
        rng.shuffle(x)
    got = run(kernel("fma.rn.f32 %d, %a, %b, %c;", ["f32"] * 3, "f32"), [a, b, c], np.float32)
    same(got, [exact_fma(float(x), float(y), float(z), "rn") for x, y, z in zip(a, b, c, strict=True)])


FLOAT: list[tuple[str, str, Callable[..., float]]] = [
    ("add.f32 %d, %a, %b;", "f32", lambda a, b: np.float32(a) + np.float32(b)),
    ("sub.rn.f32 %d, %a, %b;", "f32", lambda a, b: np.float32(a) - np.float32(b)),
    ("mul.f32 %d, %a, %b;", "f32", lambda a, b: np.float32(a) * np.float32(b)),
    ("div.rn.f32 %d, %a, %b;", "f32", lambda a, b: np.float32(a) / np.float32(b)),
    ("add.f64 %d, %a, %b;", "f64", lambda a, b: np.float64(a) + np.float64(b)),
    ("min.f32 %d, %a, %b;", "f32", lambda a, b: b if math.isnan(a) else a if math.isnan(b) else min(a, b)),
    ("max.NaN.f32 %d, %a, %b;", "f32", lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else max(a, b)),
    ("abs.f32 %d, %a;", "f32", lambda a, b: abs(a)),
    ("neg.f32 %d, %a;", "f32", lambda a, b: -a),
    ("copysign.f32 %d, %a, %b;", "f32", lambda a, b: math.copysign(b, a) if not math.isnan(b) else math.nan),
    ("sqrt.rn.f32 %d, %a;", "f32", lambda a, b: np.sqrt(np.float32(a))),
    ("add.sat.f32 %d, %a, %b;", "f32", lambda a, b: 0.0 if math.isnan(a + b) else float(np.clip(np.float32(a) + np.float32(b), 0, 1))),
    ("setp.gtu.f32 %q0, %a, %b; selp.f32 %d, 0f3F800000, 0f00000000, %q0;", "f32", lambda a, b: 1.0 if not a <= b else 0.0),
    ("setp.neu.f32 %q0, %a, %b; selp.f32 %d, 0f3F800000, 0f00000000, %q0;", "f32", lambda a, b: float(a != b)),
    ("setp.ne.f32 %q0, %a, %b; selp.f32 %d, 0f3F800000, 0f00000000, %q0;", "f32", lambda a, b: float(a < b or a > b)),
    ("setp.nan.f32 %q0, %a, %b; selp.f32 %d, 0f3F800000, 0f00000000, %q0;", "f32", lambda a, b: float(math.isnan(a) or math.isnan(b))),
    ("mov.f32 %d, 0fC0490FDB;", "f32", lambda a, b: -3.1415927410125732),
    ("testp.finite.f32 %q0, %a; selp.f32 %d, 0f3F800000, 0f00000000, %q0;", "f32", lambda a, b: float(math.isfinite(a))),
]  # fmt: skip


@pytest.mark.parametrize(("body", "kind", "reference"), FLOAT, ids=lambda v: v if isinstance(v, str) else "")
def test_float(body: str, kind: str, reference: Callable[..., float]) -> None:
    a, b = values(kind, 1), values(kind, 2)
    np.random.default_rng(0).shuffle(b)
    with np.errstate(all="ignore"):
        expected = [float(reference(float(x), float(y))) for x, y in zip(a, b, strict=True)]
    got = run(kernel(body, [kind, kind], kind), [a, b], NUMPY[kind])
    for x, y in zip(got.tolist(), expected, strict=True):
        assert (math.isnan(x) and math.isnan(y)) or x == y, (x, y)


@pytest.mark.parametrize(
    ("name", "function", "bound"),
    [("ex2", np.exp2, 2**-22), ("lg2", np.log2, 2**-22), ("rcp", lambda x: 1 / x, 2**-23),
     ("rsqrt", lambda x: 1 / np.sqrt(x), 2**-22), ("sqrt", np.sqrt, 2**-22), ("tanh", np.tanh, 2**-11),
     ("sin", np.sin, 2**-20), ("cos", np.cos, 2**-20)],
)  # fmt: skip
def test_approximations_are_within_the_isa_bounds(name: str, function: Any, bound: float) -> None:
    a = np.random.default_rng(3).uniform(0.1, 3, 32).astype(np.float32)
    got = run(kernel(f"{name}.approx.f32 %d, %a;", ["f32"], "f32"), [a], np.float32)
    exact = function(a.astype(np.float64))
    assert (np.abs(got - exact) <= bound * np.maximum(np.abs(exact), 1)).all()


# ---- conversions
CONVERSIONS: list[tuple[str, str, str, Callable[[Any], Any]]] = [
    ("cvt.s32.s16", "s16", "s32", int),
    ("cvt.u64.u32", "u32", "u64", int),
    ("cvt.u32.u64", "u64", "u32", lambda x: x & 0xFFFFFFFF),
    ("cvt.s64.s32", "s32", "s64", int),
    ("cvt.sat.u16.s32", "s32", "u16", lambda x: min(max(x, 0), 65535)),
    ("cvt.rn.f32.s32", "s32", "f32", lambda x: round_float32(Fraction(x))),
    ("cvt.rz.f32.u32", "u32", "f32", lambda x: round_float32(Fraction(x), "rz")),
    ("cvt.rn.f32.u64", "u64", "f32", lambda x: round_float32(Fraction(x))),
    ("cvt.rn.f64.s32", "s32", "f64", float),
]


@pytest.mark.parametrize(("name", "source", "target", "reference"), CONVERSIONS, ids=[c[0] for c in CONVERSIONS])
def test_convert(name: str, source: str, target: str, reference: Callable[[Any], Any]) -> None:
    a = values(source, 4)
    got = run(kernel(f"{name} %d, %a;", [source], target), [a], NUMPY[target])
    assert [x.item() for x in got] == [reference(int(x)) for x in a]


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_float_to_integer_saturates(mode: str) -> None:
    a = np.array(
        [0.5, 1.5, 2.5, -0.5, -1.5, 3e9, -3e9, np.inf, -np.inf, np.nan, 1e-40, 123.75] + [-7.25] * 20, np.float32
    )
    got = run(kernel(f"cvt.{mode}.s32.f32 %d, %a;", ["f32"], "s32"), [a], np.int32)
    rounding = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    for x, y in zip(a.tolist(), got.tolist(), strict=True):
        if math.isnan(x):
            assert y == 0
        elif math.isinf(x):
            assert y == (2**31 - 1 if x > 0 else -(2**31))
        else:
            assert y == min(max(rounding(x), -(2**31)), 2**31 - 1)


def test_pairs_put_the_first_operand_high() -> None:
    a = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    b = np.random.default_rng(1).standard_normal(32).astype(np.float32)
    torch = pytest.importorskip("torch")
    for kind, dtype in (("bf16x2", torch.bfloat16), ("f16x2", torch.float16)):
        got = run(kernel(f"cvt.rn.{kind}.f32 %d, %a, %b;", ["f32", "f32"], "b32"), [a, b], np.uint32)
        high, low = (torch.from_numpy(x).to(dtype).view(torch.int16).numpy().view(np.uint16) for x in (a, b))
        assert (got == (high.astype(np.uint32) << 16 | low)).all()


def test_fp8_pairs() -> None:
    torch = pytest.importorskip("torch")
    a = (np.random.default_rng(0).standard_normal(32) * 300).astype(np.float32)
    b = np.random.default_rng(1).standard_normal(32).astype(np.float32)
    body = "cvt.rn.satfinite.e4m3x2.f32 %d, %a, %b;"
    got = run(kernel(body, ["f32", "f32"], "b16"), [a, b], np.uint16)
    codes = [torch.from_numpy(np.clip(x, -448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy() for x in (a, b)]
    assert (got == (codes[0].astype(np.uint16) << 8 | codes[1])).all()
    back = run(kernel("cvt.rn.f16x2.e4m3x2 %d, %a;", ["b16"], "b32"), [got], np.uint32)
    low = torch.from_numpy(codes[1]).view(torch.float8_e4m3fn).to(torch.float16).numpy().view(np.uint16)
    assert ((back & 0xFFFF) == low).all()


# ---- sixteen-bit arithmetic
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_sixteen_bit_fma_is_rounded_once(kind: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = torch.float16 if kind == "f16" else torch.bfloat16
    generator = torch.Generator().manual_seed(3)
    a, b, c = (torch.randn(32, generator=generator).to(dtype) for _ in range(3))
    raw = [x.view(torch.int16).numpy().view(np.uint16) for x in (a, b, c)]
    got = run(kernel(f"fma.rn.{kind} %d, %a, %b, %c;", ["b16"] * 3, "b16"), raw, np.uint16)
    # Products of 11 or 8 bits and sums of such size are exact in float64, so torch rounds once here.
    exact = (a.double() * b.double() + c.double()).to(dtype).view(torch.int16).numpy().view(np.uint16)
    assert (got == exact).all()
