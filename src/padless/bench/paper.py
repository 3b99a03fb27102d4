"""The paper's comparison: time, memory and bitwise equality over its grid, its Figure 2 and its Tables 2 and
3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from padless.bench import tables
from padless.bench.group_sizes import Point, balanced_grid, full_grid, group_sizes, quick_grid
from padless.bench.measure import measure_grouped
from padless.bench.peers import Peer, find_peers
from padless.bench.problem import make_grouped
from padless.bench.results import (
    Comparison,
    Record,
    failures,
    sessions_of,
    summarise,
)
from padless.bench.session import (
    DEFAULT_OUT_DIR,
    DEFAULT_SETTINGS,
    RunSettings,
    open_session,
    run_points,
)

GRIDS = {"quick": quick_grid, "balanced": balanced_grid, "full": full_grid}
FIGURE_NAME = "figure2.png"


@dataclass(frozen=True)
class BenchResult:
    """What a run has measured, its earlier parts included.

    records: one per point, as in the result file (docs/benchmarking.md has the fields).
    file: the JSON lines. figure: the PNG, where one is drawn.
    """

    records: list[Record]
    file: Path
    figure: Path | None = None

    @property
    def comparisons(self) -> list[Comparison]:
        return summarise(self.records)

    @property
    def failures(self) -> list[str]:
        """Differing bits, wrong results and contenders that raised, one line each."""
        return failures(self.records)


def run_paper(
    points: str | Sequence[Point] = "quick",
    peers: Sequence[Peer] | Sequence[str] | None = None,
    out_dir: str | Path = DEFAULT_OUT_DIR,
    settings: RunSettings = DEFAULT_SETTINGS,
) -> BenchResult:
    """Measures padless, padding + the same GEMM, and peers over points of the paper's grid; prints the
    tables.

    points: "quick" (14 points, under two minutes with peers), "balanced" (72), "full" (576), or a list.
    peers: peers or their names; None for every known one. Those that cannot be used are skipped with their
        reason.
    out_dir: receives paper.jsonl (appended to; points that are there are not measured again) and figure2.png.

    Raises ValueError without a CUDA GPU, for an unknown name, and for a missing settings.peers_dir.
    """
    grid = resolve_grid(points)
    seed = settings.seed

    chosen = resolve_peers(peers, settings.peers_dir)
    session = open_session("paper", out_dir, chosen, settings, compile_ahead=grid)

    def measure(point: Point) -> Record:
        problem = make_grouped(point, group_sizes(point, seed), seed, "cuda")
        record = measure_grouped(problem, session.peers, session.timer)
        return record | {"floor_us": session.floor_us(point.flops, point.bytes)}

    records = run_points(session, "paper", grid, measure)
    tables.print_grouped(session.console, records, sessions_of(session.file.records))
    figure = report_figure(records, Path(out_dir) / FIGURE_NAME, session.console)
    return BenchResult(records, session.file.path, figure)


def report_figure(records: Sequence[Record], path: Path, console: Console) -> Path | None:
    """Draws Figure 2 if there is something to draw and matplotlib is there; says where it is or why not."""
    if not records:
        return None
    try:
        from padless.bench.figures import draw_figure2

        drawn = draw_figure2(records, path)
    except ImportError:
        console.print("no figure: it needs matplotlib (pip install 'padless[bench]')", markup=False)
        return None
    console.print(f"figure: {drawn}", highlight=False, markup=False)
    return drawn


def resolve_grid(points: str | Sequence[Point]) -> list[Point]:
    """A named grid, or the points given."""
    if isinstance(points, str):
        if points not in GRIDS:
            raise ValueError(f"points must be one of {sorted(GRIDS)} or a list of points, got {points!r}")
        return GRIDS[points]()
    return list(points)


def resolve_peers(peers: Sequence[Peer] | Sequence[str] | None, peers_dir: str | Path | None) -> list[Peer]:
    """Peers by name (all of them for None) or as they are given."""
    names = None if peers is None else [peer for peer in peers if isinstance(peer, str)]
    given = [] if peers is None else [peer for peer in peers if not isinstance(peer, str)]
    found = find_peers(peers_dir, names) if names is None or names else []
    return found + given
