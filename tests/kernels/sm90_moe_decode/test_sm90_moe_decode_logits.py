"""Decoding layers that are given a router's logits, in the emulator: padless.moe.topk's bits, and no report.

What would convince a sceptic: ids and every bit of the weights before anything is multiplied by them, of all rules,
equal logits, zeros of both signs, NaN and Inf, logits beyond the exponential's range, any number of experts; then whole
layers, whose bits are those of launches that are given topk's ids and weights; planted bugs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from padless.emulator.fake_driver import emulated_driver
from padless.kernels.sm90_moe_decode.choice import LOGITS_ROOMS, MOST_GROUPS, ByLogits
from padless.kernels.sm90_moe_decode.config import MoeDecodeConfig
from padless.kernels.sm90_moe_decode.config_fp4 import MoeDecodeFp4Config
from padless.moe import Router, topk
from support import moe_decode_cases, moe_decode_fp4_cases
from support.emulator_variants import Edit, Variant
from support.moe_cases import same_values
from support.moe_decode_bugs import MAIN, ROUTE
from support.moe_decode_cases import Output, Tokens, draw_tokens, draw_weights, scratch
from support.moe_decode_fp4_cases import draw_fp4_weights
from support.moe_decode_logits import RoutedTokens, chosen_by_kernel
from support.moe_decode_logits_bugs import BUGS
from support.planted_bugs import Bug, assert_found, cases
from support.topk_cases import DTYPES, RULES, draw_bias, draw_logits, draw_rule, special_logits

SLOW = pytest.mark.slow


def differs(logits: torch.Tensor, bias: torch.Tensor | None, rule: Router, edits: tuple[Edit, ...] = ()) -> bool:
    """Whether ids or any bit of the weights is another than topk's."""
    want = topk(logits, rule, bias)
    weights, ids = chosen_by_kernel(ByLogits(logits, bias, rule), edits)
    if not torch.equal(ids, want.ids):
        return True
    try:
        same_values(weights, want.weights)
    except AssertionError:
        return True
    return False


def problem(name: str, seed: int, tokens: int = 9) -> tuple[torch.Tensor, torch.Tensor | None, Router]:
    """Half of the tokens have few different logits."""
    rule, experts, biased = RULES[name]
    dtype = DTYPES[seed % 3]
    logits = [draw_logits(tokens, experts, dtype, seed, ties=ties) for ties in (False, True)]
    mixed = torch.where(torch.arange(tokens)[:, None] % 2 == 0, *logits)
    return mixed, draw_bias(experts, seed).to(DTYPES[(seed + 1) % 3]) if biased else None, rule


@pytest.mark.parametrize("name", RULES)
def test_rules(name: str) -> None:
    assert not differs(*problem(name, len(name)))


@SLOW
def test_random_rules() -> None:
    found = 0
    for seed in range(120):
        rule, experts, biased = draw_rule(seed, 1024 if seed % 4 == 0 else 200)
        bias = draw_bias(experts, seed).to(DTYPES[seed % 2]) if biased else None
        logits = draw_logits(3, experts, DTYPES[seed % 3], seed, ties=seed % 5 == 0)
        if rule.k <= 16 and ByLogits(logits, bias, rule).fits:
            found += 1
            assert not differs(logits, bias, rule), (seed, rule, experts)
    assert found > 80


@pytest.mark.parametrize(
    "experts", [257, *(pytest.param(n, marks=SLOW) for n in (1, 127, 129, 256, 511, 513, 1023, 1024))]
)
def test_any_number_of_experts(experts: int) -> None:
    for seed, rule in enumerate((Router(min(8, experts), renormalize=False), Router(min(3, experts), "sigmoid"))):
        logits = draw_logits(2, experts, DTYPES[seed], seed)
        assert not differs(logits, None, rule)
        assert not differs(logits, draw_bias(experts, 1), rule)


@pytest.mark.parametrize(
    "rule", [Router(4, renormalize=False), Router(16), Router(3, "sigmoid", num_expert_groups=2, top_groups=1)], ids=str
)
def test_special_logits(rule: Router) -> None:
    logits = torch.cat([special_logits(), torch.full((1, 24), -70.0), torch.linspace(-110, -40, 24)[None]])
    assert not differs(logits, None, rule)
    assert not differs(logits, torch.tensor([float("nan"), float("inf"), -float("inf"), *[0.0] * 21]), rule)


def test_what_the_launch_chooses_by() -> None:
    def fits(experts: int, **how: Any) -> bool:
        return ByLogits(torch.empty(2, experts), None, Router(2, **how)).fits

    assert fits(1024)
    assert not fits(1025)
    assert fits(128, num_expert_groups=MOST_GROUPS, top_groups=2)
    assert not fits(132, num_expert_groups=MOST_GROUPS + 1, top_groups=2)
    assert fits(132, num_expert_groups=MOST_GROUPS + 1, top_groups=MOST_GROUPS + 1)
    for config in (MoeDecodeConfig, MoeDecodeFp4Config):
        with pytest.raises(ValueError, match="logits_room is 200"):
            config(logits_room=200)
        preludes = {config(logits_room=room).prelude() for room in (0, *LOGITS_ROOMS)}
        assert len(preludes) == 1 + len(LOGITS_ROOMS)
        assert "LOGITS_ROOM" not in config().prelude()


