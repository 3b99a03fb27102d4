"""Counts cycles of the FP8_BLOCK kernel's calls on a Hopper GPU, for the clock to be compared with.

    python tools/clock_counted.py --out docs/measured/clock/counted.jsonl [--seconds 60]

Before and after a call every SM writes down its cycle counter and the time. "feed": the copy engines alone, with so many
SMs that read the same. "stages": one round of tiles, as many as there are workers, at two lengths of K, operands in L2:
the difference is a K block's. "turns": recorded points of three tiles, cold, with what clock they ran at. "in_a_row":
what a call takes less among others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from padless.bench.group_sizes import Point
from padless.bench.problem import make_grouped
from padless.bench.units import Probe, run_probe
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.ops.grouped_gemm import grouped_gemm
from padless.runtime.driver import cuda_driver
from padless.testing import machine

TILES = ((256, 128, 2, 8), (128, 192, 1, 16), (128, 128, 1, 8))  # rows, columns, CTAs, raster
SHARED = (1, 2, 4, 11, 12, 33, 66, 132)  # streams of rows that the SMs read
TURNS = (
    ((4071, 1107, 66, 2948), 3072, 4096), ((2133, 2011, 1987, 2061), 8192, 4096), ((1871, 2201, 3022, 1098), 8192, 8192),
    ((1024,) * 8, 7168, 8192), ((512,) * 16, 8192, 6144), ((256,) * 32, 8192, 8192), ((8192,), 8192, 8192),
)  # fmt: skip
Record = dict[str, Any]


@triton.jit
def stamp(out):  # type: ignore[no-untyped-def]
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    ns = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    clk = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(out + 2 * sm, clk)
    tl.store(out + 2 * sm + 1, ns)


class Counter:
    """Cycles and nanoseconds between two stamps around a call, medians over the SMs."""

    def __init__(self, device: torch.device) -> None:
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.before, self.after = (torch.zeros(self.sms, 2, dtype=torch.int64, device=device) for _ in range(2))
        self.flush = torch.zeros(512 << 20, dtype=torch.uint8, device=device)
        self.empty = 0.0
        self.empty = statistics.median(self.count(lambda: None)[0] for _ in range(20))

    def count(self, call: Callable[[], Any], cold: bool = False) -> tuple[float, float]:
        if cold:
            self.flush.zero_()
            self.flush[: 256 << 20].view(torch.int64).sum()
        self.before.fill_(-1)
        self.after.fill_(-1)
        torch.cuda._sleep(400_000)
        stamp[(self.sms,)](self.before)
        call()
        stamp[(self.sms,)](self.after)
        both = torch.stack([self.before, self.after]).cpu()
        seen = (both >= 0).all(2).all(0)
        cycles, ns = (both[1] - both[0])[seen].double().median(0).values.tolist()
        return cycles - self.empty, ns


def tile_calls(shape: tuple[int, int, int, int], rows: int, down: int, across: int, k: int) -> Callable[[], Any]:
    """A product of ``down`` x ``across`` tiles of ``rows`` rows, all but whole ones of a group each."""
    block_m, block_n, cluster, raster = shape
    sizes = [rows * down] if rows == block_m else [rows] * down
    problem = make_grouped(Point(rows * down, block_n * cluster * across, k, len(sizes)), sizes, 0, "cuda")
    config = Sm90Fp8Config(block_m=block_m, block_n=block_n, cluster_n=cluster, raster_m=raster)
    return partial(grouped_gemm, problem.a, problem.b, problem.offs, out=problem.empty_out(), config=config)


def grids(workers: int) -> list[tuple[int, int]]:
    return [(d, workers // d) for d in (1, 2, 4, 11, 12, 33, 66, 132) if workers % d == 0 and d <= workers]


def stages(counter: Counter) -> Iterator[Record]:
    for shape in TILES:
        workers = counter.sms // shape[2]
        todo = [(shape[0], d, a) for d, a in grids(workers)]
        todo += [(rows, 1, workers) for rows in range(64, shape[0], 64)] + ([(shape[0], 1, 1)] if shape[2] == 1 else [])
        for rows, down, across in todo:
            width = rows * down + across * shape[1] * shape[2]
            most = min(5120, (30 << 20) // width // 1024 * 1024)
            cycles = {}
            for k in (512 if most <= 1024 else 1024, most):
                call = tile_calls(shape, rows, down, across, k)
                for _ in range(3):
                    call()
                cycles[k] = [counter.count(call)[0] for _ in range(15)]
            short, long = (statistics.median(found) for found in cycles.values())
            low, high = cycles
            yield {
                "kind": "stage", "tile": shape[:3], "rows": rows, "down": down, "across": across, "k": [low, high],
                "cycles": cycles, "period": round((long - short) / ((high - low) / 128), 1),
            }  # fmt: skip


def rounds(counter: Counter) -> Iterator[Record]:
    """Of one, two and three rounds of whole tiles: what lies between two."""
    for shape in TILES:
        workers = counter.sms // shape[2]
        down, across = (12, 11) if workers == 132 else (6, 11)
        cycles = {}
        for count in (1, 2, 3):
            call = tile_calls(shape, shape[0], down * count, across, 2048)
            for _ in range(3):
                call()
            cycles[count] = [counter.count(call)[0] for _ in range(15)]
        yield {"kind": "rounds", "tile": shape[:3], "down": down, "across": across, "k": 2048, "cycles": cycles}


def feed(counter: Counter) -> Iterator[Record]:
    driver, device = cuda_driver(), torch.device("cuda", torch.cuda.current_device())
    buffers: dict[int, torch.Tensor] = {}
    for streams in SHARED:
        for loads in (96, 288):
            probe = Probe(
                "shared feed", loads=loads, in_flight=5, ctas=counter.sms, streams=streams, buffer_rows=streams * 1024
            )
            yield run_probe(driver, probe, device, buffers)


def turns(counter: Counter) -> Iterator[Record]:
    """Each tile at a point: in turns with the others, and then alone; after a rest, cold."""
    for sizes, n, k in TURNS:
        problem = make_grouped(Point(sum(sizes), n, k, len(sizes)), list(sizes), 0, "cuda")
        out = problem.empty_out()
        calls = {}
        for shape in TILES:
            config = Sm90Fp8Config(block_m=shape[0], block_n=shape[1], cluster_n=shape[2], raster_m=shape[3])
            calls[shape[:3]] = partial(grouped_gemm, problem.a, problem.b, problem.offs, out=out, config=config)
            calls[shape[:3]]()
        found: dict[Any, list[tuple[float, float]]] = {shape: [] for shape in calls}
        for _ in range(7):
            for tile, call in calls.items():
                torch.cuda.synchronize()
                time.sleep(0.003)
                found[tile].append(counter.count(call, cold=True))
        for tile, samples in found.items():
            cycles, ns = (statistics.median(column) for column in zip(*samples, strict=True))
            yield {
                "kind": "turn", "tile": tile, "sizes": sizes, "n": n, "k": k, "samples": samples,
                "cycles": cycles, "ns": ns, "ghz": round((cycles + counter.empty) / ns, 4),
            }  # fmt: skip


def in_a_row(counter: Counter) -> Iterator[Record]:
    """A call alone, cold, from event to event, and the mean of 15 with operands of their own after one flush."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for groups, rows, n, k in ((8, 1, 2048, 2048), (8, 64, 2048, 2048), (8, 128, 4096, 7168), (2, 256, 3072, 4096)):
        problems = [make_grouped(Point(groups * rows, n, k, groups), [rows] * groups, i, "cuda") for i in range(15)]
        calls = [partial(grouped_gemm, p.a, p.b, p.offs, out=p.empty_out()) for p in problems]
        found: dict[int, list[float]] = {1: [], 15: []}
        for count in (1, 15) * 9:
            counter.flush.zero_()
            counter.flush[: 256 << 20].view(torch.int64).sum()
            torch.cuda._sleep(4_000_000)
            start.record()
            for call in calls[:count]:
                call()
            end.record()
            torch.cuda.synchronize()
            found[count].append(1e3 * start.elapsed_time(end) / count)
        alone, row = (statistics.median(times[2:]) for times in found.values())
        yield {"kind": "in a row", "groups": groups, "rows": rows, "n": n, "k": k, "alone_us": alone, "row_us": row}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after so long")
    parser.add_argument("--part", action="append", choices=("feed", "stages", "rounds", "turns", "in_a_row"))
    arguments = parser.parse_args()
    began = time.perf_counter()
    counter = Counter(torch.device("cuda"))
    with arguments.out.open("w") as file:
        session = {"kind": "session", "what": "counted", "machine": machine.describe(), "empty": counter.empty}
        file.write(json.dumps(session) + "\n")
        for part in (feed, stages, rounds, turns, in_a_row):
            if arguments.part and part.__name__ not in arguments.part:
                continue
            try:
                for record in part(counter):
                    file.write(json.dumps(record) + "\n")
                    file.flush()
                    shown = {
                        name: record[name]
                        for name in record
                        if name not in ("cycles", "samples", "out") or part is turns
                    }
                    print(part.__name__, {k: v for k, v in shown.items() if k != "samples"}, flush=True)
                    if time.perf_counter() - began > arguments.seconds:
                        print("out of time")
                        return
            except Exception as error:
                print(f"{part.__name__}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
