"""quant_rules.cuh and activation.cuh, run by the emulator float by float, and proofs over all floats in numpy.

What would convince a sceptic: the kernels' own functions, compiled from their header, over every kind of float and each
float around the thresholds; the shortcuts for quotients and reciprocals against exact integers for every mantissa; and
mistakes that these checks notice.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from padless.emulator import Emulator
from padless.reference.activation import sigmoid
from padless.runtime import jit
from support.emulator_cuda import HEADER, compile_ptx

F32 = np.float32
THREADS, BLOCKS = 128, 8
KERNEL = """
#include "device/ptx/conversion.cuh"
#include "device/activation.cuh"
#include "device/quant_rules.cuh"
extern "C" __global__ void k(const float* x, float* y, int count) {
    for (int at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += gridDim.x * blockDim.x) {
        float value[1] = {x[at]};
        EXPRESSION
        y[at] = value[0];
    }
}
"""
SIGMOID = "value[0] = reciprocal_from_one(one_plus_exp_minus(value[0]));"
SILU = "const float one[1] = {1.0f}; activate(value, one);"
RECIPROCAL = "value[0] = reciprocal_of_ordinary(value[0]);"
SCALE = "value[0] = Fp8Block{}.scale(value[0]);"
MULTIPLIER = "value[0] = Fp8Block{}.multiplier(Fp8Block{}.scale(value[0]));"


def run(expression: str, x: np.ndarray, change: tuple[str, str] | None = None) -> np.ndarray:
    """What the device code makes of every x; ``change`` replaces a text of the two headers first."""
    files = dict(jit.sources())
    if change is not None:
        headers = [name for name in ("device/activation.cuh", "device/quant_rules.cuh") if change[0] in files[name]]
        assert len(headers) == 1
        files[headers[0]] = files[headers[0]].replace(*change)
    text = HEADER + KERNEL.replace("EXPRESSION", expression)
    emulator = Emulator(compile_ptx(text, "rules.cu", "90a", files).rstrip(b"\0").decode(), name="rules.ptx")
    x = np.ascontiguousarray(x, F32)
    y = np.full(len(x), np.nan, F32)
    addresses = [emulator.memory.register(x), emulator.memory.register(y)]
    emulator.launch("k", BLOCKS, THREADS, [*addresses, len(x)]).raise_on_reports()
    return y


def floats(first: float, last: float, count: int) -> np.ndarray:
    """``count`` floats of one sign, spread over their bits from first to last, both included."""
    bits = np.linspace(*(int(F32(x).view(np.uint32)) for x in (first, last)), count).astype(np.uint32)
    return bits.view(F32)


def around(x: float, count: int) -> np.ndarray:
    """x and ``count`` floats on either side."""
    return (int(F32(x).view(np.uint32)) + np.arange(-count, count + 1)).astype(np.uint32).view(F32)


LARGEST = float(np.finfo(F32).max)
SPECIAL = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, LARGEST, -LARGEST, 1e-45, -1e-45], F32)
# From here down 1 + exp(-gate) is above 2^126 and s is 0.
FLUSHED = -87.33655
GATES = np.concatenate(
    [
        SPECIAL,
        floats(-88.9, -85.0, 6000),
        around(FLUSHED, 300),
        around(-88.722839, 300),
        floats(-1e-30, -150.0, 4000),
        floats(1e-30, 150.0, 4000),
        floats(150.0, LARGEST, 500),
        -floats(150.0, LARGEST, 500),
        around(87.0, 50),
    ]
)


def exact_sigmoid(gate: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-gate.astype(np.float64)))


def check_sigmoid(s: np.ndarray) -> None:
    """Within the errors of exp and two roundings; 0 wherever the reference has it, but for the threshold itself."""
    number = ~np.isnan(GATES)
    flushed = GATES < FLUSHED - 1e-4
    exact = exact_sigmoid(GATES[number])
    error = np.abs(s[number] - exact)
    bound = np.where(flushed[number], 0, exact * (2.0**-21 + 2.0**-23))
    threshold = np.abs(GATES[number] - FLUSHED) <= 1e-4
    ok = (error <= bound) | (flushed[number] & (s[number] == 0)) | (threshold & (s[number] == 0))
    assert ok.all(), (GATES[number][~ok][:5], s[number][~ok][:5])
    assert not (np.abs(s[s != 0]) < 2.0**-126).any()


def test_the_sigmoid_at_every_kind_of_gate() -> None:
    s = run(SIGMOID, GATES)
    check_sigmoid(s)
    assert s[np.isposinf(GATES)] == 1
    assert s[np.isneginf(GATES)] == 0


@pytest.mark.parametrize(
    "change",
    [
        ("fma_ftz_sat(r, -__fmaf_rn(r, x, -1.0f), r)", "__fmaf_rn(r, -__fmaf_rn(r, x, -1.0f), r)"),
        ("const float x = fminf(gate, 87.0f);", "const float x = gate;"),
        ("__fmaf_rn(h, -LN2, -x))", "0.0f)"),
        ("ex2_approx(h)", "ex2_approx(h * 1.0000002f)"),
    ],
    ids=["no saturation", "no largest gate", "rounded argument", "wrong power"],
)
def test_a_wrong_sigmoid_is_noticed(change: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        check_sigmoid(run(SIGMOID, GATES, change))


def test_swiglu_is_the_reference_for_all_that_is_not_ordinary() -> None:
    """NaN, Inf, zeros and whatever s is exactly 0 or 1 for: the reference's bits. Elsewhere two roundings more."""
    got = run(SILU, GATES)
    wanted = (torch.from_numpy(GATES) * sigmoid(torch.from_numpy(GATES))).numpy()
    edge = np.abs(GATES - FLUSHED) <= 1e-4
    extreme = ~(np.abs(GATES) < 88) & ~edge
    assert extreme.sum() > 1000
    assert np.array_equal(np.isnan(got), np.isnan(wanted))
    number = extreme & ~np.isnan(wanted)
    assert np.array_equal(got[number].view(np.uint32), wanted[number].view(np.uint32))
    ordinary = ~extreme & ~edge
    error = np.abs(got[ordinary].astype(np.float64) - wanted[ordinary])
    assert (error <= np.abs(wanted[ordinary]) * (2.0**-21 + 2.0**-22)).all()