# --- whole layers ----------------------------------------------------------------------------------------


def routed(drawn: Tokens, experts: int, rule: Router, seed: int, *, biased: bool = True) -> RoutedTokens:
    logits = draw_logits(len(drawn.x), experts, DTYPES[seed % 3], seed)
    bias = draw_bias(experts, seed) if biased else None
    weights, ids = topk(logits, rule, bias)
    return RoutedTokens(drawn.x, ids, weights, drawn.shared, logits, bias, rule)


DEEPSEEK = Router(4, "sigmoid", scaling_factor=2.5, num_expert_groups=4, top_groups=2)
# FP8_BLOCK weights or MXFP4, experts, tokens, rule, multiprocessors, seed
LAYERS = [
    pytest.param("fp8", 16, 3, DEEPSEEK, 3, 10, id="fp8", marks=SLOW),
    pytest.param("fp8", 150, 8, Router(2), 2, 4, id="fp8, eight tokens", marks=SLOW),
    pytest.param("fp8", 12, 13, Router(4, renormalize=False), 2, 3, id="fp8, thirteen tokens", marks=SLOW),
    pytest.param("fp8", 600, 2, Router(8), 2, 5, id="fp8, 600 experts", marks=SLOW),
    pytest.param("fp4", 6, 2, Router(3, scaling_factor=0.7), 2, 1, id="fp4"),
    pytest.param("fp4", 140, 8, Router(4), 3, 2, id="fp4, eight tokens", marks=SLOW),
]


@pytest.mark.parametrize(("weights_are", "experts", "tokens", "rule", "sms", "seed"), LAYERS)
def test_bits_of_a_launch_that_is_given_ids(
    weights_are: str, experts: int, tokens: int, rule: Router, sms: int, seed: int
) -> None:
    driver = emulated_driver()
    if weights_are == "fp8":
        weights, h, i, launch = draw_weights(experts, 128, 128, seed=seed), 128, 128, moe_decode_cases.launch
    else:
        weights, h, i, launch = draw_fp4_weights(experts, 96, 64, seed=seed), 96, 64, moe_decode_fp4_cases.launch
    call = routed(draw_tokens(weights, tokens, rule.k, seed, shared=True), experts, rule, seed, biased=seed % 2 == 0)
    results = []
    for given in (call.given, call):
        output = Output(tokens, h)
        with driver.configured(num_sms=sms, seed=seed):
            launch(driver, weights, given, output.poisoned(tokens), scratch(tokens * rule.k * max(i, 128)))
        results.append(output)
    assert results[1].is_right(results[0].rows(tokens))


# --- planted: the comparisons see what is wrong ----------------------------------------------------------


def logits_of_bugs() -> list[tuple[torch.Tensor, torch.Tensor | None, Router]]:
    low = torch.linspace(-60, -45, 24)[None].repeat(2, 1)
    return [
        problem("softmax with a bias", 1),  # in types that are read inside of each other's memory
        *(problem(name, 2) for name in ("Qwen3-MoE", "Qwen2-MoE", "softmax with a bias", "groups of two, one chosen")),
        (special_logits(), None, Router(4)),
        (special_logits(), torch.tensor([float("nan"), *[0.0] * 23]), Router(3, "sigmoid", renormalize=False)),
        (low, None, Router(4, "sigmoid")),
        (torch.randn(5, 600, generator=torch.Generator().manual_seed(1)), None, Router(4, renormalize=False)),
    ]


def detect(bug: Bug) -> tuple[int | None, list[str]]:
    found = any(differs(logits, bias, rule, bug.edits) for logits, bias, rule in logits_of_bugs())
    return (1 if found else None), []


@pytest.mark.parametrize("bug", cases(BUGS))
def test_planted_bug_is_found(bug: Bug) -> None:
    assert_found(bug, detect)


@SLOW
def test_without_a_bug_nothing_is_found() -> None:
    assert detect(Bug("none")) == (None, [])


WAIT = "mbarrier_wait(shared_address(&shared.chosen), 0);"


@SLOW
def test_a_launch_that_does_not_wait_for_the_choice_is_reported() -> None:
    weights = draw_weights(6, 128, 128, seed=1)
    call = routed(draw_tokens(weights, 2, 2, 1), 6, Router(2), 1)
    for edits in ((), ((ROUTE, WAIT, ""),)):
        driver: Any = Variant("sm_90a", MAIN, edits, MoeDecodeConfig(8, 50_000, 128))
        with driver.configured(num_sms=1, seed=1, raise_on_reports=False):
            moe_decode_cases.launch(driver, weights, call, Output(2, 128).poisoned(2), scratch(2 * 2 * 128))
        kinds = {report.kind for report in driver.last_result.reports}
        assert bool(kinds & {"race", "uninitialised-shared"}) == bool(edits), kinds
