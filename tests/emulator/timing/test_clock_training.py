"""Predictions of MXFP8 training steps on a B200: their parts, and that the page and the record are today's.

What would convince: the weight gradient's stage takes what its copies or its products take, so nothing else of the
kernel binds, and the published problems get the faster tile; passes
take their bytes, counted here; published figures are shown as they were typed from their source, with their sums; a
call takes longer than its products at the tensor cores' rate.
"""

from __future__ import annotations

import json

import pytest

from clock_page import model_digest, read_block
from clock_training import (
    BROKEN_DOWN,
    CLOCKS,
    CUDNN_LAYER,
    RECORD,
    TOOLS,
    TORCHAO,
    TORCHAO_GB_PER_S,
    TORCHAO_STEPS,
    Linear,
    both_ways,
    in_a_row,
    wgrad_call,
    wgrad_config,
    wgrad_times,
)
from padless.emulator.timing import B200
from padless.kernels.sm100_mxfp8_wgrad.config import TILE_CYCLES, Mxfp8WgradConfig

COPIES = 2 * 128 * 128 / B200["l2_feed"]  # cycles of a stage's codes into a multiprocessor
PRODUCTS = 128 * 256 * 128 / B200["tensor_bytes_per_clk"]  # of a stage's products by a CTA of a pair


@pytest.mark.parametrize(("cta_group", "least"), [(1, COPIES), (2, PRODUCTS)])
def test_a_stage_of_the_weight_gradient_takes_what_binds_it(cta_group: int, least: float) -> None:
    """Copies of a CTA alone, products of a pair; and the choice between the two goes by these cycles."""
    times = wgrad_times(Mxfp8WgradConfig(cta_group=cta_group))
    assert 0.999 * least < times.period[0] < 1.05 * least
    assert pytest.approx(TILE_CYCLES[cta_group], abs=2) == (times.period[0], times.between[0])


def test_passes_take_their_bytes() -> None:
    """Values of 16 bits are read once, codes of 8 bits written twice, with a scale to 32; at worst at 5.42 TB/s."""
    best, worst, _ = both_ways(1e9)
    assert best - B200["row_ns"] / 1e3 == pytest.approx(1e6 * (2 + 2 * 33 / 32) / 7220)
    assert worst - B200["row_ns"] / 1e3 == pytest.approx(1e6 * (2 + 2 * 33 / 32) / TORCHAO_GB_PER_S)
    assert abs(TORCHAO_GB_PER_S / (131072 * 7168 * (2 + 33 / 32) / 525.3e3) - 1) < 1e-9


def test_tiles_that_run_together_share_their_operands() -> None:
    """Two groups of 256 features by 24 tiles each: the first 148 tiles are all; each part is read once a group."""
    alone = Mxfp8WgradConfig()
    call = wgrad_call(Linear(512, 2, 256, 1536), alone)
    assert len(call.tiles) == 2 * 2 * 12
    assert sum(call.loads) == pytest.approx(2 * (2 + 12) * 256 * 128 * 33 / 32)
    again = wgrad_call(Linear(512, 2, 2048, 1536), alone)
    assert sum(again.loads) > 2 * (16 + 12) * 256 * 128 * 33 / 32
    assert call.k_blocks == 2
    paired = wgrad_call(Linear(512, 2, 256, 1536), Mxfp8WgradConfig(cta_group=2))
    assert (len(paired.tiles), paired.workers) == (2 * 6, 74)
    assert sum(paired.loads) == pytest.approx(sum(call.loads))
    assert sum(paired.stores) == sum(call.stores)


def test_the_page_shows_the_record_of_todays_model() -> None:
    record = json.loads(RECORD.read_text())
    assert record["model"] == model_digest(*TOOLS), "run tools/clock_training.py --write"
    assert read_block("training") == record["lines"]
    shown = "\n".join(record["lines"])
    for name, published in TORCHAO.items():
        (line,) = (line for line in record["lines"] if line.startswith(f"| {name} |"))
        assert line.endswith(f"| {' + '.join(f'{us:g}' for us in published)} |")
    assert f"| {sum(map(sum, TORCHAO.values())):.0f} |" in shown
    for linear, us in TORCHAO_STEPS.items():
        shape = f"| {linear.rows}, {linear.groups}, {linear.n}, {linear.k} |"
        (line,) = (line for line in record["lines"] if line.startswith(shape))
        *_, loaded, published, ratio = (cell.strip() for cell in line.strip("|").split("|"))
        assert published == f"{us:.0f}"
        assert float(ratio) == pytest.approx(us / float(loaded), abs=0.01)
    assert record["lines"][-1].endswith(f"| {CUDNN_LAYER[-1]:.0f} |")


def test_the_weight_gradient_is_ahead_of_the_published_one_by_its_pairs() -> None:
    """It was, by single CTAs: 2495 us at the clock of kernels under full load."""
    assert wgrad_config(BROKEN_DOWN).cta_group == 2
    (line,) = (line for line in json.loads(RECORD.read_text())["lines"] if line.startswith("| weight gradient |"))
    loaded, published = (float(cell) for cell in line.strip("|").split("|")[3:5])
    assert loaded < published
    alone, pair = (Mxfp8WgradConfig(cta_group=c) for c in (1, 2))
    us = [in_a_row(wgrad_call(BROKEN_DOWN, c), wgrad_times(c))[-1] for c in (alone, pair)]
    assert us[0] > published > us[1] == pytest.approx(loaded, abs=0.5)


def test_products_take_longer_than_the_tensor_cores() -> None:
    rate = B200["tensor_bytes_per_clk"] * B200.num_sms
    wanted = [131072 * 2048 * 7168 / rate / ghz / 1e3 for ghz in CLOCKS]
    for name in ("forward product", "input gradient", "weight gradient"):
        (line,) = (line for line in json.loads(RECORD.read_text())["lines"] if line.startswith(f"| {name} |"))
        found = [float(cell) for cell in line.strip("|").split("|")[1:4]]
        assert all(us < predicted < 2.5 * us for us, predicted in zip(wanted, found, strict=True))
