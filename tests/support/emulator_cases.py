"""Problems of Hopper's FP8 kernel for the emulator, with their exact answers, and how to run one with any driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from padless.emulator.fake_driver import EmulatedDriver
from padless.formats import FP8_BLOCK
from padless.kernels.sm90_fp8 import host as sm90_fp8
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.quantization.quantize import quantize
from padless.reference.gemm import grouped_gemm_reference

GUARD = 4  # rows in front of an output, and behind it


@dataclass
class Case:
    """Operands of one problem, its exact answer, and the largest magnitude in every row of that."""

    a: Any
    b: Any
    offs: torch.Tensor
    reference: torch.Tensor
    magnitude: torch.Tensor
    rows: int


def make_case(sizes: tuple[int, ...], n: int, k: int, scales: str, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes)
    a = quantize(torch.randn(rows, k, generator=generator), FP8_BLOCK, kind="activation", scale_major=scales)
    b = quantize(torch.randn(len(sizes), n, k, generator=generator), FP8_BLOCK, kind="weight")
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    reference = grouped_gemm_reference(a, b, offs, out_dtype=torch.float32, accumulate="float64").double()
    return Case(a, b, offs, reference, reference.abs().amax(1, keepdim=True), rows)


def run_case(driver: EmulatedDriver, case: Case, config: Sm90Fp8Config) -> tuple[bool, Any]:
    """(right, launch result): right if every value is close to the exact answer and no guard row was touched."""
    whole = torch.full((case.rows + 2 * GUARD, case.reference.shape[1]), float("nan"), dtype=config.out_dtype)
    out = whole[GUARD : GUARD + case.rows]
    sm90_fp8.prepare(driver, case.a, case.b, case.offs, out, config).launch(0)
    guards = torch.cat([whole[:GUARD], whole[GUARD + case.rows :]])
    close = (out.double() - case.reference).abs() <= 0.01 * case.magnitude
    return bool(close.all()) and bool(guards.isnan().all()), driver.last_result
