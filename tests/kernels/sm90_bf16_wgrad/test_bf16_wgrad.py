"""The bf16 weight-gradient kernel in the emulator: every bit is the reference's, and nothing else is touched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from padless.emulator.fake_driver import emulated_driver
from padless.kernels.sm90_bf16_wgrad.config import Bf16WgradConfig
from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad
from padless.reference.bf16 import grouped_gemm_wgrad_rows_reference
from padless.testing.bits import same_bits
from padless.testing.gradients import Rows, padded_rows, permuted_rows, poisoned_rows
from support.bf16_problems import Shape, random_rows
from support.weight_gradients import BF16_VARIANTS, gradient_of_rows

EMULATOR = "emulator"
# Every length of the last step and stage, one tile to a group; N and K are not multiples of a tile.
LENGTHS = Shape((0, 1, 15, 16, 17, 33, 47, 49, 63, 64, 65, 127, 129), 3, 24, 72)
# Several tiles along N and K, groups of several stages, more of them than stages of the ring.
TILES = Shape((300, 0, 97), 5, 264, 136)
STORED = Bf16WgradConfig(block_n=128, out_dtype=torch.float32)


def name_of(config: Bf16WgradConfig) -> str:
    return f"{config.block_n}-{config.block_t}-{config.piece_slabs}-{str(config.out_dtype)[6:]}"


def variants(*quick: str) -> list[Any]:
    """All variants as parameters, of which those not named are slow."""
    return [
        pytest.param(config, id=name_of(config), marks=() if name_of(config) in quick else pytest.mark.slow)
        for config in BF16_VARIANTS
    ]


def reference(rows: Rows, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return grouped_gemm_wgrad_rows_reference(rows.dy, rows.x, rows.offs, out_dtype=dtype, accumulation="tensor_core")


def launched(rows: Rows, config: Bf16WgradConfig, onto: Any = None, **settings: Any) -> torch.Tensor:
    """The emulator's result; its reports are errors."""
    with emulated_driver().configured(**settings):
        return gradient_of_rows(rows, config, EMULATOR, onto)


@pytest.mark.parametrize("config", variants("256-32-2-bfloat16"))
def test_bits_are_the_references_at_every_length(config: Bf16WgradConfig) -> None:
    rows = random_rows(LENGTHS, wide=config.out_dtype == torch.float32)
    assert same_bits(launched(poisoned_rows(rows), config), reference(rows, config.out_dtype))


@pytest.mark.slow
@pytest.mark.parametrize("config", variants())
def test_bits_are_the_references_in_many_tiles(config: Bf16WgradConfig) -> None:
    rows = random_rows(TILES, 1)
    wanted = reference(rows, config.out_dtype)
    for raster_m, stages in ((8, 0), (1, 2), (8, 3)):
        given = replace(config, raster_m=raster_m, num_stages=stages)
        assert same_bits(launched(rows, given, num_sms=3), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(36))
