"""The planning model: what follows from counting, and the measured times of four GPUs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

import pytest

from padless.distributed.planning import Exchange, Machine, predict, predict_layer, table

MEASURED = Path(__file__).parents[2] / "docs/measured"


@pytest.mark.parametrize(("ranks", "experts", "top_k"), [(2, 64, 8), (8, 256, 8), (8, 256, 6), (64, 256, 8)])
def test_copies_are_those_of_a_closed_form(ranks: int, experts: int, top_k: int) -> None:
    """D = R (1 - C(E - E/R, k) / C(E, k)) for distinct uniform experts."""
    p = predict(Exchange(ranks, 4096, 7168, experts, top_k))
    want = ranks * (1 - comb(experts - experts // ranks, top_k) / comb(experts, top_k))
    assert p.copies == pytest.approx(want, rel=0.01)
    assert p.rows == pytest.approx(4096 * top_k)
    hosts = max(ranks // 8, 1)
    want = hosts * (1 - comb(experts - experts // hosts, top_k) / comb(experts, top_k))
    assert p.hosts == pytest.approx(want, rel=0.01)


def test_rows_of_slots_in_the_documentation() -> None:
    """Every line of the page's table: distinct other ranks of a token, slots on other ranks, and their bytes."""
    text = (Path(__file__).parents[2] / "docs/expert_parallelism.md").read_text()
    lines = re.findall(
        r"^\| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (\d+) \| (\d+) \|$", text, re.M
    )
    assert len(lines) == 5
    for line in lines:
        r, e, k = map(int, line[:3])
        by_rank = (r - 1) * (1 - comb(e - e // r, k) / comb(e, k))
        by_slot = k * (r - 1) / r
        megabytes = [4096 * rows * 2 * 7168 / 1e6 for rows in (by_rank, by_slot)]
        wanted = [f"{by_rank:.2f}", f"{by_slot:.2f}", f"{by_slot / by_rank:.2f}", *(f"{x:.0f}" for x in megabytes)]
        assert list(line[3:]) == wanted
        p = predict(Exchange(r, 4096, 7168, e, k))
        assert p.copies * (r - 1) / r == pytest.approx(by_rank, rel=0.01)


def records(name: str) -> list[dict[str, Any]]:
    """Points of a file of records."""
    lines = map(json.loads, (MEASURED / name).read_text().splitlines())
    return [line for line in lines if line["kind"] != "session"]


def exchange_of(point: dict[str, Any], ranks: int) -> Exchange:
    return Exchange(ranks, *(point[name] for name in ("tokens", "hidden", "experts", "top_k")))


@pytest.mark.parametrize(
    ("name", "ranks", "least"),
    [
        ("2026-11-30-h200x2-ep.jsonl", 2, 1),
        ("2026-11-29-h200-ep.jsonl", 4, 4096),  # kernels for fewer tokens have changed since
    ],
)
def test_several_gpus_as_measured(name: str, ranks: int, least: int) -> None:
    found = [record for record in records(name) if record["point"]["tokens"] >= least]
    assert len(found) == (18 if least == 1 else 6)
    for record in found:
        e = exchange_of(record["point"], ranks)
        exchange, layer = predict(e), predict_layer(e, record["point"]["intermediate"])
        said = {"dispatch": exchange.dispatch, "combine": exchange.combine, "layer": layer.layer, "step": layer.step}
        for what, us in said.items():
            if what in record["gpu"]:
                assert us == pytest.approx(record["gpu"][what]["us"], rel=0.1), (record["point"], what)


def test_products_and_steps_of_one_gpu_as_measured() -> None:
    """Where a rank has many rows. Of few, popularity decides how many experts are read, which the records skew."""
    layers = [r for r in records("2026-11-30-h200-layer.jsonl") if r["point"]["tokens"] >= 8192]
    layers = [r for r in layers if r["point"]["model"].startswith(("Qwen3", "DeepSeek"))]
    steps = records("2026-11-29-h200-train.jsonl")
    assert (len(layers), len(steps)) == (5, 4)
    for record in layers:
        found = predict_layer(exchange_of(record["point"], 1), record["point"]["intermediate"])
        assert found.products == pytest.approx(record["gpu"]["products"]["us"], rel=0.1)
    for record in steps:
        e = exchange_of(record["point"], 1)
        bf16 = predict(replace(e, quantized=False))
        alone = predict_layer(e, record["point"]["intermediate"]).step - 2 * (bf16.dispatch + bf16.combine)
        assert alone == pytest.approx(record["gpu"]["padless fp8"]["us"], rel=0.1)


def test_layers_of_few_tokens_read_fewer_experts() -> None:
    few, more = (predict_layer(Exchange(4, t, 7168, 256, 8), 2048).products for t in (1, 16))
    assert few < 0.6 * more  # 4 tokens meet 30 of 256 experts, 64 meet 222


def test_what_slows_an_exchange() -> None:
    usual = predict(Exchange(8, 4096, 7168, 256, 8))
    assert predict(Exchange(8, 4096, 7168, 256, 8, skew=1.0)).dispatch > 1.3 * usual.dispatch
    assert predict(Exchange(8, 4096, 7168, 256, 8), Machine(link=175)).combine > 1.5 * usual.combine
    two_hosts = predict(Exchange(16, 4096, 7168, 256, 8))
    assert two_hosts.combine > 3 * usual.combine  # the network, a sum for each rank
    network = 4096 * two_hosts.hosts / 2 * 7392 / Machine().network * 1e-3  # us: a row for each host, of two
    assert network < two_hosts.dispatch < network + 0.3 * usual.dispatch
    with pytest.raises(ValueError, match="experts is 10 and ranks 4"):
        predict(Exchange(4, 1, 32, 10, 2))


def test_table() -> None:
    lines = table([2, 8], 128, 4096, 64, 6, 0.0, Machine()).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| 2 | 32 |")
