"""Grid of the FP8_BLOCK GEMM on Hopper: one CTA for every piece of work, if there are multiprocessors."""

from __future__ import annotations

import random

import pytest

from padless.bench.group_sizes import draw_group_sizes
from padless.kernels import schedule
from padless.kernels.sm90_fp8.config import Problem, Sm90Fp8Config
from padless.kernels.sm90_fp8.host import ctas_of


def pieces(sizes: list[int], n: int, config: Sm90Fp8Config, workers: int) -> list[schedule.Tile]:
    """What the kernel's queue holds with so many workers."""
    offs = [sum(sizes[: g + 1]) for g in range(len(sizes))]
    columns = config.block_n * config.cluster_n
    cut_for = workers if config.block_m == 256 else None
    return list(schedule.tiles(offs, sum(sizes), n, config.block_m, columns, config.raster_m, half_tiles_for=cut_for))


CONFIGS = [Sm90Fp8Config(), Sm90Fp8Config(block_n=192), Sm90Fp8Config(256, cluster_n=2), Sm90Fp8Config(256)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.block_m}x{c.block_n}x{c.cluster_n}")
@pytest.mark.parametrize("sms", [2, 7, 132])
def test_no_cta_is_missed(config: Sm90Fp8Config, sms: int) -> None:
    """The pieces are those that a grid of all multiprocessors would make, and every one finds a CTA."""
    rng = random.Random(8)
    fewer = 0
    for _ in range(150):
        groups = rng.choice((1, 1, 2, 5, 40))
        m = rng.choice((groups, rng.randrange(groups, 600), rng.randrange(groups, 4000)))
        sizes = [m] if groups == 1 else draw_group_sizes(groups, m, rng)
        n = 8 * rng.choice((1, rng.randint(1, 60), rng.randint(1, 400)))
        ctas = ctas_of(Problem(m, n, 128, groups, num_sms=sms), config)
        assert 0 < ctas <= sms
        assert ctas % config.cluster_n == 0
        workers, most = ctas // config.cluster_n, sms // config.cluster_n
        work = pieces(sizes, n, config, most)
        assert pieces(sizes, n, config, workers) == work
        assert workers >= min(most, len(work))
        fewer += workers < most
    assert fewer > 10 or sms < 132, "too few small problems to see the bound"


def test_few_tall_tiles_are_all_cut() -> None:
    """Four tiles of each of 8 columns of clusters: 64 halves for 66 clusters, and not 40 workers for 32 tiles."""
    config = Sm90Fp8Config(256, cluster_n=2)
    ctas = ctas_of(Problem(1024, 2048, 128, 1), config)
    assert ctas == 132
    assert len(pieces([1024], 2048, config, ctas // 2)) == 64
