"""Choice of tile for the grouped Blackwell kernel, and refused configurations."""

from __future__ import annotations

import itertools

import pytest
import torch

from padless.emulator.fake_driver import emulated_driver
from padless.formats import MXFP8
from padless.kernels.sm100_grouped.config import KINDS, Sm100GroupedConfig, select_grouped_config
from padless.kernels.sm100_grouped.host import prepare
from support.sm100_grouped import make_case

C = Sm100GroupedConfig
PAIR = C(cta_group=2, mma_n=256)
TWO_PAIRS = C(cta_group=2, mma_n=256, multicast=2)


def test_select_is_made_of_configs_that_are_allowed() -> None:
    tiles = set()
    for m, n, groups in itertools.product((1, 8, 100, 1000, 10**5), (8, 128, 136, 4096), (1, 2, 8, 256, 1024)):
        for kind, num_sms in itertools.product(KINDS, (1, 148)):
            config = select_grouped_config(m, n, groups, 2048, kind, num_sms)
            assert config.cluster <= num_sms
            tiles.add((config.cta_group, config.tokens_on_n, config.mma_n))
    assert len(tiles) >= 6


@pytest.mark.parametrize(
    ("rows", "kind", "tile"),
    [(1, "NVFP4", (64, 128)), (16, "MXFP8", (32, 256)), (2048, "NVFP4", (256, 256)), (2048, "MXFP8", (256, 256))],
)
def test_few_rows_get_a_narrow_tile_and_many_the_largest(rows: int, kind: str, tile: tuple[int, int]) -> None:
    config = select_grouped_config(32 * rows, 4096, 32, 3584, kind)
    assert (config.tile_m, config.tile_n) == tile


def test_a_shorter_tile_is_taken_where_it_saves_a_round() -> None:
    """74 pairs and one group: 75 tiles of 256 rows are two rounds, of which the second is one tile."""
    assert select_grouped_config(256, 256 * 74, 1, 4096).tile_n == 256
    assert select_grouped_config(256, 256 * 75, 1, 4096) != select_grouped_config(256, 256 * 74, 1, 4096)


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
