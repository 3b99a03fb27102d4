"""NVFP4: both orders of operations, bit for bit, against their definitions in fractions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from padless import layouts
from padless.formats import NVFP4, BlockScaledTensor
from padless.quantization.quantize import dequantize, quantize
from support import slow_formats
from support.slow_formats import Fraction

RULES = ("te", "torchao")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

every_rule = pytest.mark.parametrize("rule", RULES)


def random_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of very different sizes, so that some block scales are subnormal or zero beside the largest."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-20, 3, (*shape[:-1], 1), generator=generator)
    x = torch.randn(shape, generator=generator) * 2.0**spread
    x[torch.rand(shape, generator=generator) < 0.05] = -0.0
    return x.to(dtype)


def amax_of(x: torch.Tensor) -> Fraction:
    return max((abs(Fraction(v)) for v in x.flatten().tolist()), default=Fraction(0))


def assert_is_the_definition(
    x: torch.Tensor, t: BlockScaledTensor, rule: str, global_scale: Fraction, amax: Fraction | None
) -> None:
    """Every code and scale of a 2-D x, recomputed block by block."""
    codes, scale = layouts.unpack_fp4(t.data).tolist(), t.scale.view(torch.uint8).tolist()
    for r, row in enumerate(x.to(torch.float32).tolist()):
        for c in range(0, len(row), 16):
            want_byte, want_codes = slow_formats.nvfp4_block(row[c : c + 16], rule, global_scale, amax)
            assert scale[r][c // 16] == want_byte, f"scale of row {r}, column {c}"
            assert codes[r][c : c + 16] == want_codes, f"codes of row {r}, column {c}"


@every_rule
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_scales_are_the_definition(rule: str, dtype: torch.dtype) -> None:
    x = random_values((13, 72), dtype, seed=1)
    t = quantize(x, NVFP4, scale_rule=rule)
    amax = amax_of(x)
    assert t.data.dtype == torch.float4_e2m1fn_x2
    assert t.scale.dtype == torch.float8_e4m3fn
    assert t.global_scale.shape == ()
    assert Fraction(t.global_scale.item()) == slow_formats.nvfp4_global(amax)
    assert_is_the_definition(x, t, rule, slow_formats.nvfp4_global(amax), amax)


@every_rule
@given(rows=st.integers(0, 4), half=st.integers(1, 40), seed=st.integers(0, 2**31), exponent=st.integers(-140, 120))
def test_any_shape_and_size_is_the_definition(rule: str, rows: int, half: int, seed: int, exponent: int) -> None:
    x = random_values((rows, 2 * half), torch.float32, seed) * torch.tensor(2.0).double().pow(exponent).float()
    t = quantize(x, NVFP4, scale_rule=rule)
    amax = amax_of(x)
    assert_is_the_definition(x, t, rule, slow_formats.nvfp4_global(amax), amax)


@every_rule
@pytest.mark.parametrize("global_scale", [1.0, 0.01, 3e-5, 2.0**-140, 1e30])
def test_a_given_global_scale_is_used(rule: str, global_scale: float) -> None:
    x = random_values((6, 48), torch.float32, seed=2)
    given_scale = torch.tensor(global_scale)
    t = quantize(x, NVFP4, scale_rule=rule, global_scale=global_scale)
    assert torch.equal(t.global_scale, given_scale)
    assert_is_the_definition(x, t, rule, Fraction(given_scale.item()), None)


def test_known_answer() -> None:
    """amax 2688: global scale 1; the block's scale is 448 and its largest code 6."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 17] = 2688.0, -448.0, 3.0
    t = quantize(x, NVFP4)
    assert t.global_scale.item() == 1.0
    assert t.scale.float().tolist() == [[448.0, 0.5]]
    assert t.data.view(torch.uint8)[0].tolist() == [0xA7] + [0] * 7 + [0x70] + [0] * 7
    assert torch.equal(dequantize(t), x)


def test_te_multiplies_by_a_rounded_sixth() -> None:
    """A block for which S / 6 and S * fl(1/6), which differ in the last bit, lie on two sides of an e4m3 tie."""
    amax, block = float.fromhex("0x1.9442f8p+0"), float.fromhex("0x1.125202p-10")
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = amax, block
    t = quantize(x, NVFP4)
    assert_is_the_definition(x, t, "te", slow_formats.nvfp4_global(Fraction(amax)), Fraction(amax))
    assert t.scale.float()[0, 1] == 0.3125
    encode = slow_formats.fl32(2688 / Fraction(amax))
    assert slow_formats.fl32(Fraction(block) * slow_formats.fl32(encode / 6)) < Fraction(0.296875), "not a witness"


def test_the_two_orders_differ_where_blocks_are_small() -> None:
    """torchao keeps a scale of 2^-6 where TransformerEngine's becomes subnormal or zero."""
    x = torch.zeros(1, 48)
    x[0, 0], x[0, 16] = 2688.0, 6.0 * 2.0**-8
    te, torchao = (quantize(x, NVFP4, scale_rule=rule) for rule in RULES)
    assert te.scale.float().tolist() == [[448.0, 2.0**-8, 0.0]]
    assert torchao.scale.float().tolist() == [[448.0, 2.0**-6, 2.0**-6]]
    assert torch.equal(dequantize(te), x)


def test_te_is_the_default() -> None:
    x = random_values((5, 64), torch.float32, seed=3)
    assert torch.equal(quantize(x, NVFP4).scale.float(), quantize(x, NVFP4, scale_rule="te").scale.float())


