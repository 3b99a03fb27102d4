"""The order of a weight gradient's tiles: device/longest_first.cuh, for the CPU, is its Python twin and covers all."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from padless.kernels.longest_first import tiles
from padless.kernels.schedule import Tile, walk_of_groups
from padless.row_groups import clamped_ends
from padless.runtime import jit

SHIM = r"""
#include <algorithm>
#define __device__
#define __forceinline__ inline
#define __restrict__
#include "device/scheduler.cuh"
template <int MAX_GROUPS>
struct SortedGroups {  // what LongestFirst reads of it; test_schedule.py has how it is built
    int order[MAX_GROUPS], active;
};
#include "device/longest_first.cuh"
template <int M, int R>
int walk(const int* ends, int groups, int n, int k, int skips, int* out, int room) {
    static SortedGroups<1024> sorted;
    const auto rows = [&](int g) { return ends[g] - (g == 0 ? 0 : ends[g - 1]); };
    for (int g = 0; g < groups; ++g) sorted.order[g] = g;
    std::stable_sort(sorted.order, sorted.order + groups, [&](int g, int h) { return rows(g) > rows(h); });
    sorted.active = std::count_if(sorted.order, sorted.order + groups, [&](int g) { return rows(g) > 0; });
    const LongestFirst<M, 128, R, 1024> order{sorted, groups, n, k, skips != 0};
    int count = 0;
    for (; count < room; ++count) {
        const Tile tile = order.tile_at(count);
        if (tile.rows == 0) break;
        out[4 * count] = tile.group, out[4 * count + 1] = tile.row;
        out[4 * count + 2] = tile.rows, out[4 * count + 3] = tile.column;
    }
    for (int past = 1; past < 300; ++past)  // workers draw numbers past the end
        if (order.tile_at(count + past).rows != 0) return -1;
    return count;
}
extern "C" int tiles_of(int m, int r, const int* ends, int groups, int n, int k, int skips, int* out, int room) {
    if (m == 128 && r == 8) return walk<128, 8>(ends, groups, n, k, skips, out, room);
    if (m == 256 && r == 8) return walk<256, 8>(ends, groups, n, k, skips, out, room);
    return walk<256, 3>(ends, groups, n, k, skips, out, room);
}
"""
SHAPES = ((128, 8), (256, 8), (256, 3))
Walk = Callable[..., list[Tile]]


def build(folder: Path, planted: tuple[str, str] | None = None) -> Walk:
    """The header, compiled, with a planted bug (text, replacement) if one is given."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler (g++ or c++ on the PATH)")
    text = (jit.KERNELS / "device/longest_first.cuh").read_text()
    if planted is not None:
        assert text.count(planted[0]) == 1, f"longest_first.cuh changed: plant another bug than {planted[0]!r}"
        text = text.replace(*planted)
    (folder / "device").mkdir(exist_ok=True)
    (folder / "device/longest_first.cuh").write_text(text)
    (folder / "device/scheduler.cuh").write_text((jit.KERNELS / "device/scheduler.cuh").read_text())
    (folder / "shim.cpp").write_text(SHIM)
    command = [compiler, "-std=c++17", "-O1", "-w", "-fPIC", "-shared", f"-I{folder}"]
    command += [str(folder / "shim.cpp"), "-o", str(folder / "shim.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(folder / "shim.so"))

    def walk(ends: list[int], n: int, k: int, block_m: int, raster_m: int, skips: bool) -> list[Tile]:
        room = 20_000
        out = (ctypes.c_int * (4 * room))()
        array = (ctypes.c_int * len(ends))(*ends)
        count = library.tiles_of(block_m, raster_m, array, len(ends), n, k, skips, out, room)
        assert 0 <= count < room
        return [Tile(*out[4 * i : 4 * i + 4]) for i in range(count)]

    return walk


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    return build(tmp_path_factory.mktemp("schedule"))


SIZES = ((0,), (5,), (0, 0), (3, 0, 300, 3), (1, 2, 3, 4, 5), (0, 7, 7, 0, 9), tuple(g * 37 % 53 for g in range(40)))
MATRICES = ((16, 16), (128, 128), (272, 400), (2816, 144), (1040, 640))
CASES = list(itertools.product(SIZES, MATRICES, SHAPES, (False, True)))


def compare(walk: Walk) -> None:
    for sizes, (n, k), (block_m, raster_m), skips in CASES:
        ends = clamped_ends(list(itertools.accumulate(sizes)), 10**6)
        twin = list(tiles(ends, 10**6, n, k, block_m, raster_m, skips))
        assert walk(ends, n, k, block_m, raster_m, skips) == twin, (sizes, n, k, block_m, raster_m, skips)


def test_the_header_is_its_twin(walk: Walk) -> None:
    compare(walk)


def test_every_element_is_in_one_tile_and_the_longest_groups_come_first() -> None:
    for sizes, (n, k), (block_m, raster_m), skips in CASES:
        ends = list(itertools.accumulate(sizes))
        found = list(tiles(ends, ends[-1], n, k, block_m, raster_m, skips))
        groups = [g for g, size in enumerate(sizes) if size > 0 or not skips]
        corners = set(itertools.product(groups, range(0, n, block_m), range(0, k, 128)))
        assert len(found) == len(corners)
        assert {(tile.group, tile.row, tile.column) for tile in found} == corners
        assert all(tile.rows == min(block_m, n - tile.row) for tile in found)
        lengths = [sizes[tile.group] for tile in found]
        assert lengths == sorted(lengths, reverse=True)
        order = list(dict.fromkeys(tile.group for tile in found))
        assert order == [g for g, start, end in walk_of_groups(ends, ends[-1]) if g in groups]


@pytest.mark.parametrize(
    "planted",
    [
        ("in_band % height", "in_band % RASTER_M"),
        ("if (place >= num_groups)", "if (place > num_groups)"),
        ("n_rows - row < BLOCK_M ? n_rows - row : BLOCK_M", "BLOCK_M"),
        ("skips_empty && ", ""),
    ],
)
def test_a_planted_bug_is_seen(tmp_path: Path, planted: tuple[str, str]) -> None:
    with pytest.raises((AssertionError, OSError)):
        compare(build(tmp_path, planted))
