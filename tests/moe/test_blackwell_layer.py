"""`padless.moe.moe` on a pretended B200: every launch in the emulator, the bits of the twins, and bugs between launches.

What would convince: routing, gather, quantization and sum are the PTX that Triton makes for sm_100a, products are
padless's own for sm_100a, by way of the driver's functions as on a GPU; no bit differs from the same layer computed by
torch twins and separately emulated products; and each bug planted between two launches is seen.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from padless import FP8_BLOCK, MXFP4, MXFP8, NVFP4
from padless.moe import moe
from support.blackwell_layer import BUGS, FORMATS
from support.moe_layer_problem import draw_layer
from support.own_process import run_pretended

PRODUCT = "padless_sm100_grouped_gemm"


run = partial(run_pretended, "blackwell_layer")


def reports(record: dict[str, Any]) -> dict[str, list[str]]:
    return {launched["kernel"]: launched["reports"] for launched in record["launches"] if launched["reports"]}


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["1", "37"])
@pytest.mark.parametrize("name", list(FORMATS))
def test_a_layer_has_the_bits_of_its_parts(name: str, tokens: str) -> None:
    record = run(name, tokens)
    assert record["equal"]
    assert record["off"] <= 0.01, "against float64 sums"
    assert reports(record) == {}
    kernels = [launched["kernel"] for launched in record["launches"]]
    first = ["_factors_of_given"] if name == "NVFP4" else []
    assert kernels == [*first, "_quantize_rows", PRODUCT, PRODUCT, "_combine"]
    # The sum waits for the second product's end: begun early it takes more from the product than it gains.
    late = {launched["kernel"] for launched in record["launches"] if not launched["programmatic"]}
    assert late == {"_combine", *first}


@pytest.mark.slow
def test_many_slots_are_sorted_by_a_launch_of_their_own() -> None:
    record = run("MXFP8", "350")
    assert record["equal"]
    assert reports(record) == {}
    assert len(record["launches"]) == 5


@pytest.mark.slow
@pytest.mark.parametrize("bug", list(BUGS))
def test_wrong_scales_between_launches_are_seen(bug: str) -> None:
    record = run("MXFP8", "37", bug)
    assert not record["equal"]
    assert record["off"] > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["_quantize_rows", PRODUCT])
def test_a_launch_that_does_not_wait_for_the_one_ahead_is_reported(kernel: str) -> None:
    assert reports(run("MXFP8", "5", f"no wait in {kernel}")) == {kernel: ["grid-dependency"]}


@pytest.mark.parametrize("pair", [(FP8_BLOCK, None), (MXFP8, None), (NVFP4, None), (MXFP4, MXFP8)])
def test_tokens_do_not_depend_on_their_number(pair: Any) -> None:
    """By the reference: a layer of 300 tokens, and each of these numbers of its first tokens alone."""
    whole = draw_layer(pair, tokens=300, shared=True)
    want = whole.run(moe, backend="reference")
    for tokens in (0, 1, 2, 31, 128, 129):
        got = whole.only(torch.arange(tokens)).run(moe, backend="reference")
        assert torch.equal(got, want[:tokens])
