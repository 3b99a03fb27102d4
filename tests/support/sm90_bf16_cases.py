"""Problems for the bf16 kernel on Hopper: operands of any pair of formats, and how far a result may be from exact."""

from __future__ import annotations

import math

import torch

from padless.emulator.fake_driver import EmulatedDriver
from padless.formats import FORMAT_BY_NAME, MXFP4, MXFP4_REPACKED, BlockScaledFormat, BlockScaledTensor, round_up
from padless.kernels.sm90_bf16 import host as sm90_bf16
from padless.kernels.sm90_bf16.config import Sm90Bf16Config
from padless.kernels.table import BF16
from padless.layouts import pack_fp4, to_repacked
from padless.quantization.quantize import quantize
from padless.reference.gemm import grouped_gemm_reference
from support.grouped_problem import Activation, Problem, offsets
from support.ragged import GuardedOutput

DRIVER = EmulatedDriver()  # one for all tests, since it keeps prepared kernels

FORMATS = FORMAT_BY_NAME


def random_problem(
    pair: tuple[str, str], sizes: tuple[int, ...], n: int, k: int, *, spare_rows: int = 3, layout: str = "plain"
) -> Problem:
    """Normal values whose rows differ in magnitude by up to 2^6, quantized; of repacked weights whole tiles."""
    n, k = _whole_tiles(pair, n, k)
    generator = torch.Generator().manual_seed(n * 31 + k)
    rows = sum(sizes) + spare_rows
    x = torch.randn(rows, k, generator=generator) * 2.0 ** torch.randint(-3, 4, (rows, 1), generator=generator)
    w = torch.randn(len(sizes), n, k, generator=generator)
    w = w * 2.0 ** torch.randint(-3, 4, (len(sizes), n, 1), generator=generator)
    offs = offsets(sizes)
    a: Activation = x.to(torch.bfloat16)
    if pair[0] != BF16:
        per_group = offs if pair[0] == "NVFP4" else None
        a = quantize(x, FORMATS[pair[0]], kind="activation", offs=per_group)
    return Problem(a, quantize(w, FORMATS[pair[1]], kind="weight", scale_layout=layout), offs)


def exact_problem(pair: tuple[str, str], sizes: tuple[int, ...], n: int, k: int) -> Problem:
    """Codes and scales of which every product and every partial sum is exact in float32, in any order."""
    n, k = _whole_tiles(pair, n, k)
    generator = torch.Generator().manual_seed(n + k)
    a: Activation
    if pair[0] == BF16:
        a = torch.randint(-8, 9, (sum(sizes), k), generator=generator).to(torch.bfloat16)
    else:
        a = _exact_operand(FORMATS[pair[0]], (sum(sizes), k), len(sizes), generator)
    return Problem(a, _exact_operand(FORMATS[pair[1]], (len(sizes), n, k), len(sizes), generator), offsets(sizes))


def _whole_tiles(pair: tuple[str, str], n: int, k: int) -> tuple[int, int]:
    return (round_up(n, 16), round_up(k, 64)) if pair[1] == MXFP4_REPACKED.name else (n, k)


def _exact_operand(
    fmt: BlockScaledFormat, shape: tuple[int, ...], num_groups: int, generator: torch.Generator
) -> BlockScaledTensor:
    if fmt == MXFP4_REPACKED:
        return to_repacked(_exact_operand(MXFP4, shape, num_groups, generator))
    if fmt.codes_per_byte == 2:
        data = pack_fp4(torch.randint(0, 16, shape, generator=generator).to(torch.uint8))
    else:
        data = torch.randint(-8, 9, shape, generator=generator).float().to(fmt.data_dtype)
    scale_shape = fmt.scale_shape(shape, "activation" if len(shape) == 2 else "weight")
    if fmt.name == "NVFP4":  # all four significant bits of a scale, so six of a value
        choices = torch.tensor([0.5, 0.75, 1.0, 1.375, 1.875, 2.0])
    else:
        choices = torch.tensor([0.5, 1.0, 2.0, 4.0])
    scale = choices[torch.randint(0, len(choices), scale_shape, generator=generator)].to(fmt.scale_dtype)
    global_scale = None
    if fmt.has_global_scale:
        global_scale = 2.0 ** torch.randint(-3, 4, (num_groups,), generator=generator).float()
    return BlockScaledTensor(data, scale, fmt, global_scale)


def multiply(
    problem: Problem,
    config: Sm90Bf16Config | None = None,
    out_dtype: torch.dtype = torch.float32,
    *,
    expect_finite: bool = True,
    seed: int = 0,
    num_sms: int = 2,
) -> torch.Tensor:
    """The emulated kernel's output, all checks on, in a guarded output; raises on any report."""
    guarded = GuardedOutput(problem.a.shape[0], problem.b.shape[1], out_dtype)
    with DRIVER.configured(seed=seed, num_sms=num_sms, raise_on_reports=True):
        prepared = sm90_bf16.prepare(DRIVER, problem.a, problem.b, problem.offs, guarded.out, config)
        prepared.launch(0)
    result = DRIVER.last_result
    assert result is not None
    assert not result.reports
    guarded.check(problem.valid_rows, expect_finite=expect_finite)
    return guarded.out[: problem.valid_rows]


def exact_result(problem: Problem, out_dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Products and sums in float64, of the rows that are in a group."""
    out = grouped_gemm_reference(problem.a, problem.b, problem.offs, out_dtype=out_dtype, accumulate="float64")
    return out[: problem.valid_rows]


def absolute(problem: Problem) -> Problem:
    """The same with the signs dropped: its result is the sum of the products' magnitudes."""
    a = problem.a.abs() if isinstance(problem.a, torch.Tensor) else _without_signs(problem.a)
    return Problem(a, _without_signs(problem.b), problem.offs)


def _without_signs(t: BlockScaledTensor) -> BlockScaledTensor:
    mask = 0x77 if t.format.codes_per_byte == 2 else 0x7F
    data = (t.data.view(torch.uint8) & mask).view(t.data.dtype)
    return BlockScaledTensor(data, t.scale, t.format, t.global_scale, t.scale_layout)


def error_bound(problem: Problem, out_dtype: torch.dtype) -> torch.Tensor:
    """For every element, how far the stated accumulation can be from exact.

    An instruction adds 16 products and its float32 sum: 17 terms lose less than 2^-25 of the largest, and the sum less
    than 2^-23 of itself (docs/kernels/sm90_bf16/index.md). No term and no sum exceeds the magnitudes' sum. Then
    come one rounded multiply-add for each 128 of K (FP8_BLOCK), two multiplications, and the conversion of the output.
    """
    magnitudes = exact_result(absolute(problem))
    k = problem.b.logical_shape[-1]
    steps, blocks = math.ceil(k / 128) * 8, math.ceil(k / 128)
    bound = magnitudes * (steps * (17 * 2.0**-25 + 2.0**-23) + (blocks + 3) * 2.0**-24)
    half_step = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[out_dtype]
    smallest = {torch.float32: 2.0**-150, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}[out_dtype]
    return bound + (exact_result(problem).abs() + bound) * half_step + smallest
