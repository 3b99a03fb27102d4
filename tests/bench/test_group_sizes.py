"""The benchmark's problems: Appendix C.1 as published, grids that cover what they claim, the paper's two
formulas.
"""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from padless.bench import group_sizes as gs


@given(st.integers(1, 64), st.integers(0, 5000), st.integers(0, 2**32))
def test_sizes_follow_appendix_c1(groups: int, extra: int, seed: int) -> None:
    total = groups + extra
    sizes = gs.draw_group_sizes(groups, total, random.Random(seed))
    assert len(sizes) == groups
    assert sum(sizes) == total
    # The same draws, followed by hand in exact arithmetic: int(v * (total / sum)) may be one below the exact
    # floor where the float product of an exact integer rounds down, and nowhere else differs.
    rng = random.Random(seed)
    draws = [rng.randint(0, 2 * (total // groups)) for _ in range(groups)]
    if sum(draws) == 0:
        return
    for size, draw in zip(sizes[:-1], draws[:-1], strict=True):
        exact = Fraction(draw * total, sum(draws))
        assert size == exact.numerator // exact.denominator or (exact.denominator == 1 and size == exact - 1)


def test_draws_reach_both_ends_of_the_range() -> None:
    # With two groups of one row each, a draw is 0, 1 or 2 and the second group takes the rest.
    seen = Counter(tuple(gs.draw_group_sizes(2, 2, random.Random(seed))) for seed in range(300))
    assert set(seen) == {(0, 2), (1, 1), (2, 0)}


def test_all_zero_draws_are_drawn_again() -> None:
    class Zeros(random.Random):
        def __init__(self) -> None:
            super().__init__(0)
            self.drawn = 0

        def randint(self, a: int, b: int) -> int:
            self.drawn += 1
            return 0 if self.drawn <= 3 else b

    assert gs.draw_group_sizes(3, 3, Zeros()) == [1, 1, 1]


@pytest.mark.parametrize(("groups", "total", "message"), [(0, 8, "groups"), (4, -1, "total"), (4, 3, "total")])
def test_impossible_draws_are_refused(groups: int, total: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gs.draw_group_sizes(groups, total, random.Random(0))


def test_sizes_depend_on_point_and_seed_only() -> None:
    point = gs.Point(8192, 3072, 8192, 32)
    assert gs.group_sizes(point, 0) == gs.group_sizes(point, 0)
    assert gs.group_sizes(point, 0) != gs.group_sizes(point, 1)
    assert gs.group_sizes(point, 0) != gs.group_sizes(gs.Point(8192, 4096, 8192, 32), 0)


def test_full_grid_is_the_papers() -> None:
    grid = gs.full_grid()
    assert len(grid) == len(set(grid)) == 576
    assert {p.M for p in grid} == {8192, 16384, 32768, 65536}
    assert {p.N for p in grid} == {p.K for p in grid} == {3072, 4096, 5120, 6144, 7168, 8192}
    assert {p.groups for p in grid} == {4, 8, 16, 32}


def test_quick_grid_touches_every_value_and_the_extremes() -> None:
    quick, full = gs.quick_grid(), gs.full_grid()
    assert len(quick) == len(set(quick)) <= 16
    assert set(quick) <= set(full)
    for axis in ("M", "N", "K", "groups"):
        assert {getattr(p, axis) for p in quick} == {getattr(p, axis) for p in full}
    by_flops = sorted(full, key=lambda p: p.flops)
    assert min(p.flops for p in quick) == by_flops[0].flops
    assert max(p.flops for p in quick) == by_flops[-1].flops


def test_balanced_grid_is_balanced() -> None:
    grid = gs.balanced_grid()
    assert len(grid) == len(set(grid)) == 72
    for axis in ("M", "N", "K", "groups"):
        counts = Counter(getattr(p, axis) for p in grid)
        assert len(set(counts.values())) == 1
        assert set(counts) == {getattr(p, axis) for p in gs.full_grid()}


@pytest.mark.parametrize("quick", [False, True])
def test_decode_grid_covers_every_value(quick: bool) -> None:
    grid = gs.decode_grid(quick)
    assert len(grid) == len(set(grid)) == (12 if quick else 180)
    assert {p.groups for p in grid} == {8, 32, 64, 128, 256}
    assert {p.N for p in grid} == {p.K for p in grid} == {2048, 4096, 7168}
    assert {p.rows for p in grid} == {1, 4, 16, 64}


@given(st.sampled_from(gs.decode_grid()), st.integers(0, 1000))
def test_decode_sizes_stay_in_range_and_reach_the_top(point: gs.DecodePoint, seed: int) -> None:
    sizes = gs.decode_sizes(point, seed)
    assert len(sizes) == point.groups
    assert min(sizes) >= 1
    assert max(sizes) == point.rows


def test_memory_saving_is_the_papers_formula() -> None:
    assert gs.memory_saving_percent([128, 256]) == 0.0
    assert gs.memory_saving_percent([1]) == pytest.approx(100 * (1 - 1 / 128))
    assert gs.memory_saving_percent([129, 0, 127]) == pytest.approx(100 * (1 - 256 / 384))
    assert gs.memory_saving_percent([]) == gs.memory_saving_percent([0, 0]) == 0.0


def test_largest_memory_saving_is_near_the_papers() -> None:
    """The paper reports up to 23.8% at M = 8192 with 32 groups, from unseeded draws."""
    point = gs.Point(8192, 3072, 3072, 32)
    savings = [gs.memory_saving_percent(gs.group_sizes(point, seed)) for seed in range(36)]
    assert 18 < sum(savings) / len(savings) < 23.8
    assert 20 < max(savings) < 27


def test_acceleration_is_the_papers_formula() -> None:
    assert gs.acceleration_percent(100.0, 100.0) == pytest.approx(0.0)
    assert gs.acceleration_percent(30.0 + 90.0, 100.0) == pytest.approx(20.0)


def test_counted_bytes_and_flops() -> None:
    point = gs.Point(8192, 3072, 8192, 32)
    assert point.flops == 2 * 8192 * 3072 * 8192
    weights = 32 * 3072 * 8192
    assert point.bytes == 8192 * 8192 + 8192 * 64 * 4 + weights + 32 * 24 * 64 * 4 + 2 * 8192 * 3072
