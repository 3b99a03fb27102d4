"""Bounds by the peers' times: recomputed by hand for tiny records, and for the committed records of a whole grid."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from padless.bench.report.bounds import UNITS, bounds, limit_us
from padless.bench.results import of_kind, read_records, sessions_of
from support.ragged import ROOT

MEASURED = ROOT / "docs" / "measured"
# 2 TFLOP/s: a million floating-point operations take half a microsecond.
SESSIONS = {"s": {"kind": "session", "id": "s", "ceilings": {"dense_tflops": 2.0, "copy_gb_per_s": 1.0}}}


def made_up(floor_us: float | None, sizes: list[int], flops: int, **times: float) -> dict[str, Any]:
    gpu = {name: {"us": us} for name, us in times.items()}
    point = {"M": sum(sizes), "N": 1, "K": 1, "groups": len(sizes)}
    return {
        "kind": "paper",
        "session": "s",
        "point": point,
        "sizes": sizes,
        "flops": flops,
        "floor_us": floor_us,
        "gpu": gpu,
    }


# Arithmetic binds: 100 rows, 8e6 operations, 4 us. In units of 64: 64 + 64 + 0 + 64 = 192 rows, 7.68 us.
BUSY = made_up(4.0, [1, 35, 0, 64], 8_000_000, padless=6.0, pad_then_deepgemm=8.0, tma_adaptive_kernel=12.0)
# Bytes bind: arithmetic would take 0.5 us, with 128 of 2 rows 32 us, and bytes take 30.
WIDE = made_up(30.0, [1, 1], 1_000_000, padless=40.0, pad_then_deepgemm=48.0)
# Bytes bind even in units: 0.25 us of arithmetic, 0.32 us with 128 of 100 rows.
LONG = made_up(50.0, [50, 50], 500_000, padless=100.0, pad_then_deepgemm=75.0)


def test_the_floor_in_units_by_hand() -> None:
    assert limit_us(BUSY, "floor", SESSIONS) == 4.0
    assert limit_us(BUSY, UNITS, SESSIONS) == pytest.approx(4.0 * 192 / 100)
    assert limit_us(WIDE, UNITS, SESSIONS) == pytest.approx(0.5 * 128 / 2)
    assert limit_us(LONG, UNITS, SESSIONS) == 50.0


def test_bounds_by_hand() -> None:
    lines = bounds([BUSY, WIDE, LONG], ("floor", UNITS), SESSIONS)
    assert set(lines) == {"pad + DeepGEMM", "paper's code, its GEMM alone"}
    line = lines["pad + DeepGEMM"]
    padless = line["padless"]
    assert padless is not None
    assert (padless.points, padless.smallest) == (3, 0.75)
    assert padless.geomean == pytest.approx((8 / 6 * 48 / 40 * 75 / 100) ** (1 / 3))
    floor, units = line["floor"], line[UNITS]
    assert floor is not None
    assert units is not None
    assert floor.geomean == pytest.approx((8 / 4 * 48 / 30 * 75 / 50) ** (1 / 3))
    assert floor.smallest == 1.5
    assert units.geomean == pytest.approx((8 / 7.68 * 48 / 32 * 75 / 50) ** (1 / 3))
    assert units.smallest == pytest.approx(8 / 7.68)
    kernel = lines["paper's code, its GEMM alone"]["floor"]
    assert kernel is not None
    assert (kernel.points, kernel.geomean, kernel.smallest) == (1, pytest.approx(3.0), 3.0)


def test_own_products_copies_and_the_host_are_no_bounds() -> None:
    one = made_up(4.0, [64], 8_000_000, padless=6.0, pad_then_padless=7.0, padless_on_padded=6.0)
    one["gpu"] |= {"copy of as many bytes": {"us": 5.0}, "read of as many bytes": {"us": 5.0}}
    one["end_to_end"] = {"padless": {"us": 9.0}, "tma_adaptive": {"us": 20.0}}
    assert bounds([one], ("floor", UNITS), SESSIONS) == {}


def test_what_is_missing_is_left_out() -> None:
    no_floor = made_up(None, [64], 8_000_000, padless=6.0, pad_then_deepgemm=8.0)
    assert bounds([no_floor], ("floor", UNITS), SESSIONS) == {}
    (line,) = bounds([no_floor, LONG], ("floor", UNITS), {}).values()
    assert line[UNITS] is None  # no session, so no ceiling
    assert line["floor"] is not None
    assert line["floor"].points == 1
    no_ceiling = {"s": {"ceilings": {"dense_tflops": None}}}
    assert limit_us(BUSY, UNITS, no_ceiling) is None


def test_a_dense_product_is_one_group() -> None:
    dense = made_up(4.0, [100], 8_000_000, padless=6.0, deepgemm=5.0)
    del dense["sizes"]
    assert limit_us(dense, UNITS, SESSIONS) == pytest.approx(4.0 * 128 / 100)


def recomputed(lines: list[dict[str, Any]], peer: str, unit: int) -> tuple[float, float]:
    """geomean and least of t(peer) / t(limit), from the ceilings and the sizes and nothing else of the package."""
    ceilings = {line["id"]: line["ceilings"] for line in lines if line["kind"] == "session"}
    values = []
    for line in lines:
        if line["kind"] != "paper":
            continue
        rows = sum(-(-size // unit) * unit for size in line["sizes"])
        n, k = line["point"]["N"], line["point"]["K"]
        arithmetic_us = 2 * rows * n * k / (ceilings[line["session"]]["dense_tflops"] * 1e6)
        bytes_us = line["bytes"] / (ceilings[line["session"]]["copy_gb_per_s"] * 1e3)
        values.append(line["gpu"][peer]["us"] / max(arithmetic_us, bytes_us))
    return math.exp(sum(map(math.log, values)) / len(values)), min(values)


PEERS_OF_THE_GRID = {
    "pad + DeepGEMM": "pad_then_deepgemm",
    "DeepGEMM on padded data": "deepgemm_on_padded",
    "paper's code, its GEMM alone": "tma_adaptive_kernel",
}


def test_bounds_of_the_committed_grid() -> None:
    path = MEASURED / "2026-11-21-h200-paper-full.jsonl"
    records = read_records(path)
    raw = [json.loads(line) for line in path.read_text().splitlines()]
    found = bounds(of_kind(records, "paper"), ("floor", UNITS), sessions_of(records))
    assert set(found) == set(PEERS_OF_THE_GRID)
    for title, peer in PEERS_OF_THE_GRID.items():
        line = found[title]
        floor, units = line["floor"], line[UNITS]
        assert floor is not None
        assert units is not None
        got = (floor.geomean, floor.smallest, units.geomean, units.smallest)
        assert got == pytest.approx(recomputed(raw, peer, 1) + recomputed(raw, peer, 64), rel=1e-9)
        assert floor.geomean > units.geomean > units.smallest > 0.9  # an upper bound, and the lower of the two
        assert floor.points == units.points == len(of_kind(records, "paper")) > 500
