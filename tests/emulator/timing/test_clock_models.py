"""Predictions of ten models' layers on a B200: the models are the benchmark's, and the page and the record are today's.

What would convince: every model has a line at every number of tokens, with what was published or that nothing was; no
prediction is shorter than the bytes of the experts that were hit take; a separate activation adds a launch and its
bytes, counted here; a line, computed anew, is the record's.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import clock_models
from clock_layers import layer_of, pass_us, sizes_of
from clock_models import MODELS, NONE, PUBLISHED, RECORD, TOKENS, TOOLS, model_of, models_table
from clock_page import model_digest, read_block
from padless.emulator.timing import B200


def test_the_page_shows_the_record_of_todays_model() -> None:
    record = json.loads(RECORD.read_text())
    assert record["model"] == model_digest(*TOOLS), "run tools/clock_models.py --write"
    assert read_block("models") == record["lines"]
    for name in MODELS:
        for tokens in TOKENS:
            (line,) = (line for line in record["lines"] if line.startswith(f"| {name} | {tokens} |"))
            assert line.endswith(f"| {PUBLISHED.get((name, tokens), NONE)} |")
    assert len(record["lines"]) == 2 + len(MODELS) * len(TOKENS)


def test_no_prediction_is_shorter_than_its_weights() -> None:
    """Of what every line says: the fastest of its figures, and the bytes of the experts that were hit, at four bits."""
    for line in json.loads(RECORD.read_text())["lines"][2:]:
        name, tokens, rows, *found, _ = (cell.strip() for cell in line.strip("|").split("|"))
        model = model_of(name)
        sizes = sizes_of(model, int(tokens))
        assert rows == f"{sum(sizes)}, {len(sizes)}"
        for cell, bytes_of_one in zip(found, (33 / 32, 9 / 16, 17 / 32), strict=True):
            fast, slow = (int(us) for us in cell.split(",")[0].split(" to "))
            weights = 3 * len(sizes) * model.hidden * model.intermediate * bytes_of_one / B200["memory_gb_per_s"] / 1e3
            assert weights < fast <= slow


def test_an_activation_apart_takes_its_bytes() -> None:
    """64 rows of 2 I values of 16 bits are read, and I codes of 8 bits written with a scale to 32."""
    model = model_of("gpt-oss-120b")
    assert model.activates_apart
    rows = sum(sizes_of(model, 16))
    more = pass_us(model, 16, "MXFP8") - pass_us(replace(model, activates_apart=False), 16, "MXFP8")
    read, written = rows * 2 * model.intermediate * 2, rows * model.intermediate * 33 / 32
    want = read / B200["memory_gb_per_s"] + written / B200["memory_write_gb_per_s"]
    assert rows == 64
    assert more == pytest.approx(want / 1e3)


@pytest.mark.slow
def test_an_activation_apart_is_a_launch() -> None:
    model = model_of("gpt-oss-120b")
    apart, fused = (layer_of(m, 1, "MXFP8").launches for m in (model, replace(model, activates_apart=False)))
    assert [a - f for a, f in zip(apart, fused, strict=True)] == pytest.approx([B200["row_ns"] / 1e3] * 2)


@pytest.mark.slow
def test_a_line_computed_anew_is_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_models, "MODELS", {"OLMoE": MODELS["OLMoE"]})
    monkeypatch.setattr(clock_models, "TOKENS", (1,))
    assert list(models_table())[2:] == [
        line for line in json.loads(RECORD.read_text())["lines"] if line.startswith("| OLMoE | 1 |")
    ]
