"""The dot-product-add against a slow scalar model in exact fractions, written from the published description."""

from __future__ import annotations

import time
from fractions import Fraction

import numpy as np
import pytest

from padless.emulator.units import arithmetic
from padless.emulator.units.arithmetic import FP4_BLOCK, HOPPER_FP8, WIDE, Rule, decode_operand, dot_product_add
from support.scalar_dot import FIELDS, same_bits, scalar, scalar_dot, scalar_fp4, value_of


def random_codes(rng: np.random.Generator, name: str, shape: tuple[int, int], data: str) -> np.ndarray:
    e, m, _, _ = FIELDS[name]
    width = 1 + e + m
    codes = rng.integers(0, 1 << width, shape)
    if data == "finite":
        exponents = rng.integers(1, (1 << e) - (2 if e > 2 else 0), shape)
        codes = codes & ~(((1 << e) - 1) << m) | exponents << m
    elif data == "tiny":  # subnormals and the first two normal exponents, with zeros
        codes = codes & ~(((1 << e) - 1) << m) | rng.integers(0, 3, shape) << m
        codes = np.where(rng.random(shape) < 0.3, 0, codes)
    elif data == "narrow":  # a few exponents, so that sums cancel
        middle = 1 << (e - 1)
        codes = codes & ~(((1 << e) - 1) << m) | rng.integers(middle - 1, middle + 1, shape) << m
    return codes


def random_accumulators(rng: np.random.Generator, shape: tuple[int, int], data: str) -> np.ndarray | None:
    if data == "none":
        return None
    c = rng.standard_normal(shape)
    if data == "binades":
        c = c * 2.0 ** rng.integers(-20, 21, shape)
    elif data == "subnormal":
        c = c * 2.0**-128
    elif data == "specials":
        c = np.where(rng.random(shape) < 0.2, rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0], shape), c)
    return c.astype(np.float32)


CASES = [
    (HOPPER_FP8, "e4m3", "e4m3", 32),
    (HOPPER_FP8, "e4m3", "e5m2", 32),
    (HOPPER_FP8, "e5m2", "e5m2", 32),
    (WIDE, "bf16", "bf16", 16),
    (WIDE, "f16", "f16", 16),
    (WIDE, "e4m3", "e2m1", 32),
    (WIDE, "e5m2", "e3m2", 32),
    (WIDE, "e2m3", "e4m3", 32),
]


@pytest.mark.parametrize(("rule", "name_a", "name_b", "k"), CASES)
@pytest.mark.parametrize("data", ["finite", "narrow", "tiny", "bytes"])
@pytest.mark.parametrize("accumulator", ["none", "normal", "binades", "subnormal", "specials"])
def test_truncation_against_fractions(
    rule: arithmetic.Rule, name_a: str, name_b: str, k: int, data: str, accumulator: str
) -> None:
    rng = np.random.default_rng([k, len(data), len(accumulator), ord(name_a[1]), ord(name_b[1])])
    a, b = random_codes(rng, name_a, (7, k), data), random_codes(rng, name_b, (5, k), data)
    c = random_accumulators(rng, (7, 5), accumulator)
    ours = dot_product_add(decode_operand(a, name_a), decode_operand(b, name_b), c, rule)
    model = np.array(
        [
            [
                scalar_dot(
                    a[i].tolist(), b[j].tolist(), None if c is None else int(c.view(np.uint32)[i, j]), name_a, name_b,
                    rule.fraction_bits, rule.result_bits,
                )
                for j in range(5)
            ]
            for i in range(7)
        ]
    )  # fmt: skip
    same_bits(ours, model)


