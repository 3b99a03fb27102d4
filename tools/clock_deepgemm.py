"""Times DeepGEMM's Hopper kernel by the clock, as a kernel that nobody here wrote, beside its times on an H200.

    python tools/clock_deepgemm.py [--sources FOLDER] [--write] [--launch-files FOLDER]

FOLDER is a tree of DeepGEMM 2.6.1 with third-party/cutlass, by default .peers/DeepGEMM; nvcc compiles its FP8 kernel
with the template arguments of its own host code. The kernel's product is checked in the emulator, short runs are timed,
and calls on padded groups and of one product are predicted with the rates as they are. Without the sources or nvcc it
says so and ends. --write puts the tables into docs/timing_deepgemm.md and writes the record. --launch-files leaves
PTX and a launch file of each configuration instead, for ``padless emulate --time``.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clock_b200 import Error
from clock_h200 import MEASURED
from clock_page import ROOT, Tables, model_digest, write_block
from deepgemm_kernel import BLOCK_K, HALF, PADDING, SHORT, SORTS, Config, Kernel, ceil_div, select_config
from padless.emulator.timing import H200, Chip
from padless.emulator.timing.chip import Call, TileTimes, call_time

SOURCES = ROOT / ".peers" / "DeepGEMM"
PADDED, DENSE = "2026-11-21-h200-paper-full.jsonl", "2026-11-21-h200-dense.jsonl"
COUNTED = "2026-11-21-h200-tensor-pipe.csv"
RECORD = MEASURED / "clock" / "2026-11-22-deepgemm.jsonl"
TOOLS = ("clock_deepgemm.py", "deepgemm_kernel.py")
HEAD = "| what | points | mean error | median | 9 of 10 within | largest | bias |\n|---|---|---|---|---|---|---|"
BAND = 16  # tiles side by side before the other direction goes on: its choice of 8 or 16 for both configurations


def pairs_of_tiles(rows: int, columns: int, along_n: bool) -> Iterator[tuple[tuple[int, int], ...]]:
    """The tiles (row, column) of every cluster in turn, of ``rows`` x ``columns``: bands of 16 tiles that lie in the
    direction in which a cluster does (along N: columns), the other one slower. Where a band has an odd number its last
    line comes alone at the end, in pairs that share nothing."""
    first_count, second_count = (columns, rows) if along_n else (rows, columns)
    order = []
    for first in range(0, first_count, BAND):
        width = min(BAND, first_count - first)
        even = width - width % 2
        order += [(first + i, second) for second in range(second_count) for i in range(even)]
        order += [(first + even, second) for second in range(second_count) if width % 2]
    for i in range(0, len(order), 2):
        yield tuple((b, a) if along_n else (a, b) for a, b in order[i : i + 2])


def call_of(sizes: Sequence[int], n: int, k: int, config: Config, sms: int = 132) -> Call:
    """The work of a chip: pairs of tiles in its order; a last one without its other half counts as a pair."""
    group_of, halves = [], []
    for group, size in enumerate(sizes):
        for row in range(0, size, config.block_m):
            group_of.append(group)
            halves.append(min(ceil_div(size - row, HALF), 2))
    rows, columns, along_n = len(group_of), ceil_div(n, config.block_n), config.cluster_n > 1
    keys = {sort: i for i, sort in enumerate(SORTS)}
    tiles: list[int] = []
    loads, stores = [], []
    seen: set[tuple[Any, ...]] = set()
    computed = 0
    for pair in pairs_of_tiles(rows, columns, along_n):
        (row, column), (other, other_column) = pair[0], pair[-1]
        shared = column != other_column if along_n else row != other and group_of[row] == group_of[other]
        tiles.append(keys[halves[row], halves[other], shared])
        load = store = 0.0
        for r, c in pair:
            width = min(config.block_n, n - c * config.block_n)
            parts = {
                ("a", r): config.block_m * k * (1 + 4 / 128), ("b", group_of[r], c): width * k * (1 + 4 / 128**2)
            }  # fmt: skip
            load += sum(size for part, size in parts.items() if part not in seen)
            seen.update(parts)
            store += 2.0 * config.block_m * width
            computed += halves[r] * HALF if config.grouped else config.block_m
        loads.append(load)
        stores.append(store)
    workers, k_blocks = sms // 2, ceil_div(k, BLOCK_K)
    received = float(BLOCK_K * k_blocks * len(tiles) * (config.block_m + config.block_n)) / workers
    return Call(tiles, k_blocks, float(computed * config.block_n * k), workers, loads, stores, received)


@dataclass(frozen=True)
class Point:
    """One measured call: sizes of groups, N and K, and microseconds."""

    sizes: tuple[int, ...]
    n: int
    k: int
    us: float

    @property
    def config(self) -> Config:
        """The configuration that its host code takes."""
        grouped = len(self.sizes) > 1
        return select_config(sum(ceil_div(s, PADDING) * PADDING for s in self.sizes), self.n, self.k, grouped)

    def predicted_us(self, times: TileTimes, chip: Chip) -> float:
        """By the clock."""
        return call_time(call_of(self.sizes, self.n, self.k, self.config), times, chip).ns / 1e3


def padded_points() -> list[Point]:
    """The paper's grid, groups padded beforehand."""
    return _points(PADDED, "deepgemm_on_padded")


