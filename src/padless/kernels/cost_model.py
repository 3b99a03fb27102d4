"""Cost model: what a tile costs on a GPU, what a problem takes with it, and where the numbers come from.

A kernel's time is that of a queue: every CTA (or cluster) takes the next tile when it is free. ``simulate`` plays that
queue for known group sizes. ``estimate_ns`` gives its mean when the sizes are unknown, which is what a choice of tile
has to go by: they are on the device. docs/kernels/sm90_fp8/cost_model.md compares both with measured times.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from padless._version import __version__
from padless.kernels.schedule import has_half_tiles, tiles_to_cut, walk_of_groups
from padless.runtime.disk_cache import cache_dir, write_atomically


@dataclass(frozen=True)
class Tile:
    """A tile shape, and how tiles are scheduled: a cluster of ``cluster_n`` CTAs takes as many side by side."""

    block_m: int
    block_n: int
    cluster_n: int = 1
    raster_m: int = 8

    @property
    def has_half_tiles(self) -> bool:
        """Whether tiles of the last round are cut in two."""
        return has_half_tiles(self.block_m)


@dataclass(frozen=True)
class TileCost:
    """Nanoseconds of a CTA.

    full_ns: for 128 of K, a tile with more than half of its rows.
    short_ns: for 128 of K, a tile with at most half of its rows (the end of a group).
    overhead_ns: once a tile, from its last product to the first of the next.
    """

    full_ns: float
    short_ns: float
    overhead_ns: float

    def of(self, rows: int, block_m: int, k: int) -> float:
        """Nanoseconds of a tile of ``rows`` valid rows."""
        per_block = self.short_ns if 2 * rows <= block_m else self.full_ns
        return self.overhead_ns + -(-k // 128) * per_block


@dataclass(frozen=True)
class CostTable:
    """The tiles that a kernel may be given, with their costs. ``source``: where the numbers are from."""

    costs: Mapping[Tile, TileCost]
    source: str


# By kernel, the file's name without ".cu". Only ratios matter, so a table serves other GPUs of its architecture too.
# sm90_fp8_grouped_gemm: fitted to 612 recorded times, and overheads to records of picks (the docs say how). 64 columns:
# from the ratio to 128 columns of dense products that took turns in one run.
BUILT_IN: dict[str, CostTable] = {
    "sm90_fp8_grouped_gemm": CostTable(
        {
            Tile(256, 128, 2, 8): TileCost(684, 405, 500),
            Tile(128, 192, 1, 16): TileCost(532, 501, 750),
            Tile(128, 128, 1, 8): TileCost(385, 354, 560),
            Tile(128, 64, 1, 8): TileCost(255, 235, 560),
        },
        "built in, NVIDIA H200, 2026-11-28",
    )
}


# ------------------------------------------------------------------------------------------------ estimates


def simulate(
    sizes: Sequence[int], n: int, k: int, tile: Tile, cost: TileCost, num_sms: int, half_tiles: bool = True
) -> float:
    """Nanoseconds until the last tile is done, groups of the given sizes, tiles in the order of ``schedule.tiles``.

    ``half_tiles``: whether the last round's tiles are cut in two, where the tile ``has_half_tiles``, as in its kernel.
    """
    ends = [sum(sizes[: g + 1]) for g in range(len(sizes))]
    n_tiles = -(-n // (tile.block_n * tile.cluster_n))
    free = [0.0] * max(num_sms // tile.cluster_n, 1)
    rows: list[int] = []  # of every tile
    for _, start, end in walk_of_groups(ends, sum(sizes)):
        m_tiles = -(-(end - start) // tile.block_m)
        for band in range(0, m_tiles, tile.raster_m):
            rows += [
                min(tile.block_m, end - start - m_tile * tile.block_m)
                for m_tile in range(band, min(band + tile.raster_m, m_tiles))
            ] * n_tiles
    if half_tiles and tile.has_half_tiles:
        whole, half = len(rows) - tiles_to_cut(len(rows), len(free)), tile.block_m // 2
        rows[whole:] = [part for r in rows[whole:] for part in (min(r, half), r - half) if part > 0]
    cost_of = {r: cost.of(r, tile.block_m, k) for r in set(rows)}
    for r in rows:
        heapq.heapreplace(free, free[0] + cost_of[r])
    return max(free)


def estimate_ns(m: int, n: int, k: int, num_groups: int, tile: Tile, cost: TileCost, num_sms: int) -> float:
    """The mean of ``simulate`` over sizes drawn evenly from [0, 2 M / G], to a few percent, in closed form.

    Short tiles count as the fraction of a full one that they take. The number of rounds is spread evenly over what the
    ends of G groups can make of it, and a round that has begun is paid for in full: with few large groups that is
    almost the number of whole rounds, with many small ones half a round more than the work alone.

    Where a last round is cut in half tiles (``Tile.has_half_tiles``) and so is over after half of it, that half is paid
    for. Counting by half rounds tells how often that is so; a half takes as long as a short tile. Of what this
    spares, ``_TRUSTED_OF_SPARED`` counts, but all of it for one group: its size is known.
    """
    groups = max(1, min(num_groups, m))
    full, short = expected_m_tiles(m, groups, tile.block_m)
    full_ns, short_ns = cost.of(tile.block_m, tile.block_m, k), cost.of(0, tile.block_m, k)
    # How many tiles each worker gets for one m-tile.
    share = -(-n // (tile.block_n * tile.cluster_n)) / max(num_sms // tile.cluster_n, 1)
    rounds = (full + short * short_ns / full_ns) * share
    width = math.sqrt(groups - 1) * share
    whole = max(1.0, _mean_ceil(rounds, width))
    if not tile.has_half_tiles:
        return full_ns * whole
    # Each time that counting by half rounds spares one, a half tile takes the place of a whole tile.
    spared = whole - max(0.5, _mean_ceil(2 * rounds, 2 * width) / 2)
    trusted = 1.0 if groups == 1 else _TRUSTED_OF_SPARED
    return full_ns * whole - 2 * trusted * spared * (full_ns - short_ns)


def expected_rounds(m: int, num_groups: int, block_m: int, share: float) -> float:
    """Mean rounds of whole tiles, group sizes as of ``estimate_ns``. ``share``: tiles of each worker for one m-tile."""
    groups = max(1, min(num_groups, m))
    return max(1.0, _mean_ceil(sum(expected_m_tiles(m, groups, block_m)) * share, math.sqrt(groups - 1) * share))


def routed_rounds(m: int, num_groups: int, block_m: int, share: float, short: float = 1.0) -> float:
    """Rounds of whole tiles: the geometric mean over calls of which a third are routed evenly, two thirds are not.

    share: tiles of each worker for one m-tile. short: what a tile with at most half of its rows takes of a whole one; a
    round takes what its tiles do on average. Uneven are sizes that are as likely in any split of M rows into G groups
    as in any other: s rows or more with probability q ** s, q = M / (M + G). A group's tiles begin at its rows 1,
    block_m + 1, .., and so it has q + q ** (block_m + 1) + .. of them on average, a part q ** (block_m / 2) of which
    have more than half of their rows. The ends of uneven groups cost half a round more.
    """
    rows, longer = divmod(m, num_groups)
    of_even = ((num_groups - longer, *divmod(rows, block_m)), (longer, *divmod(rows + 1, block_m)))
    tiles = sum(groups * (whole + (rest > 0)) for groups, whole, rest in of_even)
    rounds = max(1, math.ceil(tiles * share - 1e-9))
    if m == 0:
        return rounds
    ends = sum(groups for groups, _, rest in of_even if 0 < 2 * rest <= block_m)
    even = rounds * (1 - (1 - short) * ends / tiles)
    if num_groups == 1:
        return even
    q = m / (m + num_groups)
    uneven = max(1.0, num_groups * q / (1 - q**block_m) * share + 0.5) * (1 - (1 - short) * (1 - q ** (block_m / 2)))
    return float((even * uneven**2) ** (1 / 3))


# How much of what half tiles are expected to spare counts in a choice when the sizes are unknown: a tile that wins by it
# alone loses most where it is wrong. On the recorded points of M 8192 and 16384 choices lose 0.11% with a quarter of it,
# 0.16% with all, 0.12% with nothing; on those of M 512 to 4096 1.5%, 2.2% and 1.5%.
_TRUSTED_OF_SPARED = 0.25


def expected_m_tiles(m: int, groups: int, block_m: int) -> tuple[float, float]:
    """Expected numbers of m-tiles that are full, or short: of at most half of their rows."""
    if groups == 1:
        tiles, tail = divmod(m, block_m)
        return tiles + (2 * tail > block_m), float(0 < 2 * tail <= block_m)
    longest = 2 * m / groups / block_m  # in tiles; t is uniform in [0, longest]
    half_rounds = math.floor(longest + 0.5)
    # The mean of floor(t + 1/2).
    full = (half_rounds * (half_rounds - 1) / 2 + half_rounds * (longest + 0.5 - half_rounds)) / longest
    short = (math.floor(longest) / 2 + min(longest - math.floor(longest), 0.5)) / longest
    return groups * full, groups * short


def _mean_ceil(middle: float, width: float) -> float:
    """Mean of ceil(x) for x uniform in middle +- width / 2. Example: (2.25, 0) gives 3, (2.25, 1) gives 2.75."""
    if width < 1e-9:
        return math.ceil(middle - 1e-9)

    def integral(x: float) -> float:  # of ceil, from 0
        whole = math.floor(x)
        return whole * (whole + 1) / 2 + (x - whole) * (whole + 1)

    return (integral(middle + width / 2) - integral(middle - width / 2)) / width


def best_tile(costs: Mapping[Tile, TileCost], m: int, n: int, k: int, num_groups: int, num_sms: int) -> Tile:
    """The tile with the least estimated time; the first of equals. Clusters larger than the GPU are left out."""
    return min(
        (tile for tile in costs if tile.cluster_n <= num_sms),
        key=lambda tile: estimate_ns(m, n, k, num_groups, tile, costs[tile], num_sms),
    )


# -------------------------------------------------------------------------------------------------- tables


@lru_cache(maxsize=64)
def cost_table(kernel: str) -> CostTable:
    """The table in use for ``kernel``: what ``padless tune`` stored for this GPU and version, else the built-in one.

    Looked up once in a process: a choice of tile must not change under a running program.
    """
    name = gpu_name()
    return (name and read_tuned(name).get(kernel)) or BUILT_IN[kernel]


@lru_cache(maxsize=1)
def gpu_name() -> str | None:
    """The first GPU that torch sees, such as "NVIDIA H200"; None without one."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def tuned_file(gpu: str) -> Path:
    """The file of this version's tables for ``gpu``."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", gpu).strip("-")
    return cache_dir() / "tuned" / f"{slug}-{__version__}.json"


def read_tuned(gpu: str) -> dict[str, CostTable]:
    """Stored tables by kernel. What is damaged, or was measured for other tiles than today's, is left out."""
    try:
        stored = json.loads(tuned_file(gpu).read_text())
        found = {name: _table_from(stored, name) for name in stored["kernels"] if name in BUILT_IN}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {name: table for name, table in found.items() if set(table.costs) == set(BUILT_IN[name].costs)}


def _table_from(stored: dict[str, Any], kernel: str) -> CostTable:
    costs = {Tile(**row["tile"]): TileCost(**row["cost"]) for row in stored["kernels"][kernel]}
    if not all(_is_sensible(cost) for cost in costs.values()):
        raise ValueError(f"costs of {kernel} are no positive numbers")
    return CostTable(costs, f"tuned on this machine, {stored['gpu']}, {stored['date']}")


def _is_sensible(cost: TileCost) -> bool:
    finite = all(math.isfinite(value) for value in asdict(cost).values())
    return finite and cost.full_ns > 0 and cost.short_ns > 0 and cost.overhead_ns >= 0


def store_tuned(gpu: str, date: str, tables: Mapping[str, Mapping[Tile, TileCost]]) -> Path:
    """Stores tables by kernel beside those of other kernels that are there; returns the file. Raises OSError."""
    path = tuned_file(gpu)
    every = {name: table.costs for name, table in read_tuned(gpu).items()} | dict(tables)
    rows = {
        name: [{"tile": asdict(tile), "cost": asdict(cost)} for tile, cost in costs.items()]
        for name, costs in every.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"gpu": gpu, "date": date, "kernels": rows}
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    return path
