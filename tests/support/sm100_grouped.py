"""Problems for the grouped block-scaled kernel of Blackwell, with answers worked out here in float64 from the codes, and
how to run them in the emulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from padless.emulator import LaunchResult
from padless.emulator.fake_driver import EmulatedDriver, emulated_driver
from padless.formats import (
    FP8_BLOCK,
    MXFP4,
    MXFP8,
    MXFP8_E5M2,
    NVFP4,
    BlockScaledFormat,
    BlockScaledTensor,
    blocked_size,
)
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
from padless.kernels.sm100_grouped.host import prepare
from padless.layouts import to_blocked, to_blocked_groups, to_mn_major
from support.ragged import GuardedOutput

FORMATS: dict[str, BlockScaledFormat] = {f.name: f for f in (MXFP8, MXFP8_E5M2, MXFP4, NVFP4, FP8_BLOCK)}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([E2M1, -E2M1]).double()
NAN_BYTE = {"MXFP8": 0xFF, "MXFP8_E5M2": 0xFF, "MXFP4": 0xFF, "NVFP4": 0x7F}


@dataclass
class Case:
    """Operands in one layout of scales, their exact products and the sums of the magnitudes of their terms (float64)."""

    a: BlockScaledTensor
    b: BlockScaledTensor
    offs: torch.Tensor
    sizes: tuple[int, ...]
    exact: torch.Tensor
    magnitude: torch.Tensor

    @property
    def valid(self) -> int:
        return sum(self.sizes)


def values_of(codes: torch.Tensor, scales: torch.Tensor, fmt: BlockScaledFormat) -> torch.Tensor:
    """float64 values of (.., rows, K) code bytes (one a value) and (.., rows, blocks) scale bytes, or float32 scales."""
    if fmt.codes_per_byte == 2:
        values = E2M1[codes.long()]
    else:
        values = codes.view(fmt.data_dtype).double()
    if fmt is FP8_BLOCK:
        rows = fmt.block("weight" if codes.dim() == 3 else "activation")[0]
        factors = scales.double().repeat_interleave(rows, -2)[..., : codes.shape[-2], :]
    elif fmt is NVFP4:
        factors = scales.view(torch.float8_e4m3fn).double()
    else:
        factors = torch.exp2(scales.double() - 127)
    return values * factors.repeat_interleave(fmt.block_k, -1)[..., : codes.shape[-1]]


def packed(codes: torch.Tensor, fmt: BlockScaledFormat) -> torch.Tensor:
    if fmt.codes_per_byte == 2:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    return codes.contiguous().view(fmt.data_dtype)


def laid_out(
    codes: torch.Tensor, scales: torch.Tensor, fmt: BlockScaledFormat, layout: str, offs: torch.Tensor | None,
    global_scale: torch.Tensor | None, trap: bool,
) -> BlockScaledTensor:  # fmt: skip
    """The operand with its scales in `layout`; with `trap`, every byte of padding in 32x4x4 tiles is a NaN.
    FP8_BLOCK's of activations are K-major for "plain", else MN-major."""
    if fmt is FP8_BLOCK:
        scales = to_mn_major(scales) if layout != "plain" and codes.dim() == 2 else scales
        return BlockScaledTensor(packed(codes, fmt), scales, fmt)
    if layout == "plain":
        return BlockScaledTensor(packed(codes, fmt), scales.view(fmt.scale_dtype), fmt, global_scale)

    def blocked(s: torch.Tensor) -> torch.Tensor:
        return to_blocked(s) if layout == "blocked" else to_blocked_groups(s, offs)

    tiles = blocked(scales)
    if trap:
        tiles = torch.where(blocked(torch.ones_like(scales)) == 0, NAN_BYTE[fmt.name], tiles).to(torch.uint8)
    if codes.dim() == 3:
        tiles = tiles.view(codes.shape[0], blocked_size(codes.shape[1], scales.shape[-1]))
    return BlockScaledTensor(packed(codes, fmt), tiles.view(fmt.scale_dtype), fmt, global_scale, layout)


def case_of(
    codes: tuple[torch.Tensor, torch.Tensor], scales: tuple[torch.Tensor, torch.Tensor],
    formats: tuple[BlockScaledFormat, BlockScaledFormat], sizes: tuple[int, ...],
    layouts: tuple[str, str] = ("blocked", "blocked"),
    global_scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None), trap: bool = True,
) -> Case:  # fmt: skip
    """A case from code and scale bytes of A (M, ..) and B (G, N, ..)."""
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    a = laid_out(codes[0], scales[0], formats[0], layouts[0], offs, global_scales[0], trap)
    b = laid_out(codes[1], scales[1], formats[1], layouts[1], None, global_scales[1], trap)
    x = values_of(codes[0], scales[0], formats[0])
    y = values_of(codes[1], scales[1], formats[1])
    shape = (codes[0].shape[0], codes[1].shape[1])
    exact, magnitude = torch.full(shape, float("nan"), dtype=torch.float64), torch.zeros(shape).double()
    start = 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        exact[rows], magnitude[rows] = x[rows] @ y[group].T, x[rows].abs() @ y[group].abs().T
        start += size
    return Case(a, b, offs, sizes, exact, magnitude)


