"""Rates of Hopper's units from a record of `padless bench units`: what is measured against what the clock makes of the
same kernels.

The rates are fitted to a third of the runs at most (``is_fitted``); the others are a test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from clock_b200 import Error
from padless.bench.units import Probe, run_probe
from padless.emulator.fake_driver import emulated_driver
from padless.emulator.timing import Chip, timed

Record = Mapping[str, Any]
FIELDS = tuple(Probe.__dataclass_fields__)
FEW = 2  # CTAs up to which an SM has L2 for itself
PASSES = 5  # over all rates, since one moves what another is seen by


def read_record(path: Path) -> list[Record]:
    """The runs of a record, without its session."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "unit"]


def probe_of(record: Record) -> Probe:
    """The program that a record is of."""
    return Probe(**{field: record[field] for field in FIELDS if field in record})


def alone(chip: Chip) -> Chip:
    """The chip as one or two SMs find it that are alone with L2."""
    rate = chip.rates["l2_feed_alone"]
    return chip.changed(rate.mark, rate.source, l2_feed=rate.value)


def simulate(probes: Iterable[Probe], chip: Chip) -> list[Record]:
    """The same runs by the clock; those of more CTAs than two are left out, since every multiprocessor is alike to
    it."""
    driver = emulated_driver("sm_90a")
    with driver.configured(machine=timed(alone(chip), record=False)):
        return [run_probe(driver, probe, torch.device("cpu"), {}) for probe in probes if probe.ctas <= FEW]


def matches(record: Record, fields: Mapping[str, Any]) -> bool:
    """Whether a run is one of these."""
    return all(record[key] == value for key, value in fields.items())


def per_item(records: Iterable[Record], name: str, count: str, **fields: Any) -> float | None:
    """Cycles of one more item (``count``: "batches", "loads" or "products"): the slope between two runs that differ in
    nothing else. None without two such runs."""
    what = "loads_cycles" if count == "loads" else "products_cycles"
    found = [(record[count], record[what]) for record in records if record["name"] == name and matches(record, fields)]
    low, high = min(found, default=(0, 0)), max(found, default=(0, 0))
    return None if low[0] == high[0] else (high[1] - low[1]) / (high[0] - low[0])


def whole(records: Iterable[Record], name: str, count: str, **fields: Any) -> float | None:
    """Cycles an item of the shorter run, its start and end included; the median where there are several."""
    what = "loads_cycles" if count == "loads" else "products_cycles"
    found = [
        (record[count], record[what] / record[count])
        for record in records
        if record["name"] == name and matches(record, fields)
    ]
    shortest = min((at for at, _ in found), default=0)
    return median(cycles for at, cycles in found if at == shortest) if found else None


@dataclass(frozen=True)
class Step:
    """A rate and the runs that tell it: ``look`` (per_item or whole) at those of ``name`` with ``fields``. items: of the
    rate in one of the look's items."""

    rate: str
    look: Callable[..., float | None]
    name: str
    count: str
    items: float
    fields: Mapping[str, Any]


_ONE = {"warpgroups": 1, "a_in_registers": False}
STEPS = (
    Step("wgmma_wait", whole, "wgmma", "batches", 1, {**_ONE, "products": 4}),
    Step("wgmma_register_a", per_item, "wgmma", "products", 32, {"a_in_registers": True}),
    Step("tma_issue", per_item, "load", "loads", 1, {"in_flight": 5, "box_rows": 8}),
    Step("tma_latency", per_item, "load", "loads", 1, {"in_flight": 1, "box_rows": 8}),
    Step("tma_descriptor", whole, "load", "loads", 1 / 48, {"in_flight": 1, "box_rows": 8, "loads": 48}),
    Step("divide_latency", whole, "load", "loads", 5 / 48, {"in_flight": 5, "box_rows": 8, "loads": 48}),
    Step("clock_read", whole, "stamped ring", "batches", 2, {"warpgroups": 1, "in_flight": 5}),
)


def is_fitted(record: Record) -> bool:
    """Whether a rate is taken from this run."""
    if any(record["name"] == step.name and matches(record, step.fields) for step in STEPS):
        return True
    if record["name"] == "wgmma":
        return matches(record, _ONE)
    if record["name"] == "load":
        return matches(record, {"in_flight": 5, "box_rows": 256})
    return record["name"] == "overlap" or (record["name"] == "feed" and record["ctas"] > FEW)


