"""The clock's errors against records and publications stay inside what is claimed, and would not if it were wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from clock_b200 import loop_errors, measured_loops, product_errors
from clock_examine import FITTING, SHAPES, TESTING, Prepared, errors, order, prepared, recorded_times
from clock_h200 import MEASURED, grid_points, memory_rates, tile_points, tile_times
from clock_ladder import FITTED_SIZES, SIZES, ladder_errors, ladder_rows
from clock_sm100 import (
    PROBLEMS,
    chosen,
    dense_configs,
    grouped_configs,
    light_us,
    predict,
    rounded,
    rounded_grouped,
    sort_times,
)
from clock_sm100 import run_tiles as run_sm100
from clock_sm100 import tile_times as sm100_tile_times
from padless.emulator.timing import B200, H200
from padless.emulator.timing.chip import TileTimes
from padless.kernels.sm100_dense.config import TILE_CYCLES as DENSE_CYCLES
from padless.kernels.sm100_dense.config import Sm100DenseConfig
from padless.kernels.sm100_grouped.config import TILE_CYCLES, Sm100GroupedConfig
from support.ragged import ROOT

RECORD = ROOT / "docs" / "measured" / "clock" / "2026-11-22.jsonl"
TIMES = recorded_times(RECORD)
TEST_SIZES = tuple(size for size in SIZES if size not in FITTED_SIZES)


@pytest.fixture(scope="module")
def paper() -> list[Prepared]:
    """Every eighth point of the paper's grid: all of it takes five times as long."""
    return prepared(grid_points(TESTING["paper"])[::8])


def test_records_are_there() -> None:
    assert set(TIMES) == set(SHAPES)
    assert len(grid_points(TESTING["paper"])) == 576
    assert len(grid_points(TESTING["decode"])) == 180
    assert len(tile_points(FITTING["small tiles"])) == 360
    assert (MEASURED / FITTING["dense"]).exists()


def test_paper_grid_within_five_percent(paper: list[Prepared]) -> None:
    error = errors(paper, TIMES, H200)
    assert error.mape <= 0.05
    assert error.largest <= 0.12


def test_memory_rates_are_those_of_reads_and_copies() -> None:
    read, written = memory_rates(TESTING["decode"])
    assert read == pytest.approx(H200["memory_gb_per_s"], rel=0.005)
    assert written == pytest.approx(H200["memory_write_gb_per_s"], rel=0.005)


def test_decoding_near_five_percent(paper: list[Prepared]) -> None:
    """3.3% of all 180 points."""
    decode = prepared(grid_points(TESTING["decode"])[::4])
    error = errors(decode, TIMES, H200)
    assert error.mape <= 0.05
    assert error.largest <= 0.12
    all_at_once = H200.changed("stated", "a test", memory_overlap=1.5)
    assert errors(decode, TIMES, all_at_once).mape > 0.08
    assert errors(paper + decode, TIMES, H200).mape <= 0.05


def test_wrong_tiles_or_clock_would_be_seen(paper: list[Prepared]) -> None:
    slower = {
        shape: TileTimes(t.start, t.end, {unit: 1.15 * p for unit, p in t.period.items()}, t.between)
        for shape, t in TIMES.items()
    }
    assert errors(paper, slower, H200).mape > 0.05
    assert errors(paper, TIMES, H200.changed("stated", "a test", full_load_ghz=1.85)).mape > 0.05


@pytest.mark.slow
def test_tile_times_are_those_recorded() -> None:
    for shape in SHAPES:
        found = tile_times(shape, H200)
        for unit, period in TIMES[shape].period.items():
            assert found.period[unit] == pytest.approx(period, rel=0.01), (shape, unit)


def test_one_tile_time_is_that_recorded() -> None:
    shape = (128, 128, 1)
    found = tile_times(shape, H200)
    assert found.period == pytest.approx(TIMES[shape].period, rel=0.01)
    assert found.start == pytest.approx(TIMES[shape].start, rel=0.01)


def test_order_counts_pairs_once() -> None:
    points = prepared([p for p in tile_points(FITTING["small tiles"]) if p.k == 7168 and p.n == 4096])
    right, wrong = order(points, TIMES, H200)
    assert 0 < right + wrong <= 3 * len({(p.point.sizes, p.point.n, p.point.k) for p in points})


def test_faster_tile_is_named_in_nineteen_of_twenty_pairs() -> None:
    points = prepared([p for p in tile_points(TESTING["tiles"]) if p.k == 7168])
    right, wrong = order(points, TIMES, H200)
    assert right + wrong > 30
    assert right >= 0.95 * (right + wrong)
    wide = TIMES[128, 192, 1]
    faster = replace(wide, period={unit: 0.9 * cycles for unit, cycles in wide.period.items()})
    assert order(points, TIMES | {(128, 192, 1): faster}, H200)[0] < 0.5 * (right + wrong)