@pytest.mark.parametrize(("f", "r"), [(12, 13), (14, 13), (13, 23), (13, 12)])
def test_one_bit_off_shows(f: int, r: int) -> None:
    """The comparison above can fail: a rule one bit off disagrees on many outputs."""
    rng = np.random.default_rng(1)
    a, b = random_codes(rng, "e4m3", (8, 32), "finite"), random_codes(rng, "e4m3", (8, 32), "finite")
    c = rng.standard_normal((8, 8)).astype(np.float32) * 100
    x, y = decode_operand(a, "e4m3"), decode_operand(b, "e4m3")
    right = dot_product_add(x, y, c, HOPPER_FP8)
    wrong = dot_product_add(x, y, c, arithmetic.Rule("wrong", f, r))
    assert (right != wrong).mean() > 0.15


def test_worked_example() -> None:
    """448 * 448 + 2^-9 * 2^-9: terms far below the largest exponent, 16, vanish, and more so at F = 13 than at 25."""
    a, b = np.zeros((1, 32), np.uint8), np.zeros((1, 32), np.uint8)
    a[0, :2], b[0, :2] = (0x7E, 0x01), (0x7E, 0x01)
    x, y = decode_operand(a, "e4m3"), decode_operand(b, "e4m3")
    assert dot_product_add(x, y, None, HOPPER_FP8)[0, 0] == 448.0 * 448.0
    # largest exponent 16: F = 13 keeps multiples of 8, so 7.99 of an accumulator vanishes and 8 stays
    assert dot_product_add(x, y, np.array([[7.99]], np.float32), HOPPER_FP8)[0, 0] == 448.0 * 448.0
    assert dot_product_add(x, y, np.array([[-7.99]], np.float32), HOPPER_FP8)[0, 0] == 448.0 * 448.0
    # 448 * 448 + 8 = 200712 = 1.53... * 2^17, where R = 13 keeps multiples of 16
    assert dot_product_add(x, y, np.array([[8.0]], np.float32), HOPPER_FP8)[0, 0] == 200704
    assert dot_product_add(x, y, np.array([[16.0]], np.float32), HOPPER_FP8)[0, 0] == 200720
    assert dot_product_add(x, y, np.array([[7.99]], np.float32), WIDE)[0, 0] == np.float32(200711.984375)


def test_a_zero_factor_does_not_align() -> None:
    """0 * 2^100 must not push a product of 2^-60 out of the window."""
    a, b = np.zeros((1, 16), np.uint16), np.zeros((1, 16), np.uint16)
    a[0, 1], b[0, 0], b[0, 1] = (127 - 60) << 7, (127 + 100) << 7, 127 << 7
    out = dot_product_add(decode_operand(a, "bf16"), decode_operand(b, "bf16"), None, WIDE)
    assert out[0, 0] == 2.0**-60


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("rule", [HOPPER_FP8, WIDE], ids=lambda rule: rule.name)
def test_a_tiny_accumulator_outlives_products_of_zero(rule: Rule, name: str) -> None:
    """Accumulators of every binade down to the subnormals, next to a row of zeros and one of zeros and numbers."""
    rng = np.random.default_rng(5)
    a, b = (random_codes(rng, name, (rows, 32), "finite") for rows in (2, 149))
    a[0], b[:, ::2] = 0, 0
    c = np.ldexp(rng.uniform(1, 2, (2, 149)), np.arange(-149, 0)).astype(np.float32)
    x, y = decode_operand(a, name), decode_operand(b, name)
    out = dot_product_add(x, y, c, rule)
    alone = arithmetic.truncate(c.astype(np.float64), min(rule.result_bits, rule.fraction_bits))
    np.testing.assert_array_equal(out[0], alone[0])
    assert np.isfinite(out[1]).all()


@pytest.mark.parametrize("mode", arithmetic.MODES)
def test_all_modes_agree_on_exact_data(mode: str) -> None:
    """Small integers: M, N, K differ, so a transposed operand fails; every arithmetic must give the float64 result."""
    rng = np.random.default_rng(2)
    codes = {v: next(c for c in range(256) if value_of(c) == v) for v in range(-4, 5)}
    a_values, b_values = rng.integers(-4, 5, (9, 32)), rng.integers(-4, 5, (6, 32))
    a = np.vectorize(codes.get)(a_values).astype(np.uint8)
    b = np.vectorize(codes.get)(b_values).astype(np.uint8)
    c = rng.integers(-100, 100, (9, 6)).astype(np.float32)
    for rule in (HOPPER_FP8, WIDE):
        out = dot_product_add(decode_operand(a, "e4m3"), decode_operand(b, "e4m3"), c, rule, mode=mode)
        np.testing.assert_array_equal(out, a_values @ b_values.T + c)


