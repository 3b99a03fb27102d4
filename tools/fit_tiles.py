"""Fits the costs of FP8_BLOCK's tiles to a record of `padless bench picks`, and says what picks they make.

    python tools/fit_tiles.py docs/measured/2026-11-24-h200-picks.jsonl

Half of the problems, every second one, are fitted to and the others judge. Costs are changed one at a time, by steps that
get smaller, while the picks of `select_config` get closer to the fastest configuration; tiles that the table lacks are
tried too, and kept where they pay. Prints the table as kernels/cost_model.py has it. Of the other kernels, which choose
by rules and not by costs, it prints how much longer each configuration takes than the fastest, by rows a group.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean
from unittest import mock

from padless.bench.cases.picks import ALLOWED, GOOD
from padless.bench.results import Record, of_kind, read_records
from padless.kernels.cost_model import BUILT_IN, CostTable, Tile, TileCost
from padless.kernels.sm90_fp8 import config as sm90_fp8
from padless.testing.timing import geomean

KERNEL, KIND = "sm90_fp8_grouped_gemm", "fp8"
STEPS = (0.15, 0.05, 0.015, 0.005)
WORTH = 0.0005  # what a further tile must save of all times, to be in the table
PENALTY = 3.0  # of a time beyond GOOD, over one below

Costs = dict[Tile, TileCost]


def times_of(record: Record) -> dict[str, float]:
    """Microseconds of every configuration that ran, of the first calls where there are no others."""
    return record["first"] | {name: timing["us"] for name, timing in record["gpu"].items()}


def tile_of(name: str) -> Tile:
    """The tile of a configuration's name, "block_m 128, block_n 192, ..."."""
    return Tile(**{field: int(value) for field, value in (part.split() for part in name.split(", "))})


class Problems:
    """Problems of the kernel that has costs, with the times of their tiles."""

    def __init__(self, records: Sequence[Record], num_sms: int) -> None:
        self.given = [
            sm90_fp8.Problem(p["rows"], p["n"], p["k"], p["groups"], num_sms=num_sms)
            for p in (record["point"] for record in records)
        ]
        self.times = [{tile_of(name): us for name, us in times_of(record).items()} for record in records]

    def ratios(self, costs: Mapping[Tile, TileCost]) -> list[float]:
        """Of every problem the time of the tile that is picked by these costs over that of the fastest."""
        table = CostTable(costs, "tried")
        with mock.patch.object(sm90_fp8, "cost_table", lambda kernel: table):
            found = [sm90_fp8.select_config(problem) for problem in self.given]
        picked = [Tile(c.block_m, c.block_n, c.cluster_n, c.raster_m) for c in found]
        return [times.get(tile, math.inf) / min(times.values()) for tile, times in zip(picked, self.times, strict=True)]

    def loss(self, costs: Mapping[Tile, TileCost]) -> float:
        """Mean of the time lost, what is beyond GOOD counted several times; infinite where a pick was not measured."""
        ratios = self.ratios(costs)
        return fmean(ratio - 1 + (PENALTY - 1) * max(0.0, ratio - GOOD) for ratio in ratios)


def improved(problems: Problems, costs: Costs, tiles: Sequence[Tile]) -> tuple[Costs, float]:
    """Costs with those of some tiles changed for the better, and their loss."""
    costs, least = dict(costs), problems.loss(costs)
    for step in STEPS:
        better = True
        while better:
            better = False
            for tile in tiles:
                for field in fields(TileCost):
                    for factor in (1 + step, 1 / (1 + step)):
                        changed = replace(costs[tile], **{field.name: getattr(costs[tile], field.name) * factor})
                        loss = problems.loss(costs | {tile: changed})
                        if loss < least - 1e-9:
                            costs, least, better = costs | {tile: changed}, loss, True
    return costs, least


def first_guess(tile: Tile, known: Mapping[Tile, TileCost]) -> TileCost:
    """Costs of the known tile whose size is nearest, by the size."""
    area = tile.block_m * tile.block_n
    near = min(known, key=lambda other: (abs(math.log(other.block_m * other.block_n / area)), other != tile))
    scale = area / (near.block_m * near.block_n)
    return TileCost(known[near].full_ns * scale, known[near].short_ns * scale, known[near].overhead_ns)


def fitted(problems: Problems, costs: Costs) -> Costs:
    """The table's tiles first; then every other tile that was measured, one at a time, where it pays."""
    costs, least = improved(problems, costs, list(costs))
    for tile in sorted({tile for times in problems.times for tile in times} - set(costs), key=str):
        tried, loss = improved(problems, costs | {tile: first_guess(tile, costs)}, [tile])
        if loss < least - WORTH:
            costs, least = tried, loss
    return improved(problems, costs, list(costs))[0]


def line(what: str, ratios: Sequence[float]) -> str:
    """Shares of good and allowed picks, and the worst."""
    good, allowed = (100 * fmean(ratio <= most for ratio in ratios) for most in (GOOD, ALLOWED))
    return (
        f"{what}: {len(ratios)} problems, {good:.0f}% within 3%, {allowed:.0f}% within 8%, mean {geomean(ratios):.3f}, "
        f"worst {max(ratios):.3f}"
    )


def report_costs(records: Sequence[Record], num_sms: int) -> None:
    """The fit, and what it is worth on the problems that it has not seen."""
    built_in: Costs = dict(BUILT_IN[KERNEL].costs)
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


def report_rules(kind: str, records: Sequence[Record]) -> None:
    """How much longer each configuration takes than the fastest, by rows a group."""
    by_rows: dict[int, list[Record]] = {}
    for record in records:
        rows = record["point"]["rows"] / record["point"]["groups"]
        by_rows.setdefault(max(0, round(math.log2(rows))) if rows >= 1 else -1, []).append(record)
    print(f"\n{kind}: mean of times over the fastest, by rows a group; * is what was picked")
    for size, part in sorted(by_rows.items()):
        names = dict.fromkeys(name for record in part for name in times_of(record))
        over = {name: geomean([t[name] / min(t.values()) for t in map(times_of, part) if name in t]) for name in names}
        picked = {record["picked"] for record in part}
        best = sorted(over, key=lambda name: over[name])
        shown = [name for name in best[:3]] + [name for name in best[3:] if name in picked]
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
        if kind == KIND:
            report_costs(part, options.num_sms)
        else:
            report_rules(kind, part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
