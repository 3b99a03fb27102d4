"""`padless bench units` without a GPU: its kernels break no rule, measure what the clock's units do, and the fit finds
rates again that it was not told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clock_units import (
    FEW,
    FIELDS,
    STEPS,
    alone,
    errors_of,
    fit,
    is_fitted,
    matches,
    per_item,
    read_record,
    simulate,
    tensor_rate,
    unit_table,
)
from padless.bench.units import Probe, probes, run_probe, units
from padless.emulator.fake_driver import emulated_driver
from padless.emulator.timing import H200
from support.ragged import ROOT

CPU = torch.device("cpu")
SMALL = (
    Probe("wgmma", 64, 2, 4, batches=3),
    Probe("wgmma", 192, 1, 4, batches=2),
    Probe("wgmma", 64, 1, 4, a_in_registers=True, batches=3),
    Probe("load", loads=7, in_flight=3, box_rows=64, buffer_rows=512),
    Probe("load", loads=2, in_flight=5, box_rows=8, buffer_rows=64),
    Probe("overlap", 256, 1, 4, batches=2, loads=5, in_flight=5, buffer_rows=512),
    Probe("ring", 64, 2, 4, coupled=True, batches=5, loads=5, in_flight=2, box_rows=192, buffer_rows=512),
    Probe(
        "stamped ring",
        64,
        2,
        4,
        coupled=True,
        stamps=True,
        batches=5,
        loads=5,
        in_flight=2,
        box_rows=192,
        buffer_rows=512,
    ),
    Probe("feed", loads=6, in_flight=4, ctas=2, own_rows=True, buffer_rows=1024),
)
RECORD = ROOT / "docs" / "measured" / "clock" / "units.jsonl"


@pytest.mark.parametrize("probe", SMALL, ids=lambda p: f"{p.name} {p.block_n} x{p.warpgroups}")
def test_probe_breaks_no_rule(probe: Probe) -> None:
    driver = emulated_driver("sm_90a")
    for seed in (1, 4):
        with driver.configured(seed=seed, arithmetic="fast", raise_on_reports=True):
            record = run_probe(driver, probe, CPU, {})
        assert (record["products_cycles"] > 0) == (probe.batches > 0)
        assert (record["loads_cycles"] > 0) == (probe.loads > 0)


def test_ring_stamps_go_up() -> None:
    (record,) = simulate([SMALL[7]], H200)
    stamps = [x for pair in zip(record["full"], record["done"], strict=True) for x in pair]
    assert len(stamps) == 10
    assert stamps == sorted(stamps)
    assert stamps[0] > H200["tma_latency"]


def test_list_of_probes_has_two_lengths_of_everything() -> None:
    everything = list(probes(132))
    assert len(set(everything)) == len(everything)
    names = {probe.name for probe in everything}
    assert names == {"wgmma", "load", "feed", "memory", "overlap", "ring", "stamped ring"}
    for probe in everything:
        if probe.stamps:  # stamps themselves are looked at
            continue
        lengths = ("products",) if probe.name == "wgmma" else ("loads", "batches")
        assert any(
            other.name == probe.name
            and any(getattr(other, field) != getattr(probe, field) for field in lengths)
            and all(getattr(other, field) == getattr(probe, field) for field in FIELDS if field not in lengths)
            for other in everything
        ), probe


def test_needs_a_hopper_gpu(tmp_path: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="needs a CUDA GPU"):
        units(tmp_path)


TO_FIT = (
    *(Probe("wgmma", n, 1, products, batches=32) for n in (64, 128) for products in (4, 16)),
    *(Probe("load", loads=loads, in_flight=1, box_rows=8) for loads in (24, 48)),
    *(Probe("load", loads=loads, in_flight=5, box_rows=8) for loads in (24, 48)),
    *(Probe("load", loads=loads, in_flight=5, box_rows=256) for loads in (24, 48)),
)


def test_clock_measures_its_own_rates() -> None:
    records = simulate(TO_FIT, H200)
    assert tensor_rate(records) == pytest.approx(H200["tensor_bytes_per_clk"], rel=0.02)
    assert per_item(records, "load", "loads", in_flight=5, box_rows=256) == pytest.approx(
        256 * 128 / H200["l2_feed_alone"], rel=0.02
    )
    assert per_item(records, "nothing", "loads") is None


def test_fit_finds_rates_that_it_was_not_told() -> None:
    true = H200.changed("measured", "a test", wgmma_wait=71.0, tma_issue=48.0, tma_latency=330.0, l2_feed_alone=61.0)
    records = simulate(TO_FIT, true)
    feed = {"name": "feed", "ctas": 132, "own_rows": False, "in_flight": 5, "box_rows": 128}
    records += [records[0] | feed | {"loads": n, "loads_cycles": 400 * n + 7} for n in (96, 288)]
    found = fit(records, H200, "a test")
    assert found["l2_feed"] == pytest.approx(128 * 128 / 400)
    for name in ("wgmma_wait", "tma_issue", "tma_latency", "l2_feed_alone", "tensor_bytes_per_clk"):
        assert found[name] == pytest.approx(true[name], rel=0.05), name
        assert found.rates[name].mark == "measured"


def test_first_load_of_a_map_waits_for_the_map() -> None:
    probe = Probe("load", loads=3, in_flight=1, box_rows=8, buffer_rows=64)
    slow = H200.changed("stated", "a test", tma_descriptor=H200["tma_descriptor"] + 1000)
    (one,), (other,) = simulate([probe], H200), simulate([probe], slow)
    assert other["loads_cycles"] == one["loads_cycles"] + 1000  # once, not three times


def test_a_lone_multiprocessor_is_fed_faster() -> None:
    assert alone(H200)["l2_feed"] == H200["l2_feed_alone"] > H200["l2_feed"]


def test_two_thirds_of_the_record_are_held_out() -> None:
    records = read_record(RECORD)
    few = [record for record in records if record["ctas"] <= FEW]
    assert sum(map(is_fitted, records)) <= len(records) / 3
    assert sum(map(is_fitted, few)) <= len(few) / 3
    for step in STEPS:
        assert any(r["name"] == step.name and matches(r, step.fields) for r in records), step.rate
    assert not any(is_fitted(r) for r in records if r["name"] == "ring")


def test_units_of_the_record_within_three_and_five_percent() -> None:
    """Of every third of the shorter runs: all of them take ten times as long."""
    short = [r for r in read_record(RECORD) if r["batches"] <= 32 and r["loads"] <= 48 and r["products"] == 4]
    records = [r for i, r in enumerate(short) if i % 3 == 0 and r["block_n"] <= 128]
    errors = list(errors_of(records, H200))
    fitted = [abs(error) for record, _, error in errors if is_fitted(record)]
    test = [abs(error) for record, _, error in errors if not is_fitted(record)]
    assert len(fitted) >= 3
    assert len(test) >= 12
    assert sum(fitted) / len(fitted) <= 0.03
    assert sum(test) / len(test) <= 0.05
    loads = [r for r in short if r["name"] == "load" and r["box_rows"] == 256]
    slow = H200.changed("stated", "a test", tma_row=1.5, l2_feed_alone=76.7, tma_issue=32.0)
    assert sum(abs(error) for *_, error in errors_of(loads, slow)) / len(loads) > 0.05


def test_table_of_units_has_every_kind_of_run() -> None:
    records = [{**r, "products_cycles": 2 * r["products_cycles"], "loads_cycles": 2 * r["loads_cycles"]}
               for r in simulate([*SMALL[1:5], SMALL[6], SMALL[7]], H200)]  # fmt: skip
    rows: list[dict[str, Any]] = []
    lines = list(unit_table(records, H200, rows))
    assert [line.split(" | ")[0] for line in lines if "50.0%" in line and "-50.0%" in line] == [
        line.split(" | ")[0] for line in lines
    ]
    assert {row["name"] for row in rows} == {"wgmma", "load", "ring", "stamped ring"}
    assert all(row["error"] == -0.5 for row in rows)


def test_fit_finds_what_writes_cost_products() -> None:
    true = H200.changed("measured", "a test", wgmma_shared_overlap=0.5)
    overlap = [
        Probe("overlap", 256, 1, 16, batches=batches, loads=loads, in_flight=5)
        for loads in (0, 64)
        for batches in (4, 10)
    ]
    for chip, expected in ((true, 0.5), (H200, 0.0)):
        found = fit(simulate(overlap, chip), H200, "a test")
        assert found["wgmma_shared_overlap"] == pytest.approx(expected, abs=0.12)
