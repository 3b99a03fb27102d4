"""The decoding layer of MXFP4 weights in one launch, in the emulator: the bits of the several launches, and no report.

What would convince a sceptic: every bit, from random operands, biases and scales, of what is computed by other kernels
and torch; K that ends inside of a stage, a block and a quad, with scales that are no numbers past its end; outputs
poisoned and guarded; launches one after the other on one scratch, with other tokens, ids and sizes; CTAs that take each
other's shares, and CTAs that have one each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from padless.emulator.fake_driver import emulated_driver
from padless.kernels.sm90_moe_decode.config_fp4 import Fp4LayerShape, MoeDecodeFp4Config
from padless.moe import Activation
from padless.moe.fused import gate_rule_of
from support.moe_decode_cases import Output, Tokens, draw_tokens, scratch
from support.moe_decode_fp4_cases import GPT_OSS, PLAIN, Patient, draw_fp4_weights, launch, several_launches

SLOW = pytest.mark.slow
STEEP = Activation("swiglu", "alternating", alpha=0.7, up_offset=-0.5)  # no limit
# experts, H, I, tokens, top_k, kind of ids, activation, biases, shared, multiprocessors, seed
CASES = [
    pytest.param(3, 160, 96, 2, 2, "any", GPT_OSS, "both", True, 2, 1, id="small"),
    pytest.param(4, 288, 160, 1, 4, "distinct", PLAIN, "none", False, 3, 2, id="one token, plain"),
    pytest.param(3, 64, 64, 2, 2, "none", GPT_OSS, "both", True, 2, 0, id="no expert"),
    pytest.param(3, 64, 64, 2, 1, "none", GPT_OSS, "both", False, 1, 2, id="no expert, nothing shared"),
    pytest.param(6, 416, 288, 3, 2, "any", GPT_OSS, "both", True, 3, 5, id="more than a stage", marks=SLOW),
    pytest.param(4, 288, 544, 8, 2, "any", GPT_OSS, "first", False, 4, 3, id="eight tokens", marks=SLOW),
    pytest.param(3, 544, 64, 1, 4, "any", STEEP, "second", True, 1, 2, id="no limit, one CTA", marks=SLOW),
    pytest.param(40, 160, 64, 4, 4, "distinct", GPT_OSS, "both", False, 4, 44, id="many experts", marks=SLOW),
    pytest.param(2, 512, 512, 2, 2, "distinct", GPT_OSS, "both", True, 2, 10, id="whole stages", marks=SLOW),
    pytest.param(5, 128, 128, 8, 5, "one", GPT_OSS, "both", True, 2, 34, id="one expert", marks=SLOW),
    pytest.param(300, 64, 32, 5, 3, "any", PLAIN, "both", True, 5, 22, id="300 experts", marks=SLOW),
]


def words_of(tokens: int, top_k: int, i: int) -> int:
    return Fp4LayerShape(tokens, top_k, 1, 32, i, 1).hidden_words


@pytest.mark.parametrize(
    ("experts", "h", "i", "tokens", "top_k", "kind", "activation", "bias", "shared", "sms", "seed"), CASES
)
def test_bits_of_several_launches(
    experts: int, h: int, i: int, tokens: int, top_k: int, kind: str, activation: Any, bias: str, shared: bool,
    sms: int, seed: int,
) -> None:  # fmt: skip
    weights = draw_fp4_weights(experts, h, i, seed, bias=bias)
    drawn = draw_tokens(weights, tokens, top_k, seed, shared=shared, kind=kind)
    want = several_launches(weights, drawn, activation)
    assert want.isfinite().all()
    assert kind == "none" or want[0].count_nonzero() > want.shape[1] // 2
    output, driver = Output(tokens, h), emulated_driver()
    with driver.configured(num_sms=sms, seed=seed):
        launch(driver, weights, drawn, output.poisoned(tokens), scratch(words_of(tokens, top_k, i)), activation)
    assert output.is_right(want)


@pytest.mark.parametrize(
    ("h", "i", "tokens", "sms", "seed"),
    [(96, 160, 3, 3, 22), pytest.param(416, 288, 2, 4, 10, marks=SLOW), pytest.param(64, 288, 8, 2, 44, marks=SLOW)],
)
def test_hidden_rows_of_other_ctas(h: int, i: int, tokens: int, sms: int, seed: int) -> None:
    """Every CTA has a share of its own, and waits for the others' rows."""
    weights = draw_fp4_weights(4, h, i, seed)
    drawn = draw_tokens(weights, tokens, 2, seed, shared=True)
    want = several_launches(weights, drawn)
    output, driver = Output(tokens, h), Patient((), MoeDecodeFp4Config(gate_rule_of(GPT_OSS)))
    with driver.configured(num_sms=sms, seed=seed):
        launch(driver, weights, drawn, output.poisoned(tokens), scratch(words_of(tokens, 2, i)))
    assert output.is_right(want)