def test_bits_are_the_references_in_random_problems(seed: int) -> None:
    """Sizes, N, K, values, kernel and schedule at random."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    sizes = tuple(draw(0, 100) * draw(0, 2) for _ in range(draw(1, 6)))
    shape = Shape(sizes, draw(0, 20), 8 * draw(2, 20), 8 * draw(2, 34))
    rows = poisoned_rows(random_rows(shape, seed, wide=bool(draw(0, 2))))
    config = replace(BF16_VARIANTS[seed % len(BF16_VARIANTS)], num_stages=draw(2, 5))
    out = launched(rows, config, seed=seed, num_sms=draw(1, 5))
    assert same_bits(out, reference(rows, config.out_dtype))


def test_nothing_of_other_groups_has_an_influence() -> None:
    """NaN in rows of no group, groups filled up with zeros, groups in another order behind one of NaN."""
    rows = random_rows(replace(LENGTHS, sizes=(33, 0, 16, 1)), 2)
    out = launched(rows, STORED)
    assert same_bits(launched(poisoned_rows(rows), STORED), out)
    assert same_bits(launched(padded_rows(rows), STORED), out)
    order = [3, 2, 0, 1]
    assert same_bits(launched(permuted_rows(rows, order), STORED)[1:], out[order])


@pytest.mark.slow
def test_nan_in_all_groups_but_one_does_not_show_in_it() -> None:
    rows = random_rows(replace(LENGTHS, sizes=(33, 0, 129, 1, 64)), 2)
    out = launched(rows, STORED)
    for group in range(5):
        own = launched(poisoned_rows(rows, group), STORED)
        assert same_bits(own[group], out[group])
        assert bool(own.isnan().any())


def test_accumulating_adds_once_and_leaves_empty_groups_alone() -> None:
    rows = random_rows(replace(LENGTHS, sizes=(33, 0, 80, 0)), 3)
    stored = launched(rows, STORED)
    before = torch.randn(stored.shape, generator=torch.Generator().manual_seed(5)) * stored.abs().mean()
    for group in (1, 3):
        before[group].view(torch.int32).fill_(0x7FABCDEF)  # a NaN that an addition would not keep
    out = launched(rows, STORED, before)
    assert same_bits(out[[1, 3]], before[[1, 3]])
    assert same_bits(out[[0, 2]], before[[0, 2]] + stored[[0, 2]])
    assert not same_bits(out[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("block_n", [128, pytest.param(256, marks=pytest.mark.slow)])
def test_accumulating_in_many_tiles(block_n: int) -> None:
    """Several tiles to a CTA, so that buffers are used again; what was there is subnormal in places."""
    config = replace(STORED, block_n=block_n)
    rows = random_rows(Shape((100, 0, 50), 3, 144, 264), 6)
    stored = reference(rows, torch.float32)
    before = torch.randn(stored.shape, generator=torch.Generator().manual_seed(5)) * stored.abs().mean()
    before[:, ::3] *= 2.0**-140
    wanted = torch.where(torch.tensor([100, 0, 50])[:, None, None] > 0, before + stored, before)
    with emulated_driver().configured(num_sms=2):
        assert same_bits(gradient_of_rows(rows, config, EMULATOR, before), wanted)


def test_empty_groups_are_stored_as_zeros_and_not_added() -> None:
    rows = random_rows(replace(LENGTHS, sizes=(0, 0, 0)), 4)
    out = launched(poisoned_rows(rows), STORED)
    assert same_bits(out, torch.zeros_like(out))
    before = torch.randn(out.shape)
    assert same_bits(launched(rows, STORED, before), before)


def check_schedules(config: Bf16WgradConfig, seeds: range) -> None:
    """Two tiles and more to a CTA, of 0 to 5 stages; the emulator raises where it has something to report."""
    rows = random_rows(Shape((100, 0, 300), 3, 16, 264), 6)
    first = None
    for seed in seeds:
        given = replace(config, num_stages=2 + seed % 2)
        out = launched(rows, given, seed=seed, num_sms=1 + seed % 3, arithmetic="fast")
        first = out if first is None else first
        assert same_bits(out, first)


def test_no_report_on_any_schedule() -> None:
    check_schedules(replace(STORED, block_t=64), range(3, 4))


@pytest.mark.slow
@pytest.mark.parametrize("config", variants())
def test_no_report_on_24_schedules(config: Bf16WgradConfig) -> None:
    check_schedules(config, range(24))


@pytest.mark.parametrize("offs", [[100, 10, -5, 70], [2**31 - 1] * 4, [0, 2**30, -(2**31), 5]])
def test_wrong_offsets_stay_inside(offs: list[int]) -> None:
    """The emulator reports any access outside the tensors; guards stand beside the output."""
    rows = random_rows(Shape((31, 40, 1, 0), 0, 24, 72), 7)
    wrong = replace(rows, offs=torch.tensor(offs, dtype=torch.int32))
    assert same_bits(launched(wrong, STORED), reference(wrong))


def test_rows_may_lie_apart() -> None:
    rows = random_rows(replace(LENGTHS, sizes=(33, 0, 20)), 8)
    whole = torch.full((3, 26, 88), -7.5)
    wide = torch.full((56, 96), float("nan"), dtype=torch.bfloat16)
    wide[:, 8:32] = rows.dy
    out = grouped_gemm_wgrad(
        wide[:, 8:32], rows.x, offs=rows.offs, out=whole[:, :24, :72], backend=EMULATOR, config=STORED
    )
    assert same_bits(out, launched(rows, STORED))
    assert (whole[:, 24:] == -7.5).all()
    assert (whole[:, :, 72:] == -7.5).all()


@pytest.mark.slow
def test_more_groups_than_lanes_and_threads() -> None:
    rows = random_rows(Shape(tuple((7 * g) % 37 for g in range(390)), 0, 16, 24), 9)
    assert same_bits(launched(rows, STORED), reference(rows))
