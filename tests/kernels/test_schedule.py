"""The scheduler compiled for the CPU: the tiles and their order against the Python twin, the handing out exactly once.

How the last round is cut in halves is tested in test_schedule_half_tiles.py.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from padless.kernels.schedule import walk_of_groups
from padless.reference.gemm import group_rows
from padless.row_groups import clamped_ends
from support.schedule_device import ALL_SHAPES, BLOCKS_M, SIZES, Device, Shape, Table, build, ends_of, shares_of, twin

INT32 = st.integers(-(2**31), 2**31 - 1)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    return build(tmp_path_factory.mktemp("schedule"))


MANY_GROUPS = [
    (0,),
    (0, 0, 0, 0),
    (0, 0, 1500, 0),
    (1,) * 70,
    (1, 0) * 40,
    (129,) * 33,
    tuple((37 * g) % 300 for g in range(130)),
    (0,) * 31 + (5,) + (0,) * 31 + (6, 700),
]


def test_every_tile_is_the_twins_and_at_its_place(device: Device) -> None:
    """Every pair of sizes with every compiled shape; rows past the last group belong to nobody."""
    compared = 0
    for sizes in itertools.product(SIZES, repeat=2):
        offs = ends_of(sizes)
        m = offs[-1] + (7 if sum(sizes) % 2 else 0)
        for shape, n in itertools.product(ALL_SHAPES, (8, 192, 200, 1000)):
            expected = twin(offs, m, n, shape)
            numbers = list(range(len(expected) + 2))
            assert device.tiles_at(offs, m, n, shape, numbers) == [*expected, None, None]
            compared += len(expected)
    assert compared > 50_000


@pytest.mark.parametrize("sizes", MANY_GROUPS, ids=lambda sizes: f"{len(sizes)}_groups_{sum(sizes)}_rows")
def test_more_groups_than_lanes_and_groups_of_nothing(device: Device, sizes: tuple[int, ...]) -> None:
    offs = ends_of(sizes)
    for shape in ((64, 192, 8), (128, 192, 16), (256, 256, 8)):
        expected = twin(offs, offs[-1], 520, shape)
        assert device.tiles_at(offs, offs[-1], 520, shape, list(range(len(expected)))) == expected
        # A worker asks for some of the numbers only.
        for first, step in ((0, 2), (1, 3), (5, 66), (131, 132)):
            share = expected[first::step]
            wanted = list(range(first, len(expected), step))
            assert device.tiles_at(offs, offs[-1], 520, shape, [*wanted, len(expected) + 1]) == [*share, None]


def test_without_offs_there_is_one_group_of_all_rows(device: Device) -> None:
    for m in (0, 1, 64, 128, 129, 5000):
        for block_m in BLOCKS_M:
            assert device.table(None, m, block_m) == Table([m], [0], [-(-m // block_m)] if m else [], True)
        expected = twin([m], m, 200, (128, 128, 8))
        numbers = list(range(len(expected) + 1))
        assert device.tiles_at(None, m, 200, (128, 128, 8), numbers) == [*expected, None]


# --- what the twin itself must be --------------------------------------------------------------------------


@given(
    sizes=st.lists(st.sampled_from((0, 1, 2, 64, 127, 128, 129, 400)), min_size=1, max_size=7),
    rows_past_the_end=st.integers(0, 200),
    n=st.integers(1, 700),
    shape=st.sampled_from(ALL_SHAPES),
)
def test_each_element_of_each_group_is_in_exactly_one_tile(
    sizes: list[int], rows_past_the_end: int, n: int, shape: Shape
) -> None:
    block_m, block_n, _ = shape
    offs = ends_of(tuple(sizes))
    covered: Counter[tuple[int, int, int]] = Counter()
    for tile in twin(offs, sum(sizes) + rows_past_the_end, n, shape):
        start = offs[tile.group] - sizes[tile.group]
        assert 1 <= tile.rows <= block_m
        assert start <= tile.row < tile.row + tile.rows <= offs[tile.group]
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


@given(
    sizes=st.lists(st.integers(0, 500), min_size=1, max_size=12),
    n=st.integers(1, 700),
    shape=st.sampled_from(ALL_SHAPES),
)
def test_large_groups_come_first(sizes: list[int], n: int, shape: Shape) -> None:
    """What is left for the last workers should be small."""
    order = [
        group for group, _ in itertools.groupby(tile.group for tile in twin(ends_of(tuple(sizes)), 10**5, n, shape))
    ]
    assert order == sorted((g for g, size in enumerate(sizes) if size), key=lambda g: (-sizes[g], g))


def test_no_groups_have_no_tiles() -> None:
    assert twin([], 10, 200, (128, 192, 8)) == []


@given(offs=st.lists(INT32, max_size=40), m=st.integers(0, 2**30))
def test_clamped_ends_is_the_running_maximum_inside_the_tensor(offs: list[int], m: int) -> None:
    cleaned = clamped_ends(offs, m)
    assert cleaned == [min(max(0, *offs[: g + 1]), m) for g in range(len(offs))]
    assert cleaned == sorted(cleaned)
    assert all(0 <= end <= m for end in cleaned)
    assert clamped_ends(cleaned, m) == cleaned
    # The judge works out the groups by itself; the two must agree on what wrong offs mean.
    assert [end for _, end in group_rows(torch.tensor(offs, dtype=torch.int64), m)] == cleaned


@given(sizes=st.lists(st.integers(0, 1000), max_size=20), past=st.integers(0, 10))
def test_clamped_ends_leaves_right_offs_alone(sizes: list[int], past: int) -> None:
    offs = ends_of(tuple(sizes))
    assert clamped_ends(offs, sum(sizes) + past) == offs


@given(
    offs=st.lists(st.one_of(st.integers(-300, 900), INT32), min_size=1, max_size=70),
    m=st.integers(0, 700),
    block_m=st.sampled_from(BLOCKS_M),
)
def test_the_device_makes_the_same_of_wrong_offs(device: Device, offs: list[int], m: int, block_m: int) -> None:
    table = device.table(offs, m, block_m)
    assert table.cleaned == clamped_ends(offs, m)
    walk = walk_of_groups(offs, m, block_m)
    assert table.groups == [group for group, _, _ in walk]
    with_rows = [end - start for _, start, end in walk if end > start]
    assert table.tile_ends == list(itertools.accumulate(-(-size // block_m) for size in with_rows))
    shape = (block_m, 192, 3)
    expected = twin(offs, m, 400, shape)
    assert device.tiles_at(offs, m, 400, shape, list(range(len(expected) + 1))) == [*expected, None]


@given(
    offs=st.one_of(st.none(), st.lists(st.one_of(st.integers(-300, 900), INT32), min_size=1, max_size=32)),
    m=st.integers(0, 700),
    n=st.integers(1, 2000),
    shape=st.sampled_from(ALL_SHAPES),
)
def test_the_first_tile_is_that_of_the_workers_number(
    device: Device, offs: list[int] | None, m: int, n: int, shape: Shape
) -> None:
    expected = [*twin([m] if offs is None else offs, m, n, shape), None]
    for worker in {0, 1, len(expected) // 2, len(expected) - 2, len(expected) - 1} - {-1}:
        got = device.first_tile(offs, m, n, shape, worker)
        assert got == expected[min(worker, len(expected) - 1)]


# --- handing the tiles out ---------------------------------------------------------------------------------


def check_handing_out(device: Device, seed: int, counter: int, cluster: int = 1, first_is_queued: bool = False) -> None:
    """One launch, its threads interleaved as `seed` has it: every tile once, then an end to every worker."""
    pick = random.Random(seed)
    sizes = tuple(pick.choice((0, 1, 65, 300, 900)) for _ in range(pick.choice((1, 4, 40))))
    offs, shape, n = ends_of(sizes), (64, 192, 3), pick.choice((8, 400, 1000))
    expected = twin(offs, offs[-1], n, shape)
    workers = pick.choice((1, 2, 7, 132))
    entries = device.handed_out(
        offs,
        offs[-1],
        n,
        shape,
        workers=workers,
        seed=seed,
        counter=counter,
        cluster=cluster,
        first_is_queued=first_is_queued,
    )
    shares = shares_of(entries, workers)
    assert Counter(itertools.chain(*shares)) == Counter(expected)
    number = {tile: i for i, tile in enumerate(expected)}
    for worker, mine in enumerate(shares):
        numbers = [number[tile] for tile in mine]
        assert numbers == sorted(numbers), "tile_at needs ascending numbers"
        assert numbers[:1] == [worker][: len(numbers)], "a worker's first tile is the one with its number"


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("seed", range(1, 25))
def test_every_tile_is_handed_out_once(device: Device, seed: int, cluster: int) -> None:
    """Launches follow one another on the same counter, so each has to leave it at zero."""
    check_handing_out(device, seed, counter=3, cluster=cluster)
    check_handing_out(device, seed + 1000, counter=3, cluster=cluster)
    check_handing_out(device, seed, counter=-1, cluster=cluster)
    check_handing_out(device, seed + 2000, counter=3, cluster=cluster, first_is_queued=True)
    check_handing_out(device, seed, counter=-1, cluster=cluster, first_is_queued=True)


def test_without_a_counter_the_shares_are_fixed(device: Device) -> None:
    offs, shape = ends_of((300, 0, 1, 129, 640)), (128, 192, 3)
    expected = twin(offs, offs[-1], 776, shape)
    entries = device.handed_out(offs, offs[-1], 776, shape, workers=5, counter=-1, seed=11)
    for worker in range(5):
        assert [tile for w, tile in entries if w == worker] == [*expected[worker::5], None]


def many_groups() -> dict[str, list[int]]:
    """Sizes of many groups, few and many of which have rows: none, one, equal, drawn, of few sizes, in order."""
    r = random.Random(5)
    drawn = {}
    for count in (33, 64, 65, 255, 512, 1024, 4095, 4096):
        some = [0] * count
        for g in r.sample(range(count), min(count, 10)):
            some[g] = r.randint(1, 3)
        drawn |= {
            f"{count}, none": [0] * count,
            f"{count}, the last": [0] * (count - 1) + [70],
            f"{count}, ten": some,
            f"{count}, equal": [3] * count,
            f"{count}, drawn": [r.choice((0, 0, 1, r.randint(0, 300))) for _ in range(count)],
            f"{count}, ascending": list(range(count)),
        }
    return drawn


@pytest.mark.parametrize("sizes", many_groups().values(), ids=many_groups().keys())
def test_many_groups(device: Device, sizes: list[int]) -> None:
    """Up to 512 groups with rows have their places counted; the order of more is merged."""
    offs, walk = ends_of(tuple(sizes)), walk_of_groups(ends_of(tuple(sizes)), sum(sizes), 64)
    table = device.table(offs, sum(sizes), 64)
    assert table.cleaned == offs
    assert table.groups == [group for group, _, _ in walk]
    assert table.tile_ends == list(
        itertools.accumulate(-(-(end - start) // 64) for _, start, end in walk if end > start)
    )
    assert table.is_sorted == (max(sizes) > 64)
    wrong = [*offs[:-1], 10**9]  # the last end is wrong: all are cleaned, and sorted
    cleaned = device.table(wrong, sum(sizes), 64)
    assert cleaned.is_sorted
    assert cleaned.cleaned == offs
    assert cleaned.groups == [group for group, _, _ in walk_of_groups(wrong, sum(sizes), 64)]

    expected = [*twin(offs, sum(sizes), 400, (64, 192, 3)), None]
    for worker in {0, 1, len(expected) // 2, len(expected) - 2, len(expected) - 1, len(expected)} - {-1}:
        if not table.is_sorted:
            got = device.first_tile(offs, sum(sizes), 400, (64, 192, 3), worker)
            assert got == expected[min(worker, len(expected) - 1)]
        assert device.searched_tile(wrong, sum(sizes), 400, (64, 192, 3), worker) == (False, None)
        searched = device.searched_tile(offs, sum(sizes), 400, (64, 192, 3), worker)
        wanted = None if table.is_sorted else expected[min(worker, len(expected) - 1)]
        assert searched == (not table.is_sorted, wanted)


@given(
    sizes=st.lists(st.sampled_from((0, 0, 0, 1, 3, 64, 65)), min_size=33, max_size=300),
    wrong=st.one_of(st.none(), st.tuples(st.integers(0, 299), INT32)),
    past=st.integers(-2, 5),
    n=st.integers(1, 700),
    data=st.data(),
)
def test_the_first_tile_is_found_without_a_table(
    device: Device, sizes: list[int], wrong: tuple[int, int] | None, past: int, n: int, data: st.DataObject
) -> None:
    """Where the table is flat, and nowhere else, whatever offs hold."""
    offs, m = ends_of(tuple(sizes)), max(sum(sizes) + past, 0)
    if wrong is not None:
        offs[wrong[0] % len(offs)] = wrong[1]
    expected = [*twin(offs, m, n, (64, 128, 8)), None]
    worker = data.draw(st.integers(0, len(expected)))
    is_flat = not device.table(offs, m, 64).is_sorted
    wanted = expected[min(worker, len(expected) - 1)] if is_flat else None
    assert device.searched_tile(offs, m, n, (64, 128, 8), worker) == (is_flat, wanted)


@pytest.mark.parametrize("block_m", BLOCKS_M)
@pytest.mark.parametrize("most", [63, 64, 65])
def test_only_groups_that_a_tile_holds_are_left_unsorted(device: Device, block_m: int, most: int) -> None:
    """33 groups, the largest last: at its row 65 a 64-row tile has a second one, and others take longer."""
    sizes = (2, 0, 1) * 10 + (0, 7, most)
    table = device.table(ends_of(sizes), sum(sizes), block_m)
    assert table.is_sorted == (most > 64)
    assert table.groups[0] == (32 if most > 64 else 0)
    few = device.table(ends_of(sizes[1:]), sum(sizes[1:]), block_m)
    assert few.is_sorted
    assert few.groups[0] == 31


def test_a_fast_worker_gets_more(device: Device) -> None:
    """The point of the counter: the shares follow the speeds and not the numbers."""
    offs = ends_of((64,) * 200)
    entries = device.handed_out(offs, offs[-1], 64, (64, 192, 3), workers=4, counter=0, seed=5)
    shares = Counter(worker for worker, tile in entries if tile is not None)
    assert sum(shares.values()) == 200
    assert len(set(shares.values())) > 1


# --- a planted bug must be seen ----------------------------------------------------------------------------

PLANTED = {
    "band_start": ("device/scheduler.cuh", "band * RASTER_M + (in_band", "band + (in_band"),
    "last_band": ("device/scheduler.cuh", "in_band / height", "in_band / RASTER_M"),
    "off_by_one": ("device/scheduler.cuh", "number >= table.tile_ends", "number > table.tile_ends"),
    "tail_rows": ("device/scheduler.cuh", "? end - tile.row : BLOCK_M", "? BLOCK_M : BLOCK_M"),
    "equal_groups": ("device/sorted_groups.cuh", "rows_b == rows_a && b < a", "rows_b == rows_a && b > a"),
    "equal_groups_of_few": ("device/sorted_groups.cuh", "others.z == own && j + 2 < i", "others.z == own && j + 2 > i"),
    "itself_before": ("device/sorted_groups.cuh", "others.y == own && j + 1 < i", "others.y == own && j + 1 <= i"),
    "second_warp_of_groups": ("device/group_table.cuh", "tile_ends[i] += before", "tile_ends[i] += 0"),
    "past_m": ("device/sorted_groups.cuh", "end = end > m ? m : end", "end = end"),
    "always_flat": ("device/sorted_groups.cuh", "exists && end - before > FLAT_ROWS", "false"),
    "flat_group": ("device/scheduler.cuh", "at = number / n_tiles;", "at = number;"),
    "flat_column": ("device/scheduler.cuh", "number - at * n_tiles, group", "number, group"),
}
PLANTED_IN_THE_FIRST_TILE = {
    "neighbour": ("device/tile_queue.cuh", "if (in_group >= 0 &&", "if (in_group >= -1 &&"),
    "whole_group_before": (
        "device/tile_queue.cuh",
        "number - (group.tile_end - group.tiles) * n_tiles",
        "number - group.tile_end * n_tiles",
    ),
    "lane_without_a_group": (
        "device/group_table.cuh",
        "lane < num_groups ? static_cast<int>(tiles_of(rows)) : 0",
        "static_cast<int>(tiles_of(rows))",
    ),
    "wrong_offs_believed": ("device/group_table.cuh", "&& end <= m)", ")"),
    "no_end": (
        "device/tile_queue.cuh",
        "if (lane == 0) queue.tiles[0] = Tile{0, 0, 0, 0};\n    __syncwarp();\n    int number",
        "int number",
    ),
}
PLANTED_IN_THE_SEARCH = {
    "tall": ("device/tile_queue.cuh", "rows >= 0 && rows <= flat_rows(BLOCK_M)", "rows >= 0"),
    "descending": ("device/tile_queue.cuh", "rows >= 0 && rows <= flat_rows(BLOCK_M)", "rows <= flat_rows(BLOCK_M)"),
    "past_m": ("device/tile_queue.cuh", "(rows == 0 || of_group[i] <= m)", "true"),
    "start_of_four": ("device/tile_queue.cuh", "start = i == 0 ? last : of_group[i - 1]", "start = last"),
    "start_of_pass": ("device/tile_queue.cuh", "if (lane == 0) last = before;", "if (lane == 0) last = 0;"),
    "counted_in_pass": ("device/tile_queue.cuh", "int earlier = active;", "int earlier = 0;"),
    "counts_itself": (
        "device/tile_queue.cuh",
        "with_rows[i] & ((1u << lane) - 1)",
        "with_rows[i] & ((2u << lane) - 1)",
    ),
    "past_the_last": ("device/tile_queue.cuh", "first + i < num_groups ?", "true ?"),
    "column": ("device/tile_queue.cuh", "worker - wanted * n_tiles", "worker"),
}
PLANTED_IN_THE_QUEUE = {
    "first_tiles_again": ("device/tile_queue.cuh", ": workers + atomicAdd", ": atomicAdd"),
    "counter_left": ("device/tile_queue.cuh", "padless_counters[counter].drawn = 0;", ""),
    "early_reset": ("device/tile_queue.cuh", "== workers - 1", "== 0"),
    "no_counter": ("device/tile_queue.cuh", "number + workers", "number + 1"),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_bug_is_detected(tmp_path: Path, planted: tuple[str, str, str]) -> None:
    shape = (64, 192, 3)
    device = build(tmp_path, (shape,), planted)
    pick = random.Random(5)
    differ = False
    for _ in range(40):
        largest = pick.choice((4, len(SIZES)))  # of the first four sizes none is more than a tile
        sizes = tuple(pick.choice(SIZES[:largest]) for _ in range(pick.choice((1, 3, 40, 40, 40, 700))))
        offs = ends_of(sizes)
        m = pick.choice((offs[-1], offs[-1] // 2))
        expected = twin(offs, m, 400, shape)
        try:
            got = device.tiles_at(offs, m, 400, shape, list(range(len(expected) + 1)))
            differ |= got != [*expected, None]
        except ZeroDivisionError:
            differ = True
    assert differ


@pytest.mark.parametrize("planted", PLANTED_IN_THE_FIRST_TILE.values(), ids=PLANTED_IN_THE_FIRST_TILE.keys())
def test_a_planted_bug_in_the_first_tile_is_detected(tmp_path: Path, planted: tuple[str, str, str]) -> None:
    shape = (64, 192, 3)
    device = build(tmp_path, (shape,), planted)
    pick = random.Random(6)
    differ = False
    for _ in range(20):
        offs = ends_of(tuple(pick.choice(SIZES) for _ in range(pick.choice((1, 3, 32)))))
        m = pick.choice((offs[-1], offs[-1] // 2))
        expected = [*twin(offs, m, 400, shape), None]
        differ |= any(device.first_tile(offs, m, 400, shape, worker) != tile for worker, tile in enumerate(expected))
    assert differ


@pytest.mark.parametrize("planted", PLANTED_IN_THE_SEARCH.values(), ids=PLANTED_IN_THE_SEARCH.keys())
def test_a_planted_bug_in_the_search_is_detected(tmp_path: Path, planted: tuple[str, str, str]) -> None:
    shape = (64, 192, 3)
    device = build(tmp_path, (shape,), planted)
    pick = random.Random(7)
    differ = False
    for turn in range(40):
        offs = ends_of(
            tuple(pick.choice((0, 0, 2, 64, 65)[: 4 + turn % 8 // 7]) for _ in range(pick.choice((34, 301))))
        )
        m = pick.choice((offs[-1], offs[-1] // 2))
        if turn % 10 == 9:  # wrong where no later group looks
            offs[-1] = offs[-2] - 1
        expected = [*twin(offs, m, 400, shape), None]
        is_flat = not device.table(offs, m, 64).is_sorted
        for worker in pick.sample(range(len(expected)), min(len(expected), 60)):
            try:
                found = device.searched_tile(offs, m, 400, shape, worker)
            except AssertionError:
                differ = True
            else:
                differ |= found != (is_flat, expected[worker] if is_flat else None)
    assert differ


@pytest.mark.parametrize("planted", PLANTED_IN_THE_QUEUE.values(), ids=PLANTED_IN_THE_QUEUE.keys())
def test_a_planted_bug_in_the_queue_is_detected(tmp_path: Path, planted: tuple[str, str, str]) -> None:
    device = build(tmp_path, ((64, 192, 3),), planted)
    counter = -1 if planted[1] == "number + workers" else 3

    def launches() -> None:
        for seed in range(1, 25):
            check_handing_out(device, seed, counter=counter)

    with pytest.raises(AssertionError):
        launches()
