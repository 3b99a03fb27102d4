"""Fits the costs of FP8_BLOCK's tiles to a record of `padless bench picks`, and says what picks they make.

    python tools/fit_tiles.py docs/measured/2026-11-28-h200-picks.jsonl

Of every kernel it prints what was picked when the record was made and what is picked today, beside the fastest; and, of
problems that differ in routing alone, at how many the best choice that does not know it is as good: what a choice by
the host can reach. Then how much longer each configuration takes than the fastest, by rows a group.

FP8_BLOCK's kernel chooses by a table of costs where groups do not have few rows. Half of these problems, every second
one, are fitted to, and the others say what the fit is worth. Costs are changed one at a time, by steps that get smaller,
while the picks of `select_config` get closer to the fastest configuration; of all tiles that were measured those are
kept that pay. Prints the table as kernels/cost_model.py has it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from padless.bench.cases.picks import ALLOWED, GOOD
from padless.bench.cases.problems.picks import KINDS, PicksPoint, name_of, picked
from padless.bench.results import Record, of_kind, read_records
from padless.kernels.cost_model import BUILT_IN, CostTable, Tile, TileCost, estimate_ns
from padless.kernels.sm90_fp8 import config as sm90_fp8
from padless.testing.timing import geomean

KERNEL, KIND = "sm90_fp8_grouped_gemm", "fp8"
STEPS = (0.15, 0.05, 0.015, 0.005)
DOUBTS = (0.1, 0.03, 0.01)
LEAST_GAIN = 1e-6
MOST_LOST = 3.0  # times as long: a tile that was not measured counts as this
WORTH = 0.0005  # what a tile must save of all times, to be in the table
PENALTY = 3.0  # of a time beyond GOOD, over one below

Costs = dict[Tile, TileCost]


def times_of(record: Record) -> dict[str, float]:
    """Microseconds of every configuration that ran, by the most calls that there are of it."""
    timed = record["gpu"] | record.get("final", {})
    return record["first"] | {name: timing["us"] for name, timing in timed.items()}


def tile_of(name: str) -> Tile | None:
    """The tile of a configuration's name, "block_m 128, block_n 192, ..."; None for one of sm90_fp8_few."""
    values = dict(part.split() for part in name.split(", "))
    if values.pop("few_rows", "False") == "True":
        return None
    return Tile(**{field: int(value) for field, value in values.items()})


def chooses_by_costs(record: Record) -> bool:
    """Whether today's pick is made by costs, and not by the rule for few rows."""
    with mock.patch.object(sm90_fp8, "best_tile", return_value=Tile(128, 128)) as choice:
        sm90_fp8.select_config(problem_of(record, 132))
    return bool(choice.called)


def problem_of(record: Record, num_sms: int) -> sm90_fp8.Problem:
    """Inputs of the choice."""
    p = record["point"]
    return sm90_fp8.Problem(p["rows"], p["n"], p["k"], p["groups"], num_sms=num_sms)


def named_as(config: Any, times: Mapping[str, float]) -> str:
    """The configuration's name in a record, where it may lack few_rows."""
    name = name_of(config)
    return name if "few_rows" in next(iter(times)) else name.removeprefix("few_rows False, ")


