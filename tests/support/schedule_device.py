"""The scheduler's headers compiled for the CPU, and the twin to compare them with.

The headers run unchanged: schedule_shim.cpp defines the CUDA qualifiers away and plays the threads with coroutines that
give way wherever they would wait.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from padless.kernels.schedule import Tile, tiles
from padless.runtime import jit

Shape = tuple[int, int, int]  # block_m, block_n (of a whole cluster), raster_m

BLOCKS_M = (64, 128, 256)
BLOCKS_N = (128, 192, 256)
RASTERS = (3, 8, 16)
ALL_SHAPES: tuple[Shape, ...] = tuple(itertools.product(BLOCKS_M, BLOCKS_N, RASTERS))
HEADERS = tuple(
    f"device/{name}.cuh" for name in ("pipeline", "scheduler", "sorted_groups", "group_table", "tile_queue")
)

SHIM = Path(__file__).with_name("schedule_shim.cpp")


@dataclass(frozen=True)
class Table:
    """Rows of group g end at cleaned[g]; entry i of groups is the i-th of the walk, of tile_ends of those with rows."""

    cleaned: list[int]
    groups: list[int]
    tile_ends: list[int]
    is_sorted: bool


@dataclass(frozen=True)
class Device:
    """The compiled headers."""

    library: ctypes.CDLL

    def table(self, offs: list[int] | None, m: int, block_m: int) -> Table:
        """What all threads of a CTA see; offs None is the dense problem, one group of m rows."""
        num_groups = 1 if offs is None else len(offs)
        array = ctypes.c_int * num_groups
        cleaned, groups, tile_ends = (array() for _ in range(3))
        ends = None if offs is None else array(*offs)
        is_sorted = ctypes.c_int(-1)
        active = self.library.build_table(
            block_m, ends, num_groups, m, cleaned, groups, tile_ends, ctypes.byref(is_sorted)
        )
        return Table(list(cleaned), list(groups), tile_ends[:active], bool(is_sorted.value))

    def tiles_at(
        self,
        offs: list[int] | None,
        m: int,
        n: int,
        shape: Shape,
        numbers: list[int],
        half_tiles_for: int | None = None,
    ) -> list[Tile | None]:
        """The tiles of ascending numbers; None past the last one. A half without rows is one of -1 rows."""
        self.table(offs, m, shape[0])
        out = (ctypes.c_int * (4 * len(numbers)))()
        wanted = (ctypes.c_int * len(numbers))(*numbers)
        status = self.library.tiles_at(*shape, n, half_tiles_for or 0, wanted, len(numbers), out)
        assert status != -2, f"shape {shape} is not compiled into the shim"
        if status == -1:
            raise ZeroDivisionError("tile_at divided by zero")
        found = [Tile(*out[4 * i : 4 * i + 4]) for i in range(len(numbers))]
        return [tile if tile.rows != 0 else None for tile in found]

    def first_tile(
        self, offs: list[int] | None, m: int, n: int, shape: Shape, worker: int, half_tiles_for: int | None = None
    ) -> Tile | None:
        """What is queued for a worker with the table, of few groups or a flat one; None: there is no tile for it."""
        self.table(offs, m, shape[0])
        num_groups = 1 if offs is None else len(offs)
        ends = None if offs is None else (ctypes.c_int * num_groups)(*offs)
        out = (ctypes.c_int * 4)()
        status = self.library.first_tile(*shape, n, half_tiles_for or 0, ends, num_groups, m, worker, out)
        assert status != -2, f"shape {shape} is not compiled into the shim"
        assert status == 1, "not queued exactly once"
        return Tile(*out) if out[2] != 0 else None

    def searched_tile(self, offs: list[int], m: int, n: int, shape: Shape, worker: int) -> tuple[bool, Tile | None]:
        """(whether it is queued, the tile) of a worker whose CTA has no table yet."""
        out = (ctypes.c_int * 4)()
        status = self.library.searched_tile(*shape, n, (ctypes.c_int * len(offs))(*offs), len(offs), m, worker, out)
        assert status in (0, 1), f"lanes disagree, or not queued exactly once ({status})"
        return status == 1, Tile(*out) if status == 1 and out[2] != 0 else None

    def handed_out(
        self,
        offs: list[int],
        m: int,
        n: int,
        shape: Shape,
        *,
        workers: int,
        counter: int,
        seed: int = 0,
        cluster: int = 1,
        half_tiles: bool = False,
        first_is_queued: bool = False,
    ) -> list[tuple[int, Tile | None]]:
        """(worker, tile) in the order of time; None tells a worker that there are no more tiles."""
        self.table(offs, m, shape[0])
        room = 20_000
        out = (ctypes.c_int * (5 * room))()
        count = self.library.hand_out(
            *shape, n, half_tiles, cluster, counter, workers, seed, first_is_queued, out, room
        )
        assert count != -3, "the counter is not zero after the launch"
        assert count != -4, "a tile was drawn before it was asked for"
        assert 0 <= count < room
        entries = [out[5 * i : 5 * i + 5] for i in range(count)]
        return [(entry[0], Tile(*entry[1:]) if entry[3] != 0 else None) for entry in entries]


def build(folder: Path, shapes: tuple[Shape, ...] = ALL_SHAPES, planted: tuple[str, str, str] | None = None) -> Device:
    """Compiles the headers, with a planted bug (header, text, replacement) if one is given."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler (g++ or c++ on the PATH)")
    for header in HEADERS:
        text = (jit.KERNELS / header).read_text()
        if planted is not None and planted[0] == header:
            assert text.count(planted[1]) == 1, f"{header} changed: plant another bug than {planted[1]!r}"
            text = text.replace(planted[1], planted[2])
        (folder / header).parent.mkdir(exist_ok=True)
        (folder / header).write_text(text)
    calls = " ".join(f"SHAPE({m}, {n}, {r})" for m, n, r in shapes)
    library = folder / "schedule.so"
    command = [
        compiler,
        "-std=c++17",
        "-O1",
        "-w",
        "-fPIC",
        "-shared",
        f"-DSHAPES={calls}",
        f"-I{folder}",
        str(SHIM),
        "-o",
        str(library),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Device(ctypes.CDLL(str(library)))


def shares_of(entries: list[tuple[int, Tile | None]], workers: int) -> list[list[Tile]]:
    """What `handed_out` gave to each worker, in its order; every one of them was told once, and last, that it ends."""
    assert Counter(worker for worker, tile in entries if tile is None) == Counter(range(workers))
    shares = []
    for worker in range(workers):
        mine = [tile for w, tile in entries if w == worker]
        assert mine[-1] is None, "a worker goes on after the end"
        shares.append([tile for tile in mine if tile is not None])
    return shares


def ends_of(sizes: tuple[int, ...]) -> list[int]:
    return list(itertools.accumulate(sizes))


def twin(offs: list[int], m: int, n: int, shape: Shape, half_tiles_for: int | None = None) -> list[Tile]:
    return list(tiles(offs, m, n, *shape, half_tiles_for))


# Sizes around one and two tiles of every height, and more m-tiles than a band.
SIZES = (0, 1, 63, 64, 65, 129, 256, 64 * 17 + 5)
