"""Parts of every benchmark run: the place of results, the session record with the ceilings, the loop with its
progress bar.

A run is one process that measures many points. It can be cut at any moment (time_limit_s cuts it in an
orderly way); run again with the same out_dir, it measures only what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from padless.bench.group_sizes import DecodePoint, DenseShape, Point, group_sizes
from padless.bench.measure import measure_dense
from padless.bench.peers import Peer
from padless.bench.peers.find import resolve_folder
from padless.bench.problem import GroupedProblem, make_dense, make_grouped
from padless.bench.report.terminal import wide_console
from padless.bench.results import Record, ResultFile, of_kind, point_key, time_us
from padless.bench.warm_up import warm_up
from padless.testing import machine
from padless.testing.progress import progress
from padless.testing.timing import FLUSH, REPEATS, Timer, copy_bytes_per_second

DEFAULT_OUT_DIR = Path("padless-out/bench")
PAUSE_S = 0.002
CEILING_SHAPE = DenseShape(8192, 8192, 8192)
# One scale per tensor is another product: it is recorded as an upper bound and is no ceiling.
_NO_CEILING = ("cublaslt_tensor",)


@dataclass(frozen=True)
class RunSettings:
    """Settings of a benchmark run.

    peers_dir: folder of the peers' libraries; None for ./.peers if it exists.
    seed: of group sizes and values.
    repeats: timed calls of each contender at each point.
    pause_s: idle seconds before each call, on top of twice what the last one took.
    time_limit_s: stop before a point that would end later than this after the start; None for no limit.
    console, progress: where tables go, and whether progress is shown.
    """

    peers_dir: str | Path | None = None
    seed: int = 0
    repeats: int = REPEATS
    pause_s: float = PAUSE_S
    time_limit_s: float | None = None
    console: Console = field(default_factory=wide_console)
    progress: bool = True


DEFAULT_SETTINGS = RunSettings()


@dataclass(frozen=True)
class Ceilings:
    """Rates that this GPU reaches in this run.

    copy_bytes_per_s: a device-to-device copy, bytes read plus written.
    dense_flops_per_s: the fastest dense 1x128 / 128x128 product at 8192^3, of any contender.
    """

    copy_bytes_per_s: float
    dense_flops_per_s: float | None
    dense: Record

    def as_dict(self) -> Record:
        return {
            "copy_gb_per_s": self.copy_bytes_per_s / 1e9,
            "dense_tflops": None if self.dense_flops_per_s is None else self.dense_flops_per_s / 1e12,
            "dense_contenders_us": {name: timing["us"] for name, timing in self.dense.get("gpu", {}).items()},
            "dense_errors": self.dense.get("errors", {}),
        }


def measure_ceilings(peers: Sequence[Peer], timer: Timer, seed: int = 0) -> Ceilings:
    """Copy bandwidth, and padless's and every peer's dense product at 8192^3."""
    copy = copy_bytes_per_second(timer)
    dense = measure_dense(make_dense(CEILING_SHAPE, seed, "cuda"), peers, timer)
    times = [time_us(dense, "gpu", name) for name in dense["gpu"] if name not in _NO_CEILING]
    rates = [CEILING_SHAPE.flops / (1e-6 * us) for us in times if us]
    torch.cuda.empty_cache()
    return Ceilings(copy, max(rates, default=None), dense)


@dataclass
class Session:
    """One run: its result file, the usable peers, the timer, the ceilings, the settings and the points."""

    file: ResultFile
    peers: list[Peer]
    timer: Timer
    ceilings: Ceilings
    settings: RunSettings
    id: str
    started: float
    points: Sequence[Any] = ()

    @property
    def console(self) -> Console:
        return self.settings.console

    def out_of_time(self, next_s: float) -> bool:
        """Whether work of about `next_s` seconds would end past the time limit."""
        limit = self.settings.time_limit_s
        return limit is not None and time.monotonic() + next_s > self.started + limit

    def grouped(self, point: Point) -> GroupedProblem:
        """The problem of a point on the GPU, groups and values of the run's seed."""
        return make_grouped(point, group_sizes(point, self.settings.seed), self.settings.seed, "cuda")

    def with_floor(self, record: Record) -> Record:
        """The record with the time that the ceilings allow for its flops and bytes."""
        return record | {"floor_us": self.floor_us(record["flops"], record["bytes"])}

    def floor_us(self, flops: int, bytes_: int) -> float | None:
        """The time the ceilings allow: the larger of arithmetic and traffic; None without a dense ceiling."""
        rate = self.ceilings.dense_flops_per_s
        return None if rate is None else 1e6 * max(flops / rate, bytes_ / self.ceilings.copy_bytes_per_s)


