"""Rates of Hopper's units from a record of `padless bench units`: what is measured against what the clock makes of the
same kernels."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from padless.bench.units import Probe, run_probe
from padless.emulator.fake_driver import emulated_driver
from padless.emulator.timing import Chip, timed

Record = Mapping[str, Any]
FIELDS = tuple(Probe.__dataclass_fields__)


def read_record(path: Path) -> list[Record]:
    """The runs of a record, without its session."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "unit"]


def simulate(probes: Iterable[Probe], chip: Chip) -> list[Record]:
    """The same runs by the clock; those of more CTAs than two are left out, since every multiprocessor is alike to
    it."""
    driver = emulated_driver("sm_90a")
    with driver.configured(machine=timed(chip, record=False)):
        return [run_probe(driver, probe, torch.device("cpu"), {}) for probe in probes if probe.ctas <= 2]


def per_item(records: Iterable[Record], name: str, count: str, **fields: Any) -> float | None:
    """Cycles of one more item (``count``: "batches", "loads" or "products"): the slope between two runs that differ in
    nothing else. None without two such runs."""
    what = "loads_cycles" if count == "loads" else "products_cycles"
    found = [
        (record[count], record[what])
        for record in records
        if record["name"] == name and all(record[key] == value for key, value in fields.items())
    ]
    low, high = min(found, default=(0, 0)), max(found, default=(0, 0))
    return None if low[0] == high[0] else (high[1] - low[1]) / (high[0] - low[0])


def tensor_rate(records: Iterable[Record]) -> float | None:
    """Rows x columns x bytes of K a cycle, the most of any shape: narrow ones wait for their own instructions."""
    records = list(records)
    rates = []
    for n in (64, 128, 192, 256):
        for warpgroups in (1, 2):
            slope = per_item(
                records, "wgmma", "products", block_n=n, warpgroups=warpgroups, a_in_registers=False
            )
            if slope:
                rates.append(64 * n * 32 * warpgroups * 32 / slope)  # 32 batches
    return max(rates, default=None)


def fit(records: Iterable[Record], chip: Chip, source: str) -> Chip:
    """The chip with the rates that these runs tell. Every rate is moved by what the clock, with it, is off by."""
    records = list(records)
    rate = tensor_rate(records)
    if rate:
        chip = chip.changed("measured", source, tensor_bytes_per_clk=rate)
    probes = [Probe(**{field: record[field] for field in FIELDS}) for record in records]
    wanted = [
        p
        for p in probes
        if (p.name == "wgmma" and p.products == 4 and p.warpgroups == 1 and not p.a_in_registers)
        or (p.name == "load" and p.in_flight == 1 and p.box_rows == 8)
    ]
    simulated = simulate(wanted, chip)

    def behind(name: str, what: str, count: str) -> float:
        """Cycles an item by which the GPU takes longer."""
        key = lambda record: tuple(record[field] for field in FIELDS)  # noqa: E731
        measured = {key(record): record[what] for record in records}
        return median(
            (measured[key(record)] - record[what]) / record[count]
            for record in simulated
            if record["name"] == name
        )

    changes = {}
    if any(record["name"] == "wgmma" for record in simulated):
        changes["wgmma_wait"] = chip["wgmma_wait"] + behind("wgmma", "products_cycles", "batches")
    if any(record["name"] == "load" for record in simulated):
        changes["tma_latency"] = chip["tma_latency"] + behind("load", "loads_cycles", "loads")
    alone = per_item(records, "load", "loads", box_rows=256, in_flight=5)
    all_sms = max((record["ctas"] for record in records if record["name"] == "feed"), default=0)
    shared = per_item(records, "feed", "loads", ctas=all_sms, own_rows=False)
    if shared:
        changes["l2_feed"] = 128 * 128 / shared
    if alone and (not shared or alone / 256 < 0.98 * shared / 128):
        changes["tma_row"] = alone / 256
    with_loads, without = (
        per_item(records, "overlap", "batches", loads=loads)
        for loads in (max((r["loads"] for r in records), default=0), 0)
    )
    if with_loads is not None and without is not None:
        feed = changes.get("l2_feed", chip["l2_feed"])
        written = without * feed / chip["shared_bytes_per_clk"]  # cycles of writes while a batch runs
        changes["wgmma_shared_overlap"] = max((with_loads - without) / written, 0.0)
    return chip.changed("measured", source, **changes)
