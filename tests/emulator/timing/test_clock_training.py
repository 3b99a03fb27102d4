"""Predictions of MXFP8 training steps on a B200: their parts, and that the page and the record are today's.

What would convince: the weight gradient's stage takes what its copies take, so nothing else of the kernel binds; passes
take their bytes, counted here; published figures are shown as they were typed from their source, with their sums; a
call takes longer than its products at the tensor cores' rate.
"""

from __future__ import annotations

import json

import pytest

from clock_page import model_digest, read_block
from clock_training import (
    CLOCKS,
    CUDNN_LAYER,
    RECORD,
    TOOLS,
    TORCHAO,
    TORCHAO_GB_PER_S,
    TORCHAO_STEPS,
    Linear,
    both_ways,
    run_wgrad,
    wgrad_call,
)
from padless.emulator.timing import B200

COPIES = 2 * 128 * 128 / B200["l2_feed"]  # cycles of a stage's codes into a multiprocessor


def test_a_stage_of_the_weight_gradient_takes_what_its_copies_take() -> None:
    """Loads of scales that wait for one another took 5306 cycles."""
    stage = (run_wgrad(16).cycles - run_wgrad(8).cycles) / 8
    assert COPIES <= stage < 1.05 * COPIES


def test_passes_take_their_bytes() -> None:
    """Values of 16 bits are read once, codes of 8 bits written twice, with a scale to 32; at worst at 5.42 TB/s."""
    best, worst, _ = both_ways(1e9)
    assert best - B200["row_ns"] / 1e3 == pytest.approx(1e6 * (2 + 2 * 33 / 32) / 7220)
    assert worst - B200["row_ns"] / 1e3 == pytest.approx(1e6 * (2 + 2 * 33 / 32) / TORCHAO_GB_PER_S)
    assert abs(TORCHAO_GB_PER_S / (131072 * 7168 * (2 + 33 / 32) / 525.3e3) - 1) < 1e-9


def test_tiles_that_run_together_share_their_operands() -> None:
    """Two groups of 256 features by 24 tiles each: the first 148 tiles are all; each part is read once a group."""
    call = wgrad_call(Linear(512, 2, 256, 1536))
    assert len(call.tiles) == 2 * 2 * 12
    assert sum(call.loads) == pytest.approx(2 * (2 + 12) * 256 * 128 * 33 / 32)
    again = wgrad_call(Linear(512, 2, 2048, 1536))
    assert sum(again.loads) > 2 * (16 + 12) * 256 * 128 * 33 / 32
    assert call.k_blocks == 2


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


def test_products_take_longer_than_the_tensor_cores() -> None:
    rate = B200["tensor_bytes_per_clk"] * B200.num_sms
    wanted = [131072 * 2048 * 7168 / rate / ghz / 1e3 for ghz in CLOCKS]
    for name in ("forward product", "input gradient", "weight gradient"):
        (line,) = (line for line in json.loads(RECORD.read_text())["lines"] if line.startswith(f"| {name} |"))
        found = [float(cell) for cell in line.strip("|").split("|")[1:4]]
        assert all(us < predicted < 2.5 * us for us, predicted in zip(wanted, found, strict=True))
