"""Examines the clock: predictions beside what was measured, by this project on an H200 and by others on a B200.

    python tools/clock_examine.py [--fit] [--units RECORD] [--formats] [--out docs/measured/clock/DATE.jsonl]

Prints the tables of docs/timing_errors.md and writes a record; with --write both are put in place. --fit fits the
chip's rates of whole calls to the fitting set again and says what they would be; without it the rates are those of
padless.emulator.timing.rates. --units takes the rates of Hopper's units from a record of `padless bench units` first.
--formats takes two minutes more.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clock_b200 import LOOP_RATES, Error, fit_loops, loop_errors, measured_loops, product_errors
from clock_formats import examine as examine_formats
from clock_h200 import MEASURED, Point, Shape, call_of, grid_points, tile_points, tile_times
from clock_ladder import ladder_rows, ladder_table
from clock_page import Tables, model_digest, write_block
from clock_units import fit as fit_units
from clock_units import read_record, unit_table
from padless.emulator.timing import B200, H200, Chip
from padless.emulator.timing.chip import Call, TileTimes, call_time, queue_cycles

SHAPES: tuple[Shape, ...] = ((256, 128, 2), (128, 192, 1), (128, 128, 1))
FITTING = {"dense": "2026-11-21-h200-dense.jsonl", "small tiles": "2026-11-21-h200-tiles-small.jsonl"}
TESTING = {
    "paper": "2026-11-21-h200-paper-full.jsonl",
    "decode": "2026-11-21-h200-decode.jsonl",
    "tiles": "2026-11-21-h200-tiles.jsonl",
}
UNITS = MEASURED / "clock" / "units.jsonl"
COUNTED = MEASURED / "clock" / "counted.jsonl"
RASTERS = {(256, 128, 2): 8, (128, 192, 1): 16, (128, 128, 1): 8}  # of the counted calls
FITTED_PAIR = {"NVFP4 x NVFP4": "one rate of power fitted to"}
RECORD = MEASURED / "clock" / "2026-11-22.jsonl"
TOOLS = ("clock_b200.py", "clock_examine.py", "clock_formats.py", "clock_h200.py", "clock_ladder.py", "clock_units.py")
CALL_RATES = {
    "full_load_ghz": (1.9, 1.92, 1.94, 1.96, 1.98, 2.0, 2.02),
    "launch_ns": (4750, 5000, 5250, 5500, 5750), "memory_overlap": (3, 3.5, 4, 5, 6),
}  # fmt: skip
HEAD = "| what | points | mean error | median | 9 of 10 within | largest | bias |\n|---|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Prepared:
    """A point with its call, so that rates can be tried without counting tiles again."""

    point: Point
    call: Call

    def us(self, times: dict[Shape, TileTimes], chip: Chip, cycles: float | None = None) -> float:
        """Predicted microseconds; ``cycles``: of the queue, where they are known."""
        return call_time(self.call, times[self.point.shape], chip, cycles=cycles).ns / 1e3


def recorded_times(path: Path) -> dict[Shape, TileTimes]:
    """Tile times of an earlier examination."""
    times: dict[Shape, TileTimes] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "tile":
            block_m, block_n, cluster = row["tile"]
            tile = times.setdefault((block_m, block_n, cluster), TileTimes(row["start"], row["end"], {}, {}))
            periods, between = dict(tile.period), dict(tile.between)
            periods[row["units"]], between[row["units"]] = row["period"], row["between"]
            times[block_m, block_n, cluster] = replace(tile, period=periods, between=between)
    return times


def prepared(points: Sequence[Point]) -> list[Prepared]:
    """Points whose tile has been timed."""
    return [
        Prepared(p, call_of(p.sizes, p.n, p.k, p.shape, p.raster_m, H200.num_sms)) for p in points if p.shape in SHAPES
    ]


def errors(points: Sequence[Prepared], times: dict[Shape, TileTimes], chip: Chip) -> Error:
    """Of times, from event to event."""
    return Error(tuple(p.us(times, chip) / p.point.us - 1 for p in points))


def fit_calls(points: Sequence[Prepared], times: dict[Shape, TileTimes], chip: Chip) -> Chip:
    """The rates of whole calls that fit best, of a coarse grid. Those of memory are not among them: reads and copies
    tell them."""
    best: tuple[float, Chip] | None = None
    cycles = [queue_cycles(p.call, times[p.point.shape]) for p in points]
    for values in itertools.product(*CALL_RATES.values()):
        tried = chip.changed("fitted", "", **dict(zip(CALL_RATES, values, strict=True)))
        pairs = zip(points, cycles, strict=True)
        mape = Error(tuple(p.us(times, tried, c) / p.point.us - 1 for p, c in pairs)).mape
        if best is None or mape < best[0]:
            best = mape, tried
    assert best is not None
    return best[1]


def counted_cycles(times: dict[Shape, TileTimes]) -> list[str]:
    """Predicted cycles beside Nsight Compute's, where the sizes of groups are known: one group."""
    lines = []
    with (MEASURED / "2026-11-21-h200-tensor-pipe.csv").open() as file:
        next(file)
        for row in csv.DictReader(file):
            if row["kernel"] != "padless" or row["groups"] != "1" or row["call"] != "1":
                continue
            m, n, k = int(row["M"]), int(row["N"]), int(row["K"])
            shape = (256, 128, 2)
            cycles = queue_cycles(call_of([m], n, k, shape, 8, H200.num_sms), times[shape])
            measured = int(row["sm_cycles_elapsed"])
            lines.append(f"| {m} x {n} x {k} | {measured:,} | {cycles:,.0f} | {cycles / measured - 1:+.1%} |")
    return lines


