"""The problems the benchmarks measure: the paper's grid and its random group sizes, decode sizes, dense shapes.

The paper is "TMA-Adaptive FP8 Grouped GEMM" (arXiv 2508.16584). Its grid is 4 M x 6 N x 6 K x 4 group counts
= 576 points; group sizes follow its Appendix C.1 as its published test draws them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from padless.formats import ceil_div, round_up

PAPER_M = (8192, 16384, 32768, 65536)
PAPER_N = (3072, 4096, 5120, 6144, 7168, 8192)
PAPER_K = (3072, 4096, 5120, 6144, 7168, 8192)
PAPER_GROUPS = (4, 8, 16, 32)

PADDED_GROUP_MULTIPLE = 128  # what padding implementations round every group up to

DECODE_GROUPS = (8, 32, 64, 128, 256)
DECODE_ROWS = (1, 4, 16, 64)
DECODE_N = (2048, 4096, 7168)
DECODE_K = (2048, 4096, 7168)


@dataclass(frozen=True)
class Point:
    """One grouped problem: (M, K) x (groups, N, K) -> (M, N), M the total over all groups."""

    M: int
    N: int
    K: int
    groups: int

    @property
    def flops(self) -> int:
        """Floating-point operations on valid rows."""
        return 2 * self.M * self.N * self.K

    @property
    def bytes(self) -> int:
        """Fewest bytes through device memory: codes and scales of both operands once, bf16 results once.

        Counts every group's weights, also those of an empty group: at most a few percent on the paper's grid.
        """
        block_k = ceil_div(self.K, 128)
        a = self.M * (self.K + 4 * block_k)
        b = self.groups * (self.N * self.K + 4 * ceil_div(self.N, 128) * block_k)
        return a + b + 2 * self.M * self.N


@dataclass(frozen=True)
class DecodePoint:
    """A grouped problem of decoding: every group draws 1 to `rows` rows, so weights dominate the traffic."""

    groups: int
    rows: int
    N: int
    K: int


@dataclass(frozen=True)
class DenseShape:
    """(M, K) x (N, K) -> (M, N)."""

    M: int
    N: int
    K: int

    @property
    def flops(self) -> int:
        return 2 * self.M * self.N * self.K


# 4096^3, 8192^3 and three products of DeepSeek-V3's layers on 4096 tokens.
DENSE_SHAPES = (
    DenseShape(4096, 4096, 4096),
    DenseShape(8192, 8192, 8192),
    DenseShape(4096, 7168, 2048),
    DenseShape(4096, 4096, 7168),
    DenseShape(4096, 7168, 16384),
)

# The quick subset: every value of every axis, the cheapest and the dearest corner, and the shapes whose
# padding waste is largest (32 groups of 256 rows on average) and smallest (4 groups).
QUICK_POINTS = (
    Point(8192, 3072, 3072, 4),
    Point(8192, 3072, 8192, 32),
    Point(32768, 3072, 8192, 32),
    Point(8192, 4096, 7168, 8),
    Point(32768, 4096, 7168, 8),
    Point(16384, 5120, 6144, 16),
    Point(65536, 6144, 5120, 16),
    Point(8192, 7168, 4096, 32),
    Point(32768, 7168, 4096, 32),
    Point(8192, 8192, 3072, 32),
    Point(8192, 8192, 8192, 4),
    Point(32768, 8192, 8192, 4),
    Point(65536, 3072, 3072, 4),
    Point(65536, 8192, 8192, 32),
)


def draw_group_sizes(groups: int, total: int, rng: random.Random) -> list[int]:
    """Rows of each group by the paper's Appendix C.1, as its test draws them.

    Draws v_i uniformly in [0, 2 * floor(total / groups)], both ends included; scales each to int(v_i * (total
    / sum)); gives what rounding lost to the last group. Sizes of zero occur. The authors' code divides by
    zero when every draw is 0; this one draws again, which changes nothing else.
    """
    if groups < 1:
        raise ValueError(f"groups must be at least 1, got {groups}")
    if total < 0:
        raise ValueError(f"total must not be negative, got {total}")
    if total < groups:
        raise ValueError(f"total must be at least groups = {groups} (or every draw is 0), got {total}")
    top = 2 * (total // groups)
    draws = [0]
    while sum(draws) == 0:
        draws = [rng.randint(0, top) for _ in range(groups)]
    ratio = total / sum(draws)
    sizes = [int(draw * ratio) for draw in draws]
    sizes[-1] += total - sum(sizes)
    return sizes


def point_rng(point: Point | DecodePoint | DenseShape, seed: int) -> random.Random:
    """The generator of one point's sizes: the same for the same point and seed, whatever ran before."""
    return random.Random(f"{seed}:{point!r}")


