"""Problems for Hopper's FP8 kernel with swapped operands and the kernel whose bits it must have, in the emulator."""

from __future__ import annotations

import torch

from padless.emulator.fake_driver import EmulatedDriver
from padless.formats import FP8_BLOCK
from padless.kernels.sm90_fp8 import host as sm90_fp8
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.sm90_fp8_swapped import host as swapped
from padless.kernels.sm90_fp8_swapped.config import Sm90Fp8SwappedConfig
from padless.quantization.quantize import quantize
from support.grouped_problem import Problem, offsets
from support.ragged import GuardedOutput

DRIVER = EmulatedDriver()  # one for all tests, since it keeps prepared kernels
SMALL = Sm90Fp8Config(block_m=64, block_n=64)


def random_problem(sizes: tuple[int, ...], n: int, k: int, *, spare_rows: int = 3, scale_major: str = "mn") -> Problem:
    """Random values over some binades, quantized; ``spare_rows`` behind the last group are NaN, codes and scales."""
    generator = torch.Generator().manual_seed(n * 31 + k + len(sizes))
    rows = sum(sizes)
    x = torch.randn((rows + spare_rows, k), generator=generator)
    x *= 2.0 ** torch.randint(-4, 5, (rows + spare_rows, 1), generator=generator)
    a = quantize(x, FP8_BLOCK, kind="activation", scale_major=scale_major)
    b = quantize(torch.randn((len(sizes), n, k), generator=generator), FP8_BLOCK, kind="weight")
    a.data.view(torch.uint8)[rows:] = 0x7F
    a.scale[rows:] = float("nan")
    return Problem(a, b, offsets(sizes))


def multiply(
    problem: Problem,
    config: Sm90Fp8SwappedConfig | Sm90Fp8Config,
    dtype: torch.dtype = torch.bfloat16,
    *,
    expect_finite: bool = True,
    driver: EmulatedDriver = DRIVER,
    **settings: object,
) -> torch.Tensor:
    """The valid rows of a kernel's result; checks that no other row was written, and that nothing was reported."""
    host = swapped if isinstance(config, Sm90Fp8SwappedConfig) else sm90_fp8
    guarded = GuardedOutput(problem.a.shape[0], problem.b.shape[-2], dtype)
    with driver.configured(**settings):
        host.prepare(driver, problem.a, problem.b, problem.offs, guarded.out, config).launch(0)
    guarded.check(problem.valid_rows, expect_finite=expect_finite)
    return guarded.out[: problem.valid_rows]


def assert_same_bits(out: torch.Tensor, wanted: torch.Tensor) -> None:
    """NaN equals NaN."""
    same = (out == wanted) | (out.isnan() & wanted.isnan())
    bad = torch.nonzero(~same.all(1)).flatten()
    assert bad.numel() == 0, f"rows {bad.tolist()[:8]} of {len(out)} differ"
