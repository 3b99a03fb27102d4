"""Every tile of FP8_BLOCK's kernel on the same problems, in turns: measurements that the cost model is evaluated by.

A tile's time is that of `grouped_gemm` with the configuration of that tile; results are checked as in the paper's grid.
The first tile is the one that is chosen for most points of the paper's grid, the tallest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from padless.bench.group_sizes import PAPER_GROUPS, PAPER_K, PAPER_N, Point, quick_grid
from padless.bench.measure import timed
from padless.bench.peers import Contender
from padless.bench.problem import GroupedProblem, sample_reference
from padless.bench.report import table
from padless.bench.results import AXES, Record
from padless.bench.session import Session
from padless.kernels.cost_model import BUILT_IN, Tile
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.testing.judge import check
from padless.testing.timing import Timer

KERNEL = "sm90_fp8_grouped_gemm"
FULL_M = (8192, 16384)


def grid(name: str, seed: int) -> list[Point]:
    """All points of the paper's grid with M 8192 and 16384 ("full"), or those of its quick subset."""
    if name == "quick":
        return [point for point in quick_grid() if point.M in FULL_M]
    axes_of_it = itertools.product(FULL_M, PAPER_N, PAPER_K, PAPER_GROUPS)
    return [Point(*values) for values in axes_of_it]


def tiles() -> dict[str, Tile]:
    """The tiles that the cost model knows, by name."""
    return {f"{tile.block_m} x {tile.block_n}": tile for tile in BUILT_IN[KERNEL].costs}


def session_facts() -> Record:
    """The tiles' configurations, for the session record."""
    return {"tiles": {name: asdict(tile) for name, tile in tiles().items()}}


def contenders(problem: GroupedProblem, backend: str | None = None) -> list[Contender]:
    """padless with each tile; each has its own output."""
    from padless.ops.grouped_gemm import grouped_gemm

    found = []
    for name, tile in tiles().items():
        out, config = problem.empty_out(), Sm90Fp8Config(**asdict(tile))
        chosen: dict[str, Any] = {"config": config, "backend": backend}
        call = partial(grouped_gemm, problem.a, problem.b, problem.offs, out=out, **chosen)
        found.append(Contender(name, call, lambda out=out: out))  # type: ignore[misc]
    return found


def measure(problem: GroupedProblem, timer: Timer, backend: str | None = None) -> Record:
    """Record of one point."""
    right, record = check(contenders(problem, backend), sample_reference(problem), {})
    return record | {"sizes": problem.sizes, "bytes": problem.point.bytes} | timed(right, timer)


def measure_at(session: Session, point: Point) -> Record:
    """Every tile at a point."""
    return measure(session.grouped(point), session.timer)


def tables(records: table.Records, sessions: table.Sessions, width: int) -> Sequence[table.Table]:
    """A line a point: microseconds with each tile, and what the first tile takes over the fastest one."""
    names = list(dict.fromkeys(name for record in records for name in record["gpu"]))

    def over_least(part: table.Records) -> list[float]:
        first = table.times(part, names[0])
        return [first[0] / min(us for name in names for us in table.times(part, name))] if first else []

    columns = [*table.axes(*AXES), *(table.time(name) for name in names), table.Column("first / least", over_least, 3)]
    title = "Tiles: GPU time (us), and the first tile's over the least"
    return [table.table_of(title, columns, table.by_point(records), 1)]