def dense_points() -> list[Point]:
    """One product."""
    return _points(DENSE, "deepgemm")


def _points(name: str, contender: str) -> list[Point]:
    with (MEASURED / name).open() as lines:
        records = [json.loads(line) for line in lines]
    return [
        Point(tuple(r.get("sizes") or [r["point"]["M"]]), r["point"]["N"], r["point"]["K"], r["gpu"][contender]["us"])
        for r in records
        if r["kind"] != "session"
    ]


SETS = {"groups padded to 128 rows": padded_points, "one product": dense_points}


def counted_calls(times: TileTimes, chip: Chip) -> list[dict[str, Any]]:
    """Calls whose cycles and clock Nsight Compute counted, the first of two each, beside predicted ones. Where there are
    several groups, their sizes are taken to be the grid's."""
    with (MEASURED / COUNTED).open() as file:
        next(file)
        rows = [row for row in csv.DictReader(file) if "DeepGEMM" in row["kernel"] and row["call"] == "1"]
    known = {(sum(p.sizes), p.n, p.k, len(p.sizes)): p.sizes for p in padded_points()}
    found = []
    for row in rows:
        m, n, k, groups = (int(row[name]) for name in ("M", "N", "K", "groups"))
        sizes = (m,) if groups == 1 else known[m, n, k, groups]
        time = call_time(call_of(sizes, n, k, select_config(m, n, k, True)), times, chip)
        cycles = round((time.ns - chip["launch_ns"]) * time.ghz)
        found.append(
            {
                "kind": "counted", "m": m, "n": n, "k": k, "groups": groups, "ghz": round(time.ghz, 3), "cycles": cycles,
                "counted_cycles": int(row["sm_cycles_elapsed"]), "counted_ghz": float(row["sm_ghz"]),
            }
        )  # fmt: skip
    return found


def examine(sources: Path, nvcc: str, say: Tables) -> list[dict[str, Any]]:
    """Rows of the record; tables as they come."""
    sets = {name: points() for name, points in SETS.items()}
    say("| tile | a K block | between tiles | start | end |", "|---|---|---|---|---|")
    record: list[dict[str, Any]] = []
    known: dict[Config, TileTimes] = {}
    for points in sets.values():
        for config in dict.fromkeys(point.config for point in points):
            kernel = Kernel(sources, nvcc, config)
            record.append(kernel.check())
            known[config] = times = kernel.tile_times(H200)
            record.append({"kind": "tile", "config": vars(config), "times": vars(times)})
            cells = times.period[0], times.between[0], times.start, times.end
            say(f"| {config.name} | " + " | ".join(f"{cell:.0f}" for cell in cells) + " |")
    padded = padded_points()[0].config
    counted = counted_calls(known[padded], H200)
    record += counted
    say(
        "\n| M x N x K, groups | cycles counted | predicted | error | GHz counted | predicted |",
        "|---|---|---|---|---|---|",
    )
    for row in counted:
        shape = f"{row['m']} x {row['n']} x {row['k']}, {row['groups']}"
        error = row["cycles"] / row["counted_cycles"] - 1
        cycles = f"{row['counted_cycles']:,} | {row['cycles']:,} | {error:+.1%}"
        say(f"| {shape} | {cycles} | {row['counted_ghz']:.3f} | {row['ghz']:.3f} |")
    say("")
    say(HEAD)
    for name, points in sets.items():
        errors = []
        for p in points:
            us = round(p.predicted_us(known[p.config], H200), 2)
            errors.append(us / p.us - 1)
            call = {"sizes": p.sizes, "n": p.n, "k": p.k, "measured_us": p.us, "predicted_us": us}
            record.append({"kind": "call", "set": name} | call)
        say(Error(tuple(errors)).row(f"{name}, {', '.join(dict.fromkeys(p.config.name for p in points))} (test)"))
    return record


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, default=SOURCES)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--launch-files", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    nvcc = shutil.which("nvcc")
    if not (arguments.sources / "third-party" / "cutlass" / "include").is_dir() or nvcc is None:
        wanted = (
            f"DeepGEMM 2.6.1 with third-party/cutlass in {arguments.sources} (--sources FOLDER)" if nvcc else "nvcc"
        )
        print(f"not examined: this needs {wanted}")
        return
    if arguments.launch_files is not None:
        for config in {point.config for points in SETS.values() for point in points()}:
            kernel = Kernel(arguments.sources.resolve(), nvcc, config)
            folder = arguments.launch_files / config.name.replace(" ", "")
            problem, code = kernel.prepared([256], config.block_n * config.cluster_n, SHORT)
            problem.leave(folder, code, config)
            print(f"padless emulate {folder / 'kernel.ptx'} --launch {folder / 'launch.toml'} --time")
        return
    say = Tables()
    record = examine(arguments.sources.resolve(), nvcc, say)
    if arguments.write:
        write_block("deepgemm", say.lines)
        release = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
        session = {
            "kind": "session", "what": "clock", "model": model_digest(*TOOLS), "kernel": "DeepGEMM 2.6.1",
            "nvcc": re.findall(r"V[\d.]+", release)[0],
        }  # fmt: skip
        rows = (session, *record, {"kind": "page", "lines": say.lines})
        RECORD.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