def counted_tiles(times: dict[Shape, TileTimes]) -> list[str]:
    """Predicted cycles of a K block beside those counted, with rows that many SMs share: as in a large product."""
    lines = ["| tile | counted | predicted | error |", "|---|---|---|---|"]
    rows = [json.loads(line) for line in COUNTED.read_text().splitlines()]
    for block_m, block_n, cluster in SHAPES:
        shape = block_m, block_n, cluster
        seen = [
            row["period"] for row in rows
            if row["kind"] == "stage" and tuple(row["tile"]) == shape and row["down"] in (11, 12)
        ]  # fmt: skip
        counted, predicted = sum(seen) / len(seen), times[shape].period[block_m // 64]
        fitted = " (fitted to)" if shape == (128, 128, 1) else ""
        name = f"{block_m} x {block_n} x {cluster}{fitted}"
        lines.append(f"| {name} | {counted:.0f} | {predicted:.0f} | {predicted / counted - 1:+.1%} |")
    return lines


def counted_calls(times: dict[Shape, TileTimes], chip: Chip) -> list[str]:
    """Errors of cycles and of the clock at the problems whose cycles and times were counted, with every tile."""
    rows = [json.loads(line) for line in COUNTED.read_text().splitlines()]
    turns = [row for row in rows if row["kind"] == "turn"]
    fitted: list[float] = []
    cycles: list[float] = []
    clocks: list[float] = []
    for i, row in enumerate(turns):
        shape: Shape = tuple(row["tile"])
        call = call_of(row["sizes"], row["n"], row["k"], shape, RASTERS[shape], H200.num_sms)
        time = call_time(call, times[shape], chip)
        cycles.append((time.ns - chip["launch_ns"]) * time.ghz / row["cycles"] - 1)
        (fitted if i // len(SHAPES) % 2 else clocks).append(time.ghz / row["ghz"] - 1)
    return [
        Error(tuple(cycles)).row("cycles (test)"),
        Error(tuple(fitted)).row("clock, 3 problems (two rates of power fitted to)"),
        Error(tuple(clocks)).row("clock, 4 others (test)"),
    ]


def examine_h200(say: Tables, fit: bool, units: Path | None, record: list[dict[str, Any]]) -> None:
    """Units, then tile times by emulation, then the records of calls."""
    chip = H200 if units is None else fit_units(read_record(units), H200, units.name)
    if units is not None:
        moved = {n: r.value for n, r in chip.rates.items() if r.source == units.name}
        say("fitted: " + ", ".join(f"{name} {value:.4g}" for name, value in moved.items()) + "\n")
    say(f"### Units of an H200, cycles\n\n{HEAD}")
    say(*unit_table(read_record(UNITS if units is None else units), chip, record))
    times = {shape: tile_times(shape, chip) for shape in SHAPES}
    say("\n### Tiles of the FP8_BLOCK kernel on an H200, cycles\n")
    say("| tile | units of 64 rows | a K block | between tiles |\n|---|---|---|---|")
    for (block_m, block_n, cluster), tile in times.items():
        for unit in sorted(tile.period):
            say(f"| {block_m} x {block_n} x {cluster} | {unit} | {tile.period[unit]:.0f} | {tile.between[unit]:.0f} |")
            record.append(
                {
                    "kind": "tile", "tile": [block_m, block_n, cluster], "units": unit,
                    "period": tile.period[unit], "between": tile.between[unit], "start": tile.start, "end": tile.end,
                }
            )  # fmt: skip
    say("\n### Whole kernels, cycles\n\n| M x N x K | counted | predicted | error |\n|---|---|---|---|")
    say("\n".join(counted_cycles(times)))
    say("\n### A K block of a whole tile, cycles\n", *counted_tiles(times))
    sets = {
        name: prepared(tile_points(file) if "tiles" in name else grid_points(file))
        for name, file in (FITTING | TESTING).items()
    }
    fitting = [p for name in FITTING for p in sets[name]]
    if fit:
        chip = fit_calls(fitting, times, chip)
        say("\nfitted: " + ", ".join(f"{name} {chip[name]:g}" for name in CALL_RATES))
    say(f"\n### Calls, microseconds from event to event\n\n{HEAD}")
    for name, points in sets.items():
        error = errors(points, times, chip)
        say(error.row(f"{name} ({'fitted to' if name in FITTING else 'test'})"))
        record += [
            {
                "kind": "call", "set": name, "sizes": list(p.point.sizes), "n": p.point.n, "k": p.point.k,
                "tile": list(p.point.shape), "measured_us": p.point.us, "predicted_us": round(p.us(times, chip), 2),
            }
            for p in points
        ]  # fmt: skip
    say(f"\n### Calls whose cycles and clock were counted, 7 problems with 3 tiles each\n\n{HEAD}")
    say(*counted_calls(times, chip))
    right, wrong = order(sets["tiles"], times, chip)
    say(f"\nOrder of two tiles that differ by more than 3%: right in {right} of {right + wrong} pairs.")


def order(points: Sequence[Prepared], times: dict[Shape, TileTimes], chip: Chip) -> tuple[int, int]:
    """(right, wrong) pairs of tiles at one point, where their times differ by more than 3%."""
    by_point: dict[tuple[tuple[int, ...], int, int], list[Prepared]] = {}
    for p in points:
        by_point.setdefault((p.point.sizes, p.point.n, p.point.k), []).append(p)
    right = wrong = 0
    for group in by_point.values():
        for one, other in itertools.combinations(group, 2):
            ratio = one.point.us / other.point.us
            if abs(ratio - 1) > 0.03:
                same = (one.us(times, chip) > other.us(times, chip)) == (ratio > 1)
                right, wrong = right + same, wrong + (not same)
    return right, wrong


def examine_b200(say: Tables, fit: bool, record: list[dict[str, Any]]) -> None:
    """Published cycles, and the ladder."""
    say(f"\n### Products of a B200, published cycles\n\n{HEAD}")
    for held_out, name in ((False, "fitted to"), (True, "test: other kinds")):
        for what, error in zip(("interval", "latency"), product_errors(B200, held_out), strict=True):
            say(error.row(f"{what} ({name})"))
    loops = measured_loops(B200)
    fitting, testing = loops[::3], [loop for i, loop in enumerate(loops) if i % 3]
    chip = fit_loops(B200, fitting) if fit else B200
    if fit:
        say("\nfitted: " + ", ".join(f"{name} {chip[name]:g}" for name in LOOP_RATES))
    say(f"\n### Main loops of one CTA on a B200, published milliseconds\n\n{HEAD}")
    say(loop_errors(chip, fitting).row("every third (fitted to)"))
    say(loop_errors(chip, testing).row("the others (test)"))
    for kind in ("FP8_E4M3", "BF16"):
        say(loop_errors(chip, [loop for loop in testing if loop.kind == kind]).row(f"the others, {kind}"))
    rows = ladder_rows(B200)
    say("\n### The eleven steps of a published MXFP8 GEMM on a B200\n")
    say(ladder_table(rows))
    record += [{"kind": "step", **row} for row in rows]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--units", type=Path)
    parser.add_argument("--formats", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", action="store_true", help="the page and its record; takes --formats along")
    arguments = parser.parse_args()
    record: list[dict[str, Any]] = []
    say = Tables()
    examine_h200(say, arguments.fit, arguments.units, record)
    if arguments.formats or arguments.write:
        say(f"\n### Other kernels, prefill, microseconds\n\n{HEAD}")
        for pair, error, tile in examine_formats():
            say(error.row(f"{pair} ({FITTED_PAIR.get(pair, 'test')})"))
            record.append({"kind": "formats", "pair": pair, "errors": error.values, "period": tile.period})
    examine_b200(say, arguments.fit, record)
    if arguments.write:
        write_block("examination", say.lines)
    out = RECORD if arguments.write else arguments.out
    if out is not None:
        rates = {chip.name: {n: vars(r) for n, r in chip.rates.items()} for chip in (H200, B200)}
        session: dict[str, Any] = {"kind": "session", "what": "clock", "model": model_digest(*TOOLS), "rates": rates}
        record.append({"kind": "page", "lines": say.lines})
        out.write_text("".join(json.dumps(line) + "\n" for line in (session, *record)))


if __name__ == "__main__":
    main()
