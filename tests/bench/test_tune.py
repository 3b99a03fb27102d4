"""padless tune with a clock that knows the truth: what it fits, prints, stores and refuses."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from padless.bench.tune import costs as tune
from padless.bench.tune.costs import STEPS, Trial, fit, measure_costs, trials
from padless.kernels import cost_model
from padless.kernels.cost_model import BUILT_IN, CostTable, Tile, TileCost, simulate
from padless.testing import progress

KERNEL = "sm90_fp8_grouped_gemm"
TILES = list(BUILT_IN[KERNEL].costs)
TRUTH = {
    tile: TileCost(c.full_ns * (1.3 - 0.1 * i), c.short_ns * (0.7 + 0.1 * i), 300.0 * i)
    for i, (tile, c) in enumerate(BUILT_IN[KERNEL].costs.items())
}
LAUNCH_US = 17.0


def knowing_clock(
    truth: dict[Tile, TileCost], num_sms: int, noise: float = 0.0, seen: list[Trial] | None = None
) -> tune.Clock:
    """Plays the queue with the true costs."""
    rng = random.Random(6)

    def clock(turn: Sequence[Trial]) -> list[float]:
        if seen is not None:
            seen.extend(turn)
        return [
            (LAUNCH_US + simulate(t.sizes, t.n, t.k, t.tile, truth[t.tile], num_sms) / 1e3)
            * (1 + rng.uniform(-noise, noise))
            for t in turn
        ]

    return clock


@pytest.mark.parametrize("num_sms", [132, 148, 78, 2])
def test_the_costs_behind_the_times_are_found(num_sms: int) -> None:
    found = measure_costs(TILES, num_sms, knowing_clock(TRUTH, num_sms))
    assert list(found) == TILES
    for tile, cost in found.items():
        assert cost.full_ns == pytest.approx(TRUTH[tile].full_ns, rel=1e-3)
        assert cost.overhead_ns == pytest.approx(TRUTH[tile].overhead_ns, abs=1)
        # Where an end takes nearly as long as a full tile, the queue can take the same time with two costs of it.
        close = 0.05 if TRUTH[tile].short_ns > 0.85 * TRUTH[tile].full_ns else 0.01
        assert cost.short_ns == pytest.approx(TRUTH[tile].short_ns, rel=close)
        tails = trials(tile, num_sms)[3:]
        (took,) = knowing_clock(found, num_sms)(tails)
        assert took == pytest.approx(knowing_clock(TRUTH, num_sms)(tails)[0], rel=1e-3)


def test_half_a_percent_of_noise_moves_them_a_little() -> None:
    found = measure_costs(TILES, 132, knowing_clock(TRUTH, 132, noise=0.005))
    for tile, cost in found.items():
        assert cost.full_ns == pytest.approx(TRUTH[tile].full_ns, rel=0.02)
        assert cost.short_ns == pytest.approx(TRUTH[tile].short_ns, rel=0.15)
        assert cost.overhead_ns == pytest.approx(TRUTH[tile].overhead_ns, abs=200)


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.block_m}x{t.block_n}")
@pytest.mark.parametrize("num_sms", [132, 148])
def test_the_products_are_what_they_are_for(tile: Tile, num_sms: int) -> None:
    workers = num_sms // tile.cluster_n
    long, short, few, tails = trials(tile, num_sms)
    for trial, rounds in ((long, 12), (short, 12), (few, 4)):
        (m,) = trial.sizes
        assert m % tile.block_m == 0
        assert trial.n % (tile.block_n * tile.cluster_n) == 0
        assert m // tile.block_m * (trial.n // (tile.block_n * tile.cluster_n)) == rounds * workers
        assert m * trial.n <= 20_000**2, "fits in memory"
    assert long.k > 4 * short.k == 4 * few.k
    assert all(rows % tile.block_m == tile.block_m // 2 for rows in tails.sizes)
    # Groups that end in half a tile must be felt: they are a quarter of the work or more.
    cheaper = TileCost(TRUTH[tile].full_ns, 0.5 * TRUTH[tile].short_ns, 0.0)
    ratio = [simulate(tails.sizes, tails.n, tails.k, tile, c, num_sms) for c in (cheaper, TRUTH[tile])]
    assert ratio[0] < 0.95 * ratio[1]


def test_every_tile_takes_its_turn_in_every_step() -> None:
    seen: list[Trial] = []
    done: list[int] = []
    measure_costs(TILES, 132, knowing_clock(TRUTH, 132, seen=seen), lambda: done.append(len(seen)))
    assert done == [len(TILES) * step for step in range(1, len(STEPS) + 1)]
    assert [trial.tile for trial in seen] == TILES * len(STEPS)


@pytest.mark.parametrize("times", [(100.0, 200.0, 50.0, 90.0), (500.0, 80.0, 90.0, 480.0), (500.0, 80.0, 35.0, 5000.0)])
def test_times_that_make_no_sense_are_refused(times: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"fit no costs.*is the GPU busy"):
        fit(TILES[0], 132, times)


# --- the command -----------------------------------------------------------------------------------------


def driver_of(arch: str) -> Callable[[], SimpleNamespace]:
    return lambda: SimpleNamespace(arch=arch, num_sms=lambda device: 132)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """machine(**options) runs padless tune on a GPU that is not there, and returns what it printed."""
    monkeypatch.setenv("PADLESS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cost_model, "gpu_name", lambda: "NVIDIA Made Up")
    monkeypatch.setattr(tune, "cuda_driver", driver_of("sm_90a"))
    monkeypatch.setattr(tune, "gpu_clock", lambda path, repeats: knowing_clock(TRUTH, 132))
    cost_model.cost_table.cache_clear()

    def run(**options: bool) -> str:
        buffer = io.StringIO()
        assert tune.run_tune(console=Console(file=buffer, width=160), **options) == 0
        return buffer.getvalue()

    yield run
    cost_model.cost_table.cache_clear()


def test_what_was_measured_is_printed_stored_and_used(machine: Callable[..., str]) -> None:
    before = cost_model.cost_table(KERNEL)
    text = machine()
    for tile in TILES:
        (line,) = [x for x in text.splitlines() if x.lstrip().startswith(f"{tile.block_m} x {tile.block_n},")]
        numbers = [int(word) for word in line.split()[-6:]]
        old, new = before.costs[tile], TRUTH[tile]
        assert numbers[0::2] == [round(x) for x in (old.full_ns, old.short_ns, old.overhead_ns)]
        assert numbers[1] == pytest.approx(new.full_ns, abs=2)
    file = cost_model.tuned_file("NVIDIA Made Up")
    assert str(file) in text
    after = cost_model.cost_table(KERNEL)
    assert "NVIDIA Made Up" in after.source
    assert after.costs[TILES[0]].full_ns == pytest.approx(TRUTH[TILES[0]].full_ns, rel=1e-3)
    assert cost_model.best_tile(after.costs, 65536, 8192, 8192, 1, 132) in TILES

    assert "removed" in machine(reset=True)
    assert not file.exists()
    assert "nothing is stored" in machine(reset=True)
    cost_model.cost_table.cache_clear()
    assert cost_model.cost_table(KERNEL) is BUILT_IN[KERNEL]


def test_a_reset_needs_no_gpu(machine: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the tables of every GPU go, and of this version alone."""
    machine()
    first, second = cost_model.tuned_file("NVIDIA Made Up"), cost_model.tuned_file("NVIDIA Other")
    older = first.with_name("NVIDIA-Made-Up-0.0.0.json")
    for copy in (second, older):
        copy.write_bytes(first.read_bytes())
    machine(reset=True)
    assert [file.exists() for file in (first, second, older)] == [False, True, True]
    first.write_bytes(second.read_bytes())
    monkeypatch.setattr(cost_model, "gpu_name", lambda: None)
    assert machine(reset=True).count("removed") == 2
    assert [file.exists() for file in (first, second, older)] == [False, False, True]
    assert "nothing is stored for any GPU" in machine(reset=True)
    with pytest.raises(ValueError, match="needs a CUDA GPU"):
        machine()


