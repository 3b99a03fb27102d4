"""The NVFP4 weight-gradient kernel of Blackwell in the emulator: right, and independent of other groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from padless import BlockScaledTensor
from padless.emulator.fake_driver import driver_of
from padless.kernels.sm100_wgrad import Sm100WgradConfig
from padless.ops.grouped_gemm_wgrad_nvfp4 import grouped_gemm_wgrad_nvfp4
from padless.reference.wgrad_nvfp4 import decoded, grouped_gemm_wgrad_nvfp4_reference
from padless.testing.bits import same_bits
from support.nvfp4_wgrad import Problem, group_of, launched, poisoned, random_problem

BACKEND = "emulator:sm_100a"
DRIVER = driver_of(BACKEND)
STORED = Sm100WgradConfig(num_stages=2, out_dtype=torch.float32)
# Every length of the last stage; N and K differ and are no multiples of a tile.
LENGTHS, TILES = (0, 64, 128, 192, 256, 320), (576, 0, 64)


def reference(problem: Problem) -> torch.Tensor:
    out = torch.full(problem.shape, torch.nan)
    return grouped_gemm_wgrad_nvfp4_reference(problem.dy, problem.x, problem.ends, out=out, accumulate=False)


def bound(problem: Problem) -> torch.Tensor:
    """Of rounding: a 2^-23 of the sum of magnitudes for every instruction, and for two roundings behind them."""
    magnitudes = replace(problem, **{name: _magnitude(getattr(problem, name)) for name in ("dy", "x")})
    return (max(problem.sizes) // 64 + 2) * 2.0**-23 * reference(magnitudes)


def _magnitude(t: BlockScaledTensor) -> BlockScaledTensor:
    return replace(t, data=(t.data.view(torch.uint8) & 0x77).view(t.data.dtype))


@pytest.mark.parametrize(
    ("sizes", "n", "k"),
    [(LENGTHS, 48, 160), pytest.param(TILES, 272, 144, marks=pytest.mark.slow)],
    ids=["lengths", "tiles"],
)
def test_sums_that_float32_holds_have_the_references_bits(sizes: tuple[int, ...], n: int, k: int) -> None:
    problem = random_problem(sizes, 64, n, k, exact=True)
    out = launched(DRIVER, problem, STORED)
    assert same_bits(out, reference(problem))
    assert not out[sizes.index(0)].any()
    assert out.abs().amax() > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_random_problems(seed: int) -> None:
    """Scales of all sizes, subnormal and zero ones, and every order in which the emulator can run warps."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=g))

    sizes = (64, *(64 * draw(0, 6) * draw(0, 2) for _ in range(draw(1, 5))))
    problem = random_problem(sizes, 64 * draw(0, 3), 16 * draw(1, 10), 16 * draw(1, 10), seed)
    with DRIVER.configured(seed=seed):
        out = launched(DRIVER, problem, replace(STORED, num_stages=draw(2, 5)))
    assert bool(((out - reference(problem)).abs() <= bound(problem)).all())


@pytest.mark.slow
def test_bfloat16_is_the_float32_sum_rounded() -> None:
    problem = random_problem((64, 0, 128), 64, 48, 80, 1)
    exact = launched(DRIVER, problem, STORED)
    assert same_bits(launched(DRIVER, problem, replace(STORED, out_dtype=torch.bfloat16)), exact.bfloat16())


@pytest.mark.slow
def test_nothing_of_other_groups_has_an_influence() -> None:
    """Each group alone, and under NaN in its neighbours: the same bits."""
    problem = random_problem((64, 0, 320, 64), 64, 48, 16, 2)
    out = launched(DRIVER, problem, STORED)
    for group, size in enumerate(problem.sizes):
        if size:
            assert same_bits(launched(DRIVER, group_of(problem, group), STORED)[0], out[group])
    dy, x = (poisoned(poisoned(t, 0, 64), 384, 448) for t in (problem.dy, problem.x))
    again = launched(DRIVER, replace(problem, dy=dy, x=x), STORED)
    assert same_bits(again[2], out[2])
    assert bool(again[[0, 3]].isnan().all())


@pytest.mark.slow
def test_the_call_is_the_kernel_and_adds_once() -> None:
    problem = random_problem((64, 0, 128), 0, 48, 144, 3)
    operands = (problem.dy, problem.x, problem.ends)
    stored = launched(DRIVER, problem, STORED)
    assert same_bits(grouped_gemm_wgrad_nvfp4(*operands, out_dtype=torch.float32, backend=BACKEND), stored)
    before = torch.randn(stored.shape, generator=torch.Generator().manual_seed(5)) * stored.abs().mean()
    before[1].view(torch.int32).fill_(0x7FABCDEF)  # a NaN that an addition would not keep
    out = before.clone()
    assert grouped_gemm_wgrad_nvfp4(*operands, out=out, accumulate=True, backend=BACKEND) is out
    assert same_bits(out[1], before[1])
    assert same_bits(out[[0, 2]], before[[0, 2]] + stored[[0, 2]])


@pytest.mark.slow
def test_ends_that_are_wrong_touch_nothing_outside() -> None:
    """Past the tokens, falling, and inside of a product; the emulator refuses other accesses."""
    problem = random_problem((64, 0, 128), 64, 48, 16, 3)
    for ends in ((100, 20, 400), (-5, 200, 100), (2**31 - 1, 2**31 - 1, 2**31 - 1)):
        launched(DRIVER, replace(problem, ends=torch.tensor(ends, dtype=torch.int32)), STORED)


def test_the_reference_decodes_every_code() -> None:
    """Written out by hand: the sign is the fourth bit, the first code the low half of a byte."""
    problem = random_problem((64,), 0, 16, 16)
    codes = torch.arange(16, dtype=torch.uint8).repeat(4)
    problem.dy.data.view(torch.uint8)[0] = codes[0::2] | codes[1::2] << 4
    found = decoded(problem.dy)[0, :16]
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    scale = problem.dy.scale.view(torch.uint8)[0].view(torch.float8_e4m3fn).double()
    assert torch.equal(found, torch.tensor([*values, *(-v for v in values)], dtype=torch.float64) * scale)


def test_what_is_not_allowed() -> None:
    problem = random_problem((64, 0, 128), 64, 48, 144, 3)
    dy, x, ends = problem.dy, problem.x, problem.ends
    plain = BlockScaledTensor(dy.data, torch.zeros(48, 16, dtype=dy.scale.dtype), dy.format, dy.global_scale)
    with pytest.raises(ValueError, match=r"dy must be \(features, tokens\) NVFP4 with blocked scales"):
        grouped_gemm_wgrad_nvfp4(plain, x, ends)
    with pytest.raises(ValueError, match=r"x has no global scale, or several; it must have one"):
        grouped_gemm_wgrad_nvfp4(dy, replace(x, global_scale=None), ends)
    with pytest.raises(ValueError, match="the same tokens"):
        grouped_gemm_wgrad_nvfp4(dy, group_of(problem, 0).x, ends)
    with pytest.raises(ValueError, match="has a kernel for sm_100a"):
        grouped_gemm_wgrad_nvfp4(dy, x, ends, backend="emulator")
    with pytest.raises(ValueError, match="accumulate adds to float32"):
        grouped_gemm_wgrad_nvfp4(dy, x, ends, accumulate=True)