# ---------------------------------------------------------------------------------------------------- B200
def test_products_within_two_percent() -> None:
    for held_out in (False, True):
        intervals, latencies = product_errors(B200, held_out)
        assert intervals.mape <= 0.02
        assert latencies.mape <= 0.05
    wrong = B200.changed("stated", "a test", mma_shared_bytes_per_clk=112)
    assert product_errors(wrong, True)[0].mape > 0.02


def test_loops_within_five_percent() -> None:
    loops = measured_loops(B200)
    assert len(loops) == 592
    test = [loop for i, loop in enumerate(loops) if i % 3]
    error = loop_errors(B200, test)
    assert error.mape <= 0.05
    assert error.quantile(0.9) <= 0.13
    for name, value in (("tma_row", 1.8), ("ring_latency", 900.0), ("stream_bytes_per_clk", 128.0)):
        assert loop_errors(B200.changed("stated", "a test", **{name: value}), test).mape > 0.05, name


def test_steps_of_the_ladder() -> None:
    rows = ladder_rows(B200)
    assert len(rows) == 48
    test = ladder_errors(rows, TEST_SIZES)
    assert test.ratio <= 0.08
    assert test.right / test.pairs >= 0.85
    everything = ladder_errors(rows)
    assert everything.ratio <= 0.08
    assert everything.right / everything.pairs >= 0.85


def test_ladder_without_its_causes_is_worse() -> None:
    rows = ladder_rows(B200.changed("stated", "a test", local_lookups=0.0))
    assert ladder_errors(rows, TEST_SIZES).ratio > ladder_errors(ladder_rows(B200), TEST_SIZES).ratio


# ------------------------------------------------------------------------ this library on a B200
@pytest.mark.parametrize("tile", DENSE_CYCLES, ids=str)
def test_the_dense_kernels_table_is_what_the_clock_says(tile: tuple[int, int]) -> None:
    assert rounded(sort_times("MXFP8", dict(dense_configs())[tile])) == pytest.approx(DENSE_CYCLES[tile], abs=2)


@pytest.mark.parametrize(("fmt", "tile"), [(fmt, tile) for fmt in TILE_CYCLES for tile in TILE_CYCLES[fmt]], ids=str)
def test_the_grouped_kernels_table_is_what_the_clock_says(fmt: str, tile: tuple[bool, int, int]) -> None:
    assert rounded_grouped(fmt, dict(grouped_configs(fmt))[tile]) == pytest.approx(TILE_CYCLES[fmt][tile], abs=2)


@pytest.mark.slow
def test_blackwell_prediction_is_a_band_above_the_speed_of_light() -> None:
    problem = next(p for p in PROBLEMS if p.name == "D")
    config = chosen(problem)
    fast, slow = predict(problem, config)
    assert light_us(problem) < fast < slow
    for columns, period in sm100_tile_times(problem.fmt, config).period.items():
        assert period >= 0.97 * 128 * (columns or config.mma_n) * 128 / B200["tensor_bytes_per_clk"]


def test_products_do_not_wait_between_tiles_of_the_dense_kernel() -> None:
    """Two accumulators that share columns: the tensor pipe goes from tile to tile with no pause."""
    one, three = (run_sm100("MXFP8", Sm100DenseConfig(), count, 16) for count in (1, 3))
    tile = 16 * 524
    assert (three.cycles - one.cycles) / 2 < 1.03 * tile


@pytest.mark.slow
def test_a_last_tile_that_is_cut_ends_as_a_half() -> None:
    """Two pairs and three tiles: a whole one and a half each, which nothing was fitted to."""
    config = Sm100DenseConfig(out_dtype=torch.float32)
    cut = run_sm100("MXFP8", config, 3, 16, pairs=2).cycles
    whole, half = (sort_times("MXFP8", replace(config, block_n=columns)) for columns in (256, 128))
    until_the_end = whole.start + 16 * (whole.period[0] + half.period[0])
    assert cut == pytest.approx(until_the_end + half.end, rel=0.01)
    assert cut < 0.9 * (until_the_end + whole.end)


@pytest.mark.slow
def test_a_tile_of_few_tokens_takes_less() -> None:
    config = Sm100GroupedConfig(tokens_on_n=True, mma_n=256, cta_group=2)
    times = sm100_tile_times("NVFP4", config)
    assert list(times.period) == [64, 128, 192, 256]
    assert times.period[64] < 0.65 * times.period[256]
    assert times.ends[64] < 0.5 * times.ends[256]
