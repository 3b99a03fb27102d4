"""Predictions of products of K = 96: the units' cycles, and that the page and the record are today's.

What would convince: a product of K = 96 takes as many cycles of the tensor pipe as one of K = 64; bytes into a
multiprocessor are counted here; no predicted stage is shorter than its busiest unit, and none longer with a faster pipe;
published figures are shown with their ratio.
"""

from __future__ import annotations

import json

import pytest

from clock_k96 import (
    FEEDS,
    PUBLISHED,
    RATES,
    RECORD,
    TILES,
    TOOLS,
    chip_with,
    config_of,
    resources,
    stage_bytes,
    stage_cycles,
)
from clock_page import model_digest, read_block
from padless.emulator.timing import B200


def test_a_product_of_96_takes_as_long_as_one_of_64() -> None:
    """A stage of 256 is four products of 64, or 8 / 3 of 96; scales' copies, 384 rows of 16 bytes, stay."""
    scales = 384 * 16 / B200["cp_bytes_per_clk"]
    pair = config_of(2, 256)
    of_64, of_96 = (resources(pair, chip_with(RATES[name]))["tensor pipe"] - scales for name in ("K = 64", "K = 96"))
    assert of_64 / 4 == pytest.approx(128)
    assert of_96 / (8 / 3) == pytest.approx(128)
    assert RATES["96 + 96 + 64"] == pytest.approx((96 + 96 + 64) / (3 * 64))


def test_bytes_of_a_stage() -> None:
    """Codes of 128 rows and of half of 256 columns, half a byte each; scales, one to 16, of the rows and all columns."""
    assert stage_bytes(config_of(2, 256)) == 256 // 2 * (128 + 128) + 256 // 16 * (128 + 256)
    assert stage_bytes(config_of(1, 256)) == 256 // 2 * (128 + 256) + 256 // 16 * (128 + 256)


def test_the_page_shows_the_record_of_todays_model() -> None:
    record = json.loads(RECORD.read_text())
    assert record["model"] == model_digest(*TOOLS), "run tools/clock_k96.py --write"
    assert read_block("k96") == record["lines"]
    rows = [line.strip("|").split("|") for line in record["lines"] if " x " in line]
    assert len(rows) == len(TILES) * len(FEEDS)
    for tile, _, of_64, mixed, of_96, gain, *busy, binds in rows:
        assert float(of_96) <= float(mixed) <= float(of_64), tile
        assert float(of_96) >= 0.99 * max(float(cycles) for cycles in busy), (tile, binds)
        assert float(gain) == pytest.approx(float(of_64) / float(of_96), abs=0.01)
    for size, flops in PUBLISHED.items():
        (line,) = (line for line in record["lines"] if line.startswith(f"| {size} |"))
        assert f"| {' | '.join(f'{pf:g}' for pf in flops)} | {flops[-1] / flops[0]:.2f} |" in line


@pytest.mark.slow
def test_a_line_computed_anew_is_the_records() -> None:
    found = stage_cycles(config_of(2, 128), [chip_with(rate) for rate in RATES.values()])
    (line, _) = (line for line in json.loads(RECORD.read_text())["lines"] if line.startswith("| 256 x 128, 2 |"))
    assert line.startswith(f"| 256 x 128, 2 | 71 | {' | '.join(f'{cycles:.0f}' for cycles in found)} |")