class Problems:
    """Problems of the kernel that has costs, with the times of their tiles.

    tiles: of all problems. allowed: (problems, tiles), whether a pick may be that tile. over: its time over that of the
    problem's fastest, infinite where it was not measured.
    """

    def __init__(self, records: Sequence[Record], num_sms: int) -> None:
        times = [times_of(record) for record in records]
        measured = {tile for of in times for name in of if (tile := tile_of(name))}
        self.tiles = sorted(measured | set(BUILT_IN[KERNEL].costs), key=str)
        self.given = [problem_of(record, num_sms) for record in records]
        table = CostTable(dict.fromkeys(self.tiles, TileCost(1.0, 1.0, 1.0)), "every tile")
        self.allowed = np.zeros((len(records), len(self.tiles)), dtype=bool)
        self.over = np.full(self.allowed.shape, math.inf)
        for i, (problem, of) in enumerate(zip(self.given, times, strict=True)):
            for j, tile in enumerate(self.tiles):
                with (
                    mock.patch.object(sm90_fp8, "cost_table", return_value=table),
                    mock.patch.object(sm90_fp8, "best_tile", return_value=tile) as choice,
                ):
                    config = sm90_fp8.select_config(problem)  # whose cluster may be another than the tile's
                self.allowed[i, j] = tile in choice.call_args.args[0]
                self.over[i, j] = of.get(named_as(config, of), math.inf) / min(of.values())
        self._estimates: dict[tuple[Tile, TileCost], np.ndarray] = {}

    def estimates(self, tile: Tile, cost: TileCost) -> np.ndarray:
        """(problems,) logarithms of the estimated times."""
        key = (tile, cost)
        if key not in self._estimates:
            ns = [estimate_ns(p.m, p.n, p.k, p.num_groups, tile, cost, p.num_sms) for p in self.given]
            self._estimates[key] = np.log(ns)
        return self._estimates[key]

    def by_tile(self, costs: Mapping[Tile, TileCost]) -> np.ndarray:
        """(problems, tiles) logarithms of the estimated times, infinite where a pick may not be that tile."""
        columns = [
            self.estimates(t, costs[t]) if t in costs else np.full(len(self.given), math.inf) for t in self.tiles
        ]
        return np.where(self.allowed, np.stack(columns, axis=1), math.inf)

    def ratios(self, costs: Mapping[Tile, TileCost]) -> np.ndarray:
        """Of every problem the time of the tile that is picked by these costs over that of the fastest."""
        picks = self.by_tile(costs).argmin(axis=1)
        return np.take_along_axis(self.over, picks[:, None], axis=1)[:, 0]

    def loss(self, costs: Mapping[Tile, TileCost], doubt: float) -> float:
        """Mean of the time lost, what is beyond GOOD counted several times.

        doubt: how much longer an estimate may be for its tile to be taken for the pick in part, so that costs are worth
        changing before a pick changes; 0 counts picks alone.
        """
        estimates = self.by_tile(costs)
        above = estimates - estimates.min(axis=1, keepdims=True)
        share = np.exp(-above / doubt) if doubt else (above == 0).astype(float)
        share /= share.sum(axis=1, keepdims=True)
        lost = np.minimum(self.over, MOST_LOST) - 1
        return float((share * (lost + (PENALTY - 1) * np.maximum(0.0, lost + 1 - GOOD))).sum(axis=1).mean())


def improved(problems: Problems, costs: Costs, tiles: Sequence[Tile], doubt: float) -> tuple[Costs, float]:
    """Costs with those of some tiles changed for the better, and their loss."""
    costs, least = dict(costs), problems.loss(costs, doubt)
    for step in STEPS:
        better = True
        while better:
            better = False
            for tile, field, sign in itertools.product(tiles, fields(TileCost), (1, -1)):
                value = max(1.0, getattr(costs[tile], field.name) * (1 + step) ** sign)
                changed = costs | {tile: replace(costs[tile], **{field.name: value})}
                loss = problems.loss(changed, doubt)
                if loss < least - LEAST_GAIN:
                    costs, least, better = changed, loss, True
    return costs, least


def first_guess(tile: Tile, known: Mapping[Tile, TileCost]) -> TileCost:
    """Costs of the known tile whose size is nearest, by the size."""
    area = tile.block_m * tile.block_n
    near = min(known, key=lambda other: (abs(math.log(other.block_m * other.block_n / area)), other != tile))
    scale = area / (near.block_m * near.block_n)
    return TileCost(known[near].full_ns * scale, known[near].short_ns * scale, known[near].overhead_ns)


def fitted(problems: Problems, known: Mapping[Tile, TileCost]) -> Costs:
    """Costs of the tiles that are worth having: of all that were measured first, less those without which picks are as
    good."""
    costs = {tile: known.get(tile) or first_guess(tile, known) for tile in problems.tiles}
    for doubt in DOUBTS:
        costs, least = improved(problems, costs, list(costs), doubt)
    for tile in problems.tiles:
        without = {other: cost for other, cost in costs.items() if other != tile}
        loss = problems.loss(without, DOUBTS[-1]) if without else math.inf
        if loss < least + WORTH:
            costs, least = without, loss
    for doubt in (*DOUBTS[1:], 0.0):
        costs, _ = improved(problems, costs, list(costs), doubt)
    return costs


def line(what: str, ratios: np.ndarray) -> str:
    """Shares of good and allowed picks, and the worst."""
    good, allowed = (100 * (ratios <= most).mean() for most in (GOOD, ALLOWED))
    mean, worst = geomean(ratios.tolist()), ratios.max()
    shares = f"{good:.0f}% within 3%, {allowed:.0f}% within 8%"
    return f"{what}: {len(ratios)} problems, {shares}, mean {mean:.3f}, worst {worst:.3f}"


