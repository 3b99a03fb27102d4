"""Problems for the MXFP8 kernel on Hopper, and a model of its arithmetic that predicts every bit of the result."""

from __future__ import annotations

import torch

from padless.emulator.fake_driver import EmulatedDriver
from padless.formats import MXFP8, MXFP8_E5M2, TILE_COLUMNS, BlockScaledFormat, BlockScaledTensor
from padless.kernels.sm90_mxfp8 import host as sm90_mxfp8
from padless.kernels.sm90_mxfp8.config import Sm90Mxfp8Config
from padless.layouts import from_blocked, plain_scale, to_blocked, to_blocked_groups
from padless.reference.gemm import fma_float32, group_rows, round_to
from support.grouped_problem import Problem, offsets
from support.ragged import GuardedOutput

DRIVER = EmulatedDriver()  # one for all tests, since it keeps prepared kernels
NAN_SCALE = 255
PAIRS = ((MXFP8, MXFP8), (MXFP8, MXFP8_E5M2), (MXFP8_E5M2, MXFP8), (MXFP8_E5M2, MXFP8_E5M2))


def tensor(
    codes: torch.Tensor, scales: torch.Tensor, fmt: BlockScaledFormat, layout: str, offs: torch.Tensor
) -> BlockScaledTensor:
    """Codes and plain scale bytes with the scales in ``layout``, whose padding is full of NaN scales."""
    e8m0 = scales.to(torch.uint8).view(fmt.scale_dtype)
    if layout == "blocked":
        e8m0 = _nan_padding(to_blocked(e8m0), *scales.shape[-2:])
    elif layout == "blocked_groups":
        e8m0 = to_blocked_groups(e8m0, offs)
        e8m0.view(torch.uint8)[e8m0.view(torch.uint8) == 0] = NAN_SCALE  # no scale of the problems is 0
    return BlockScaledTensor(codes.view(fmt.data_dtype), e8m0, fmt, scale_layout=layout)