def nearest_float32(x: Fraction) -> np.float32:
    """Correct rounding by bracketing: candidates next to a float64 guess, compared exactly, ties to even."""
    guess = np.float32(float(x)) if abs(x) < Fraction(2) ** 127 else np.float32(np.sign(float(x / 2**64)) * 3.4e38)
    candidates = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    finite = [v for v in candidates if np.isfinite(v)]
    best = min(finite, key=lambda v: (abs(Fraction(float(v)) - x), int(v.view(np.uint32)) & 1))
    return best + np.float32(0)


@pytest.mark.parametrize(("name_a", "name_b", "k"), [("e4m3", "e4m3", 32), ("e5m2", "e5m2", 32), ("bf16", "bf16", 16)])
@pytest.mark.parametrize("accumulator", ["none", "normal", "binades", "subnormal"])
def test_exact_mode_rounds_once(name_a: str, name_b: str, k: int, accumulator: str) -> None:
    rng = np.random.default_rng([k, len(accumulator)])
    data = "finite" if name_a != "bf16" else "narrow"
    a, b = random_codes(rng, name_a, (6, k), data), random_codes(rng, name_b, (5, k), data)
    c = random_accumulators(rng, (6, 5), accumulator)
    ours = dot_product_add(decode_operand(a, name_a), decode_operand(b, name_b), c, WIDE, mode="exact")
    for i in range(6):
        for j in range(5):
            total = Fraction(0) if c is None else Fraction(float(c[i, j]))
            for x, y in zip(a[i].tolist(), b[j].tolist(), strict=True):
                total += scalar(x, name_a)[0] * scalar(y, name_b)[0]  # type: ignore[index]
            assert ours[i, j] == nearest_float32(total)


def test_exact_sum_of_wild_terms() -> None:
    """Cancelling terms over 600 binades, and sums within a hair of a tie, are rounded as exact fractions are."""
    from padless.emulator.units.exact_sum import round_sum

    rng = np.random.default_rng(3)
    terms = [rng.standard_normal(400) * 2.0 ** rng.integers(-60, 60, 400) for _ in range(5)]
    terms += [-terms[0], -terms[1] * (1 + 2.0**-50)]
    tie = 1.0 + 2.0**-24  # half-way between two float32
    for i, hair in enumerate((0.0, 2.0**-90, -(2.0**-90), 2.0**-300, -(2.0**-300))):
        for term in terms:
            term[i] = 0.0
        terms[0][i], terms[3][i] = tie, hair
    got = round_sum(terms).astype(np.float32)
    for i in range(400):
        assert got[i] == nearest_float32(sum((Fraction(float(t[i])) for t in terms), Fraction(0))), i
    assert got[0] == 1.0
    assert got[1] > 1.0
    assert got[2] == 1.0


def test_separate_add_is_two_roundings() -> None:
    """The products' sum is truncated, then c is added to nearest even."""
    a, b = np.zeros((1, 16), np.uint16), np.zeros((1, 16), np.uint16)
    a[0, 0] = b[0, 0] = 127 << 7  # 1 * 1
    c = np.array([[1.5 * 2.0**-23]], np.float32)
    x, y = decode_operand(a, "bf16"), decode_operand(b, "bf16")
    assert dot_product_add(x, y, c, WIDE)[0, 0] == np.float32(1 + 2.0**-23)
    assert dot_product_add(x, y, c, WIDE, mode="separate_add")[0, 0] == np.float32(1 + 2.0**-22)


