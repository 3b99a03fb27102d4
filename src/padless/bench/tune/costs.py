"""`padless tune`: measures on this GPU what tiles cost, and stores it for `select_config` to use.

Four products a tile, of all tiles in turns: whole rounds of full tiles with a long and a short K and fewer rounds give
the cost of 128 of K, of a tile, and of a launch; groups that end in half a tile give the cost of such a tile, as the
one with which the simulated queue takes the measured time.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from padless.bench.tune import tiles_sm100 as tune_tiles
from padless.kernels import cost_model
from padless.kernels.cost_model import Tile, TileCost, simulate
from padless.kernels.table import ROUTES, Route, kernels_arch
from padless.options import check_folder
from padless.runtime.architecture import BLACKWELL
from padless.runtime.driver import cuda_driver
from padless.testing.operands import make_operands
from padless.testing.progress import progress

_LONG_K, _SHORT_K = 8192, 1024
_ROUNDS, _FEW_ROUNDS = 12, 4
_TAIL_GROUPS, _TAIL_FULL_TILES = 4, 2
STEPS = ("whole rounds, long K", "whole rounds, short K", "fewer rounds", "groups that end in half a tile")


@dataclass(frozen=True)
class Trial:
    """A product to time with one tile: groups of ``sizes`` rows, (G, N, K) weights."""

    tile: Tile
    sizes: tuple[int, ...]
    n: int
    k: int


# Microseconds of every trial, which take turns.
Clock = Callable[[Sequence[Trial]], Sequence[float]]


def trials(tile: Tile, num_sms: int) -> tuple[Trial, Trial, Trial, Trial]:
    """The four products of STEPS for one tile."""
    many, few = (_whole_rounds(tile, num_sms, rounds) for rounds in (_ROUNDS, _FEW_ROUNDS))
    columns = tile.block_n * tile.cluster_n
    workers = max(num_sms // tile.cluster_n, 1)
    m_tiles = _TAIL_GROUPS * (_TAIL_FULL_TILES + 1)
    rows = _TAIL_FULL_TILES * tile.block_m + tile.block_m // 2
    n = columns * max(round(workers * _ROUNDS / m_tiles), 1)
    return (
        Trial(tile, (many[0],), many[1], _LONG_K),
        Trial(tile, (many[0],), many[1], _SHORT_K),
        Trial(tile, (few[0],), few[1], _SHORT_K),
        Trial(tile, (rows,) * _TAIL_GROUPS, n, _LONG_K),
    )


def _whole_rounds(tile: Tile, num_sms: int, rounds: int) -> tuple[int, int]:
    """(M, N) that make exactly ``rounds`` tiles for every worker, as square as that allows."""
    columns = tile.block_n * tile.cluster_n
    total = max(num_sms // tile.cluster_n, 1) * rounds
    shapes = [
        (m_tiles * tile.block_m, total // m_tiles * columns) for m_tiles in range(1, total + 1) if total % m_tiles == 0
    ]
    return min(shapes, key=lambda shape: max(shape) / min(shape))


def fit(tile: Tile, num_sms: int, times_us: Sequence[float]) -> TileCost:
    """The costs with which the queue takes the times of ``trials(tile, num_sms)``.

    Raises ValueError when no costs do: the GPU did something else as well.
    """
    long, short, few, tails = (1e3 * us for us in times_us)
    *_, tail_trial = trials(tile, num_sms)
    long_blocks, short_blocks = _LONG_K // 128, _SHORT_K // 128
    full_ns = (long - short) / _ROUNDS / (long_blocks - short_blocks)
    per_tile = (short - few) / (_ROUNDS - _FEW_ROUNDS)
    overhead_ns = max(per_tile - short_blocks * full_ns, 0.0)
    launch_ns = few - _FEW_ROUNDS * (overhead_ns + short_blocks * full_ns)

    def with_short(short_ns: float) -> float:
        cost = TileCost(full_ns, short_ns, overhead_ns)
        return launch_ns + simulate(tail_trial.sizes, tail_trial.n, tail_trial.k, tile, cost, num_sms)

    if full_ns <= 0 or per_tile <= 0 or not with_short(0.0) < tails < with_short(2 * full_ns):
        times = ", ".join(f"{name} {us:.1f} us" for name, us in zip(STEPS, times_us, strict=True))
        raise ValueError(
            f"the times of the {tile.block_m} x {tile.block_n} tile fit no costs ({times}): is the GPU busy? Try again"
        )
    low, high = 0.0, 2 * full_ns
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if with_short(middle) < tails else (low, middle)
    return TileCost(round(full_ns, 1), round((low + high) / 2, 1), round(overhead_ns, 1))


def measure_costs(
    tiles: Sequence[Tile], num_sms: int, clock: Clock, advance: Callable[[], None] = lambda: None
) -> dict[Tile, TileCost]:
    """Costs of tiles by a clock. One product of every tile in turns, then the next; ``advance`` is called after each."""
    columns = [trials(tile, num_sms) for tile in tiles]
    times = []
    for turn in zip(*columns, strict=True):
        times.append(clock(turn))
        advance()
    return {tile: fit(tile, num_sms, of) for tile, of in zip(tiles, zip(*times, strict=True), strict=True)}


# ------------------------------------------------------------------------------------------------ on a GPU


def path_of(kernel: str, arch: str) -> Route | None:
    """The first route that runs ``kernel`` (a file name without ".cu") on ``arch``."""
    wanted = (kernel, arch, "grouped_gemm")
    return next((route for route in ROUTES if (route.name, route.arch, route.operation) == wanted), None)


def config_for(route: Route, tile: Tile) -> Any:
    """The kernel's configuration with this tile: the fields of Tile that the configuration has."""
    config = route.config_class
    names = {field.name for field in fields(config)}
    return config(**{f.name: getattr(tile, f.name) for f in fields(Tile) if f.name in names})


