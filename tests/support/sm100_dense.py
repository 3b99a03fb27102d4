"""Problems for the dense MXFP8 kernel of Blackwell with their answers in float64, and a way to run them emulated."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from padless.emulator import LaunchResult
from padless.emulator.fake_driver import EmulatedDriver, emulated_driver
from padless.formats import MXFP8, MXFP8_E5M2, BlockScaledFormat, BlockScaledTensor
from padless.kernels.sm100_dense.config import Sm100DenseConfig
from padless.kernels.sm100_dense.host import prepare
from padless.layouts import to_blocked
from padless.quantization.quantize import quantize
from support.ragged import GuardedOutput

FORMATS: dict[str, BlockScaledFormat] = {"e4m3": MXFP8, "e5m2": MXFP8_E5M2}


@dataclass(frozen=True)
class DenseCase:
    """a (M, K), b (1, N, K), their product, and the sum of the magnitudes of its terms; float64, worked out here."""

    a: BlockScaledTensor
    b: BlockScaledTensor
    exact: torch.Tensor
    magnitude: torch.Tensor

    @property
    def k_steps(self) -> int:
        return self.a.data.shape[1] // 32


def decode(codes: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
    """float64 values of (rows, K) codes with (rows, K / 32) scale exponents + 127."""
    return codes.double() * torch.exp2(scale_bytes.double() - 127).repeat_interleave(32, 1)


def case_of(
    a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor, formats: str = "e4m3 e4m3"
) -> DenseCase:
    """Values of the codes (float, representable) and scale bytes of both operands."""
    a_format, b_format = (FORMATS[name] for name in formats.split())
    codes = [a.to(a_format.data_dtype), b.to(b_format.data_dtype)]
    assert torch.equal(codes[0].float(), a)
    assert torch.equal(codes[1].float(), b)
    x, y = decode(codes[0], sfa), decode(codes[1], sfb)
    return DenseCase(
        BlockScaledTensor(codes[0], sfa.to(torch.uint8).view(torch.float8_e8m0fnu), a_format),
        BlockScaledTensor(codes[1][None], sfb.to(torch.uint8).view(torch.float8_e8m0fnu)[None], b_format),
        x @ y.T,
        x.abs() @ y.abs().T,
    )


def exact_case(m: int, n: int, k: int, seed: int = 0, formats: str = "e4m3 e4m3") -> DenseCase:
    """Small integers and powers of two, other ones in A than in B: no sum of any terms needs more than 24 bits, so that
    every order and every rule of rounding gives the same bits."""
    g = torch.Generator().manual_seed(seed)
    a = torch.randint(-3, 4, (m, k), generator=g).float()
    b = torch.randint(-5, 6, (n, k), generator=g).float()
    a[a == 0], b[b == 0] = 6.0, -4.0
    sfa = torch.randint(121, 127, (m, k // 32), generator=g)
    sfb = torch.randint(128, 132, (n, k // 32), generator=g)
    case = case_of(a, sfa, b, sfb, formats)
    assert case.magnitude.max() < 2.0 ** (24 + 121 - 127 + 128 - 127), "not exact in float32"
    return case


def read_out_case(m: int, n: int, k: int, seed: int = 0) -> DenseCase:
    """B has a single 1 in every row: D[i, j] is one element of A with its two scales, whatever the arithmetic.

    The scales are random over 40 binades, other ones for every row and every 32 of K, so an element or a scale taken
    from anywhere else shows. With n >= k every element of A is read.
    """
    g = torch.Generator().manual_seed(seed)
    rows, columns = torch.arange(m)[:, None], torch.arange(k)[None]
    a = ((7 * rows + 5 * columns + columns // 32) % 13 + 1).float() * (1 - 2 * ((rows + columns) % 2))
    b = torch.zeros(n, k)
    b[torch.arange(n), (11 * torch.arange(n) + 3) % k] = 1.0
    sfa = torch.randint(107, 147, (m, k // 32), generator=g)
    sfb = torch.randint(107, 147, (n, k // 32), generator=g)
    return case_of(a, sfa, b, sfb)


def swapped(case: DenseCase) -> DenseCase:
    """The transposed product."""
    a = BlockScaledTensor(case.b.data[0], case.b.scale[0], case.b.format)
    b = BlockScaledTensor(case.a.data[None], case.a.scale[None], case.a.format)
    return DenseCase(a, b, case.exact.T, case.magnitude.T)


def nan_padded(case: DenseCase) -> DenseCase:
    """The same with blocked scales, all of whose unused bytes are NaN."""
    padded = []
    for t in (case.a, case.b):
        scale = t.scale.view(torch.uint8)
        blocked, used = to_blocked(scale), to_blocked(torch.ones_like(scale))
        blocked[used == 0] = 0xFF
        scale = blocked.view(torch.float8_e8m0fnu)
        padded.append(BlockScaledTensor(t.data, scale, t.format, scale_layout="blocked"))
    return dataclasses.replace(case, a=padded[0], b=padded[1])


def random_case(m: int, n: int, k: int, seed: int = 0, formats: str = "e4m3 e4m3") -> DenseCase:
    """Quantized normal numbers, with rows and blocks of very different size."""
    g = torch.Generator().manual_seed(seed)
    a_format, b_format = (FORMATS[name] for name in formats.split())
    x = torch.randn(m, k, generator=g) * torch.exp2(torch.randint(-6, 7, (m, 1), generator=g))
    y = torch.randn(n, k, generator=g) * torch.exp2(torch.randint(-3, 4, (1, k), generator=g))
    a, b = quantize(x, a_format, kind="activation"), quantize(y, b_format, kind="weight")
    p = decode(a.data, a.scale.view(torch.uint8))
    q = decode(b.data, b.scale.view(torch.uint8))
    b = BlockScaledTensor(b.data[None], b.scale[None], b.format)
    return DenseCase(a, b, p @ q.T, p.abs() @ q.abs().T)


def launch(
    driver: EmulatedDriver, case: DenseCase, out: torch.Tensor, config: Sm100DenseConfig | None, **settings: Any
) -> LaunchResult:
    """Run the kernel; what it found."""
    settings = {"num_sms": 2, "raise_on_reports": False, **settings}
    with driver.configured(**settings):
        prepare(driver, case.a, case.b, None, out, config).launch(0)
        assert driver.last_result is not None
        return driver.last_result


def compute(
    case: DenseCase, config: Sm100DenseConfig | None, dtype: torch.dtype = torch.float32, **settings: Any
) -> torch.Tensor:
    """The kernel's result, after making sure that it was all written, nothing else was, and nothing reported."""
    m, n = case.exact.shape
    guarded = GuardedOutput(m, n, dtype)
    result = launch(emulated_driver("sm_100a"), case, guarded.out, config, **settings)
    result.raise_on_reports()
    guarded.check(m)
    return guarded.out


def error_bound(case: DenseCase, dtype: torch.dtype) -> torch.Tensor:
    """Largest error that any of the arithmetics may make, element by element.

    A step aligns 33 terms, of which none is larger than the sum of all magnitudes, to 2^-25 of the largest, and rounds
    its sum to 2^-23; twice that for a power of two in between. Then the output is rounded to nearest.
    """
    accumulation = case.k_steps * (33 * 2.0**-25 + 2.0**-23) * 2 * case.magnitude
    relative = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    smallest = {torch.float32: 0.0, torch.float16: 2.0**-25, torch.bfloat16: 0.0}[dtype]
    return accumulation * (1 + relative) + relative * case.exact.abs() + smallest
