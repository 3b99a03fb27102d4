"""The weight-gradient kernel in the emulator: every bit is the reference's, and nothing else is touched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from padless.emulator.fake_driver import emulated_driver
from padless.kernels.sm90_fp8_wgrad.config import WgradConfig
from padless.layouts import GroupedColumns
from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad
from padless.reference.wgrad import grouped_gemm_wgrad_reference
from padless.testing.bits import same_bits
from padless.testing.gradients import WgradShape, padded, permuted, poisoned, random_operands, with_data
from support.weight_gradients import FP8_VARIANTS, GuardedGradient, gradient_of_columns

EMULATOR = "emulator"
# Every length of the last block of tokens, one tile to a group; N and K are not multiples of a tile.
LENGTHS = WgradShape((0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129), 3, 48, 80)
# Several tiles along N and K, groups of several blocks, more of them than stages, and alignments that differ.
TILES = WgradShape((300, 0, 97), 5, 272, 144, (128, 32))
STORED = WgradConfig(block_m=128, out_dtype=torch.float32)


def name_of(config: WgradConfig) -> str:
    return f"{config.mode}-{config.block_m}-{str(config.out_dtype)[6:]}"


def variants(*quick: str) -> list[Any]:
    """All variants as parameters, of which those not named are slow."""
    return [
        pytest.param(config, id=name_of(config), marks=() if name_of(config) in quick else pytest.mark.slow)
        for config in FP8_VARIANTS
    ]


def reference(dy: GroupedColumns, x: GroupedColumns, dtype: torch.dtype) -> torch.Tensor:
    return grouped_gemm_wgrad_reference(dy, x, out_dtype=dtype, accumulation="tensor_core")


def launched(
    dy: GroupedColumns, x: GroupedColumns, config: WgradConfig, onto: Any = None, **settings: Any
) -> torch.Tensor:
    """The emulator's result; its reports are errors."""
    with emulated_driver().configured(**settings):
        return gradient_of_columns(dy, x, config, EMULATOR, onto)


@pytest.mark.parametrize("config", variants("1d2d-256-bfloat16", "1d1d-128-float32"))
def test_bits_are_the_references_at_every_length(config: WgradConfig) -> None:
    dy, x = random_operands(LENGTHS, config.mode, any_code=config.block_m == 256)
    assert same_bits(launched(dy, x, config), reference(dy, x, config.out_dtype))


@pytest.mark.parametrize("config", variants())
def test_bits_are_the_references_in_many_tiles(config: WgradConfig) -> None:
    dy, x = random_operands(TILES, config.mode, 1)
    wanted = reference(dy, x, config.out_dtype)
    for raster_m, stages in ((8, 0), (1, 2)):
        given = replace(config, raster_m=raster_m, num_stages=stages)
        assert same_bits(launched(dy, x, given, num_sms=3), wanted)


@pytest.mark.parametrize("mode", ["1d2d", pytest.param("1d1d", marks=pytest.mark.slow)])
def test_nothing_of_other_groups_has_an_influence(mode: str) -> None:
    """NaN in every code that is not a group's own, groups padded to 128 with zeros, groups in another order."""
    shape = replace(LENGTHS, sizes=(33, 0, 129, 1, 64))
    config = replace(STORED, mode=mode)
    dy, x = random_operands(shape, mode, 2)
    out = launched(dy, x, config)
    assert same_bits(launched(poisoned(dy), poisoned(x), config), out)
    assert same_bits(launched(padded(dy), padded(x), config), out)
    order = (4, 2, 0, 3, 1)
    assert same_bits(launched(permuted(dy, order), permuted(x, order), config)[1:], out[list(order)])
    for group in range(5):  # NaN in all groups but one
        own = launched(poisoned(dy, group), poisoned(x, group), config)
        assert same_bits(own[group], out[group])
        assert bool(own.isnan().any())


def test_accumulating_adds_once_and_leaves_empty_groups_alone() -> None:
    shape = replace(LENGTHS, sizes=(33, 0, 129, 0, 64))
    for config in (STORED, replace(STORED, block_m=256)):
        dy, x = random_operands(shape, "1d2d", 3)
        stored = launched(dy, x, config)
        before = torch.randn(stored.shape, generator=torch.Generator().manual_seed(5)) * stored.abs().mean()
        for group in (1, 3):
            before[group].view(torch.int32).fill_(0x7FABCDEF)  # a NaN that an addition would not keep
        out = launched(dy, x, config, before)
        assert same_bits(out[[1, 3]], before[[1, 3]])
        kept = [0, 2, 4]
        assert same_bits(out[kept], before[kept] + stored[kept])
        assert not same_bits(out[kept], before[kept])