def group_sizes(point: Point, seed: int = 0) -> list[int]:
    """Group sizes of a point of the paper's grid: `point.groups` values that sum to `point.M`."""
    return draw_group_sizes(point.groups, point.M, point_rng(point, seed))


def decode_sizes(point: DecodePoint, seed: int = 0) -> list[int]:
    """Group sizes of a decode point: each group 1 to `point.rows` rows, at least one group with all `point.rows`."""
    rng = point_rng(point, seed)
    sizes = [rng.randint(1, point.rows) for _ in range(point.groups)]
    sizes[rng.randrange(point.groups)] = point.rows
    return sizes


def full_grid() -> list[Point]:
    """The paper's 576 points, ordered by M, then groups, N and K."""
    return [Point(m, n, k, groups) for m, groups, n, k in itertools.product(PAPER_M, PAPER_GROUPS, PAPER_N, PAPER_K)]


def quick_grid() -> list[Point]:
    """Fourteen points of the grid that touch every value of every axis and its extremes."""
    return list(QUICK_POINTS)


def balanced_grid() -> list[Point]:
    """72 points of the grid in which every value of every axis is equally frequent."""
    chosen = []
    for (i_m, m), (i_n, n), (i_k, k), (i_g, groups) in itertools.product(
        enumerate(PAPER_M), enumerate(PAPER_N), enumerate(PAPER_K), enumerate(PAPER_GROUPS)
    ):
        if (i_n + i_k) % 2 == 0 and (i_m + i_g + i_n + i_k // 2) % 4 == 0:
            chosen.append(Point(m, n, k, groups))
    return chosen


def decode_grid(quick: bool = False) -> list[DecodePoint]:
    """Decode sizes: all 180 combinations, or twelve that touch every value of every axis."""
    every = [
        DecodePoint(groups, rows, n, k)
        for groups, rows, n, k in itertools.product(DECODE_GROUPS, DECODE_ROWS, DECODE_N, DECODE_K)
    ]
    if not quick:
        return every
    return [
        DecodePoint(DECODE_GROUPS[i % 5], DECODE_ROWS[i % 4], DECODE_N[i % 3], DECODE_K[(i + i // 3) % 3])
        for i in range(12)
    ]


def padded_rows(sizes: Sequence[int], multiple: int = PADDED_GROUP_MULTIPLE) -> int:
    """Rows once every group is rounded up to `multiple`."""
    return sum(round_up(size, multiple) for size in sizes)


def memory_saving_percent(sizes: Sequence[int], multiple: int = PADDED_GROUP_MULTIPLE) -> float:
    """The paper's memory saving: 100 * (1 - M / rows after padding every group)."""
    padded = padded_rows(sizes, multiple)
    return 100.0 * (1.0 - sum(sizes) / padded) if padded else 0.0


def acceleration_percent(baseline_us: float, padless_us: float) -> float:
    """The paper's acceleration: 100 * (t_baseline / t - 1), baseline: padding and the padded GEMM."""
    return 100.0 * (baseline_us / padless_us - 1.0)
