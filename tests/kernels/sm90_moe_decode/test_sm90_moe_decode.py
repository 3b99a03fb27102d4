"""The decoding layer's one launch in the emulator: the bits of the layer's several launches, and no report.

What would convince a sceptic: every bit, from random operands, of what is computed by other kernels and torch; outputs
poisoned and guarded; launches one after the other on one scratch, with other tokens, ids and sizes; any number of CTAs
resident (the emulator draws 1 to 3 by the seed), so that CTAs take each other's shares.
"""

from __future__ import annotations

import pytest
import torch

from padless.emulator.fake_driver import emulated_driver
from support.moe_decode_cases import Output, draw_tokens, draw_weights, launch, scratch, several_launches

SLOW = pytest.mark.slow
# experts, H, I, gate_up, tokens, top_k, kind of ids, shared, multiprocessors, seed
CASES = [
    pytest.param(6, 256, 256, "concatenated", 3, 2, "any", True, 3, 10, id="small"),
    pytest.param(3, 256, 128, "concatenated", 2, 2, "any", True, 2, 4, id="copies late", marks=SLOW),
    pytest.param(4, 128, 128, "interleaved", 1, 8, "any", False, 2, 1, id="one token, repeats"),
    pytest.param(3, 256, 128, "concatenated", 2, 2, "none", True, 2, 0, id="no expert"),
    pytest.param(3, 256, 128, "concatenated", 2, 1, "none", False, 2, 2, id="no expert, nothing shared"),
    pytest.param(40, 256, 128, "interleaved", 8, 4, "distinct", False, 4, 7, id="many experts", marks=SLOW),
    pytest.param(5, 128, 384, "concatenated", 8, 3, "one", True, 1, 3, id="one expert", marks=SLOW),
    pytest.param(12, 384, 256, "interleaved", 8, 8, "any", True, 5, 11, id="most rows of eight tokens", marks=SLOW),
    pytest.param(7, 256, 128, "concatenated", 16, 4, "any", True, 4, 5, id="sixteen tokens", marks=SLOW),
    pytest.param(4, 128, 128, "concatenated", 13, 4, "distinct", False, 2, 9, id="all of all experts", marks=SLOW),
    pytest.param(300, 128, 128, "concatenated", 5, 2, "any", False, 3, 8, id="300 experts", marks=SLOW),
    pytest.param(2, 4224, 128, "concatenated", 1, 2, "distinct", False, 2, 6, id="33 blocks of K", marks=SLOW),
]


@pytest.mark.parametrize(("experts", "h", "i", "gate_up", "tokens", "top_k", "kind", "shared", "sms", "seed"), CASES)
def test_bits_of_several_launches(
    experts: int, h: int, i: int, gate_up: str, tokens: int, top_k: int, kind: str, shared: bool, sms: int, seed: int
) -> None:
    weights = draw_weights(experts, h, i, gate_up, seed)
    drawn = draw_tokens(weights, tokens, top_k, seed, shared=shared, kind=kind)
    want = several_launches(weights, drawn)
    assert want.isfinite().all()
    output, driver = Output(tokens, h), emulated_driver()
    with driver.configured(num_sms=sms, seed=seed):
        launch(driver, weights, drawn, output.poisoned(tokens), scratch(tokens * top_k * i))
    assert output.is_right(want)


def check_sequence(sizes: list[tuple[int, int, str]], i: int, seeds: list[int]) -> None:
    """Launches of (tokens, top_k, kind) in turn with one scratch and one output address."""
    weights = draw_weights(5, 256, i, seed=2)
    calls = [draw_tokens(weights, t, k, n, kind=kind, shared=n % 2 == 1) for n, (t, k, kind) in enumerate(sizes)]
    wanted = [several_launches(weights, call) for call in calls]
    driver = emulated_driver()
    for seed in seeds:
        output, memory = Output(max(t for t, _, _ in sizes), 256), scratch(max(t * k for t, k, _ in sizes) * i)
        for n, (call, want) in enumerate(zip(calls, wanted, strict=True)):
            with driver.configured(num_sms=3, seed=seed + n):
                launch(driver, weights, call, output.poisoned(len(call.ids)), memory)
            assert output.is_right(want), f"launch {n} of seed {seed}"
            assert memory[:4].tolist()[:3] == [n + 1, 0, 0], "control words are not as the next launch needs them"


def test_one_token_after_eight() -> None:
    check_sequence([(8, 1, "any"), (1, 2, "distinct"), (3, 1, "any")], 128, [0])


@pytest.mark.slow
def test_many_launches_with_one_scratch() -> None:
    sizes = [
        (3, 2, "any"),
        (2, 2, "none"),
        (8, 3, "any"),
        (1, 1, "distinct"),
        (1, 4, "any"),
        (12, 2, "any"),
        (2, 2, "any"),
    ]
    check_sequence(sizes, 128, [10, 44])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_and_ids_of_other_types(dtype: torch.dtype) -> None:
    weights = draw_weights(4, 128, 128)
    drawn = draw_tokens(weights, 3, 2, 5, shared=True)
    drawn = type(drawn)(drawn.x, drawn.ids.int(), drawn.weights.to(dtype), drawn.shared)
    want = several_launches(weights, drawn)
    output, driver = Output(3, 128), emulated_driver()
    with driver.configured(seed=4):
        launch(driver, weights, drawn, output.poisoned(3), scratch(3 * 2 * 128))
    assert output.is_right(want)
    far = type(drawn)(
        drawn.x, drawn.ids.long() + 2**32, drawn.weights, drawn.shared
    )  # no experts, though low halves are
    with driver.configured(seed=4):
        launch(driver, weights, far, output.poisoned(3), scratch(3 * 2 * 128))
    assert output.is_right(several_launches(weights, far))


@pytest.mark.slow
def test_values_that_are_no_numbers() -> None:
    """A token with an Inf and one with a NaN give NaN and leave the others alone; so do sums beyond float32."""
    weights = draw_weights(4, 128, 128)
    drawn = draw_tokens(weights, 4, 2, 6, kind="distinct")
    drawn.x[0, 5], drawn.x[1, 77], drawn.x[2] = float("inf"), float("nan"), 3e38
    want = several_launches(weights, drawn)
    out, driver = torch.empty(4, 128, dtype=torch.bfloat16), emulated_driver()
    with driver.configured(seed=1):
        launch(driver, weights, drawn, out, scratch(4 * 2 * 128))
    assert torch.equal(out.isnan(), want.isnan())
    assert want[:3].isnan().any()
    assert torch.equal(out[~want.isnan()], want[~want.isnan()])