@every_rule
def test_a_zero_tensor_is_zero(rule: str) -> None:
    t = quantize(torch.zeros(2, 32), NVFP4, scale_rule=rule)
    assert t.global_scale.item() == 1.0
    assert not t.data.view(torch.uint8).any()
    assert not dequantize(t).any()


@every_rule
def test_nan_and_inf_poison_their_block_and_no_other(rule: str) -> None:
    """They do not count for the global scale either."""
    x = random_values((4, 48), torch.float32, seed=4)
    clean = quantize(x, NVFP4, scale_rule=rule)
    x[0, 17], x[1, 18], x[2, 19] = float("nan"), -float("inf"), -float("nan")
    x[0, 16] = x[1, 16] = x[2, 16] = 0.0
    t = quantize(x, NVFP4, scale_rule=rule, global_scale=clean.global_scale)
    again = quantize(x, NVFP4, scale_rule=rule)
    finite = torch.where(x.isfinite(), x, 0.0)
    assert torch.equal(again.global_scale, quantize(finite, NVFP4).global_scale)
    assert t.scale.view(torch.uint8)[:3, 1].tolist() == [0x7F] * 3
    assert not layouts.unpack_fp4(t.data)[:3, 16:32].any()
    assert dequantize(t)[:3, 16:32].isnan().all()
    assert dequantize(t)[3].isfinite().all()
    reference = quantize(finite, NVFP4, scale_rule=rule, global_scale=clean.global_scale)
    for keep in (slice(0, 16), slice(32, 48)):
        assert torch.equal(layouts.unpack_fp4(t.data)[:, keep], layouts.unpack_fp4(reference.data)[:, keep])


@every_rule
def test_every_weight_has_its_global_scale(rule: str) -> None:
    w = random_values((3, 20, 48), torch.bfloat16, seed=5) * torch.tensor([1.0, 1e-3, 50.0])[:, None, None]
    t = quantize(w, NVFP4, kind="weight", scale_rule=rule)
    assert t.global_scale.shape == (3,)
    values = dequantize(t)
    for g in range(3):
        one = quantize(w[g], NVFP4, kind="weight", scale_rule=rule)
        assert torch.equal(t.global_scale[g], one.global_scale)
        assert torch.equal(t.scale[g].view(torch.uint8), one.scale.view(torch.uint8))
        assert torch.equal(t.data[g].view(torch.uint8), one.data.view(torch.uint8))
        assert torch.equal(values[g], dequantize(one))


@every_rule
def test_every_group_of_rows_has_its_global_scale(rule: str) -> None:
    x = random_values((9, 48), torch.float32, seed=6)
    offs = torch.tensor([4, 4, 7], dtype=torch.int32)
    t = quantize(x, NVFP4, scale_rule=rule, offs=offs)
    assert t.global_scale.shape == (3,)
    assert t.global_scale[1] == 1.0, "an empty group"
    values = dequantize(t, offs=offs)
    for g, rows in enumerate((slice(0, 4), slice(4, 4), slice(7 - 3, 9))):
        one = quantize(x[rows], NVFP4, scale_rule=rule)
        assert torch.equal(t.global_scale[g], one.global_scale)
        assert torch.equal(t.scale[rows].view(torch.uint8), one.scale.view(torch.uint8))
        assert torch.equal(values[rows], dequantize(one))
    with pytest.raises(ValueError, match="offs must have 3 entries, one per global scale, got None"):
        dequantize(t)


@given(seed=st.integers(0, 2**31), rule=st.sampled_from(RULES))
def test_dequantize_is_code_times_scale_times_global(seed: int, rule: str) -> None:
    x = random_values((3, 40), torch.float32, seed)
    t = quantize(x, NVFP4, scale_rule=rule)
    got, codes = dequantize(t).tolist(), layouts.unpack_fp4(t.data).tolist()
    scale, global_scale = t.scale.view(torch.uint8).tolist(), Fraction(t.global_scale.item())
    for r in range(3):
        for c in range(40):
            exact = slow_formats.E2M1.decode(codes[r][c]) * slow_formats.E4M3.decode(scale[r][c // 16])
            assert got[r][c] == float(slow_formats.fl32(exact * global_scale))


def test_layouts_hold_the_same_scales() -> None:
    x = random_values((140, 80), torch.bfloat16, seed=7)
    offs = torch.tensor([9, 137], dtype=torch.int32)
    plain = quantize(x, NVFP4)
    blocked = quantize(x, NVFP4, scale_layout="blocked")
    groups = quantize(x, NVFP4, scale_layout="blocked_groups", offs=offs, global_scale=plain.global_scale)
    assert torch.equal(layouts.plain_scale(blocked).view(torch.uint8), plain.scale.view(torch.uint8))
    same = layouts.plain_scale(groups, offs).view(torch.uint8)[:137]
    assert torch.equal(same, quantize(x, NVFP4, global_scale=plain.global_scale).scale.view(torch.uint8)[:137])


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="scale_rule must be one of \\('te', 'torchao'\\) for NVFP4, got 'floor'"):
        quantize(torch.ones(2, 16), NVFP4, scale_rule="floor")
    with pytest.raises(ValueError, match="even for NVFP4"):
        quantize(torch.ones(2, 15), NVFP4)
    with pytest.raises(ValueError, match="global_scale must be one number or one for each of 1 groups"):
        quantize(torch.ones(2, 16), NVFP4, global_scale=torch.ones(2))
    with pytest.raises(ValueError, match="one for each of 3 groups, got shape \\(2,\\)"):
        quantize(torch.ones(3, 2, 16), NVFP4, kind="weight", global_scale=torch.ones(2))
