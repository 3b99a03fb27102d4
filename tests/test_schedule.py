"""The scheduler and its table of groups, compiled for the CPU and compared with the Python twin tile by tile.

The headers run unchanged: a shim written here defines the CUDA qualifiers away and plays one warp with 32
coroutines that stop at every shuffle.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from padless import jit
from padless.reference import group_rows
from padless.schedule import Tile, clean_offs, tiles

INT32 = st.integers(-(2**31), 2**31 - 1)
BLOCKS_M = (64, 128, 256)
BLOCKS_N = (64, 128, 192, 384)  # 384: a cluster of two CTAs of 192 columns
RASTERS = (1, 2, 3, 8)
ROOM = 20_000  # tiles that one walk may give
ALL_SHAPES = tuple(itertools.product(BLOCKS_M, BLOCKS_N, RASTERS))

SHIM = r"""
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <ucontext.h>

#define __device__
#define __forceinline__ inline

// One warp: lane l runs until it shuffles, then lane l + 1, and so on round; two boxes, since lane 0 goes on
// to the next shuffle before lane 31 has read this one.
namespace warp {
ucontext_t caller, lanes[32];
alignas(16) char stacks[32][65536];
int box[2][32], turn[32], lane;

int exchange(int value, int source) {
    const int me = lane, b = turn[me] ^= 1;
    box[b][me] = value;
    lane = (me + 1) % 32;
    swapcontext(&lanes[me], &lanes[lane]);
    lane = me;
    return box[b][source];
}
}  // namespace warp

static int __shfl_up_sync(unsigned, int value, int distance) {
    return warp::exchange(value, warp::lane >= distance ? warp::lane - distance : warp::lane);
}
static int __shfl_sync(unsigned, int value, int source) { return warp::exchange(value, source); }

#include "group_table.cuh"
#include "scheduler.cuh"

namespace {
struct { const int* offs; int num_groups, m; int *group_ends, *tile_ends; } table;
sigjmp_buf crashed;
void on_crash(int) { siglongjmp(crashed, 1); }

template <int BLOCK_M>
void run_lane() {
    build_group_table<BLOCK_M>(table.offs, table.num_groups, table.m, table.group_ends, table.tile_ends,
                               warp::lane);
    if (++warp::lane < 32) setcontext(&warp::lanes[warp::lane]);
    setcontext(&warp::caller);
}
}  // namespace

extern "C" void build_table(int block_m, const int* offs, int num_groups, int m, int* group_ends,
                            int* tile_ends) {
    table = {offs, num_groups, m, group_ends, tile_ends};
    volatile bool done = false;
    for (int l = 0; l < 32; ++l) {
        warp::turn[l] = 0;
        getcontext(&warp::lanes[l]);
        warp::lanes[l].uc_stack.ss_sp = warp::stacks[l];
        warp::lanes[l].uc_stack.ss_size = sizeof(warp::stacks[l]);
        warp::lanes[l].uc_link = nullptr;
        makecontext(&warp::lanes[l], block_m == 64    ? run_lane<64>
                                      : block_m == 128 ? run_lane<128>
                                                       : run_lane<256>, 0);
    }
    getcontext(&warp::caller);
    if (!done) {
        done = true;
        warp::lane = 0;
        setcontext(&warp::lanes[0]);
    }
}

template <int BLOCK_M, int BLOCK_N, int RASTER_M>
int walk_as(const int* group_ends, const int* tile_ends, int num_groups, int n, int worker, int workers,
            int* out, int room) {
    TileScheduler<BLOCK_M, BLOCK_N, RASTER_M> scheduler(group_ends, tile_ends, num_groups, n, worker,
                                                        workers);
    Tile tile;
    int count = 0;
    for (; count < room && scheduler.next_tile(tile); ++count) {
        int* t = out + 5 * count;
        t[0] = tile.group, t[1] = tile.group_end, t[2] = tile.row, t[3] = tile.rows, t[4] = tile.column;
    }
    return count;
}

// Number of tiles of a worker, at most `room`; -1 for a division by zero, -2 for a shape not compiled in.
extern "C" int walk(int block_m, int block_n, int raster_m, const int* group_ends, const int* tile_ends,
                    int num_groups, int n, int worker, int workers, int* out, int room) {
    volatile int count = -2;
    auto before = signal(SIGFPE, on_crash);
    if (sigsetjmp(crashed, 1)) {
        count = -1;
    } else {
#define SHAPE(M, N, R) \
    if (block_m == M && block_n == N && raster_m == R) \
        count = walk_as<M, N, R>(group_ends, tile_ends, num_groups, n, worker, workers, out, room);
        SHAPES
    }
    signal(SIGFPE, before);
    return count;
}
"""


@dataclass(frozen=True)
class DeviceSchedule:
    """The compiled headers."""

    library: ctypes.CDLL
    out: ctypes.Array[ctypes.c_int]

    def table(self, offs: list[int] | None, m: int, block_m: int) -> tuple[list[int], list[int]]:
        """(group_ends, tile_ends); offs None is the dense problem, one group of m rows."""
        num_groups = 1 if offs is None else len(offs)
        array = ctypes.c_int * num_groups
        ends, counts = array(), array()
        given_offs = None if offs is None else array(*offs)
        self.library.build_table(block_m, given_offs, num_groups, m, ends, counts)
        return list(ends), list(counts)

    def tiles(
        self,
        offs: list[int] | None,
        m: int,
        n: int,
        shape: tuple[int, int, int],
        worker: int = 0,
        workers: int = 1,
    ) -> list[Tile]:
        """One worker's tiles as the device would give them; shape is (block_m, block_n, raster_m)."""
        ends, counts = self.table(offs, m, shape[0])
        array = ctypes.c_int * len(ends)
        count = self.library.walk(
            *shape, array(*ends), array(*counts), len(ends), n, worker, workers, self.out, ROOM
        )
        assert count != -2, f"shape {shape} is not compiled into the shim"
        if count == -1:
            raise ZeroDivisionError("next_tile divided by zero")
        return [Tile(*self.out[5 * i : 5 * i + 5]) for i in range(count)]


