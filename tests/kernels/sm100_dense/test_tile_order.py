"""The orders of a dense product's tiles: the header on the CPU against its Python twin, and what they promise."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from padless.kernels.sm100_dense.config import TILE_ORDERS
from padless.runtime import jit
from support.dense_tile_order import Point, tile_order

SHIM = """
#define __device__
#define __forceinline__ inline
#include "sm100_dense/tile_order.cuh"
extern "C" void points(int order, int m_tiles, int n_tiles, int* out) {
    for (int i = 0; i < m_tiles * n_tiles; ++i) {
        const GridPoint p = order == ORDER_HILBERT ? hilbert_order(i, m_tiles, n_tiles) : row_order(i, n_tiles);
        out[2 * i] = p.m;
        out[2 * i + 1] = p.n;
    }
}
"""
NUMBERS = {"row": 0, "hilbert": 1}
# Every grid up to 32 x 32, and long ones.
GRIDS = [
    *((m, n) for m in range(1, 33) for n in range(1, 33)),
    *((1, 997), (997, 1), (2, 301), (301, 2), (3, 500), (64, 64), (63, 129), (128, 37), (200, 61)),
]


def build(folder: Path, planted: tuple[str, str] | None = None) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler (g++ or c++ on the PATH)")
    header = jit.sources()["sm100_dense/tile_order.cuh"]
    if planted is not None:
        assert planted[0] in header, f"the header changed: plant another bug than {planted[0]!r}"
        header = header.replace(*planted, 1)
    (folder / "sm100_dense").mkdir(exist_ok=True)
    (folder / "sm100_dense/tile_order.cuh").write_text(header)
    (folder / "shim.cpp").write_text(SHIM)
    library = folder / "order.so"
    command = [compiler, "-std=c++17", "-O1", "-w", "-fPIC", "-shared", str(folder / "shim.cpp"), "-o"]
    done = subprocess.run([*command, str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def points(library: ctypes.CDLL, order: str, m_tiles: int, n_tiles: int) -> list[Point]:
    out = (ctypes.c_int * (2 * m_tiles * n_tiles))()
    library.points(NUMBERS[order], m_tiles, n_tiles, out)
    return list(zip(out[0::2], out[1::2], strict=True))


@pytest.mark.parametrize("order", TILE_ORDERS)
def test_the_device_walks_as_its_twin(order: str, tmp_path: Path) -> None:
    library = build(tmp_path)
    for m_tiles, n_tiles in GRIDS:
        assert points(library, order, m_tiles, n_tiles) == list(tile_order(order, m_tiles, n_tiles))


@pytest.mark.parametrize("order", TILE_ORDERS)
def test_every_tile_comes_once(order: str) -> None:
    for m_tiles, n_tiles in GRIDS:
        everything = {(m, n) for m in range(m_tiles) for n in range(n_tiles)}
        walked = list(tile_order(order, m_tiles, n_tiles))
        assert len(walked) == len(everything)
        assert set(walked) == everything


def steps(walk: list[Point]) -> list[tuple[int, int]]:
    return [(abs(b[0] - a[0]), abs(b[1] - a[1])) for a, b in itertools.pairwise(walk)]


def test_neighbours_on_the_curve_are_neighbours_in_the_grid() -> None:
    """One step along or across; at most one diagonal one, and only where the longer side is odd, the shorter even."""
    for m_tiles, n_tiles in GRIDS:
        found = steps(list(tile_order("hilbert", m_tiles, n_tiles)))
        longer, shorter = max(m_tiles, n_tiles), min(m_tiles, n_tiles)
        diagonal = sum(step == (1, 1) for step in found)
        assert set(found) <= {(0, 1), (1, 0), (1, 1)}, (m_tiles, n_tiles)
        assert diagonal <= (longer % 2 == 1 and shorter % 2 == 0), (m_tiles, n_tiles)


def footprint(walk: list[Point], window: int) -> float:
    """Mean number of different rows and columns of tiles that `window` tiles in a row touch."""
    starts = range(0, len(walk) - window + 1, window // 4)
    sizes = [len({m for m, _ in walk[i : i + window]}) + len({n for _, n in walk[i : i + window]}) for i in starts]
    return sum(sizes) / len(sizes)


@pytest.mark.parametrize("grid", [(64, 64), (48, 100), (33, 35)])
def test_tiles_in_flight_share_operands(grid: Point) -> None:
    """What 74 pairs of CTAs work on at a time touches far fewer rows and columns of tiles than in row order."""
    hilbert, row = (footprint(list(tile_order(order, *grid)), 74) for order in ("hilbert", "row"))
    assert hilbert < 0.6 * row
    assert hilbert < 1.25 * 2 * 74**0.5  # a square of 74 tiles has 2 * 8.6


def test_a_square_of_a_power_of_two_is_the_classic_curve() -> None:
    """4 x 4, worked out by hand."""
    assert list(tile_order("hilbert", 4, 4)) == [
        (0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (3, 0), (3, 1), (2, 1),
        (2, 2), (3, 2), (3, 3), (2, 3), (1, 3), (1, 2), (0, 2), (0, 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "planted",
    [("half_across % 2 != 0", "half_across % 2 == 0"), ("bm = -old_am", "bm = old_am"), ("along - 1", "along")],
)
def test_a_planted_bug_shows(planted: tuple[str, str], tmp_path: Path) -> None:
    library = build(tmp_path, planted)
    assert any(points(library, "hilbert", m, n) != list(tile_order("hilbert", m, n)) for m, n in GRIDS[:400])