def test_a_pipe_gets_lines_while_it_measures(machine: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    text = machine(dry_run=True)
    assert [line for line in text.splitlines() if "Products of all tiles: " in line] == [
        f"     0 s  Products of all tiles: {done} of 4" for done in range(1, 5)
    ]


def test_a_dry_run_stores_nothing(machine: Callable[..., str], tmp_path: Path) -> None:
    assert "Nothing stored" in machine(dry_run=True)
    assert list(tmp_path.rglob("*")) == []


def test_a_place_that_cannot_be_written_to_is_refused_first(
    machine: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tuned").touch()
    monkeypatch.setattr(tune, "gpu_clock", lambda path, repeats: pytest.fail("it measures"))
    with pytest.raises(ValueError, match=r"tuned' is no folder that can be written to$"):
        machine()


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "gpu_name", lambda: None)
    with pytest.raises(ValueError, match="needs a CUDA GPU"):
        tune.run_tune()


def test_a_gpu_whose_kernels_have_no_table_is_left_alone(
    machine: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tune, "cuda_driver", driver_of("sm_75"))
    assert "no kernel that runs on NVIDIA Made Up" in machine()
    assert list(tmp_path.rglob("*")) == []


def test_another_architectures_kernels_get_a_table_of_their_own(
    machine: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = Tile(128, 256, 1, 8)
    truth = {tile: TileCost(100.0, 60.0, 50.0)}
    monkeypatch.setitem(BUILT_IN, "sm100_made_up", CostTable({tile: TileCost(90, 80, 70)}, "a test"))
    path = SimpleNamespace(name="sm100_made_up", arch="sm_100a", operation="grouped_gemm")
    monkeypatch.setattr(tune, "ROUTES", (*tune.ROUTES, path))
    monkeypatch.setattr(tune, "cuda_driver", driver_of("sm_100a"))
    monkeypatch.setattr(tune, "gpu_clock", lambda path, repeats: knowing_clock(truth, 132))
    text = machine()
    assert "sm100_made_up" in text
    assert KERNEL not in text
    assert list(cost_model.read_tuned("NVIDIA Made Up")) == ["sm100_made_up"]


def test_every_table_is_of_a_kernel_that_takes_its_tiles() -> None:
    for name, table in BUILT_IN.items():
        path = next((p for p in (tune.path_of(name, arch) for arch in ("sm_90a", "sm_100a")) if p), None)
        assert path is not None, name
        for tile in table.costs:
            config = tune.config_for(path, tile)
            assert (config.block_m, config.block_n) == (tile.block_m, tile.block_n)