def open_session(
    what: str,
    out_dir: str | Path,
    peers: Sequence[Peer],
    settings: RunSettings,
    compile_ahead: Sequence[Point] | Sequence[DecodePoint] = (),
    facts: Record | None = None,
) -> Session:
    """Checks that there is a GPU, opens `out_dir`/`what`.jsonl, measures the ceilings, writes the session record.

    compile_ahead: points whose kernels are compiled before anything is timed, unless they are in the file already.
    facts: further fields of the session record.
    """
    machine.require_gpu(f"padless bench {what}")
    started = time.monotonic()
    console = settings.console
    file = ResultFile(Path(out_dir) / f"{what}.jsonl")
    usable, described = [], {}
    for peer in peers:
        missing = peer.missing()
        usable += [] if missing else [peer]
        described[peer.name] = {"missing": missing} if missing else {"version": peer.version()}
        found = f"not used: {missing}" if missing else f"{peer.version()} ({peer.licence})"
        console.print(f"{peer.name}: {found}", highlight=False, markup=False)
    if compile_ahead:
        with console.status("compiling kernels"):
            names = [peer.name for peer in usable if peer.compiles_at_run_time]
            left = missing_points(file, what, compile_ahead, settings.seed)
            warm_up(what, left, resolve_folder(settings.peers_dir), names, settings.seed)
    timer = Timer(repeats=settings.repeats, pause_s=settings.pause_s)
    with console.status("measuring the ceilings"):
        ceilings = measure_ceilings(usable, timer, settings.seed)
    about = machine.describe()
    session = Session(file, usable, timer, ceilings, settings, about["date"], started)
    file.append(
        {
            "kind": "session",
            "id": session.id,
            "what": what,
            "machine": about,
            "peers": described,
            "ceilings": ceilings.as_dict(),
            "repeats": settings.repeats,
            "pause_s": settings.pause_s,
            "flush": FLUSH,
            "ready_after_s": round(time.monotonic() - started, 1),
        }
        | (facts or {})
    )
    return session


def missing_points(file: ResultFile, kind: str, points: Sequence[Any], seed: int) -> list[Any]:
    """The points that the result file does not hold."""
    done = file.measured(kind, seed)
    return [point for point in points if point_key(asdict(point)) not in done]


def run_points(session: Session, kind: str, points: Sequence[Any], measure: Callable[[Any], Record]) -> list[Record]:
    """Measures every point that the result file lacks; returns the records of all points, old ones too."""
    seed = session.settings.seed
    missing = missing_points(session.file, kind, points, seed)
    if len(missing) < len(points):
        session.console.print(f"{len(points) - len(missing)} of {len(points)} points are there already")
    slowest = 0.0
    shown = progress(session.console, kind, len(missing)) if session.settings.progress else nullcontext(lambda: None)
    with shown as advance:
        for point in missing:
            if session.out_of_time(slowest):
                session.console.print("the time limit is near: run again with the same folder for the rest")
                break
            start = time.monotonic()
            record: Record = {"kind": kind, "session": session.id, "seed": seed, "point": asdict(point)}
            record |= measure(point)
            took_s = time.monotonic() - start
            session.file.append(record | {"took_s": round(took_s, 2)})
            slowest = max(slowest, took_s)
            advance()
            torch.cuda.empty_cache()
    wanted = {point_key(asdict(point)) for point in points}
    return [
        record
        for record in of_kind(session.file.records, kind)
        if record["seed"] == seed and point_key(record["point"]) in wanted
    ]