def over_fastest(record: Record, num_sms: int | None) -> float:
    """Time of what was picked, over the fastest; of what is picked today where num_sms are given. NaN where that was not
    measured.
    """
    times = times_of(record)
    name = record["picked"]
    if num_sms is not None:
        point = PicksPoint(**record["point"])
        columns = sum(-(-size // 128) * 128 for size in record.get("sizes", ()))  # of copies, where they are read
        name = named_as(picked(point, columns if KINDS[point.kind].wgrad else 0, num_sms), times)
    return times.get(name, math.nan) / min(times.values())


def report_picks(kind: str, records: Sequence[Record], num_sms: int) -> None:
    """Prints what the choice was worth when it was measured, and today's on the same times; and what a choice could be
    worth that knows all but how tokens are routed.
    """
    for when, sms in (("then", None), ("now", num_sms)):
        ratios = np.array([over_fastest(record, sms) for record in records])
        print(line(f"{kind}, as picked {when}", ratios[~np.isnan(ratios)]))
    alike: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        point = record["point"]
        inputs = tuple(point[field] for field in ("model", "rows", "n", "k"))
        alike.setdefault(inputs, []).append(record)
    best: list[float] = []
    now: list[float] = []
    for part in alike.values():
        if len({record["point"]["routing"] for record in part}) > 1:
            times = [times_of(record) for record in part]
            ratios_of = {
                name: [of[name] / min(of.values()) for of in times]
                for name in times[0]
                if all(name in of for of in times)
            }
            best += max(ratios_of.values(), key=lambda found: (sum(x <= GOOD for x in found), -sum(found)))
            now += [over_fastest(record, num_sms) for record in part]
    if best:
        print(line(f"{kind}, problems that differ in routing alone, as picked now", np.array(now)))
        print(line(f"{kind}, the best choice that does not know it", np.array(best)))


def report_costs(records: Sequence[Record], num_sms: int) -> None:
    """The fit, and what it is worth on the problems that it has not seen."""
    built_in = BUILT_IN[KERNEL].costs
    seen, unseen, everything = (Problems(part, num_sms) for part in (records[::2], records[1::2], records))
    half = fitted(seen, built_in)
    for name, costs in (("table in use", built_in), ("fitted to half", half)):
        print(line(f"{name}, problems fitted to", seen.ratios(costs)))
        print(line(f"{name}, the others", unseen.ratios(costs)))
    costs = fitted(everything, half)
    print(line("fitted to all", everything.ratios(costs)))
    for tile, cost in costs.items():
        names = (tile.block_m, tile.block_n, tile.cluster_n, tile.raster_m)
        values = (round(getattr(cost, field.name)) for field in fields(TileCost))
        print(f"            Tile({', '.join(map(str, names))}): TileCost({', '.join(map(str, values))}),")


def report_times(kind: str, records: Sequence[Record]) -> None:
    """Prints how much longer each configuration takes than the fastest, by rows a group."""
    by_rows: dict[int, list[Record]] = {}
    for record in records:
        rows = record["point"]["rows"] / record["point"]["groups"]
        by_rows.setdefault(max(0, round(math.log2(rows))) if rows >= 1 else -1, []).append(record)
    print(f"{kind}: mean of times over the fastest, by rows a group; * is what was picked")
    for size, part in sorted(by_rows.items()):
        names = dict.fromkeys(name for record in part for name in times_of(record))
        over = {name: geomean([t[name] / min(t.values()) for t in map(times_of, part) if name in t]) for name in names}
        picked = {record["picked"] for record in part}
        best = sorted(over, key=lambda name: over[name])
        shown = best[:3] + [name for name in best[3:] if name in picked]
        about = "less than 1" if size < 0 else f"about {2**size}"
        print(f"  {about} ({len(part)}): " + "; ".join(f"{over[n]:.3f} {n}{'*' * (n in picked)}" for n in shown))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("record", type=Path, nargs="+")
    parser.add_argument("--num-sms", type=int, default=132)
    options = parser.parse_args(arguments)
    records = [r for path in options.record for r in of_kind(read_records(path), "picks") if r["picked"] in r["gpu"]]
    kinds = dict.fromkeys(record["point"]["kind"] for record in records)
    for kind in kinds:
        part = [record for record in records if record["point"]["kind"] == kind]
        report_picks(kind, part, options.num_sms)
        report_times(kind, part)
        by_costs = [record for record in part if kind == KIND and chooses_by_costs(record)]
        if by_costs:
            report_costs(by_costs, options.num_sms)
    return 0


if __name__ == "__main__":
    sys.exit(main())
