"""The order of tiles with even shares of rows: the header, compiled for the CPU, against its Python twin."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from padless.kernels.schedule import Tile
from padless.kernels.sm90_fp8_swapped.config import tiles
from padless.runtime import jit

SHIM = """
#define __device__
#define __forceinline__ inline
#include "scheduler.cuh"
#include "order.cuh"
extern "C" int tile(int number, int start, int end, int block_m, int n, int* out) {
    const auto with = [&](auto order) {
        using Order = decltype(order);
        const int m_tiles = (end - start + block_m - 1) / block_m;
        const Tile tile = Order::tile_in_group(number, 5, start, end, m_tiles, Order::tiles_along(n));
        out[0] = tile.group, out[1] = tile.row, out[2] = tile.rows, out[3] = tile.column;
    };
    if (block_m == 128) with(EvenTileOrder<128, 256, 8>({}, n));
    else with(EvenTileOrder<136, 256, 8>({}, n));
    return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler (g++ or c++ on the PATH)")
    folder: Path = tmp_path_factory.mktemp("order")
    for header in ("device/scheduler.cuh", "sm90_fp8_swapped/order.cuh"):
        (folder / Path(header).name).write_text((jit.KERNELS / header).read_text())
    (folder / "shim.cpp").write_text(SHIM)
    command = [
        compiler,
        "-std=c++17",
        "-w",
        "-fPIC",
        "-shared",
        "-o",
        str(folder / "order.so"),
        str(folder / "shim.cpp"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "order.so"))


@pytest.mark.parametrize("block_m", [128, 136])
def test_every_tile_is_the_twins(library: ctypes.CDLL, block_m: int) -> None:
    out = (ctypes.c_int * 4)()
    for rows in (*range(1, 420), 1100, 2305, 20001):
        # Group 5 starts at row 7: before it there are one group of 7 rows and four empty ones.
        every = tiles([7] * 5 + [7 + rows], 7 + rows, 520, block_m, 8)
        wanted = [tile for tile in every if tile.group == 5]
        for number, tile in enumerate(wanted):
            library.tile(number, 7, 7 + rows, block_m, 520, out)
            assert Tile(*out) == tile


@pytest.mark.parametrize("rows", [1, 8, 127, 128, 129, 200, 257, 1030, 5000])
def test_tiles_of_a_group_cover_it_once_in_eights(rows: int) -> None:
    found = sorted(tiles([3, 3 + rows], 3 + rows, 8, 128, 8), key=lambda tile: tile.row)
    found = [tile for tile in found if tile.group == 1]
    assert len(found) == -(-rows // 128)
    assert [tile.row for tile in found] == [3 + sum(t.rows for t in found[:i]) for i in range(len(found))]
    assert sum(tile.rows for tile in found) == rows
    eights = {-(-tile.rows // 8) for tile in found}
    assert max(eights) - min(eights) <= 1
    assert all(0 < tile.rows <= 128 for tile in found)
