"""The tool that times the passes: what it calls is right before it is timed, and its record can be read."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import time_passes
from padless.bench.cases.problems.layer import MODELS

SMALL = "small"


@pytest.fixture(autouse=True)
def a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, SMALL, (5, 3, 320, 64))


def test_calls_of_a_point() -> None:
    """Of few tokens all passes in one; of many each alone, beside a copy and a fill of as many bytes."""
    few = time_passes.calls_of(SMALL, 9, "cpu")
    assert list(few) == ["routing, gather and sum", "routing and gather", "sum"]
    routing, rows, out = few["routing, gather and sum"]()
    assert (len(routing.tokens), tuple(rows.data.shape), tuple(out.shape)) == (27, (27, 320), (9, 320))
    many = time_passes.calls_of(SMALL, 300, "cpu")
    rows, copied, filled = (
        many[name]() for name in ("gather_quantize", "copy of as many bytes", "fill of what it writes")
    )
    written = rows.data.numel() + 4 * 900 * 3
    assert filled.numel() == written
    assert 2 * copied.numel() == 2 * 300 * 320 + written + 4 * 900
    assert torch.equal(many["its quantizing launch alone"]().data, rows.data)


def test_wrong_bits_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = time_passes.gather_quantize

    def one_bit_off(*arguments: Any, **options: Any) -> Any:
        rows = gather(*arguments, **options)
        rows.data.view(torch.uint8)[7, 300] ^= 1
        return rows

    monkeypatch.setattr(time_passes, "gather_quantize", one_bit_off)
    with pytest.raises(AssertionError, match="other bits"):
        time_passes.calls_of(SMALL, 9, "cpu")


def test_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON, a point a line; layers of an older record stay."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(time_passes, "driver_version", lambda: "1.2")
    older = tmp_path / "older.json"
    older.write_text(json.dumps({"passes": [1], "layers": [{"model": SMALL, "us": {"layer": 5.0}}]}))
    points = [{"model": SMALL, "tokens": n, "us": {"route": 2.5}} for n in (64, 2048)]
    text = time_passes.text_of(points, argparse.Namespace(repeats=15, keep=older))
    record = json.loads(text)
    assert record["passes"] == points
    assert record["layers"] == [{"model": SMALL, "us": {"layer": 5.0}}]
    assert (record["gpu"], record["driver"], record["repeats"]) == ("a GPU", "1.2", 15)
    assert sum(SMALL in line for line in text.splitlines()) == 3