def tensor_rate(records: Iterable[Record]) -> float | None:
    """Rows x columns x bytes of K a cycle, the most of any shape: narrow ones wait for their own instructions."""
    records = list(records)
    rates = []
    for n in (64, 128, 192, 256):
        for warpgroups in (1, 2):
            slope = per_item(records, "wgmma", "products", block_n=n, warpgroups=warpgroups, a_in_registers=False)
            if slope:
                rates.append(64 * n * 32 * warpgroups * 32 / slope)  # 32 batches
    return max(rates, default=None)


def fit(records: Iterable[Record], chip: Chip, source: str) -> Chip:
    """The chip with the rates that these runs tell. Every rate is moved by what the clock, with it, is off by."""
    records = [record for record in records if is_fitted(record)]
    changes = {}
    rate = tensor_rate(records)
    if rate:
        changes["tensor_bytes_per_clk"] = rate
    own = per_item(records, "load", "loads", box_rows=256, in_flight=5)
    if own:
        changes["l2_feed_alone"] = 256 * 128 / own
        changes["tma_row"] = own / 256
    all_sms = max((record["ctas"] for record in records if record["name"] == "feed"), default=0)
    shared = per_item(records, "feed", "loads", ctas=all_sms, own_rows=False)
    if shared:
        changes["l2_feed"] = 128 * 128 / shared
    chip = chip.changed("measured", source, **changes)
    for _ in range(PASSES):
        for step in STEPS:
            chip = moved(records, chip, source, step)
    share = slowed(records, chip)
    return chip if share is None else chip.changed("measured", source, wgmma_shared_overlap=share)


def slowed(records: Iterable[Record], chip: Chip) -> float | None:
    """Share of the cycles in which copies write shared memory that products take longer, from runs with and without
    loads; None without both."""
    overlap = [record for record in records if record["name"] == "overlap"]
    without = {record["batches"]: record["products_cycles"] for record in overlap if not record["loads"]}
    shares = []
    for record in overlap:
        if record["loads"] and record["batches"] in without:
            alone_cycles = without[record["batches"]]
            landed = min(alone_cycles / record["loads_cycles"], 1.0) * record["loads"]
            written = landed * record["box_rows"] * 128 / chip["shared_bytes_per_clk"]
            shares.append((record["products_cycles"] - alone_cycles) / written)
    return max(median(shares), 0.0) if shares else None


def moved(records: Sequence[Record], chip: Chip, source: str, step: Step) -> Chip:
    """The chip with one rate moved by what the step's runs take longer than on the clock."""
    own = [r for r in records if r["name"] == step.name and matches(r, step.fields)]
    seen = step.look(own, step.name, step.count)
    if seen is None:
        return chip
    made = step.look(simulate(map(probe_of, own), chip), step.name, step.count)
    assert made is not None
    value = max(chip[step.rate] + (seen - made) / step.items, 0.0)
    return chip.changed("measured", source, **{step.rate: value})


def errors_of(records: Sequence[Record], chip: Chip) -> Iterator[tuple[Record, str, float]]:
    """(run, what is counted, error of its cycles) of the runs that the clock can make. What the loads of a ring take is
    what its products take, so only these count."""
    few = [record for record in records if record["ctas"] <= FEW]
    for record, made in zip(few, simulate(map(probe_of, few), chip), strict=True):
        for what in ("products_cycles", "loads_cycles"):
            if record[what] and (what == "products_cycles" or not record["coupled"]):
                yield record, what, made[what] / record[what] - 1


def unit_table(records: Sequence[Record], chip: Chip, record: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of the table of unit errors, by kind; every run goes into ``record``."""
    found: dict[tuple[bool, str], list[float]] = {}
    for run, what, error in errors_of(records, chip):
        # The overlap's rate is taken from its products: what its loads take is a test.
        test = not is_fitted(run) or (run["name"] == "overlap" and what == "loads_cycles")
        names = [run["name"] if what == "products_cycles" or run["name"] != "overlap" else "overlap, its loads"]
        if not run["stamps"]:
            names.append("all but stamped rings")
        names.append("all")
        for name in names:
            found.setdefault((test, name), []).append(error)
        fields = {key: value for key, value in run.items() if key in FIELDS}
        record.append({**fields, "kind": "unit error", "what": what, "fitted": not test, "error": round(error, 4)})
    order = ("wgmma", "load", "feed", "overlap", "overlap, its loads", "ring", "stamped ring")
    for test in (False, True):
        for name in (*order, "all but stamped rings", "all"):
            if (test, name) in found:
                yield Error(tuple(found[test, name])).row(f"{name} ({'test' if test else 'fitted to'})")
