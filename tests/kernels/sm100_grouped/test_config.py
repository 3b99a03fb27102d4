"""Choice of tile for the grouped Blackwell kernel, and refused configurations."""

from __future__ import annotations

import itertools

import pytest
import torch

from padless.emulator.fake_driver import emulated_driver
from padless.formats import MXFP8
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig, select_grouped_config
from padless.kernels.sm100_grouped.host import prepare
from support.sm100_grouped import make_case, run

C = Sm100GroupedConfig
PAIR = C(cta_group=2, mma_n=256)
TWO_PAIRS = C(cta_group=2, mma_n=256, multicast=2)


def test_select_is_made_of_configs_that_are_allowed() -> None:
    tiles = set()
    for m, n, groups in itertools.product((1, 8, 100, 1000, 10**5), (8, 128, 136, 4096), (1, 2, 8, 256, 1024)):
        config = select_grouped_config(m, n, groups)
        tiles.add((config.cta_group, config.tokens_on_n, config.mma_n))
        rows = -(-m // min(groups, m))
        assert config.tokens_on_n == (rows <= 192)
    assert len(tiles) >= 6


@pytest.mark.parametrize(
    ("rows", "n", "multicast"),
    [(2048, 4096, 2), (2048, 512, 2), (2048, 256, 1), (2048, 768, 1), (2048, 2304, 2), (2048, 128, 1),
     (128, 4096, 2), (128, 768, 1), (64, 4096, 1), (16, 4096, 1), (8, 128, 1)],
)  # fmt: skip
def test_two_pairs_share_the_tokens_where_they_are_many_and_columns_even(rows: int, n: int, multicast: int) -> None:
    assert select_grouped_config(8 * rows, n, 8).multicast == multicast


def test_a_device_of_one_pair_multicasts_nothing() -> None:
    case = make_case("MXFP8", (300,), 512, 32, exact=True)
    assert select_grouped_config(300, 512, 1).multicast == 2
    for num_sms in (2, 4):
        out = run(case, num_sms=num_sms, arithmetic="fast").out
        assert torch.equal(out.double(), case.exact)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"cta_group": 3}, "cta_group is 3"),
        ({"mma_n": 48}, "mma_n is 48"),
        ({"multicast": 3}, "multicast is 3"),
        ({"mma_n": 32, "tokens_on_n": True, "cta_group": 2, "multicast": 4}, "multicast is 4"),
        ({"num_stages": 1}, "num_stages is 1"),
        ({"keep": "d"}, "keep is 'd'"),
        ({"scales_a": "tiled"}, "scales_a is 'tiled'"),
        ({"mma_n": 64, "scales_b": "tiled"}, "scales_b is 'tiled'"),
        ({"out_dtype": torch.int8}, "out_dtype is torch.int8"),
    ],
    ids=str,
)
def test_what_a_config_may_not_be(fields: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        C(**fields)


def test_what_the_kernel_refuses() -> None:
    driver = emulated_driver("sm_100a")
    case = make_case("MXFP8", (4, 4), 16, 64)
    out = torch.empty(8, 16)

    def refused(match: str, **changes: object) -> None:
        arguments = {"a": case.a, "b": case.b, "offs": case.offs, "out": out, "config": None} | changes
        with pytest.raises(ValueError, match=match):
            prepare(driver, **arguments)

    refused("one element size", b=make_case("NVFP4", (4, 4), 16, 64).b)
    refused("out has strides", out=torch.empty(8, 32)[:, ::2])
    refused("alpha must be float32", alpha=torch.ones(3))
    refused("does not fit in shared memory", config=C(num_stages=12))
    with driver.configured(num_sms=1):
        refused("cta_group 2", config=PAIR)
    with driver.configured(num_sms=3):
        refused("clusters of 4 CTAs", config=TWO_PAIRS)
    a = make_case("NVFP4", (4, 4), 16, 64, global_scales=(torch.ones(3), None))
    refused("a.global_scale has 3 values", a=a.a, b=a.b)
    assert case.a.format is MXFP8