@pytest.mark.parametrize("scale_bits", [0x7F, 0x07])
def test_fp4_with_ue4m3_scales(scale_bits: int) -> None:
    rng = np.random.default_rng(scale_bits)
    a, b = rng.integers(0, 16, (6, 64)), rng.integers(0, 16, (5, 64))
    sa, sb = rng.integers(0, 0x7F, (6, 4)) & scale_bits, rng.integers(0, 0x7F, (5, 4)) & scale_bits
    c = (rng.standard_normal((6, 5)) * 2.0 ** rng.integers(-30, 30, (6, 5))).astype(np.float32)
    ours = dot_product_add(
        decode_operand(a, "e2m1"), decode_operand(b, "e2m1"), c, FP4_BLOCK,
        scale_a=sa | 0x80, scale_b=sb, scale_format="ue4m3",
    )  # fmt: skip
    model = np.array(
        [
            [
                scalar_fp4(
                    a[i].tolist(), b[j].tolist(), [value_of(int(s)) for s in sa[i]], [value_of(int(s)) for s in sb[j]],
                    float(c[i, j]),
                )
                for j in range(5)
            ]
            for i in range(6)
        ]
    )  # fmt: skip
    same_bits(ours, model)


def test_nan_scales_and_nan_accumulators_are_canonical() -> None:
    a = np.full((2, 64), 2)
    scale = np.array([[0x38] * 4, [0x7F, 0x38, 0x38, 0x38]])
    out = dot_product_add(
        decode_operand(a, "e2m1"), decode_operand(a, "e2m1"), None, FP4_BLOCK,
        scale_a=scale, scale_b=scale[:1].repeat(2, 0), scale_format="ue4m3",
    )  # fmt: skip
    assert out[0, 0] == 64
    assert (out.view(np.uint32)[1] == 0x7FFFFFFF).all()
    x = decode_operand(np.full((1, 32), 0x38), "e4m3")
    scaled = x.scaled(np.array([[0xFF]]))
    assert dot_product_add(scaled, x, None, WIDE).view(np.uint32)[0, 0] == 0x7FFFFFFF
    assert dot_product_add(x.scaled(np.array([[130]])), x, None, WIDE)[0, 0] == 32 * 8
    c = np.array([0xFFC12345], np.uint32).view(np.float32)[None]
    assert dot_product_add(x, x, c, HOPPER_FP8).view(np.uint32)[0, 0] == 0x7FFFFFFF


def test_infinities() -> None:
    one, inf, zero = 0x3C, 0x7C, 0x00  # e5m2
    row = lambda *head: np.array([[*head] + [one] * (32 - len(head))])  # noqa: E731

    def out(a: np.ndarray, b: np.ndarray) -> float:
        return dot_product_add(decode_operand(a, "e5m2"), decode_operand(b, "e5m2"), None, HOPPER_FP8)[0, 0]

    assert out(row(inf), row(one)) == np.inf
    assert out(row(inf | 0x80), row(one)) == -np.inf
    assert np.isnan(out(row(inf), row(zero)))
    assert np.isnan(out(row(inf, inf | 0x80), row(one)))


def test_a_tile_step_is_fast() -> None:
    """A 128 x 192 x 128 FP8 step, four instructions, stays well under 0.3 s."""
    rng = np.random.default_rng(4)
    a, b = random_codes(rng, "e4m3", (128, 128), "finite"), random_codes(rng, "e4m3", (192, 128), "finite")
    best = np.inf
    for _ in range(3):
        started = time.perf_counter()
        c = None
        for k in range(0, 128, 32):
            x, y = (decode_operand(v[:, k : k + 32], "e4m3") for v in (a, b))
            c = dot_product_add(x, y, c, HOPPER_FP8)
        best = min(best, time.perf_counter() - started)
    assert best < 0.3, f"{best:.3f} s"
    print(f"128 x 192 x 128 bit-accurate FP8: {1e3 * best:.1f} ms")
