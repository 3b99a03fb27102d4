"""`padless bench units` without a GPU: its kernels break no rule, measure what the clock's units do, and the fit finds
rates again that it was not told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clock_units import FIELDS, fit, per_item, simulate, tensor_rate
from padless.bench.units import Probe, probes, run_probe, units
from padless.emulator.fake_driver import emulated_driver
from padless.emulator.timing import H200

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
            and all(
                getattr(other, field) == getattr(probe, field) for field in FIELDS if field not in lengths
            )
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
    *(Probe("load", loads=loads, in_flight=5, box_rows=256) for loads in (24, 48)),
    *(Probe("feed", loads=loads, in_flight=5, ctas=2) for loads in (24, 48)),
)


def test_clock_measures_its_own_rates() -> None:
    records = simulate(TO_FIT, H200)
    assert tensor_rate(records) == pytest.approx(H200["tensor_bytes_per_clk"], rel=0.02)
    assert per_item(records, "load", "loads", in_flight=5) == pytest.approx(
        256 * 128 / H200["l2_feed"], rel=0.02
    )
    assert per_item(records, "nothing", "loads") is None


def test_fit_finds_rates_that_it_was_not_told() -> None:
    true = H200.changed("measured", "a test", wgmma_wait=71.0, tma_latency=830.0, l2_feed=41.0)
    found = fit(simulate(TO_FIT, true), H200, "a test")
    for name in ("wgmma_wait", "tma_latency", "l2_feed", "tensor_bytes_per_clk"):
        assert found[name] == pytest.approx(true[name], rel=0.05), name
        assert found.rates[name].mark == "measured"


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
