"""MXFP8 and MXFP4: codes and scales, bit for bit, against the definition in fractions."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from padless import layouts
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledFormat, BlockScaledTensor
from padless.quantization.quantize import dequantize, quantize
from support import slow_formats
from support.slow_formats import Fraction

FORMATS = (MXFP8, MXFP8_E5M2, MXFP4)
RULES = ("floor", "rceil")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAN_CODE = {MXFP8: 0x7F, MXFP8_E5M2: 0x7F, MXFP4: 0}

every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
every_rule = pytest.mark.parametrize("rule", RULES)


def codes_of(t: BlockScaledTensor) -> torch.Tensor:
    """uint8, one code an element."""
    return layouts.unpack_fp4(t.data) if t.format.codes_per_byte == 2 else t.data.view(torch.uint8)


def bytes_of(t: BlockScaledTensor) -> torch.Tensor:
    return t.scale.view(torch.uint8)


def random_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of very different sizes, zeros of both signs and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-24, 14, (*shape[:-1], 1), generator=generator)
    x = torch.randn(shape, generator=generator) * 2.0**spread
    chance = torch.rand(shape, generator=generator)
    x[chance < 0.05] = -0.0
    x[(chance > 0.05) & (chance < 0.08)] = 1e-43
    return x.clamp(-60000, 60000).to(dtype)


def assert_is_the_definition(x: torch.Tensor, t: BlockScaledTensor, rule: str) -> None:
    """Every code and scale of a 2-D x, recomputed block by block."""
    codes, scale = codes_of(t).tolist(), bytes_of(t).tolist()
    for r, row in enumerate(x.to(torch.float32).tolist()):
        for c in range(0, len(row), 32):
            want_byte, want_codes = slow_formats.mx_block(row[c : c + 32], t.format.name, rule)
            assert scale[r][c // 32] == want_byte, f"scale of row {r}, column {c}"
            assert codes[r][c : c + 32] == want_codes, f"codes of row {r}, column {c}"


@every_format
@every_rule
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_scales_are_the_definition(fmt: BlockScaledFormat, rule: str, dtype: torch.dtype) -> None:
    x = random_values((11, 112), dtype, seed=1)
    t = quantize(x, fmt, scale_rule=rule)
    assert t.data.dtype == fmt.data_dtype
    assert t.scale.dtype == torch.float8_e8m0fnu
    assert_is_the_definition(x, t, rule)


@every_format
@every_rule
@given(rows=st.integers(0, 4), half=st.integers(1, 50), seed=st.integers(0, 2**31))
def test_any_shape_is_the_definition(fmt: BlockScaledFormat, rule: str, rows: int, half: int, seed: int) -> None:
    x = random_values((rows, 2 * half), torch.float32, seed)
    t = quantize(x, fmt, scale_rule=rule)
    assert t.scale.shape == (rows, (2 * half + 31) // 32)
    assert_is_the_definition(x, t, rule)


@every_format
@every_rule
def test_scales_next_to_every_boundary(fmt: BlockScaledFormat, rule: str) -> None:
    """amax at, just below and just above max * 2^e and 2^e, from subnormals to the largest float32."""
    points = []
    for base in (fmt.max_value, 1.0):
        for e in [*range(-149, -100, 3), -126, -127, -60, -7, 0, 40, 100, 111, 112, 118, 119, 120, 125, 127]:
            for direction in (-math.inf, 0, math.inf):
                point = torch.tensor(base * 2.0**e, dtype=torch.float32)
                point = torch.nextafter(point, torch.tensor(direction)) if direction else point
                if point.isfinite() and point > 0:
                    points.append(point.item())
    x = torch.zeros(len(points), 32)
    x[:, 5] = torch.tensor(points)
    x[:, 6] = -0.3 * x[:, 5]
    assert_is_the_definition(x, quantize(x, fmt, scale_rule=rule), rule)


@pytest.mark.parametrize(("fmt", "emax"), [(MXFP8, 8), (MXFP8_E5M2, 15), (MXFP4, 2)], ids=["e4m3", "e5m2", "e2m1"])
def test_known_bytes(fmt: BlockScaledFormat, emax: int) -> None:
    """Round-up keeps byte 127 up to the largest element and takes 128 one float above; floor only looks at
    the exponent.
    """
    largest = torch.tensor(fmt.max_value)
    below, above = (torch.nextafter(largest, torch.tensor(d)) for d in (0.0, math.inf))
    x = torch.zeros(4, 32)
    x[:, 0] = torch.stack([below, largest, above, torch.tensor(2.0 ** (emax + 1))])
    assert bytes_of(quantize(x, fmt, scale_rule="rceil")).flatten().tolist() == [127, 127, 128, 128]
    assert bytes_of(quantize(x, fmt, scale_rule="floor")).flatten().tolist() == [127, 127, 127, 128]


@every_format
def test_floor_saturates_and_rceil_never_does(fmt: BlockScaledFormat) -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 1.99 * 2.0 ** math.floor(math.log2(fmt.max_value)), -1.0
    floor, rceil = (quantize(x, fmt, scale_rule=rule) for rule in RULES)
    assert dequantize(floor)[0, 0] == fmt.max_value
    assert dequantize(rceil)[0, 0] > fmt.max_value


@every_format
@given(seed=st.integers(0, 2**31))
def test_rceil_is_the_smallest_scale_without_saturation(fmt: BlockScaledFormat, seed: int) -> None:
    x = random_values((6, 32), torch.float32, seed)
    for amax, byte in zip(x.abs().amax(1).tolist(), bytes_of(quantize(x, fmt)).flatten().tolist(), strict=True):
        bound = Fraction(fmt.max_value) * Fraction(2) ** (byte - 127)
        assert Fraction(amax) <= bound
        assert byte == 0 or Fraction(amax) > bound / 2


@every_format
@every_rule
def test_the_largest_float32_does_not_reach_byte_254(fmt: BlockScaledFormat, rule: str) -> None:
    """Its multiplier would be subnormal; the quantisers have no case for it."""
    x = torch.full((1, 32), torch.finfo(torch.float32).max)
    t = quantize(x, fmt, scale_rule=rule)
    assert bytes_of(t).item() <= 253
    assert_is_the_definition(x, t, rule)


def test_rceil_is_the_default() -> None:
    x = random_values((5, 64), torch.float32, seed=3)
    assert torch.equal(bytes_of(quantize(x, MXFP8)), bytes_of(quantize(x, MXFP8, scale_rule="rceil")))
    assert not torch.equal(bytes_of(quantize(x, MXFP8)), bytes_of(quantize(x, MXFP8, scale_rule="floor")))


@every_format
@every_rule
def test_zero_nan_and_inf_blocks(fmt: BlockScaledFormat, rule: str) -> None:
    x = random_values((4, 96), torch.float32, seed=4)
    x[0, 32:64] = 0.0
    x[0, 40] = -0.0
    clean = quantize(x, fmt, scale_rule=rule)
    assert bytes_of(clean)[0, 1] == 0
    zero_codes = codes_of(clean)[0, 32:64]
    assert zero_codes.count_nonzero() == 1, "only -0 has a bit set"
    x[1, 33], x[2, 34], x[3, 35] = float("nan"), -float("inf"), -float("nan")
    t = quantize(x, fmt, scale_rule=rule)
    assert bytes_of(t)[1:, 1].tolist() == [255] * 3
    assert (codes_of(t)[1:, 32:64] == NAN_CODE[fmt]).all()
    assert dequantize(t)[1:, 32:64].isnan().all()
    for keep in (slice(0, 32), slice(64, 96)):
        assert torch.equal(codes_of(t)[:, keep], codes_of(clean)[:, keep])
    assert torch.equal(bytes_of(t)[:, [0, 2]], bytes_of(clean)[:, [0, 2]])


@every_format
@every_rule
def test_subnormal_values_are_not_flushed(fmt: BlockScaledFormat, rule: str) -> None:
    x = torch.zeros(2, 32)
    x[0, 0], x[0, 1] = 1e-39, -4e-40
    x[1, 0] = 1e-45
    t = quantize(x, fmt, scale_rule=rule)
    assert_is_the_definition(x, t, rule)
    assert bytes_of(t).flatten().tolist() == [0, 0]
    if fmt is not MXFP4:
        assert dequantize(t)[0, 0].item() == pytest.approx(1e-39, rel=0.2)


def test_nibble_order_through_quantize() -> None:
    """A GEMM cannot show a swap that both operands share; the bytes can. The scale is 1."""
    x = torch.tensor([[6.0, 0.5, -1.0, 3.0, 0.0, -6.0]])
    t = quantize(x, MXFP4)
    assert bytes_of(t).item() == 127
    assert t.data.view(torch.uint8).tolist() == [[0x17, 0x5A, 0xF0]]
    assert dequantize(t).tolist() == x.tolist()


def test_fp4_ties_go_to_even_codes() -> None:
    points = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = torch.tensor([[6.0, 0.0, *points, *(-p for p in points)]])
    wanted = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert dequantize(quantize(x, MXFP4)).tolist() == [[6.0, 0.0, *wanted, *(-w for w in wanted)]]
    above = torch.nextafter(torch.tensor(points), torch.tensor(math.inf))
    x = torch.cat([torch.tensor([6.0]), above])[None]
    assert dequantize(quantize(x, MXFP4)).tolist() == [[6.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]]


@every_format
@given(seed=st.integers(0, 2**31), rule=st.sampled_from(RULES))
def test_dequantize_is_code_times_scale(fmt: BlockScaledFormat, seed: int, rule: str) -> None:
    x = random_values((3, 70), torch.float32, seed)
    t = quantize(x, fmt, scale_rule=rule)
    element = slow_formats.MX_ELEMENTS[fmt.name][0]
    got, codes, scale = dequantize(t).tolist(), codes_of(t).tolist(), bytes_of(t).tolist()
    for r in range(3):
        for c in range(70):
            exact = element.decode(codes[r][c]) * Fraction(2) ** (scale[r][c // 32] - 127)
            assert got[r][c] == float(slow_formats.fl32(exact))


@every_format
def test_layouts_and_batches_hold_the_same_scales(fmt: BlockScaledFormat) -> None:
    x = random_values((130, 160), torch.bfloat16, seed=5)
    plain = quantize(x, fmt)
    blocked = quantize(x, fmt, scale_layout="blocked")
    assert torch.equal(layouts.plain_scale(blocked).view(torch.uint8), bytes_of(plain))
    offs = torch.tensor([3, 3, 129], dtype=torch.int32)
    groups = quantize(x, fmt, scale_layout="blocked_groups", offs=offs)
    assert torch.equal(layouts.plain_scale(groups, offs).view(torch.uint8)[:129], bytes_of(plain)[:129])
    assert torch.equal(dequantize(groups, offs=offs)[:129], dequantize(plain)[:129])
    w = torch.stack([x, x * 3, x * 100])
    batch = quantize(w, fmt, kind="weight", scale_layout="blocked")
    for g in range(3):
        one = quantize(w[g], fmt, kind="weight", scale_layout="blocked")
        assert torch.equal(batch.data[g].view(torch.uint8), one.data.view(torch.uint8))
        assert torch.equal(bytes_of(batch)[g], bytes_of(one))


BAD_CALLS = {
    "x must have K > 0 and even for MXFP4, got shape (2, 3)": (MXFP4, (2, 3), {}),
    "scale_rule must be one of ('rceil', 'floor') for MXFP8, got 'te'": (MXFP8, (2, 4), {"scale_rule": "te"}),
    "scale_major must be 'k' for MXFP8, got 'mn'": (MXFP8, (2, 4), {"scale_major": "mn"}),
    "scale_layout must be one of": (MXFP8, (2, 4), {"scale_layout": "tiled"}),
    "offs must be given for scale_layout 'blocked_groups'": (MXFP8, (2, 4), {"scale_layout": "blocked_groups"}),
    "offs must be None for MXFP8 with scale_layout 'plain'": (
        MXFP8,
        (2, 4),
        {"offs": torch.tensor([2], dtype=torch.int32)},
    ),
    "offs must be a 1-D int32 or int64 tensor": (
        MXFP8,
        (2, 4),
        {"offs": torch.tensor([2.0]), "scale_layout": "blocked_groups"},
    ),
    "offs must be None for kind='weight'": (
        MXFP8,
        (2, 4),
        {"offs": torch.tensor([2], dtype=torch.int32), "kind": "weight", "scale_layout": "blocked_groups"},
    ),
    "global_scale must be None for MXFP4": (MXFP4, (2, 4), {"global_scale": 1.0}),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_bad_arguments_are_named(message: str) -> None:
    fmt, shape, options = BAD_CALLS[message]
    with pytest.raises(ValueError) as error:
        quantize(torch.ones(shape), fmt, **options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fmt", "k", "layout"),
    [
        (MXFP4, 2880, "blocked"),  # 90 scales a row
        (MXFP4, 512, "plain"),
        (NVFP4, 256, "plain"),
        (NVFP4, 768 - 32, "blocked"),
        (MXFP8, 2880, "plain"),
        (FP8_BLOCK, 2880, "plain"),
    ],
)
def test_weights_on_a_gpu_have_scales_that_kernels_read_in_place(
    fmt: BlockScaledFormat, k: int, layout: Literal["plain", "blocked"]
) -> None:
    """On a CPU they are plain, as files have them."""
    with FakeTensorMode():
        assert quantize(torch.empty(2, 40, k, device="cuda"), fmt, kind="weight").scale_layout == layout
        assert quantize(torch.empty(40, k, device="cuda"), fmt).scale_layout == "plain", "activations"
    w = torch.randn(2, 40, k)
    plain = quantize(w, fmt, kind="weight")
    assert plain.scale_layout == "plain"
    made = quantize(w, fmt, kind="weight", scale_layout=layout)
    assert torch.equal(layouts.plain_scale(made).view(torch.uint8), plain.scale.view(torch.uint8))
