"""The cost model: the queue it plays, the closed form against it, recorded times, and the tables on disk."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from padless.bench.group_sizes import draw_group_sizes
from padless.kernels import cost_model, schedule
from padless.kernels.cost_model import BUILT_IN, CostTable, Tile, TileCost, best_tile, estimate_ns, simulate
from padless.kernels.sm90_fp8.config import Problem, select_config
from support.ragged import ROOT

KERNEL = "sm90_fp8_grouped_gemm"
COSTS = BUILT_IN[KERNEL].costs
MEASURED = ROOT / "docs/measured"
RECORDED = MEASURED / "2026-11-21-h200-tiles.jsonl"
RECORDED_SMALL = MEASURED / "2026-11-21-h200-tiles-small.jsonl"  # M 512 to 4096
DECODE = MEASURED / "2026-11-21-h200-decode.jsonl"
TALL, WIDE, SMALL = Tile(256, 128, 2, 8), Tile(128, 192, 1, 16), Tile(128, 128, 1, 8)


# --- the queue -------------------------------------------------------------------------------------------


def played_slowly(sizes: list[int], n: int, k: int, tile: Tile, cost: TileCost, num_sms: int) -> float:
    """The queue, tile by tile, from the tile order's own twin."""
    offs = [sum(sizes[: g + 1]) for g in range(len(sizes))]
    columns = tile.block_n * tile.cluster_n
    free = [0.0] * (num_sms // tile.cluster_n)
    half_tiles_for = len(free) if tile.block_m == 256 else None
    for piece in schedule.tiles(offs, sum(sizes), n, tile.block_m, columns, tile.raster_m, half_tiles_for):
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


def test_a_last_round_in_half_tiles_by_hand() -> None:
    tile, cost = Tile(256, 64), TileCost(10.0, 6.0, 1.0)
    # A whole round, then two tiles in four halves.
    assert simulate([256], 64 * 6, 128, tile, cost, 4) == 11 + 7
    assert simulate([256], 64 * 6, 128, tile, cost, 4, half_tiles=False) == 11 + 11
    # Of three tiles one is cut, which saves nothing.
    assert simulate([256], 64 * 7, 128, tile, cost, 4) == 11 + 11
    assert simulate([256], 64 * 2, 128, tile, cost, 4) == 7  # fewer tiles than workers
    assert simulate([100], 64 * 6, 128, tile, cost, 4) == 7 + 7  # halves without rows cost nothing
    assert simulate([256], 64 * 6, 128, Tile(128, 64), cost, 4) == 3 * 11


# --- the closed form -------------------------------------------------------------------------------------


def trust_in_half_tiles(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """How much of what halves spare counts where sizes are unknown: of one group all of it does, whatever the share.

    With 0 the estimate for more than one group is that of a queue without halves.
    """
    monkeypatch.setattr(cost_model, "_TRUSTED_OF_SPARED", share)


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


def simulated_mean(m: int, n: int, k: int, groups: int, tile: Tile, half_tiles: bool = True, draws: int = 5) -> float:
    total = 0.0
    for draw in range(draws):
        sizes = [m] if groups == 1 else draw_group_sizes(groups, m, random.Random(f"{draw} {m} {groups}"))
        total += simulate(sizes, n, k, tile, COSTS[tile], 132, half_tiles)
    return total / draws


@pytest.mark.parametrize("half_tiles", [True, False])
def test_the_estimate_is_the_mean_of_the_simulation_and_its_choice_costs_little(
    monkeypatch: pytest.MonkeyPatch, half_tiles: bool
) -> None:
    if not half_tiles:
        trust_in_half_tiles(monkeypatch, 0.0)
    errors, losses = [], []
    for m, n, k, groups in problems(3, 40):
        means = {tile: simulated_mean(m, n, k, groups, tile, half_tiles or groups == 1) for tile in COSTS}
        errors += [estimate_ns(m, n, k, groups, tile, cost, 132) / means[tile] - 1 for tile, cost in COSTS.items()]
        losses.append(means[best_tile(COSTS, m, n, k, groups, 132)] / min(means.values()) - 1)
    assert abs(sum(errors) / len(errors)) < 0.05
    assert rms(errors) < 0.12
    assert sum(losses) / len(losses) < 0.01, sorted(losses)[-5:]
    assert sorted(losses)[-2] < 0.08, sorted(losses)[-5:]


def test_the_estimate_knows_what_half_tiles_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tall tiles, M 8192: the mean of the queue to 2.5% if all that halves spare counts, further off if nothing does."""

    def estimate(groups: int, n: int, k: int, share: float) -> float:
        trust_in_half_tiles(monkeypatch, share)
        return estimate_ns(8192, n, k, groups, TALL, COSTS[TALL], 132)

    others = []
    for groups, n, k in (
        (4, 4096, 4096),
        (8, 3072, 7168),
        (8, 6144, 3072),
        (16, 5120, 4096),
        (32, 4096, 3072),
        (16, 3072, 8192),
    ):
        simulated = simulated_mean(8192, n, k, groups, TALL, draws=20)
        everything, nothing = (estimate(groups, n, k, share) for share in (1.0, 0.0))
        assert everything == pytest.approx(simulated, rel=0.025), (groups, n, k)
        assert everything <= nothing
        others.append(nothing / simulated - 1)
    assert max(others) > 0.03


def test_one_group_takes_whole_rounds_and_a_half_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is known: all that halves spare counts, whatever counts for more groups."""
    trust_in_half_tiles(monkeypatch, 0.0)
    spared = 0
    shapes = [(m, n, k) for m, n, k, _ in problems(4, 20)]
    shapes += [(m, 2048, 4096) for m in (250, 1024, 2304, 5120)]
    for m, n, k in shapes:
        for tile, cost in COSTS.items():
            tail = m % tile.block_m
            if 0 < tail <= tile.block_m / 2:  # the last tiles are shorter
                continue
            estimate, whole_rounds = (
                estimate_ns(m, n, k, 1, tile, cost, 132),
                simulate([m], n, k, tile, cost, 132, half_tiles=False),
            )
            assert estimate == pytest.approx(simulate([m], n, k, tile, cost, 132))
            assert tile.has_half_tiles or estimate == pytest.approx(whole_rounds)
            spared += estimate < 0.999 * whole_rounds
    assert spared > 2


def test_expected_tiles_against_every_size() -> None:
    """Groups of every size from 0 to 2 M / G, counted."""
    for block_m in (64, 128, 256):
        for mean_rows in (10, 100, 300, 1000):
            every = range(2 * mean_rows + 1)
            full = sum(s // block_m + (s % block_m > block_m / 2) for s in every) / len(every)
            short = sum(0 < s % block_m <= block_m / 2 for s in every) / len(every)
            got = cost_model.expected_m_tiles(7 * mean_rows, 7, block_m)
            assert got == pytest.approx((7 * full, 7 * short), rel=0.06, abs=0.1)


def test_rounds_of_routed_tokens() -> None:
    """Even sizes exactly, uneven ones against tiles of every geometric size; twice as much of these."""
    cases = ((5, 8, 16, 0.3), (96, 64, 8, 1.5), (1000, 64, 32, 4.0), (8192, 128, 64, 2.0), (8200, 33, 128, 1.1))
    for (m, groups, block_m, share), short in itertools.product(cases, (1.0, 0.7)):

        def cost(rows: int, block_m: int = block_m, short: float = short) -> float:
            """Of the tiles of so many rows, in whole ones."""
            return rows // block_m + (0 if rows % block_m == 0 else short if 2 * (rows % block_m) <= block_m else 1)

        rows, longer = divmod(m, groups)
        sizes = [rows + (g < longer) for g in range(groups)]
        tiles = sum(math.ceil(s / block_m) for s in sizes)
        even = math.ceil(tiles * share) * sum(map(cost, sizes)) / tiles
        q = m / (m + groups)
        chances = [(1 - q) * q**s for s in range(200 * max(rows, 1))]
        mean = groups * sum(p * math.ceil(s / block_m) for s, p in enumerate(chances))
        costs = groups * sum(p * cost(s) for s, p in enumerate(chances))
        uneven = max(1.0, mean * share + 0.5) * costs / mean
        got = cost_model.routed_rounds(m, groups, block_m, share, short)
        assert got == pytest.approx((even * uneven**2) ** (1 / 3))
    assert cost_model.routed_rounds(1000, 1, 128, 0.5) == 4
    assert cost_model.routed_rounds(1060, 1, 128, 0.5, 0.5) == pytest.approx(5 * 8.5 / 9)
    assert cost_model.routed_rounds(0, 8, 128, 0.5) == 1


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


def recorded(path: Path = RECORDED) -> list[tuple[Problem, list[int], int, dict[Tile, float]]]:
    """(problem, sizes, bytes, microseconds by tile) of every recorded point."""
    session, *points = map(json.loads, path.read_text().splitlines())
    tiles = {name: Tile(**fields) for name, fields in session["tiles"].items()}
    return [
        (
            Problem(*(r["point"][axis] for axis in ("M", "N", "K", "groups"))),
            r["sizes"],
            r["bytes"],
            {tiles[name]: timing["us"] for name, timing in r["gpu"].items()},
        )
        for r in points
    ]


def recorded_errors(costs: Mapping[Tile, TileCost], tile: Tile, every: int = 1) -> list[float]:
    """log(predicted / recorded) of every so many points with a tile.

    Beside the queue: 7.5 us from event to event with nothing to do, a ninth of the time that the bytes would take
    alone, and 2.65% for each doubling above 300 us, which is the power limit lowering clocks.
    """
    errors = []
    for p, sizes, moved, took in [point for point in recorded() if tile in point[3]][::every]:
        us = 7.5 + 0.11 * moved / 4.2e6 + simulate(sizes, p.n, p.k, tile, costs[tile], 132) / 1e3
        errors.append(math.log(us * (1 + 0.0265 * max(0.0, math.log2(us / 300))) / took[tile]))
    return errors


def rms(values: list[float]) -> float:
    return (sum(v * v for v in values) / len(values)) ** 0.5


@pytest.mark.parametrize("tile", [TALL, WIDE, SMALL], ids=lambda tile: f"{tile.block_m}x{tile.block_n}")
def test_the_queue_explains_the_recorded_times(tile: Tile) -> None:
    every = 1 if tile == SMALL else 4
    errors = recorded_errors(COSTS, tile, every)
    assert len(errors) >= 36
    assert rms(errors) < 0.02
    assert max(map(abs, errors)) < 0.08
    # And the recorded times would not agree with just any table.
    for field in ("full_ns", "short_ns"):
        other = replace(COSTS[tile], **{field: 0.7 * getattr(COSTS[tile], field)})
        assert rms(recorded_errors({**COSTS, tile: other}, tile, every)) > 1.1 * rms(errors)
    other = replace(COSTS[tile], full_ns=0.9 * COSTS[tile].full_ns)
    assert rms(recorded_errors({**COSTS, tile: other}, tile, every)) > 0.025


def losses_of_choices(costs: Mapping[Tile, TileCost]) -> dict[tuple[int, int], list[float]]:
    """By M and groups: what the chosen tile took over the fastest, 0 where it was the fastest."""
    losses: dict[tuple[int, int], list[float]] = {}
    for p, _, _, took in recorded():
        tile = best_tile(costs, p.m, p.n, p.k, p.num_groups, 132)
        slower = took[tile] / min(took.values()) - 1  # KeyError: a tile that nobody would have timed
        losses.setdefault((p.m, p.num_groups), []).append(slower)
    return losses


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def mean_loss(costs: Mapping[Tile, TileCost]) -> float:
    return mean([loss for values in losses_of_choices(costs).values() for loss in values])


def test_the_chosen_tiles_were_the_fastest_or_nearly_so() -> None:
    losses = losses_of_choices(COSTS)
    assert {key: len(values) for key, values in losses.items()} == {
        (m, groups): 36 for m in (8192, 16384) for groups in (4, 8, 16, 32)
    }
    every = [loss for values in losses.values() for loss in values]
    assert mean(every) < 0.0011
    assert max(every) < 0.045
    for key, values in losses.items():
        assert mean(values) < 0.0045, key
    # Other costs and always the same tile would have cost more.
    for tile, factor in ((TALL, 1.04), (WIDE, 0.96)):
        cost = COSTS[tile]
        other = replace(cost, full_ns=factor * cost.full_ns, short_ns=factor * cost.short_ns)
        assert mean_loss({**COSTS, tile: other}) > 0.01
    assert mean_loss({TALL: COSTS[TALL]}) > 1.2 * mean(every)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_choices_would_lose_more_if_nothing_or_all_that_half_tiles_spare_counted(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    now = mean_loss(COSTS)
    trust_in_half_tiles(monkeypatch, share)
    assert mean_loss(COSTS) > 1.05 * now


def test_choices_for_few_rows_would_lose_more_if_all_that_is_spared_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """M 512 to 4096, the model alone. One draw of sizes a point: no choice by M and groups is right for all of them."""

    def losses() -> list[float]:
        found = []
        for p, _, _, took in recorded(RECORDED_SMALL):
            tile = best_tile(COSTS, p.m, p.n, p.k, p.num_groups, 132)
            if tile in took:  # 64 columns, chosen for a single group of 512 rows, were not timed
                found.append(took[tile] / min(took.values()) - 1)
        return found

    now = losses()
    assert len(now) == 118
    assert mean(now) < 0.015
    trust_in_half_tiles(monkeypatch, 1.0)
    others = losses()
    assert len(others) == 118
    assert mean(others) > mean(now) + 0.002


def test_many_small_groups_get_the_wide_tile_that_was_measured_faster() -> None:
    """M 8192, N 3072, 32 groups: 128 x 192 at every K, by 1.7 to 2.8%."""
    for p, _, _, took in recorded():
        if (p.m, p.n, p.num_groups) == (8192, 3072, 32):
            assert took[WIDE] < 0.985 * took[TALL]
            assert best_tile(COSTS, p.m, p.n, p.k, p.num_groups, 132) == WIDE, p


def test_decode_sizes_get_128_columns() -> None:
    """The decode record's sizes. In turns with 128 x 192 they were as fast from 64 groups on, else up to 3% faster."""
    records = [json.loads(line) for line in DECODE.read_text().splitlines()]
    points = [record for record in records if record["kind"] == "decode"]
    assert len(points) > 100
    seen = 0
    for record in points:
        n, k, groups = (record["point"][axis] for axis in ("N", "K", "groups"))
        config = select_config(Problem(sum(record["sizes"]), n, k, groups))
        if config.few_rows:  # measured later, for short K and few rows
            assert k <= 2048
            continue
        seen += 1
        assert (config.block_m, config.block_n, config.cluster_n) == (128, 128, 1), record["point"]
    assert seen > 80


@pytest.mark.parametrize("rows", [16, 48, 49])
def test_groups_of_up_to_48_rows_get_no_wide_tiles_though_the_model_alone_would_give_them(rows: int) -> None:
    m, n, k, groups = 64 * rows, 7168, 7168, 64
    assert best_tile(COSTS, m, n, k, groups, 132) == WIDE
    assert select_config(Problem(m, n, k, groups)).block_n == (192 if rows > 48 else 128)


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
    slow = {t: replace(c, full_ns=9 * c.full_ns) if t.block_n == before.block_n else c for t, c in COSTS.items()}
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
    monkeypatch.setattr(cost_model, "__version__", "99.0")
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