def build(
    folder: Path,
    shapes: tuple[tuple[int, int, int], ...] = ALL_SHAPES,
    planted: tuple[str, str, str] | None = None,
) -> DeviceSchedule:
    """Compiles the headers, with a planted bug (header, text, replacement) if one is given."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler (g++ or c++ on the PATH)")
    for header in ("group_table.cuh", "scheduler.cuh"):
        text = (jit.KERNELS / header).read_text()
        if planted is not None and planted[0] == header:
            assert text.count(planted[1]) == 1, f"{header} changed: plant another bug than {planted[1]!r}"
            text = text.replace(planted[1], planted[2])
        (folder / header).write_text(text)
    calls = " ".join(f"SHAPE({m}, {n}, {r})" for m, n, r in shapes)
    (folder / "shim.cpp").write_text(SHIM.replace("SHAPES", calls))
    library = folder / "schedule.so"
    command = [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-unknown-pragmas"]
    done = subprocess.run(
        [*command, "shim.cpp", "-o", str(library)], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return DeviceSchedule(ctypes.CDLL(str(library)), (ctypes.c_int * (5 * ROOM))())


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> DeviceSchedule:
    return build(tmp_path_factory.mktemp("schedule"))


def ends_of(sizes: tuple[int, ...]) -> list[int]:
    return list(itertools.accumulate(sizes))


def twin(
    offs: list[int], m: int, n: int, shape: tuple[int, int, int], worker: int, workers: int
) -> list[Tile]:
    return list(tiles(offs, m, n, *shape, worker=worker, workers=workers))


# Sizes around one and two tiles of 64 and of 128 rows, and more m-tiles than the highest band.
SIZES = (0, 1, 63, 64, 65, 128, 129, 64 * 9 + 5)
COLUMNS = (8, 192, 200, 1000)


def test_every_worker_gets_the_twins_tiles_in_the_twins_order(device: DeviceSchedule) -> None:
    """Every pair of sizes, with every compiled shape; rows past the last group belong to nobody."""
    compared = 0
    for sizes in itertools.product(SIZES, repeat=2):
        offs = ends_of(sizes)
        m = offs[-1] + (7 if sum(sizes) % 2 else 0)
        for shape, n in itertools.product(ALL_SHAPES, COLUMNS):
            for workers in (1, 3):
                for worker in range(workers):
                    expected = twin(offs, m, n, shape, worker, workers)
                    assert device.tiles(offs, m, n, shape, worker, workers) == expected
                    compared += len(expected)
    assert compared > 100_000


@pytest.mark.parametrize(
    "sizes",
    [
        (0,),
        (0, 0, 0, 0),
        (0, 0, 1500, 0),
        (1,) * 70,
        (1, 0) * 40,
        (129,) * 33,
        tuple((37 * g) % 300 for g in range(130)),
        (0,) * 31 + (5,) + (0,) * 31 + (6, 700),
    ],
    ids=lambda sizes: f"{len(sizes)}_groups_{sum(sizes)}_rows",
)
def test_more_groups_than_lanes_and_groups_of_nothing(device: DeviceSchedule, sizes: tuple[int, ...]) -> None:
    offs = ends_of(sizes)
    for shape in ((64, 192, 8), (128, 128, 8), (128, 384, 2)):
        for workers in (1, 2, 66, 132):
            for worker in range(0, workers, max(1, workers // 5)):
                expected = twin(offs, offs[-1], 520, shape, worker, workers)
                assert device.tiles(offs, offs[-1], 520, shape, worker, workers) == expected


def test_many_workers_share_what_one_would_do(device: DeviceSchedule) -> None:
    offs = ends_of((300, 0, 1, 129, 640))
    alone = device.tiles(offs, offs[-1], 776, (128, 192, 3))
    for workers in (1, 2, 5, 24, 200):
        shares = [device.tiles(offs, offs[-1], 776, (128, 192, 3), w, workers) for w in range(workers)]
        dealt = [tile for tile in itertools.chain(*itertools.zip_longest(*shares)) if tile is not None]
        assert dealt == alone
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_without_offs_there_is_one_group_of_all_rows(device: DeviceSchedule) -> None:
    for m in (0, 1, 64, 128, 129, 5000):
        for block_m in BLOCKS_M:
            assert device.table(None, m, block_m) == ([m], [-(-m // block_m)])
        assert device.tiles(None, m, 200, (128, 128, 8)) == twin([m], m, 200, (128, 128, 8), 0, 1)


# --- what the twin itself must be --------------------------------------------------------------------------


@given(
    sizes=st.lists(st.sampled_from((0, 1, 2, 64, 127, 128, 129, 400)), max_size=7),
    rows_past_the_end=st.integers(0, 200),
    n=st.integers(1, 700),
    shape=st.sampled_from(ALL_SHAPES),
    workers=st.integers(1, 9),
)
def test_each_element_of_each_group_is_in_exactly_one_tile(
    sizes: list[int], rows_past_the_end: int, n: int, shape: tuple[int, int, int], workers: int
) -> None:
    block_m, block_n, raster_m = shape
    offs = ends_of(tuple(sizes))
    m = sum(sizes) + rows_past_the_end
    covered: Counter[tuple[int, int, int]] = Counter()
    for worker in range(workers):
        for tile in tiles(offs, m, n, block_m, block_n, raster_m, worker, workers):
            start = offs[tile.group] - sizes[tile.group]
            assert 1 <= tile.rows <= block_m
            assert start <= tile.row < tile.row + tile.rows <= offs[tile.group] == tile.group_end
            assert (tile.row - start) % block_m == 0
            assert 0 <= tile.column < n
            assert tile.column % block_n == 0
            covered.update((tile.group, row, tile.column) for row in range(tile.row, tile.row + tile.rows))
    expected = Counter(
        (group, row, column)
        for group, end in enumerate(offs)
        for row in range(end - sizes[group], end)
        for column in range(0, n, block_n)
    )
    assert covered == expected


@given(offs=st.lists(INT32, max_size=40), m=st.integers(0, 2**30))
def test_clean_offs_is_the_running_maximum_inside_the_tensor(offs: list[int], m: int) -> None:
    cleaned = clean_offs(offs, m)
    assert cleaned == [min(max(0, *offs[: g + 1]), m) for g in range(len(offs))]
    assert cleaned == sorted(cleaned)
    assert all(0 <= end <= m for end in cleaned)
    assert clean_offs(cleaned, m) == cleaned
    # The judge works out the groups by itself; the two must agree on what wrong offs mean.
    assert [end for _, end in group_rows(torch.tensor(offs, dtype=torch.int64), m)] == cleaned


@given(sizes=st.lists(st.integers(0, 1000), max_size=20), past=st.integers(0, 10))
def test_clean_offs_leaves_right_offs_alone(sizes: list[int], past: int) -> None:
    offs = ends_of(tuple(sizes))
    assert clean_offs(offs, sum(sizes) + past) == offs


@given(
    offs=st.lists(st.one_of(st.integers(-300, 900), INT32), min_size=1, max_size=70),
    m=st.integers(0, 700),
    block_m=st.sampled_from(BLOCKS_M),
)
def test_the_device_cleans_offs_as_the_twin_does(
    device: DeviceSchedule, offs: list[int], m: int, block_m: int
) -> None:
    ends, counts = device.table(offs, m, block_m)
    assert ends == clean_offs(offs, m)
    sizes = [end - start for start, end in itertools.pairwise([0, *ends])]
    assert counts == list(itertools.accumulate(-(-size // block_m) for size in sizes))
    shape = (block_m, 192, 3)
    assert device.tiles(offs, m, 400, shape, 1, 3) == twin(offs, m, 400, shape, 1, 3)


# --- a planted bug must be seen ----------------------------------------------------------------------------

PLANTED = {
    "band_start": ("scheduler.cuh", "band * RASTER_M + (in_band", "band + (in_band"),
    "last_band": ("scheduler.cuh", "in_band / height", "in_band / RASTER_M"),
    "off_by_one": ("scheduler.cuh", "next >= tile_ends", "next > tile_ends"),
    "tail_rows": ("scheduler.cuh", "? tile.group_end - tile.row : BLOCK_M", "? BLOCK_M : BLOCK_M"),
    "step": ("scheduler.cuh", "next += step", "next += 1"),
    "second_warp_of_groups": ("group_table.cuh", "tiles += previous_tiles", "tiles += 0"),
    "past_m": ("group_table.cuh", "end = end > m ? m : end", "end = end"),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_bug_is_detected(tmp_path: Path, planted: tuple[str, str, str]) -> None:
    shape = (64, 192, 3)
    device = build(tmp_path, (shape,), planted)
    pick = random.Random(5)
    differ = False
    for _ in range(60):
        sizes = tuple(pick.choice(SIZES) for _ in range(pick.choice((1, 3, 40))))
        offs, workers = ends_of(sizes), pick.choice((1, 4))
        m = pick.choice((offs[-1], offs[-1] // 2))
        try:
            differ |= device.tiles(offs, m, 400, shape, 0, workers) != twin(offs, m, 400, shape, 0, workers)
        except ZeroDivisionError:
            differ = True
    assert differ