@pytest.mark.parametrize("config", [v for v in variants("1d2d-128-float32") if v.values[0].out_dtype == torch.float32])
def test_accumulating_in_many_tiles(config: WgradConfig) -> None:
    """Several tiles to a CTA, so that buffers are used again; what was there lies apart and is subnormal in places."""
    dy, x = random_operands(TILES, config.mode, 1)
    stored = reference(dy, x, torch.float32)
    before = torch.randn(stored.shape, generator=torch.Generator().manual_seed(5)) * stored.abs().mean()
    before[:, ::3] *= 2.0**-140
    wanted = torch.where(torch.tensor([300, 0, 97])[:, None, None] > 0, before + stored, before)
    assert same_bits(launched(dy, x, config, before, num_sms=2), wanted)


# Three tiles along K, of which the last cluster has one; and one, of which the second CTA has nothing.
PAIRS = (WgradShape((160, 0, 33), 5, 48, 272, (128, 32)), WgradShape((33, 200), 0, 160, 80))


@pytest.mark.parametrize(
    "config",
    [
        WgradConfig(block_m=128, cluster_n=2),
        pytest.param(WgradConfig(block_m=256, cluster_n=2), marks=pytest.mark.slow),
        pytest.param(WgradConfig(block_m=256, cluster_n=2, mode="1d1d"), marks=pytest.mark.slow),
        pytest.param(replace(STORED, cluster_n=2), marks=pytest.mark.slow),
        pytest.param(replace(STORED, cluster_n=2, mode="1d1d"), marks=pytest.mark.slow),
    ],
)
def test_clusters_have_the_references_bits(config: WgradConfig) -> None:
    for shape in PAIRS:
        dy, x = random_operands(shape, config.mode, 1)
        out = launched(poisoned(dy), poisoned(x), config, num_sms=2)
        assert same_bits(out, reference(dy, x, config.out_dtype))


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            replace(STORED, accumulate=True, block_m=rows, reduced_pieces=pieces, cluster_n=cluster, mode=mode),
            id=f"{mode}-{rows}-{pieces}-{cluster}",
            marks=() if (rows, cluster) == (256, 2) and mode == "1d2d" and pieces == 2 else pytest.mark.slow,
        )
        for mode in ("1d2d", "1d1d")
        for rows, pieces, cluster in ((128, 1, 1), (128, 1, 2), (256, 0, 2), (256, 2, 1), (256, 2, 2), (256, 3, 2))
    ],
)
def test_pieces_that_tma_adds(config: WgradConfig) -> None:
    """Several tiles to a CTA; what was there is subnormal in places, and so is the sum where dY is zero."""
    for shape in PAIRS:
        dy, x = random_operands(shape, config.mode, 1)
        dy.data.view(torch.uint8)[::6] = 0
        stored = reference(dy, x, torch.float32)
        before = torch.randn(stored.shape, generator=torch.Generator().manual_seed(5)) * stored.abs().mean()
        before[:, ::3] *= 2.0**-140
        wanted = torch.where(torch.tensor(shape.sizes)[:, None, None] > 0, before + stored, before)
        assert same_bits(launched(dy, x, config, before, num_sms=2), wanted)


def test_empty_groups_are_stored_as_zeros() -> None:
    for sizes in ((0, 0, 0), (0, 40, 0)):
        dy, x = random_operands(replace(LENGTHS, sizes=sizes), "1d2d", 4)
        for config in (STORED, WgradConfig(block_m=256)):
            out = launched(poisoned(dy), poisoned(x), config)
            empty = out[[g for g, size in enumerate(sizes) if size == 0]]
            assert same_bits(empty, torch.zeros_like(empty))


def test_accumulating_nothing_touches_nothing() -> None:
    dy, x = random_operands(replace(LENGTHS, sizes=(0, 0, 0)), "1d2d", 4)
    before = torch.randn((3, 48, 80))
    assert same_bits(launched(dy, x, STORED, before), before)


