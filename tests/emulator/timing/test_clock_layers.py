"""Predictions of whole layers on a B200: their parts add up, and the page and the record are today's.

What would convince: rows and experts are those of an even choice, counted by drawing it; passes take their bytes,
counted here, at memory's rate; a layer takes longer than its weights take to arrive, and than its products alone; and a
table of another model, or without a published figure, is refused.
"""

from __future__ import annotations

import json

import pytest
import torch

from clock_layers import DEEPSEEK, PUBLISHED, RECORD, TOOLS, Layer, layer_of, pass_us, sizes_of
from clock_page import model_digest, read_block
from padless.emulator.timing import B200


@pytest.mark.parametrize("tokens", list(PUBLISHED))
def test_rows_are_those_of_an_even_choice(tokens: int) -> None:
    g, turns = torch.Generator().manual_seed(tokens), 400 if tokens < 1000 else 20
    rows, hit = 0.0, 0.0
    for _ in range(turns):
        ids = torch.rand(tokens, DEEPSEEK.experts, generator=g).topk(DEEPSEEK.top_k).indices
        ids = ids[ids < DEEPSEEK.local]
        rows += ids.numel() / turns
        hit += ids.unique().numel() / turns
    sizes = sizes_of(DEEPSEEK, tokens)
    assert abs(sum(sizes) - rows) <= 0.5 + 0.1 * rows
    assert abs(len(sizes) - hit) <= 0.5 + 0.05 * hit
    assert max(sizes) - min(sizes) <= 1


def test_passes_take_their_bytes() -> None:
    """4096 tokens and as many rows: bfloat16 is read and written once, MXFP8 codes with a scale to 32 are written."""
    h = DEEPSEEK.hidden
    values = 4096 * h * 2
    read, written = 2 * values, values + 4096 * h * 33 / 32
    want = read / B200["memory_gb_per_s"] + written / B200["memory_write_gb_per_s"]
    assert pass_us(DEEPSEEK, 4096, "MXFP8") == pytest.approx(want / 1e3)


def test_parts_add_up() -> None:
    layer = Layer(((10.0, 12.0), (20.0, 23.0)), 3.0, (7.0, 9.0))
    assert layer.total == (40.0, 47.0)


@pytest.mark.slow
def test_a_layer_takes_longer_than_its_weights() -> None:
    fast, slow = layer_of(DEEPSEEK, 1, "MXFP8").total
    weights = 3 * DEEPSEEK.hidden * DEEPSEEK.intermediate * 33 / 32 / B200["memory_gb_per_s"] / 1e3
    alone = sum(us for us, _ in layer_of(DEEPSEEK, 1, "MXFP8").products)
    assert weights < alone < fast <= slow


def test_the_page_shows_the_record_of_todays_model() -> None:
    record = json.loads(RECORD.read_text())
    assert record["model"] == model_digest(*TOOLS), "run tools/clock_layers.py --write"
    assert read_block("layers") == record["lines"]
    for tokens, (by_hand, trtllm) in PUBLISHED.items():
        shown = [line for line in record["lines"] if line.startswith(f"| {tokens} |")]
        assert len(shown) == 2
        assert all(line.endswith(f"| {by_hand:g} | {trtllm:g} |") for line in shown)