def test_scales_with_a_second_factor() -> None:
    """Scales above 2, which bf16 has no factor for, in some warps' weights; x is small, so that sums are numbers."""
    weights = draw_fp4_weights(3, 96, 64, 4, size=30.0)
    assert (weights.w13.scale.view(torch.uint8)[:, :64] > 128).any()
    drawn = draw_tokens(weights, 2, 2, 4)
    want = several_launches(weights, drawn)
    output, driver = Output(2, 96), emulated_driver()
    with driver.configured(num_sms=2, seed=10):
        launch(driver, weights, drawn, output.poisoned(2), scratch(words_of(2, 2, 64)))
    assert want.isfinite().all()
    assert output.is_right(want)


def check_sequence(sizes: list[tuple[int, int, str]], i: int, seeds: list[int]) -> None:
    """Launches of (tokens, top_k, kind) in turn with one scratch and one output address."""
    weights = draw_fp4_weights(4, 96, i, seed=2)
    calls = [draw_tokens(weights, t, k, n, kind=kind, shared=n % 2 == 1) for n, (t, k, kind) in enumerate(sizes)]
    wanted = [several_launches(weights, call) for call in calls]
    driver = emulated_driver()
    for seed in seeds:
        output, memory = Output(8, 96), scratch(max(words_of(t, k, i) for t, k, _ in sizes))
        for n, (call, want) in enumerate(zip(calls, wanted, strict=True)):
            with driver.configured(num_sms=3, seed=seed + n):
                launch(driver, weights, call, output.poisoned(len(call.ids)), memory)
            assert output.is_right(want), f"launch {n} of seed {seed}"
            assert memory[:3].tolist() == [n + 1, 0, 0], "control words are not as the next launch needs them"


def test_one_token_after_four() -> None:
    check_sequence([(4, 2, "any"), (1, 2, "distinct"), (3, 1, "any")], 64, [0])


@pytest.mark.slow
def test_many_launches_with_one_scratch() -> None:
    sizes = [(3, 2, "any"), (2, 2, "none"), (8, 3, "any"), (1, 1, "distinct"), (1, 4, "any"), (5, 2, "any")]
    check_sequence(sizes, 160, [10, 44])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_and_ids_of_other_types(dtype: torch.dtype) -> None:
    weights = draw_fp4_weights(4, 64, 64)
    drawn = draw_tokens(weights, 3, 2, 5, shared=True)
    drawn = Tokens(drawn.x, drawn.ids.int(), drawn.weights.to(dtype), drawn.shared)
    want = several_launches(weights, drawn)
    output, driver = Output(3, 64), emulated_driver()
    with driver.configured(seed=4):
        launch(driver, weights, drawn, output.poisoned(3), scratch(words_of(3, 2, 64)))
    assert output.is_right(want)


@pytest.mark.slow
def test_values_that_are_no_numbers() -> None:
    """A token with an Inf and one with a NaN leave the others alone; words of two NaN are not taken for missing ones."""
    weights = draw_fp4_weights(4, 96, 64)
    drawn = draw_tokens(weights, 4, 2, 6, kind="distinct")
    drawn.x[0, 5], drawn.x[1, 77] = float("inf"), float("nan")
    want = several_launches(weights, drawn)
    out, driver = torch.empty(4, 96, dtype=torch.bfloat16), emulated_driver()
    with driver.configured(seed=1):
        launch(driver, weights, drawn, out, scratch(words_of(4, 2, 64)))
    assert torch.equal(out.isnan(), want.isnan())
    assert want[:2].isnan().any()
    assert torch.equal(out[~want.isnan()], want[~want.isnan()])


def test_what_fits() -> None:
    gpt_oss = Fp4LayerShape(1, 4, 128, 2880, 2880, 132)
    assert gpt_oss.fits
    assert gpt_oss.stages == 4
    assert Fp4LayerShape(4, 4, 128, 2880, 2880, 132).fits
    for change in ({"tokens": 9}, {"tokens": 8}, {"top_k": 17}, {"experts": 4097}, {"h": 2872}, {"i": 16}):
        sizes = {"tokens": 1, "top_k": 4, "experts": 128, "h": 2880, "i": 2880, "shares": 132} | change
        assert not Fp4LayerShape(**sizes).fits, change
