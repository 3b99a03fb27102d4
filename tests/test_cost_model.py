"""The cost model: the queue it plays, the closed form against it, recorded times, and the tables on disk."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import padless
from padless import cost_model, schedule
from padless.bench.group_sizes import draw_group_sizes
from padless.config import Problem, select_config
from padless.cost_model import BUILT_IN, CostTable, Tile, TileCost, best_tile, estimate_ns, simulate

KERNEL = "sm90_fp8_grouped_gemm"
COSTS = BUILT_IN[KERNEL].costs
RECORDED = Path(__file__).parents[1] / "docs/measured/2026-11-21-h200-paper-balanced-without-rests.jsonl"


# --- the queue -------------------------------------------------------------------------------------------


def played_slowly(sizes: list[int], n: int, k: int, tile: Tile, cost: TileCost, num_sms: int) -> float:
    """The queue, tile by tile, from the tile order's own twin."""
    offs = [sum(sizes[: g + 1]) for g in range(len(sizes))]
    columns = tile.block_n * tile.cluster_n
    free = [0.0] * (num_sms // tile.cluster_n)
    halves_for = len(free) if tile.block_m == 256 else None
    for piece in schedule.tiles(offs, sum(sizes), n, tile.block_m, columns, tile.raster_m, halves_for):
        first = free.index(min(free))
        free[first] += cost.overhead_ns + math.ceil(k / 128) * (
            cost.full_ns if piece.rows > tile.block_m / 2 else cost.short_ns
        )
    return max(free)


@pytest.mark.parametrize("tile", COSTS, ids=lambda tile: f"{tile.block_m}x{tile.block_n}")
def test_the_simulation_is_the_queue_played_tile_by_tile(tile: Tile) -> None:
    rng = random.Random(11)
    for _ in range(12):
        sizes = [rng.choice((0, 1, 64, 65, 128, 129, rng.randrange(900))) for _ in range(rng.randint(1, 9))]
        n, k, sms = 8 * rng.randint(1, 300), 16 * rng.randint(1, 99), rng.randint(2, 9)
        expected = played_slowly(sizes, n, k, tile, COSTS[tile], sms)
        assert simulate(sizes, n, k, tile, COSTS[tile], sms) == pytest.approx(expected)


def test_one_tile_and_whole_rounds_by_hand() -> None:
    tile, cost = Tile(128, 64), TileCost(10.0, 7.0, 3.0)
    assert simulate([100], 64, 256, tile, cost, 4) == 2 * 10 + 3
    assert simulate([64], 64, 256, tile, cost, 4) == 2 * 7 + 3
    assert simulate([128], 64 * 9, 128, tile, cost, 4) == 3 * (10 + 3)  # nine tiles, four workers
    assert simulate([0, 0], 64, 128, tile, cost, 4) == 0


def test_a_last_round_in_halves_by_hand() -> None:
    tile, cost = Tile(256, 64), TileCost(10.0, 6.0, 1.0)
    assert (
        simulate([256], 64 * 6, 128, tile, cost, 4) == 11 + 7
    )  # a whole round, then two tiles in four halves
    assert (
        simulate([256], 64 * 7, 128, tile, cost, 4) == 11 + 11
    )  # of three tiles one is cut, which saves nothing
    assert simulate([256], 64 * 2, 128, tile, cost, 4) == 7  # fewer tiles than workers
    assert simulate([100], 64 * 6, 128, tile, cost, 4) == 7 + 7  # halves without rows cost nothing
    assert simulate([256], 64 * 6, 128, Tile(128, 64), cost, 4) == 3 * 11


# --- the closed form -------------------------------------------------------------------------------------


def problems(seed: int, count: int) -> list[tuple[int, int, int, int]]:
    rng = random.Random(seed)
    return [
        (
            rng.choice((777, 2048, 8192, 16384)),
            rng.choice((1024, 3072, 4096, 7168)),
            rng.choice((512, 2048, 3072, 8192)),
            rng.choice((1, 4, 8, 16, 32)),
        )
        for _ in range(count)
    ]


def simulated_mean(m: int, n: int, k: int, groups: int, tile: Tile, draws: int = 5) -> float:
    total = 0.0
    for draw in range(draws):
        sizes = [m] if groups == 1 else draw_group_sizes(groups, m, random.Random(f"{draw} {m} {groups}"))
        total += simulate(sizes, n, k, tile, COSTS[tile], 132, halves=False)
    return total / draws


def test_the_estimate_is_the_mean_of_the_simulation_and_its_choice_costs_little() -> None:
    errors, losses = [], []
    for m, n, k, groups in problems(3, 40):
        means = {tile: simulated_mean(m, n, k, groups, tile) for tile in COSTS}
        errors += [
            estimate_ns(m, n, k, groups, tile, cost, 132) / means[tile] - 1 for tile, cost in COSTS.items()
        ]
        losses.append(means[best_tile(COSTS, m, n, k, groups, 132)] / min(means.values()) - 1)
    assert abs(sum(errors) / len(errors)) < 0.05
    assert (sum(e * e for e in errors) / len(errors)) ** 0.5 < 0.12
    assert sum(losses) / len(losses) < 0.01, sorted(losses)[-5:]
    assert sorted(losses)[-2] < 0.08, sorted(losses)[-5:]


def test_one_group_takes_whole_rounds_exactly() -> None:
    for m, n, k, _ in problems(4, 20):
        for tile, cost in COSTS.items():
            if (
                m % tile.block_m > tile.block_m / 2 or m % tile.block_m == 0
            ):  # else the last tiles are shorter
                estimate = estimate_ns(m, n, k, 1, tile, cost, 132)
                assert estimate == pytest.approx(simulate([m], n, k, tile, cost, 132, halves=False))


def test_expected_tiles_against_every_size() -> None:
    """Groups of every size from 0 to 2 M / G, counted."""
    for block_m in (64, 128, 256):
        for mean_rows in (10, 100, 300, 1000):
            every = range(2 * mean_rows + 1)
            full = sum(s // block_m + (s % block_m > block_m / 2) for s in every) / len(every)
            short = sum(0 < s % block_m <= block_m / 2 for s in every) / len(every)
            got = cost_model._expected_m_tiles(7 * mean_rows, 7, block_m)
            assert got == pytest.approx((7 * full, 7 * short), rel=0.06, abs=0.1)


def test_mean_ceil_against_a_sum() -> None:
    rng = random.Random(5)
    for _ in range(50):
        middle, width = rng.uniform(0.5, 30), rng.uniform(0.01, 9)
        middle = max(middle, width / 2)
        points = [math.ceil(middle + width * ((i + 0.5) / 2000 - 0.5)) for i in range(2000)]
        assert cost_model._mean_ceil(middle, width) == pytest.approx(sum(points) / 2000, abs=0.01)
    assert cost_model._mean_ceil(2.25, 0) == 3
    assert cost_model._mean_ceil(2.25, 1) == 2.75
    assert cost_model._mean_ceil(4.0, 0) == 4


# --- recorded times --------------------------------------------------------------------------------------


def tile_of_that_day(m: int, n: int, k: int, groups: int) -> Tile:
    """Which tile the recorded runs took: the rule they were recorded with."""
    cycles = {
        Tile(256, 128, 2, 8): 1180,
        Tile(128, 192, 1, 16): 915,
        Tile(128, 128, 1, 8): 660,
        Tile(128, 64, 1, 8): 430,
    }

    def estimate(tile: Tile) -> float:
        rows = max(m / tile.block_m + groups / 2, groups)
        rounds = rows * -(-n // (tile.block_n * tile.cluster_n)) / (132 // tile.cluster_n)
        return max(rounds + 0.4, 1.0) * (-(-k // 128) * cycles[tile] + 2000)

    return min(cycles, key=estimate)


def recorded_errors(costs: dict[Tile, TileCost]) -> list[float]:
    """log(predicted / recorded) of each point below 2 ms; longer ones run at clocks the power limit lowers.

    The record is from before tiles were cut in halves. Beside the queue: 16.5 us from event to event with nothing to
    do (most of it the eviction of what was written to flush L2), a seventh of the time that the bytes would take
    alone, and 1.5% for each doubling above 300 us.
    """
    errors = []
    for line in RECORDED.read_text().splitlines()[1:]:
        record = json.loads(line)
        point, took = record["point"], record["gpu"]["padless"]["us"]
        if took > 2000:
            continue
        m, n, k, groups = (point[axis] for axis in ("M", "N", "K", "groups"))
        tile = tile_of_that_day(m, n, k, groups)
        queue = simulate(record["sizes"], n, k, tile, costs[tile], 132, halves=False) / 1e3
        us = 16.5 + 0.145 * record["bytes"] / 4.2e6 + queue
        errors.append(math.log(us * (1 + 0.015 * max(0.0, math.log2(us / 300))) / took))
    return errors


def rms(values: list[float]) -> float:
    return (sum(v * v for v in values) / len(values)) ** 0.5


def test_the_queue_explains_the_recorded_times() -> None:
    # The record is of the kernel whose consumers stored themselves, which took longer between two tiles.
    costs = {**COSTS, Tile(256, 128, 2, 8): TileCost(700, 426, 650)}
    errors = recorded_errors(costs)
    assert len(errors) > 50
    assert rms(errors) < 0.02
    assert max(map(abs, errors)) < 0.05
    # And the recorded times would not agree with just any table.
    for tile in (Tile(256, 128, 2, 8), Tile(128, 192, 1, 16)):
        other = replace(costs[tile], full_ns=0.9 * costs[tile].full_ns)
        assert rms(recorded_errors({**costs, tile: other})) > 0.04
        flat = replace(costs[tile], short_ns=0.0)
        assert rms(recorded_errors({**costs, tile: flat})) > 0.025


def test_few_large_groups_get_the_tile_that_was_measured_faster() -> None:
    """M 8192, N 3072, K 3072, 4 groups: 127.1 us with 256 x 128, 116.6 us with 128 x 192. Before halves, that was."""
    sizes = [62, 3958, 1352, 2820]
    wide, tall = Tile(128, 192, 1, 16), Tile(256, 128, 2, 8)
    slower, faster = (simulate(sizes, 3072, 3072, t, COSTS[t], 132, halves=False) for t in (tall, wide))
    assert (slower - faster) / 1e3 == pytest.approx(127.1 - 116.6, abs=5)
    chosen = select_config(Problem(8192, 3072, 3072, 4))
    assert (chosen.block_m, chosen.block_n) == (128, 192)


# --- tables on disk --------------------------------------------------------------------------------------

OTHER = {tile: TileCost(1.5 * c.full_ns, c.short_ns, 7.0) for tile, c in COSTS.items()}


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A cache of its own and a GPU with a name."""
    monkeypatch.setenv("PADLESS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cost_model, "gpu_name", lambda: "NVIDIA Test/9 GPU")
    cost_model.cost_table.cache_clear()
    yield "NVIDIA Test/9 GPU"
    cost_model.cost_table.cache_clear()


def test_without_a_stored_table_the_built_in_one_is_used(gpu: str) -> None:
    assert cost_model.cost_table(KERNEL) is BUILT_IN[KERNEL]
    assert not cost_model.tuned_file(gpu).parent.exists(), "asking must not create it"


def test_a_stored_table_is_used_and_decides(gpu: str) -> None:
    problem = Problem(8192, 3072, 3072, 4)
    before = select_config(problem)
    slow = {
        t: replace(c, full_ns=9 * c.full_ns) if t.block_n == before.block_n else c for t, c in COSTS.items()
    }
    path = cost_model.store_tuned(gpu, "2031-02-03", {KERNEL: slow})
    assert path.parent.parent == Path(cost_model.cache_dir())
    assert select_config(problem) == before, "the table of a running process does not change"
    cost_model.cost_table.cache_clear()
    table = cost_model.cost_table(KERNEL)
    assert table.costs == slow
    assert "2031-02-03" in table.source
    assert gpu in table.source
    assert select_config(problem).block_n != before.block_n


def test_another_gpu_or_version_has_a_table_of_its_own(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cost_model.store_tuned(gpu, "today", {KERNEL: OTHER})
    assert cost_model.read_tuned(gpu)[KERNEL].costs == OTHER
    assert cost_model.read_tuned("NVIDIA Test 10 GPU") == {}
    monkeypatch.setattr(padless, "__version__", "99.0")
    assert cost_model.read_tuned(gpu) == {}


def test_storing_one_kernel_keeps_the_others(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILT_IN, "another", CostTable(COSTS, "a test"))
    cost_model.store_tuned(gpu, "today", {KERNEL: OTHER})
    cost_model.store_tuned(gpu, "today", {"another": COSTS})
    found = cost_model.read_tuned(gpu)
    assert found[KERNEL].costs == OTHER
    assert found["another"].costs == COSTS
    assert len(list(cost_model.tuned_file(gpu).parent.iterdir())) == 1, "no temporary file is left"


DAMAGE = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "a list": lambda text: "[]",
    "not a number": lambda text: text.replace('"full_ns": ', '"full_ns": "x", "y": '),
    "negative": lambda text: text.replace('"full_ns": ', '"full_ns": -'),
    "NaN": lambda text: text.replace('"overhead_ns": 7.0', '"overhead_ns": NaN'),
    "another tile": lambda text: text.replace('"block_n": 192', '"block_n": 160'),
    "a field more": lambda text: text.replace('"block_n": ', '"block_k": 64, "block_n": '),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_table_is_not_used(gpu: str, damage: str) -> None:
    path = cost_model.store_tuned(gpu, "today", {KERNEL: OTHER})
    text = path.read_text()
    changed = DAMAGE[damage](text)
    assert changed != text
    path.write_text(changed)
    assert cost_model.read_tuned(gpu) == {}
    assert cost_model.cost_table(KERNEL) is BUILT_IN[KERNEL]