def check_schedules(config: WgradConfig, seeds: range) -> None:
    """Two tiles and more to a CTA, of 0 to 5 blocks; the emulator raises where it has something to report."""
    dy, x = random_operands(WgradShape((200, 0, 600), 3, 16, 144), config.mode, 6)
    first = None
    for seed in seeds:
        given = replace(config, num_stages=2 + seed % 2)
        adds = seed % 2 == 0 and config.out_dtype == torch.float32
        onto = torch.zeros((3, 16, 144)) if adds else None
        sms = config.cluster_n * (1 + seed % 3)  # one to three clusters
        out = launched(dy, x, given, onto, seed=seed, num_sms=sms, arithmetic="fast")
        first = out if first is None else first
        assert same_bits(out, first)


@pytest.mark.parametrize("config", variants("1d2d-256-float32"))
def test_no_report_on_any_schedule(config: WgradConfig) -> None:
    check_schedules(config, range(3, 5))


@pytest.mark.parametrize("config", variants())
def test_no_report_on_fifty_schedules(config: WgradConfig) -> None:
    check_schedules(config, range(50))


@pytest.mark.parametrize("offs", [[300, 10, -5, 200], [2**31 - 1] * 4, [0, 2**30, -(2**31), 5]])
def test_wrong_offsets_and_starts_stay_inside(offs: list[int]) -> None:
    """The emulator reports any access outside the tensors; guards stand beside the output."""
    dy, x = random_operands(WgradShape((31, 64, 1, 0), 0, 48, 80), "1d2d", 7)
    wrong = torch.tensor(offs, dtype=torch.int32)
    for starts in (dy.starts, wrong, torch.tensor([1, 17, 33, 2**30 + 5], dtype=torch.int32)):
        for blocks in (dy.block_starts, wrong):
            fields = {"offs": wrong, "starts": starts, "block_starts": blocks}
            launched(replace(dy, **fields), replace(x, **fields), STORED, arithmetic="fast")


def test_rows_of_the_output_may_lie_apart() -> None:
    dy, x = random_operands(replace(LENGTHS, sizes=(33, 0, 64)), "1d2d", 8)
    whole = torch.full((3, 50, 96), -7.5)
    out = grouped_gemm_wgrad(dy, x, out=whole[:, :48, :80], backend=EMULATOR, config=STORED)
    assert same_bits(out, launched(dy, x, STORED))
    assert (whole[:, 48:] == -7.5).all()
    assert (whole[:, :, 80:] == -7.5).all()


@pytest.mark.slow
def test_more_groups_than_lanes_and_threads() -> None:
    sizes = tuple((7 * g) % 37 for g in range(390))
    dy, x = random_operands(WgradShape(sizes, 0, 16, 16), "1d2d", 9)
    assert same_bits(launched(dy, x, STORED), reference(dy, x, torch.float32))


# --- the checks above can fail ---------------------------------------------------------------------------


def test_slack_that_is_not_zero_is_seen() -> None:
    """A group's last K step takes its slack: one code there that is not zero changes the result."""
    dy, x = random_operands(replace(LENGTHS, sizes=(33, 0, 64)), "1d2d", 10)
    wanted = reference(dy, x, torch.float32)
    assert same_bits(launched(dy, x, STORED), wanted)
    codes = [operand.data.view(torch.uint8).clone() for operand in (dy, x)]
    for code in codes:
        code[:, 33] = 0x40  # token 33 of a group of 33
    out = launched(*(with_data(operand, code) for operand, code in zip((dy, x), codes, strict=True)), STORED)
    assert not same_bits(out[0], wanted[0])
    assert same_bits(out[2], wanted[2])


def test_scales_of_padded_starts_are_seen() -> None:
    """Scale rows counted as if groups were padded to 128 tokens before them."""
    dy, x = random_operands(replace(LENGTHS, sizes=(33, 0, 64)), "1d2d", 11)
    wrong = torch.tensor([0, 1, 1], dtype=torch.int32) + torch.tensor([0, 0, 1], dtype=torch.int32)
    out = launched(replace(dy, block_starts=wrong), x, STORED)
    assert not same_bits(out, reference(dy, x, torch.float32))


def test_an_unwritten_element_and_a_touched_guard_are_seen() -> None:
    guarded = GuardedGradient((2, 3, 16), torch.float32)
    guarded.out.fill_(1.0)
    guarded.check()
    guarded.out.view(torch.int32)[1, 2, 15] = 0x7FC0DEAD
    with pytest.raises(AssertionError, match=r"rows \[5\] of 6 were not written.*: 1 elements"):
        guarded.check()
    guarded.out.fill_(1.0)
    torch.as_strided(guarded.out, (1,), (1,), guarded.out.storage_offset() + guarded.out.numel()).zero_()
    with pytest.raises(AssertionError, match="guard"):
        guarded.check()