def test_the_reference_flushes_where_the_sum_passes_2_to_126() -> None:
    gate = torch.from_numpy(around(FLUSHED, 300))
    s = sigmoid(gate)
    power = torch.exp(-gate.double()).float() + 1
    assert torch.equal(s == 0, power > 2.0**126)
    assert (s == 0).any()
    assert (s != 0).any()


def test_reciprocals_of_ordinary_numbers_and_of_none() -> None:
    x = np.concatenate([floats(2.0**-126, 2.0**126, 20000), around(2.0**100, 200), floats(1, 2, 5000)])
    assert np.array_equal(run(RECIPROCAL, x), F32(1) / x)
    above = np.array([2.0**127, LARGEST, np.inf], F32)
    assert (run(RECIPROCAL, above) == 0).all()
    assert np.isnan(run(RECIPROCAL, np.array([np.nan], F32))).all()


def test_scales_and_multipliers_of_fp8_blocks() -> None:
    amax = np.concatenate([np.abs(SPECIAL), floats(1e-45, LARGEST, 20000), around(1e-4, 200), floats(1e-4, 2e-4, 5000)])
    wanted = np.maximum(amax, F32(1e-4)) / F32(448)
    wanted[np.isnan(amax)] = np.array(0x7FC00000, np.uint32).view(F32)
    got = run(SCALE, amax)
    assert np.array_equal(got.view(np.uint32), wanted.view(np.uint32))
    inverse = run(MULTIPLIER, amax)
    assert np.array_equal(inverse, F32(1) / wanted, equal_nan=True)


def test_a_product_in_place_of_the_quotient_is_noticed() -> None:
    x = floats(1.0, 2.0, 5000)
    change = ("return __fmaf_rn(__fmaf_rn(quotient, -448.0f, x), INVERSE, quotient);", "return quotient;")
    assert not np.array_equal(run(SCALE, x, change), x / F32(448))


# --- every mantissa --------------------------------------------------------------------------------------


def rounded(numerator: np.ndarray, shift: int) -> np.ndarray:
    """numerator / 2^shift to the nearest integer, ties to even."""
    down, rest = numerator >> shift, numerator & ((1 << shift) - 1)
    half = 1 << (shift - 1)
    return down + ((rest > half) | ((rest == half) & (down % 2 == 1)))


def wrong_reciprocals(first: int, last: int, off: int) -> int:
    """Mantissas in [first, last) whose reciprocal the Newton step misses, from ``off`` units beside the rounded one.

    x = X 2^-23 and r = R 2^-24; the residual r x - 1 is E 2^-47 exactly, as |E| < 2^24.
    """
    x = np.arange(first, last, dtype=np.int64)
    one = 1 << 47
    wanted = one // x
    rest = one - wanted * x
    wanted += (2 * rest > x) | ((2 * rest == x) & (wanted % 2 == 1))
    r = wanted + off
    residual = r * x - one
    exact = np.abs(residual) < 1 << 24
    step = r + rounded(-r * residual, 47)
    return int(((step != wanted) & exact).sum()) + int((~exact).sum() if off == 0 else 0)


def wrong_quotients(first: int, last: int) -> int:
    """Mantissas in [first, last) whose quotient by 448 divided_by_448 misses: float64 holds every exact value here."""
    x = np.arange(first, last, dtype=np.int64).astype(F32)
    inverse = F32(F32(1) / F32(448))
    quotient = x * inverse
    left = x.astype(np.float64) - quotient.astype(np.float64) * 448  # 24 bits times 3: exact
    assert (left == left.astype(F32)).all()
    # Of the sum only 2^-53 is lost: no tie is closer to a float than that, as 448 has 3 bits.
    result = (quotient.astype(np.float64) + left * inverse.astype(np.float64)).astype(F32)
    return int((result != x / F32(448)).sum())


def test_the_shortcuts_for_every_mantissa() -> None:
    """From the rounded reciprocal, which is the emulator's, the step never leaves it; quotients are always right.

    From a neighbour it misses some, so that a bound of one unit on rcp.approx would not be enough: the function unit's
    own values matter, and the compiler trusts the same step from them in rcp.rn.
    """
    missed = 0
    for first in range(1 << 23, 1 << 24, 1 << 19):
        assert wrong_reciprocals(first, first + (1 << 19), 0) == 0
        assert wrong_quotients(first, first + (1 << 19)) == 0
        missed += sum(wrong_reciprocals(first, first + (1 << 19), off) for off in (-1, 1))
    assert 0 < missed < 100
