"""The Hopper kernel for formats that are exact in bf16, in the emulator: against float64, element by element."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import padless
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledTensor
from padless.kernels.sm90_bf16 import host as sm90_bf16
from padless.kernels.sm90_bf16.config import FORMATS as NUMBERS
from padless.kernels.sm90_bf16.config import PAIRS, Sm90Bf16Config, select_config
from padless.kernels.table import BF16, find_route
from padless.layouts import from_blocked, pack_fp4, to_blocked, to_blocked_groups
from support.ragged import ROOT
from support.sm90_bf16_cases import (
    DRIVER,
    FORMATS,
    Problem,
    error_bound,
    exact_problem,
    exact_result,
    multiply,
    random_problem,
)

SIZES = (5, 0, 9, 1)  # two tiles of 8 tokens in a group, an empty group, a one-row group
N, K = 136, 160  # tails of a 128-row tile, of an m64, of 128 of K; odd numbers of scales


def name(pair: tuple[str, str]) -> str:
    return f"{pair[0]}-{pair[1]}"


def check_close(problem: Problem, out: torch.Tensor) -> None:
    error = (out.double() - exact_result(problem)).abs()
    worst = (error / error_bound(problem, out.dtype)).amax(1)  # of each row
    assert bool((worst <= 1).all()), f"rows off by up to {worst.max():.3g} times the bound"


def test_the_pairs_asked_for_are_there() -> None:
    fp8 = ("MXFP8", "MXFP8_E5M2")
    wanted = {*itertools.product(fp8, fp8), ("MXFP4", "MXFP4"), ("NVFP4", "NVFP4")}
    wanted |= {*itertools.product((BF16, "FP8_BLOCK"), ("MXFP4", "NVFP4")), (BF16, "FP8_BLOCK")}
    assert wanted <= set(PAIRS)


def test_the_page_lists_the_pairs() -> None:
    page = (ROOT / "docs/kernels/sm90_bf16/index.md").read_text()
    table = page.split("| activations A | weights B |\n|---|---|\n")[1].split("\n\n")[0]
    rows = [line.replace("bf16", BF16).strip("| ").split(" | ") for line in table.splitlines()]
    listed = [pair for a, b in rows for pair in itertools.product(a.split(", "), b.split(", "))]
    assert sorted(listed) == sorted(PAIRS)


# --- every pair ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS, ids=name)
def test_exact_data_give_exact_results(pair: tuple[str, str]) -> None:
    """Every product and sum is exact, so each bit is determined: a wrong order of K in one operand cannot pass."""
    problem = exact_problem(pair, SIZES, N, K)
    out = multiply(problem, Sm90Bf16Config(*pair, block_m=8), seed=1)
    assert torch.equal(out, exact_result(problem, torch.float32))


@pytest.mark.parametrize("pair", PAIRS, ids=name)
def test_random_data_are_within_the_bound(pair: tuple[str, str]) -> None:
    problem = random_problem(pair, SIZES, N, K)
    seed = PAIRS.index(pair)
    out = multiply(problem, Sm90Bf16Config(*pair, block_m=8), seed=seed, num_sms=1 + seed % 3)
    check_close(problem, out)


def test_the_bound_is_tight_enough_to_see_a_lost_product() -> None:
    problem = random_problem(("NVFP4", "NVFP4"), SIZES, N, K)
    changed = problem.b.data.view(torch.uint8).clone()
    changed[:, 3, 7] ^= 0x20  # one code of one row
    other = BlockScaledTensor(changed.view(problem.b.dtype), problem.b.scale, NVFP4, problem.b.global_scale)
    moved = exact_result(dataclasses.replace(problem, b=other)).to(torch.float32)
    with pytest.raises(AssertionError, match="times the bound"):
        check_close(problem, moved)


@pytest.mark.parametrize("pair", [("NVFP4", "NVFP4"), (BF16, "MXFP4")], ids=name)
def test_swapped_nibbles_of_one_operand_change_the_result(pair: tuple[str, str]) -> None:
    """The exact data would show it: what test_exact_data_give_exact_results rests on."""
    problem = exact_problem(pair, SIZES, N, K)
    codes = problem.b.data.view(torch.uint8)
    swapped = ((codes >> 4) | (codes << 4)).view(problem.b.dtype)
    b = BlockScaledTensor(swapped, problem.b.scale, problem.b.format, problem.b.global_scale)
    assert not torch.equal(exact_result(problem), exact_result(dataclasses.replace(problem, b=b)))


# --- every tile ------------------------------------------------------------------------------------------

TILES = [
    # block_m, block_n, warpgroups, pair, layout of the weights' scales, output
    (8, 256, 4, ("MXFP8", "MXFP8"), "blocked", torch.bfloat16),
    (16, 128, 2, ("NVFP4", "NVFP4"), "blocked", torch.float16),
    (16, 256, 4, ("NVFP4", "NVFP4"), "plain", torch.bfloat16),
    (64, 256, 4, (BF16, "NVFP4"), "blocked", torch.float32),
    (32, 256, 2, ("MXFP4", "MXFP4"), "blocked", torch.bfloat16),
    (64, 128, 2, ("FP8_BLOCK", "NVFP4"), "blocked", torch.bfloat16),
    (128, 128, 2, ("FP8_BLOCK", "MXFP4"), "plain", torch.float32),
    (128, 256, 2, (BF16, "NVFP4"), "blocked", torch.float16),
    (32, 256, 2, (BF16, "FP8_BLOCK"), "plain", torch.bfloat16),
    (128, 128, 2, (BF16, "FP8_BLOCK"), "plain", torch.float16),
]


@pytest.mark.parametrize(("block_m", "block_n", "warpgroups", "pair", "layout", "dtype"), TILES, ids=lambda v: str(v))
def test_tiles_layouts_and_outputs(
    block_m: int, block_n: int, warpgroups: int, pair: tuple[str, str], layout: str, dtype: torch.dtype
) -> None:
    config = Sm90Bf16Config(*pair, block_m=block_m, block_n=block_n, num_warpgroups=warpgroups)
    # An odd number of column tiles of scales; more rows than a tile has; columns in two tiles of weight rows.
    problem = random_problem(pair, (3, block_m + 1, 0), 328, 320, layout=layout)
    check_close(problem, multiply(problem, config, dtype, seed=2))


# Tiles of 128 tokens that have fewer, as many as a copy, one more, all of them; second tiles of one row and of 65.
ENDS_OF_GROUPS = (1, 63, 64, 65, 0, 127, 128, 129, 192, 193, 0)
# Of those pairs that take tiles of at most 64 tokens in a loop of their own.
IN_TWO_LOOPS = [
    ((BF16, "MXFP4"), 256, "blocked"),
    ((BF16, "NVFP4"), 256, "plain"),
    ((BF16, "FP8_BLOCK"), 128, "plain"),
    (("FP8_BLOCK", "MXFP4"), 128, "blocked"),
    (("MXFP4", "MXFP4"), 256, "plain"),
    (("NVFP4", "NVFP4"), 128, "blocked"),
    (("MXFP8", "MXFP4"), 128, "plain"),
]


@pytest.mark.parametrize(
    ("sizes", "pair", "block_n", "layout"),
    [
        ((64, 0, 65, 129), *IN_TWO_LOOPS[0]),
        *(pytest.param(ENDS_OF_GROUPS, *case, marks=pytest.mark.slow) for case in IN_TWO_LOOPS),
    ],
    ids=str,
)
def test_tiles_of_few_tokens_among_tiles_of_many(
    sizes: tuple[int, ...], pair: tuple[str, str], block_n: int, layout: str
) -> None:
    """With the bits of tiles that all have 64 tokens, though one CTA goes from the one kind of tile to the other."""
    problem = random_problem(pair, sizes, 136, 288, spare_rows=70, layout=layout)
    config = Sm90Bf16Config(*pair, block_m=128, block_n=block_n, num_stages=2)
    assert config.box_rows == 64
    out = multiply(problem, config, torch.bfloat16, seed=4, num_sms=2)
    check_close(problem, out)
    assert torch.equal(out, multiply(problem, Sm90Bf16Config(*pair, block_m=64), torch.bfloat16))


def test_which_tiles_are_copied_in_boxes_of_64() -> None:
    for pair, block_n, _ in IN_TWO_LOOPS:
        for block_m in (8, 16, 32, 64):
            assert Sm90Bf16Config(*pair, block_m=block_m, block_n=block_n).box_rows == block_m
    for pair in PAIRS:
        rows = 128 if pair == ("FP8_BLOCK", "NVFP4") else 64
        assert Sm90Bf16Config(*pair, block_m=128, block_n=128).box_rows == rows
    for pair in (("NVFP4", "NVFP4"), ("MXFP8", "MXFP4"), ("MXFP8_E5M2", "MXFP8")):
        assert Sm90Bf16Config(*pair, block_m=128, block_n=256).box_rows == 128


@pytest.mark.parametrize(
    ("format", "block_m", "layout"),
    [("MXFP4", 32, "plain"), ("MXFP4", 32, "blocked"), ("NVFP4", 64, "plain"), ("NVFP4", 64, "blocked")],
)
def test_two_blocks_of_k_to_a_stage_are_as_good_as_one(format: str, block_m: int, layout: str) -> None:
    """Bit for bit: the order of the sums does not change. 3 blocks, the last of them cut short."""
    pair = (format, format)
    problem = random_problem(pair, (3, block_m + 1, 0), 328, 320, layout=layout)
    one = Sm90Bf16Config(*pair, block_m=block_m, block_n=256, num_warpgroups=4, stage_blocks=1)
    two = dataclasses.replace(one, stage_blocks=2)
    out = torch.bfloat16
    assert torch.equal(multiply(problem, two, out, seed=1), multiply(problem, one, out))


@pytest.mark.parametrize("pair", [("NVFP4", "NVFP4"), ("MXFP8", "MXFP8")], ids=name)
def test_scales_that_can_be_read_in_place_are(pair: tuple[str, str]) -> None:
    problem = random_problem(pair, (4, 9), 72, 1024)
    out = torch.empty(16, 72)
    prepared = sm90_bf16.prepare(DRIVER, problem.a, problem.b, problem.offs, out, None)
    assert prepared.copies == ()
    check_close(problem, multiply(problem, select_config(*pair, 13, 72, 2)))


def test_blocked_scales_of_activations_count_too() -> None:
    problem = random_problem(("MXFP8", "MXFP8"), SIZES, 72, 160)
    expected = multiply(problem)
    a = problem.a
    assert isinstance(a, BlockScaledTensor)
    for layout, scale in (
        ("blocked", to_blocked(a.scale)),
        ("blocked_groups", to_blocked_groups(a.scale, problem.offs)),
    ):
        other = BlockScaledTensor(a.data, scale, a.format, scale_layout=layout)
        assert torch.equal(multiply(dataclasses.replace(problem, a=other)), expected), layout


# --- shapes of groups ------------------------------------------------------------------------------------

GROUPS = {
    "one-row groups": ((1, 1, 1, 1), 0),
    "empty first and last": ((0, 33, 2, 0), 0),
    "all in one": ((0, 0, 41), 0),
    "rows past the end": ((7, 0, 2), 30),
    "all empty": ((0, 0, 0), 5),
    "tiny": ((1,), 0),
}


@pytest.mark.parametrize("sizes", GROUPS)
def test_groups(sizes: str) -> None:
    """One kernel for all of them; N and K smaller than a tile."""
    rows, spare = GROUPS[sizes]
    problem = random_problem(("MXFP4", "MXFP4"), rows, 40, 96, spare_rows=spare)
    out = multiply(problem, Sm90Bf16Config("MXFP4", "MXFP4", block_m=16), torch.bfloat16, num_sms=3)
    check_close(problem, out)


def test_the_public_calls_end_here() -> None:
    problem = random_problem((BF16, "NVFP4"), (4, 3), 72, 160, spare_rows=0)
    assert find_route("gemm", "sm_90a", BF16, "NVFP4").kernel == sm90_bf16.KERNEL
    out = padless.grouped_gemm(problem.a, problem.b, problem.offs, backend="emulator", out_dtype=torch.float32)
    check_close(problem, out)
    b = problem.b
    assert b.global_scale is not None
    one = BlockScaledTensor(b.data[0], b.scale[0], b.format, b.global_scale[:1])
    dense = padless.gemm(problem.a[:4], one, backend="emulator", out_dtype=torch.float32)
    assert torch.equal(dense, out[:4])


# --- numbers that are not numbers, and large and small ones ----------------------------------------------


def ones(fmt: padless.BlockScaledFormat, shape: tuple[int, ...], scale: float = 1.0) -> BlockScaledTensor:
    if fmt.codes_per_byte == 2:
        data = pack_fp4(torch.full(shape, 2, dtype=torch.uint8))
    else:
        data = torch.ones(shape).to(fmt.data_dtype)
    kind = "activation" if len(shape) == 2 else "weight"
    return BlockScaledTensor(data, torch.full(fmt.scale_shape(shape, kind), scale).to(fmt.scale_dtype), fmt)


def same_as_reference(a: BlockScaledTensor | torch.Tensor, b: BlockScaledTensor) -> torch.Tensor:
    problem = Problem(a, b, torch.tensor([a.shape[0]], dtype=torch.int32))
    out = multiply(problem, expect_finite=False)
    expected = exact_result(problem, torch.float32)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())
    return out


@pytest.mark.parametrize("fmt", [MXFP8, MXFP4, NVFP4], ids=lambda f: f.name)
def test_a_nan_scale_makes_its_row_nan(fmt: padless.BlockScaledFormat) -> None:
    a, b = ones(fmt, (6, 64)), ones(fmt, (1, 24, 64))
    nan = 0xFF if fmt.scale_dtype == torch.float8_e8m0fnu else 0x7F
    a.scale.view(torch.uint8)[2, 1] = nan
    b.scale.view(torch.uint8)[0, 17, 0] = nan
    out = same_as_reference(a, b)
    assert bool(out[2].isnan().all())
    assert bool(out[:, 17].isnan().all())
    assert int(out.isnan().sum()) == 24 + 6 - 1


def test_nan_and_large_scales_of_float32() -> None:
    """A scale of 2^120 beside codes of 448, which no bf16 factor could hold exactly, and NaN of one block alone."""
    b = ones(FP8_BLOCK, (1, 136, 160))
    b.data.view(torch.uint8)[0, 5, 7] = 0xFF
    b.data.view(torch.uint8)[0, 6] = 0x7E  # 448
    b.scale[0, 0, 1] = 2.0**110 * (1 + 2.0**-20)
    b.scale[0, 1, 0] = float("nan")
    out = same_as_reference(torch.ones(6, 160, dtype=torch.bfloat16), b)
    assert bool(out[:, 128:].isnan().all())
    assert int(out.isnan().sum()) == 6 * 9


@pytest.mark.parametrize("fmt", [MXFP8, MXFP8_E5M2], ids=lambda f: f.name)
def test_a_nan_or_infinite_code_makes_its_row_so(fmt: padless.BlockScaledFormat) -> None:
    a, b = ones(fmt, (6, 64)), ones(fmt, (1, 24, 64))
    a.data.view(torch.uint8)[3, 33] = 0x7F
    b.data.view(torch.uint8)[0, 5, 7] = 0xFF
    if fmt is MXFP8_E5M2:
        a.data.view(torch.uint8)[1, 50] = 0xFC  # -Inf
    out = same_as_reference(a, b)
    assert int(out.isnan().sum()) == 24 + 6 - 1
    assert int(out.isinf().sum()) == (23 if fmt is MXFP8_E5M2 else 0)


@pytest.mark.parametrize("fmt", [MXFP8, MXFP4], ids=lambda f: f.name)
def test_the_ends_of_the_scales_range_are_exact(fmt: padless.BlockScaledFormat) -> None:
    a, b = ones(fmt, (4, 64)), ones(fmt, (1, 16, 64))
    a.scale.view(torch.uint8)[:] = 254  # 2^127
    b.scale.view(torch.uint8)[:] = 0  # 2^-127, in bf16 a subnormal
    b.scale.view(torch.uint8)[0, 3] = 1
    out = same_as_reference(a, b)
    assert out[0, 0] == 64
    assert out[0, 3] == 128


def test_nvfp4_scales_range_from_the_smallest_to_the_largest() -> None:
    a, b = ones(NVFP4, (4, 64)), ones(NVFP4, (1, 16, 64))
    a.scale.view(torch.uint8)[:, 1] = 0x7E  # 448
    b.scale.view(torch.uint8)[0, 3] = 0x01  # 2^-9
    b.scale.view(torch.uint8)[0, 4] = 0x00
    out = same_as_reference(a, b)
    assert out[0, 3] == (448 + 3) * 16 * 2.0**-9
    assert out[0, 4] == 0


@pytest.mark.parametrize("fmt", [MXFP8, NVFP4], ids=lambda f: f.name)
def test_what_pads_blocked_scales_does_not_matter(fmt: padless.BlockScaledFormat) -> None:
    """Rows past N and columns past K are NaN: the second is met by zero codes, and 0 * NaN would be NaN."""
    problem = random_problem((fmt.name, fmt.name), (5,), 72, 160)
    b = problem.b
    rows, columns = b.scale.shape[-2:]
    whole = torch.full((128, -(-columns // 4) * 4), 0xFF if fmt is MXFP8 else 0x7F, dtype=torch.uint8)
    whole[:rows, :columns] = b.scale[0].view(torch.uint8)
    blocked = to_blocked(whole).view(b.scale.dtype)
    assert torch.equal(from_blocked(blocked, rows, columns).view(torch.uint8), b.scale[0].view(torch.uint8))
    other = BlockScaledTensor(b.data, blocked[None], fmt, b.global_scale, "blocked")
    assert torch.equal(multiply(dataclasses.replace(problem, b=other)), multiply(problem))


# --- which tile ------------------------------------------------------------------------------------------


def test_a_tile_has_room_for_what_a_group_may_have() -> None:
    """A group alone has all rows; of several, some have more than the mean, and then a larger tile may save a round."""
    alone = ((0, 8), (1, 8), (8, 8), (9, 16), (32, 32), (33, 64), (65, 128))
    of_many = ((0, 8), (3, 8), (64, 8), (128, 8), (256, 16), (512, 16), (1024, 32), (4096, 64), (8192, 128))
    for groups, sizes in ((1, alone), (64, of_many)):
        for m, tokens in sizes:
            assert select_config("NVFP4", "NVFP4", m, 8192, groups).block_m == tokens, (m, groups)


def test_few_tiles_are_narrow_so_that_more_multiprocessors_have_one() -> None:
    """Two groups of n rows: tiles of 256 only where 128 rows a tile were more tiles than there are multiprocessors."""
    for n, sms, block_n in ((33 * 256, 132, 128), (33 * 256 + 8, 132, 256), (256, 4, 128), (512, 4, 256)):
        config = select_config("BF16", "MXFP4", 2, n, 300, num_sms=sms)
        assert (config.block_n, config.num_warpgroups) == (block_n, 4 if block_n == 256 else 2), (n, sms)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"a_format": "FP8_BLOCK", "b_format": "MXFP8"}, r"b_format is 'MXFP8'; allowed: MXFP4, NVFP4 with"),
        ({"a_format": "FP16"}, r"a_format is 'FP16'"),
        (
            {"a_format": BF16, "b_format": "FP8_BLOCK", "out_dtype": torch.float32},
            r"block_m is 128; allowed: at most 64",
        ),
        (
            {"a_format": BF16, "b_format": "FP8_BLOCK", "block_n": 256, "block_m": 64},
            r"block_n is 256; allowed: 128 with",
        ),
        ({"block_m": 24}, r"block_m is 24; allowed: 8, 16, 32, 64 or 128"),
        ({"block_n": 64}, r"block_n is 64"),
        ({"num_warpgroups": 4}, r"block_n is 128; allowed: 256 with 4 warpgroups"),
        ({"num_warpgroups": 4, "block_n": 256}, r"block_m is 128; allowed: at most 64 with 4 warpgroups"),
        ({"num_stages": 1}, r"num_stages is 1"),
        ({"stage_blocks": 3}, r"stage_blocks is 3; allowed: 0 \(chosen\), 1 or 2"),
        ({"a_format": "MXFP8", "b_format": "MXFP8", "stage_blocks": 2}, r"stage_blocks is 2; allowed: 0 or 1"),
    ],
)
def test_a_config_that_cannot_be(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sm90Bf16Config(**{"a_format": "NVFP4", "b_format": "NVFP4", **fields})


# --- schedules -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=name)
@pytest.mark.parametrize("warpgroups", [2, 4])
def test_no_report_on_many_schedules(pair: tuple[str, str], warpgroups: int) -> None:
    config = Sm90Bf16Config(*pair, block_m=16, block_n=256, num_warpgroups=warpgroups, num_stages=2)
    problem = random_problem(pair, (20, 0, 3), 328, 544)
    first = multiply(problem, config)
    for seed in range(1, 12):
        assert torch.equal(multiply(problem, config, seed=seed, num_sms=1 + seed % 3), first), seed


def test_every_format_is_numbered() -> None:
    assert set(FORMATS) | {BF16} == set(NUMBERS)
