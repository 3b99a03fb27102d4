"""The FP8 kernel with swapped operands, in the emulator: bit for bit the products of the kernel with tokens on rows."""

from __future__ import annotations

import pytest
import torch

from padless.kernels.sm90_fp8_swapped.config import Sm90Fp8SwappedConfig
from padless.reference.gemm import grouped_gemm_reference
from support.sm90_fp8_swapped_cases import SMALL, assert_same_bits, multiply, random_problem

QUICK = Sm90Fp8SwappedConfig(block_m=64, step_m=16)  # few instances of the main loop, so quickly compiled
CASES = (  # sizes, n, k: tails of 256 weights and of 128 of K, rows around an eight and around a tile
    ((1, 0, 7, 8, 9), 64, 144),
    ((64, 63, 2), 192, 16),
    ((130, 5), 320, 144),
)


@pytest.mark.parametrize(("sizes", "n", "k"), CASES)
def test_bits_are_those_of_the_other_kernel(sizes: tuple[int, ...], n: int, k: int) -> None:
    problem = random_problem(sizes, n, k)
    assert_same_bits(multiply(problem, QUICK, num_sms=2), multiply(problem, SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("config", [Sm90Fp8SwappedConfig(), Sm90Fp8SwappedConfig(block_m=136, num_d=1)], ids=str)
@pytest.mark.parametrize("sizes", [(127, 128, 129, 1), (200, 0, 257)], ids=str)
def test_bits_of_every_size_around_a_tile(sizes: tuple[int, ...], config: Sm90Fp8SwappedConfig) -> None:
    problem = random_problem(sizes, 264, 272)
    assert_same_bits(multiply(problem, config, num_sms=2, seed=len(sizes)), multiply(problem, SMALL))


@pytest.mark.parametrize("seed", [1, 2])
def test_every_schedule_gives_the_same_bits(seed: int) -> None:
    problem = random_problem((9, 3), 64, 4240)  # more than 32 K blocks, and more than the pipeline has stages
    config = Sm90Fp8SwappedConfig(block_m=64, step_m=16, num_stages=2)
    assert_same_bits(multiply(problem, config, seed=seed, num_sms=seed), multiply(problem, SMALL))


def test_row_by_row_it_is_close_to_the_exact_product() -> None:
    problem = random_problem((17, 40), 136, 272)
    out = multiply(problem, QUICK).double()
    exact = grouped_gemm_reference(problem.a, problem.b, problem.offs, out_dtype=torch.float64, accumulate="float64")
    exact = exact[: len(out)]
    assert float(((out - exact).norm(dim=1) / exact.norm(dim=1)).max()) < 4e-3


def test_row_major_scales_are_copied_and_float16_is_rounded_once() -> None:
    problem = random_problem((9, 20), 72, 144, scale_major="k")
    out = multiply(problem, QUICK, torch.float16)
    assert_same_bits(out, multiply(problem, SMALL, torch.float16))


def test_a_nan_row_is_nan_alone() -> None:
    problem = random_problem((9, 20), 72, 144)
    clean = multiply(problem, QUICK)
    problem.a.scale[9, 1] = float("nan")  # the neighbour of the first group's last row
    out = multiply(problem, QUICK, expect_finite=False)
    assert bool(out[9].isnan().all())
    kept = torch.arange(len(out)) != 9
    assert torch.equal(out[kept], clean[kept])