def _nan_padding(blocked: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    size = blocked.shape[-1]
    real = to_blocked(torch.ones((rows, columns), dtype=torch.uint8))
    assert real.numel() == size
    found = blocked.view(torch.uint8).clone()
    found[..., real == 0] = NAN_SCALE
    assert torch.equal(from_blocked(found, rows, columns), from_blocked(blocked.view(torch.uint8), rows, columns))
    return found.view(blocked.dtype)


def random_codes(shape: tuple[int, ...], fmt: BlockScaledFormat, generator: torch.Generator) -> torch.Tensor:
    """Every finite code, as likely as any other: values over many binades."""
    largest = 0x7E if fmt is MXFP8 else 0x7B
    magnitude = torch.randint(0, largest + 1, shape, generator=generator)
    sign = torch.randint(0, 2, shape, generator=generator)
    return (magnitude + 128 * sign).to(torch.uint8)


def random_problem(
    sizes: tuple[int, ...],
    n: int,
    k: int,
    *,
    pair: tuple[BlockScaledFormat, BlockScaledFormat] = (MXFP8, MXFP8),
    layouts: tuple[str, str] = ("plain", "plain"),
    scales: tuple[int, int] = (117, 138),
    spare_rows: int = 3,
) -> Problem:
    """Random codes with random scale bytes from ``scales`` (low, one past high)."""
    generator = torch.Generator().manual_seed(n * 31 + k + len(sizes))
    rows, offs = sum(sizes) + spare_rows, offsets(sizes)
    parts = []
    for shape, fmt, layout in zip(((rows, k), (len(sizes), n, k)), pair, layouts, strict=True):
        codes = random_codes(shape, fmt, generator)
        bytes_ = torch.randint(*scales, (*shape[:-1], k // 32), generator=generator)
        parts.append(tensor(codes, bytes_, fmt, layout, offs))
    return Problem(*parts, offs)


def multiply(
    problem: Problem,
    dtype: torch.dtype = torch.float32,
    config: Sm90Mxfp8Config | None = None,
    *,
    expect_finite: bool = True,
    **settings: object,
) -> torch.Tensor:
    """The valid rows of the kernel's result; checks that no other row was written, and that nothing was reported."""
    m, n = problem.a.shape[0], problem.b.shape[-2]
    guarded = GuardedOutput(m, n, dtype)
    with DRIVER.configured(**settings):
        prepared = sm90_mxfp8.prepare(DRIVER, problem.a, problem.b, problem.offs, guarded.out, config)
        prepared.launch(0)
    guarded.check(problem.valid_rows, expect_finite=expect_finite)
    return guarded.out[: problem.valid_rows]


# --- the model -------------------------------------------------------------------------------------------


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)


def fp8_sums(a: torch.Tensor, b: torch.Tensor, least: tuple[int, int]) -> torch.Tensor:
    """(m, n) sums of 32 products as one FP8 wgmma makes them: a (m, 32), b (n, 32) values, float64.

    Products are cut to 13 fractional bits of the largest exponent, the sum to 13 fractional bits of its own.
    ``least``: the exponents of subnormal codes of a and of b.
    """

    def exponent(x: torch.Tensor, low: int) -> torch.Tensor:
        return torch.where(x == 0, -126, (torch.frexp(x)[1] - 1).clamp(min=low))

    low_a, low_b = least
    exponents = exponent(a, low_a)[:, None] + exponent(b, low_b)[None]
    largest = exponents.amax(-1, keepdim=True)
    unit = power_of_two(largest - 13)
    total = ((a[:, None] * b[None] / unit).trunc() * unit).sum(-1)
    fraction, power = torch.frexp(total)
    return torch.ldexp((fraction * 2**14).trunc(), power - 14)


def scale_products(sfa: torch.Tensor, sfb: torch.Tensor, step: int) -> torch.Tensor:
    """(m, n) float32 products of column ``step`` of scale bytes (m, 4) and (n, 4), -1 where there is none."""
    power = (sfa[:, step, None] - 127) + (sfb[None, :, step] - 127)
    others = torch.cat([sfb[:, :step], sfb[:, step + 1 :]], dim=1)
    beside = torch.where(others < 0, -126, (others - 127).clamp(min=-126)).amax(1) - 126
    power = torch.where(power < beside[None] - 25, -1000, power)  # lost beside a zero with a large exponent
    exact = power_of_two(power)
    exact = torch.where(power < -149, 0.0, exact)
    nan = (sfa[:, step, None] == NAN_SCALE) | (sfb == NAN_SCALE).any(1)[None]
    return torch.where(nan, float("nan"), exact).to(torch.float32)


def predicted(problem: Problem, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Every bit of the kernel's result (NaN for NaN)."""
    a, b = problem.a, problem.b
    k = a.shape[1]
    sfa = plain_scale(a, problem.offs).view(torch.uint8).long()
    sfb = plain_scale(b).view(torch.uint8).long()
    padding = (0, -sfa.shape[-1] % TILE_COLUMNS)
    sfa, sfb = (torch.nn.functional.pad(s, padding, value=-1) for s in (sfa, sfb))
    least = tuple(-6 if t.format is MXFP8 else -14 for t in (a, b))
    rows = []
    for group, (start, end) in enumerate(group_rows(problem.offs, a.shape[0])):
        acc = torch.zeros((end - start, b.shape[1]))
        for block in range(k // 32):
            part = slice(32 * block, 32 * block + 32)
            codes_a, codes_b = a.data[start:end, part].double(), b.data[group, :, part].double()
            stage = slice(block // 4 * 4, block // 4 * 4 + 4)
            scale = scale_products(sfa[start:end, stage], sfb[group, :, stage], block % 4)
            acc = fma_float32(fp8_sums(codes_a, codes_b, least).to(torch.float32), scale, acc)
        rows.append(acc)
    return round_to(torch.cat(rows), dtype)