def gpu_clock(route: Route, repeats: int) -> Clock:
    """Times trials of random operands on the current GPU by a `products_clock`."""
    time = tune_tiles.products_clock(repeats)

    def clock(turn: Sequence[Trial]) -> list[float]:
        products = []
        for i, trial in enumerate(turn):
            operands = make_operands(route.a, route.b, list(trial.sizes), trial.n, trial.k, seed=i, device="cuda")
            products.append((operands, config_for(route, trial.tile)))
        return time(products)

    return clock


def run_tune(*, dry_run: bool = False, reset: bool = False, repeats: int = 20, console: Console | None = None) -> int:
    """Measures the tables of every kernel that has one and runs here, prints old and new, stores the new ones.

    dry_run: store nothing. reset: measure nothing, remove what was stored; without a GPU, for all of them. Returns the
    exit code. Raises ValueError without a GPU to measure, and where times make no sense.
    """
    console = console or Console()
    gpu = cost_model.gpu_name()
    if reset:
        own = cost_model.tuned_file(gpu or "")
        files = sorted(own.parent.glob(own.name if gpu else f"*{own.name}"))
        for file in files:
            file.unlink()
        removed = "\n".join(f"removed {file}" for file in files)
        console.print(removed or f"nothing is stored for {gpu or 'any GPU'}", soft_wrap=True)
        return 0
    if gpu is None:
        raise ValueError("padless tune needs a CUDA GPU, and torch sees none on this machine")
    if not dry_run:
        check_folder("the folder of compiled kernels", cost_model.tuned_file(gpu).parent)
    arch = cuda_driver().arch
    found = {name: route for name in cost_model.BUILT_IN if (route := path_of(name, arch)) is not None}
    if not found and kernels_arch(arch) == BLACKWELL.name:
        with progress(console, "Problems", len(tune_tiles.points())) as advance:
            times = tune_tiles.compare(tune_tiles.gpu_clock(repeats), advance)
        tune_tiles.print_comparison(console, times)
        console.print("Nothing stored: tiles are chosen by a rule here, not by a table.")
        return 0
    if not found:
        console.print(f"no kernel that runs on {gpu} has a table of tiles")
        return 0
    new: dict[str, Mapping[Tile, TileCost]] = {}
    with progress(console, "Products of all tiles", len(found) * len(STEPS)) as advance:
        for name, route in found.items():
            tiles = list(cost_model.BUILT_IN[name].costs)
            new[name] = measure_costs(tiles, cuda_driver().num_sms(0), gpu_clock(route, repeats), advance)
    for name, costs in new.items():
        console.print(comparison(name, cost_model.cost_table(name), costs))
    if dry_run:
        console.print("Nothing stored.")
        return 0
    stored = cost_model.store_tuned(gpu, datetime.date.today().isoformat(), new)
    cost_model.cost_table.cache_clear()
    console.print(f"Stored in {stored}; programs that start from now on use it.", soft_wrap=True)
    return 0


def comparison(kernel: str, old: cost_model.CostTable, new: Mapping[Tile, TileCost]) -> Table:
    """Old and new costs of a kernel, in nanoseconds."""
    table = Table(title=f"{kernel}: ns of a tile, old ({old.source}) and new", title_justify="left", box=None)
    table.add_column("tile")
    for heading in ("full", "short", "once"):
        table.add_column(f"{heading}, old", justify="right")
        table.add_column("new", justify="right")
    for tile, cost in new.items():
        before = old.costs[tile]
        pairs = ((getattr(before, f.name), getattr(cost, f.name)) for f in fields(TileCost))
        cells = [f"{value:.0f}" for pair in pairs for value in pair]
        table.add_row(f"{tile.block_m} x {tile.block_n}, cluster of {tile.cluster_n}", *cells)
    return table