def random_bytes(
    fmt: BlockScaledFormat, shape: tuple[int, ...], g: torch.Generator, exact: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales; a shape of three sizes is one of weights. `exact`: small integers and few binades, so that no
    order or rounding of sums changes a bit."""
    if fmt.codes_per_byte == 2:
        codes = torch.randint(0, 16, shape, generator=g).to(torch.uint8)
    elif exact:
        values = torch.randint(-4, 5, shape, generator=g).float()
        codes = values.to(fmt.data_dtype).view(torch.uint8)
    else:
        codes = torch.randn(shape, generator=g).to(fmt.data_dtype).view(torch.uint8)
    blocks = fmt.scale_shape(shape, "weight" if len(shape) == 3 else "activation")
    if fmt is FP8_BLOCK:
        powers = torch.randint(-1, 2, blocks, generator=g).float()
        return codes, torch.exp2(powers if exact else 6 * torch.rand(blocks, generator=g) - 6)
    # Exact: 0.5, 1 and 2. Else NVFP4's are 2^-4 to 1 with three bits of mantissa, the others 2^-6 to 1.
    if fmt is NVFP4:
        scales = (
            torch.randint(6, 9, blocks, generator=g) << 3 if exact else torch.randint(0x18, 0x39, blocks, generator=g)
        )
    else:
        low, high = (126, 129) if exact else (121, 128)
        scales = torch.randint(low, high, blocks, generator=g)
    return codes, scales.to(torch.uint8)


def make_case(
    fmt: str | tuple[str, str], sizes: tuple[int, ...], n: int, k: int, *, m: int | None = None, seed: int = 0,
    exact: bool = False, layouts: tuple[str, str] = ("blocked", "blocked"), **options: Any,
) -> Case:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    names = (fmt, fmt) if isinstance(fmt, str) else fmt
    formats = (FORMATS[names[0]], FORMATS[names[1]])
    rows = sum(sizes) if m is None else m
    a = random_bytes(formats[0], (rows, k), g, exact)
    b = random_bytes(formats[1], (len(sizes), n, k), g, exact)
    case = case_of((a[0], b[0]), (a[1], b[1]), formats, sizes, layouts, **options)
    if exact and rows > 0:
        assert case.magnitude.max() < 2**20, "sums of multiples of 2^-4 must fit in 24 bits"
    return case


def drawn_sizes(seed: int) -> tuple[int, ...]:
    """Rows of every group, one of five sorts by the seed: a list with each sort of group, one group with all rows, forty
    groups, and twice whatever comes."""
    g = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    if seed % 5 == 0:
        return (20, 0, 130, 1)
    if seed % 5 == 1:
        return (number(100, 300),)
    if seed % 5 == 2:
        return (*(number(1, 30) if number(0, 4) == 0 else 0 for _ in range(39)), number(129, 200))
    sorts = ((0, 1), (1, 2), (2, 40), (40, 130), (130, 200))
    return tuple(number(*sorts[number(0, 5)]) for _ in range(number(2, 6)))


@dataclass
class Run:
    out: torch.Tensor
    result: LaunchResult
    intact: bool = True  # nothing was written outside the groups


def run(
    case: Case, config: Sm100GroupedConfig | None = None, dtype: torch.dtype = torch.float32, *, seed: int = 0,
    num_sms: int = 2, arithmetic: str = "truncate", checks: bool = True, alpha: torch.Tensor | None = None,
    column_major: bool = False, driver: EmulatedDriver | None = None, fences: bool = True, guard: bool = True,
) -> Run:  # fmt: skip
    """Launches and checks, unless told otherwise, that nothing was reported and nothing written outside the groups.

    The device has ``num_sms`` multiprocessors, or as many more as one cluster of ``config`` needs."""
    m, n = case.exact.shape
    num_sms = num_sms if config is None else max(num_sms, config.cluster)
    guarded = GuardedOutput(n, m, dtype) if column_major else GuardedOutput(m, n, dtype)
    out = guarded.out.t() if column_major else guarded.out
    driver = emulated_driver("sm_100a") if driver is None else driver
    with driver.configured(seed=seed, num_sms=num_sms, arithmetic=arithmetic, checks=checks, raise_on_reports=False):
        prepare(driver, case.a, case.b, case.offs, out, config, alpha).launch(0)
    result = driver.last_result
    assert result is not None
    if guard:
        assert not result.reports, "\n".join(map(str, result.reports[:3]))
        if column_major:
            guarded.check(n, expect_finite=False)
            assert out[: case.valid].isfinite().all()
            poison = GuardedOutput(n, m, dtype).out.t()
            bits = torch.int32 if dtype.itemsize == 4 else torch.int16
            assert torch.equal(
                out[case.valid :].t().contiguous().view(bits), poison[case.valid :].t().contiguous().view(bits)
            )
        else:
            guarded.check(case.valid)
    return Run(out, result, _intact(guarded, n if column_major else case.valid))


def _intact(guarded: GuardedOutput, valid: int) -> bool:
    try:
        guarded.check(valid, expect_finite=False)
    except AssertionError:
        return False
    return True


def tolerance(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """Of every element: each product step and each sum may lose a unit in the 23rd place of what it adds up, and the
    output rounding half a unit of its own."""
    steps = case.a.logical_shape[-1] / 32 + 2
    half_unit = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    smallest = 2.0**-24 if dtype == torch.float16 else 2.0**-126
    return case.magnitude * steps * 2.0**-22 + case.exact.abs() * half_unit + smallest


def check_close(case: Case, out: torch.Tensor) -> None:
    error = (out.double() - case.exact).abs()[: case.valid]
    excess = error - tolerance(case, out.dtype)[: case.valid]
    assert case.valid == 0 or excess.max() <= 0, f"row {int(excess.amax(1).argmax())} is off by {float(error.max())}"
