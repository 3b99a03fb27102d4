"""Does the emulator's tensor core compute the GPU's bits? Single wgmma instructions on hostile operands, compared.

A GEMM shows the arithmetic only on the values that occur in it. Here every operand is drawn to be difficult: exponents
over the whole range of the type, zeros beside large partners, subnormals, accumulators over 60 binades, and, in a part
of the problems, infinities and NaNs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from padless.kernels.table import kernels_arch
from padless.runtime.driver import Driver, LaunchShape, cuda_driver
from padless.runtime.jit import compile_kernel
from padless.verify.checks import Comparison

KERNEL = "wgmma_probe/wgmma_probe.cu"
M, N, K_BYTES = 64, 8, 32

# Element types of A and B, each a torch dtype; the instruction takes 32 bytes of K.
TYPES: dict[str, torch.dtype] = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}
PAIRS = (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2"), ("bf16", "bf16"), ("f16", "f16"))
KINDS_OF_DATA = ("any bits", "few binades", "zeros among large", "zero times large beside tiny", "specials")


def operand(rows: int, problems: int, dtype: torch.dtype, data: str, generator: torch.Generator) -> torch.Tensor:
    """(problems, rows, K) of ``dtype``, difficult in the way that ``data`` names."""
    k = K_BYTES // dtype.itemsize
    shape = (problems, rows, k)
    bits_type = torch.uint8 if dtype.itemsize == 1 else torch.int16
    if data == "few binades":
        return _normal(shape, 4, generator).to(dtype)
    low, high = (0, 256) if dtype.itemsize == 1 else (-(2**15), 2**15)
    values = torch.randint(low, high, shape, generator=generator).to(bits_type).view(dtype)
    wide = values.float()
    if dtype == torch.bfloat16:  # products of two of these stay inside float32
        keep = (wide.abs() < 2.0**62) | ~wide.isfinite()
        values = torch.where(keep, wide, _normal(shape, 60, generator)).to(dtype)
        wide = values.float()
    if data != "specials":
        values = torch.where(wide.isfinite(), wide, torch.ones_like(wide)).to(dtype)
    if data == "zeros among large":
        zero = torch.rand(shape, generator=generator) < 0.6
        values = torch.where(zero, torch.zeros_like(wide), values.float()).to(dtype)
    return values


def _normal(shape: tuple[int, ...], binades: int, generator: torch.Generator) -> torch.Tensor:
    """Normal values, each times a power of two of up to ``binades`` up or down."""
    powers = torch.randint(-binades, binades + 1, shape, generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(powers.float())


def _zero_times_large(
    a: torch.Tensor, b: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """For half of the k: a is zero and b as large as it gets; for the others both are tiny."""
    large = torch.rand((a.shape[0], 1, a.shape[2]), generator=generator) < 0.5
    top = {torch.bfloat16: 2.0**126, torch.float16: 2.0**14}.get(b.dtype, 224.0)  # up to e4m3's maximum
    tiny = {torch.bfloat16: 2.0**-55, torch.float16: 2.0**-12}.get(a.dtype, 2.0**-5)

    def spread(t: torch.Tensor, scale: float) -> torch.Tensor:
        return scale * (1 + torch.rand(t.shape, generator=generator))

    sign = torch.randint(0, 2, a.shape, generator=generator) * 2.0 - 1
    a = torch.where(large, torch.zeros(()), sign * spread(a, tiny)).to(a.dtype)
    return a, torch.where(large, spread(b, top), spread(b, tiny)).to(b.dtype)


def in_core_matrices(t: torch.Tensor) -> torch.Tensor:
    """(problems, rows, K) as bytes in core matrices of 8 rows x 16 bytes: (problems, rows / 8, 2, 8, 16)."""
    problems, rows, _ = t.shape
    return t.contiguous().view(torch.uint8).view(problems, rows // 8, 8, 2, 16).transpose(2, 3).contiguous()


def run_wgmma(driver: Driver, pair: tuple[str, str], a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """One wgmma for every problem: the accumulators (problems, 128, 4) float32 after it, on the device of ``a``."""
    sixteen_bits = TYPES[pair[0]].itemsize == 2
    prelude = (
        f'#define KINDS "{pair[0]}.{pair[1]}"\n'
        f'#define WGMMA_K "{K_BYTES // TYPES[pair[0]].itemsize}"\n'
        f'#define TRANSPOSES "{", 0, 0" if sixteen_bits else ""}"\n'
    )
    kernel = compile_kernel(KERNEL, prelude, driver.arch, driver.kind)
    function = driver.load(kernel, a.device.index or 0)
    d = torch.full_like(c, float("nan"))
    tensors = [a, b, c, d]
    launch = driver.prepare(
        function, kernel, LaunchShape(a.shape[0], 128, 1), [(t.data_ptr(), 8) for t in tensors], tensors
    )
    launch(torch.cuda.current_stream(a.device).cuda_stream if a.is_cuda else 0)
    return d


def problems_of(pair: tuple[str, str], problems: int, seed: int) -> Iterator[tuple[str, tuple[torch.Tensor, ...]]]:
    """(kind of data, (a, b, c)) as the kernel takes them, on the CPU: a function of the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    for data in KINDS_OF_DATA:
        a = operand(M, problems, TYPES[pair[0]], data, generator)
        b = operand(N, problems, TYPES[pair[1]], data, generator)
        if data == "zero times large beside tiny":  # does a zero product's exponent take part in the alignment?
            a, b = _zero_times_large(a, b, generator)
        c = _normal((problems, 128, 4), 30, generator)
        c[torch.rand(c.shape, generator=generator) < 0.25] = 0.0
        if data == "specials":
            special = torch.tensor([float("inf"), -float("inf"), float("nan"), 2.0**-140])
            at = torch.rand(c.shape, generator=generator) < 0.1
            c = torch.where(at, special[torch.randint(0, 4, c.shape, generator=generator)], c)
        yield data, (in_core_matrices(a), in_core_matrices(b), c)


def check_tensor_core(problems: int = 40, seed: int = 0) -> str:
    """Raises AssertionError when one accumulator's bits differ between the GPU and the emulator."""
    from padless.emulator.fake_driver import emulated_driver

    compared = 0
    wrong: list[str] = []
    for pair in PAIRS:
        for data, operands in problems_of(pair, problems, seed):
            emulated = run_wgmma(emulated_driver(), pair, *operands).view(torch.int32)
            computed = run_wgmma(cuda_driver(), pair, *(t.cuda() for t in operands)).cpu().view(torch.int32)
            differ = computed != emulated
            compared += differ.numel()
            if differ.any():
                first = tuple(differ.nonzero()[0].tolist())
                here, there = (f"{int(t[first]) & 0xFFFFFFFF:#010x}" for t in (computed, emulated))
                wrong.append(
                    f"{pair[0]} x {pair[1]}, {data}: {int(differ.sum())} of {differ.numel()} differ, "
                    f"first at {first}: {here} on the GPU, {there} emulated"
                )
    assert not wrong, "; ".join(wrong)
    return f"{compared} accumulators of {len(PAIRS)} pairs of types, bit for bit the same"


def rehearse(arch: str) -> None:
    """A problem of every pair, by the emulator."""
    from padless.emulator.fake_driver import emulated_driver

    for pair in PAIRS:
        for _, operands in problems_of(pair, 1, 0):
            run_wgmma(emulated_driver(arch), pair, *operands)


COMPARISONS = {
    "emulator's tensor core agrees": Comparison(check_tensor_core, lambda arch: [(kernels_arch(arch),)], rehearse)
}
