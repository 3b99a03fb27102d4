"""The MXFP8 weight-gradient kernel of Blackwell in the emulator: right, and independent of other groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import padless
from padless import MXFP8, Epilogue, grouped_gemm_epilogue, quantize
from padless.emulator.fake_driver import driver_of
from padless.kernels.sm100_mxfp8_wgrad import host
from padless.kernels.sm100_mxfp8_wgrad.config import Mxfp8WgradConfig, select_config
from padless.ops.grouped_gemm_wgrad_mxfp8 import grouped_gemm_wgrad_mxfp8
from padless.reference.wgrad_mxfp8 import decoded, grouped_gemm_wgrad_mxfp8_reference
from padless.testing.bits import same_bits
from support.mxfp8_wgrad import Columns, columns_of, group_of, launched, random_columns

BACKEND = "emulator:sm_100a"
DRIVER = driver_of(BACKEND)
STORED = Mxfp8WgradConfig(num_stages=2, out_dtype=torch.float32)
# Every length of the last step and stage; N and K differ and are no multiples of a tile.
PAIR = replace(STORED, cta_group=2)
LENGTHS = (0, 1, 31, 32, 33, 63, 65, 96, 97, 127, 128, 129, 257)
TILES = (300, 0, 97)


def reference(problem: Columns, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    shape = (len(problem.sizes), problem.dy[0].shape[1], problem.x[0].shape[1])
    out = torch.empty(shape, dtype=dtype)
    return grouped_gemm_wgrad_mxfp8_reference(problem.dy, problem.x, problem.offs, out=out, accumulate=False)


def magnitudes(problem: Columns) -> torch.Tensor:
    """Sums of the products' magnitudes, which rounding errors are bounded by."""
    found, start, first = [], 0, 0
    for size in problem.sizes:
        dy, x = (decoded(operand, start, start + size, first).abs() for operand in (problem.dy, problem.x))
        found.append(dy.T @ x)
        start, first = start + size, first + 4 * -(-size // 128)
    return torch.stack(found)


@pytest.mark.parametrize(
    ("sizes", "n", "k"),
    [(LENGTHS, 48, 16), pytest.param(TILES, 272, 144, marks=pytest.mark.slow)],
    ids=["lengths", "tiles"],
)
def test_sums_are_exact_but_for_the_tensor_cores_rounding(sizes: tuple[int, ...], n: int, k: int) -> None:
    """Rows of no group and their scales are NaN; the tensor core keeps 25 bits below the largest term of 32 tokens."""
    problem = random_columns(sizes, 5, n, k)
    out = launched(DRIVER, problem, STORED)
    steps = -(-max(sizes) // 32)
    bound = 34 * steps * 2.0**-25 * magnitudes(problem)
    assert bool(((out - reference(problem)).abs() <= bound).all())
    assert not out[sizes.index(0)].any()
    assert out.abs().amax() > 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_problems(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    sizes = tuple(draw(0, 200) * draw(0, 2) for _ in range(draw(1, 6)))
    problem = random_columns(sizes, draw(0, 40), 16 * draw(1, 10), 16 * draw(1, 18), seed)
    config = replace(STORED, num_stages=draw(2, 5))
    with DRIVER.configured(seed=seed):
        out = launched(DRIVER, problem, config)
    steps = -(-max(sizes) // 32)
    assert bool(((out - reference(problem)).abs() <= 34 * steps * 2.0**-25 * magnitudes(problem)).all())


@pytest.mark.parametrize(
    ("sizes", "behind", "n", "k"),
    [((1, 0, 70), 7, 144, 48), pytest.param((300, 0, 97, 1, 33), 3, 272, 400, marks=pytest.mark.slow)],
    ids=["half of the columns", "several tiles"],
)
def test_a_pairs_bits_are_those_of_single_ctas(sizes: tuple[int, ...], behind: int, n: int, k: int) -> None:
    """Groups without a token and of one, part of a step and of a stage, NaN behind the last; all are added to."""
    problem = random_columns(sizes, behind, n, k, 4)
    want = launched(DRIVER, problem, STORED)
    assert same_bits(launched(DRIVER, problem, replace(PAIR, accumulate=True), want.clone()), want + want)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_pairs_bits_in_random_problems(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    sizes = tuple(draw(0, 300) * draw(0, 2) + draw(0, 2) for _ in range(draw(1, 5)))
    problem = random_columns(sizes, draw(1, 40), 16 * draw(1, 20), 16 * draw(1, 30), seed)
    with DRIVER.configured(seed=seed):
        config = replace(PAIR, num_stages=draw(2, 7))
        want = launched(DRIVER, problem, STORED)
        assert same_bits(launched(DRIVER, problem, config), want)
        assert same_bits(launched(DRIVER, problem, replace(config, out_dtype=torch.bfloat16)), want.bfloat16())


def test_bfloat16_is_the_float32_sum_rounded() -> None:
    problem = random_columns((40, 0, 130), 3, 48, 80, 1)
    exact = launched(DRIVER, problem, STORED)
    assert same_bits(launched(DRIVER, problem, replace(STORED, out_dtype=torch.bfloat16)), exact.bfloat16())


def test_nothing_of_other_groups_has_an_influence() -> None:
    """Each group alone, in another order, under NaN in its neighbours, and filled up with zeros: the same bits."""
    problem = random_columns((33, 0, 130, 1), 3, 48, 16, 2)
    out = launched(DRIVER, problem, STORED)
    for group, size in enumerate(problem.sizes):
        if size:
            assert same_bits(launched(DRIVER, group_of(problem, group), STORED)[0], out[group])

    poisoned = [codes.clone() for codes, _ in (problem.dy, problem.x)]
    for codes in poisoned:
        codes.view(torch.uint8)[:33] = 0x7F
        codes.view(torch.uint8)[163:] = 0x7F
    dy, x = ((codes, scale) for codes, (_, scale) in zip(poisoned, (problem.dy, problem.x), strict=True))
    again = launched(DRIVER, replace(problem, dy=dy, x=x), STORED)
    assert same_bits(again[2], out[2])
    assert bool(again[0].isnan().any())
    assert bool(again[3].isnan().all())

    rows = [torch.zeros(160, t[0].shape[1]) for t in (problem.dy, problem.x)]
    for whole, operand in zip(rows, (problem.dy, problem.x), strict=True):
        whole[:130] = decoded(operand, 33, 163, 4).float()
    filled = Columns(*(columns_of(t, (160,)) for t in rows), torch.tensor([160], dtype=torch.int32), (160,))
    assert same_bits(launched(DRIVER, filled, STORED)[0], out[2])


def test_accumulating_adds_once_and_leaves_empty_groups_alone() -> None:
    problem = random_columns((33, 0, 80), 2, 48, 144, 3)
    stored = launched(DRIVER, problem, STORED)
    before = torch.randn(stored.shape, generator=torch.Generator().manual_seed(5)) * stored.abs().mean()
    before[1].view(torch.int32).fill_(0x7FABCDEF)  # a NaN that an addition would not keep
    out = launched(DRIVER, problem, replace(STORED, accumulate=True), before)
    assert same_bits(out[1], before[1])
    assert same_bits(out[[0, 2]], before[[0, 2]] + stored[[0, 2]])


def test_from_the_column_outputs_of_a_forward_product() -> None:
    """What a quantizing epilogue leaves along M is multiplied as it is: no copy, no transpose."""
    generator = torch.Generator().manual_seed(7)
    sizes = (40, 0, 70)
    offs = padless.group_offsets(list(sizes))
    columns, values = [], []
    for n in (64, 32):
        a = quantize(torch.randn(sum(sizes), 64, generator=generator), MXFP8)
        b = quantize(torch.randn(3, n, 64, generator=generator), MXFP8, kind="weight")
        made = grouped_gemm_epilogue(
            a, b, offs, Epilogue(column_format=MXFP8, scale_rule="rceil", d_dtype=torch.float32), backend=BACKEND
        )
        columns.append((made.column_codes, made.column_scale))
        values.append(made.d)
    out = grouped_gemm_wgrad_mxfp8(*columns, offs, out_dtype=torch.float32, backend=BACKEND)
    assert same_bits(out[1], torch.zeros_like(out[1]))
    start = 0
    for group, size in enumerate(sizes):
        want = values[0][start : start + size].double().T @ values[1][start : start + size].double()
        assert (out[group] - want).norm() <= 0.06 * want.norm()
        start += size
    exact = grouped_gemm_wgrad_mxfp8(*columns, offs, out_dtype=torch.float32)
    assert (out - exact).norm() <= 2.0**-20 * exact.norm()


# --- the call --------------------------------------------------------------------------------------------


def test_the_call_is_the_kernel() -> None:
    problem = random_columns((33, 0, 80), 2, 48, 144, 3)
    operands = (problem.dy, problem.x, problem.offs)
    stored = launched(DRIVER, problem, STORED)
    assert same_bits(grouped_gemm_wgrad_mxfp8(*operands, out_dtype=torch.float32, backend=BACKEND), stored)
    out = torch.ones_like(stored)
    returned = grouped_gemm_wgrad_mxfp8(*operands, out=out, accumulate=True, backend=BACKEND)
    assert returned is out
    assert same_bits(out, torch.where(torch.tensor([33, 0, 80])[:, None, None] > 0, stored + 1, torch.ones(())))


def test_the_call_takes_a_pair_where_it_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tiles by two CTAs one after the other, or one tile by the pair that they make: other tiles, the same bits."""
    problem = random_columns((5, 33), 2, 144, 144, 3)
    operands, used, prepare = (problem.dy, problem.x, problem.offs), [], host.prepare

    def prepared(*arguments: Any) -> Any:
        used.append(arguments[-1])
        return prepare(*arguments)

    monkeypatch.setattr(host, "prepare", prepared)
    got = grouped_gemm_wgrad_mxfp8(*operands, out_dtype=torch.float32, backend=BACKEND)
    want = grouped_gemm_wgrad_mxfp8(*operands, out_dtype=torch.float32, backend=BACKEND, config=STORED)
    assert used == [Mxfp8WgradConfig(out_dtype=torch.float32, cta_group=2), STORED]
    assert same_bits(got, want)


def test_the_tile_that_a_problem_gets() -> None:
    """A pair, unless its tiles are so few that many multiprocessors would have none; never where there is one alone."""
    assert select_config(131072, 2048, 7168, 8, 148).cta_group == 2
    assert select_config(1024, 2048, 2048, 64, 148).cta_group == 2
    assert select_config(4096, 1024, 1024, 1, 148).cta_group == 1  # 64 tiles of 148 multiprocessors, or 16 of 74 pairs
    assert select_config(4096, 128, 128, 64, 148).cta_group == 1  # no half of a tile would be used
    assert select_config(131072, 2048, 7168, 8, 1).cta_group == 1


@pytest.mark.parametrize("config", [STORED, pytest.param(PAIR, marks=pytest.mark.slow)], ids=["CTA", "pair"])
def test_offsets_that_are_wrong_touch_nothing_outside(config: Mxfp8WgradConfig) -> None:
    """Past the rows, falling, and with more tokens than the scales have rows; the emulator refuses other accesses."""
    problem = random_columns((33, 0, 80), 2, 48, 16, 3)
    for ends in ((40, 20, 400), (-5, 200, 100), (2**31 - 1, 2**31 - 1, 2**31 - 1)):
        launched(DRIVER, replace(problem, offs=torch.tensor(ends, dtype=torch.int32)), config)


def test_what_is_not_allowed() -> None:
    problem = random_columns((33, 0, 80), 2, 48, 144, 3)
    dy, x, offs = problem.dy, problem.x, problem.offs
    with pytest.raises(ValueError, match=r"dy's codes must be .*float8_e4m3fn"):
        grouped_gemm_wgrad_mxfp8((dy[0].float(), dy[1]), x, offs)
    with pytest.raises(ValueError, match=r"x has 136 features; they must be a positive multiple of 16"):
        grouped_gemm_wgrad_mxfp8(dy, (x[0][:, :136], x[1]), offs)
    with pytest.raises(ValueError, match="the same rows"):
        grouped_gemm_wgrad_mxfp8(dy, (x[0][:100], x[1]), offs)
    with pytest.raises(ValueError, match=r"x's scale must be \(12 or more, 144\) float8_e8m0fnu"):
        grouped_gemm_wgrad_mxfp8(dy, (x[0], x[1][:8]), offs)
    with pytest.raises(ValueError, match="has a kernel for sm_100a"):
        grouped_gemm_wgrad_mxfp8(dy, x, offs, backend="emulator")
    with pytest.raises(ValueError, match="accumulate adds to float32"):
        grouped_gemm_wgrad_mxfp8(dy, x, offs, accumulate=True)
    with pytest.raises(ValueError, match="num_stages is 1; allowed"):
        Mxfp8WgradConfig(num_stages=1)
    with pytest.raises(ValueError, match="cta_group is 4; allowed: 1 or 2"):
        Mxfp8WgradConfig(cta_group=4)
