"""Does the emulator compute the GPU's bits? Random problems, run by both, compared bit for bit."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.table import kernels_arch
from padless.ops.grouped_gemm import group_offsets, grouped_gemm
from padless.testing.operands import moved
from padless.testing.processes import in_order, worker_pool
from padless.verify.fp8_block import CONFIGS

DEVICE = "cuda"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PROBLEMS = 200
_BITS = {2: torch.int16, 4: torch.int32}


def random_problem(seed: int) -> tuple[BlockScaledTensor, BlockScaledTensor, torch.Tensor, Sm90Fp8Config, torch.dtype]:
    """A small ragged problem on the CPU, a kernel and an output dtype: a function of the seed alone.

    Half of the problems hold normal values; the others any e4m3 code but NaN, with scales over 20 powers of two.
    """
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    sizes = [draw.choice((0, 1, 5, 63, 64, 65, 127, 129, draw.randrange(200))) for _ in range(draw.randint(1, 4))]
    m, n, k = sum(sizes) + draw.randrange(4), 8 * draw.randint(1, 26), 16 * draw.randint(1, 25)
    config, dtype = draw.choice(CONFIGS), draw.choice(DTYPES)
    if dtype == torch.float32 and config.block_m == 256:
        config = replace(config, block_m=128)

    def codes(*shape: int) -> torch.Tensor:
        if seed % 2:
            return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        byte = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        byte[(byte & 0x7F) == 0x7F] = 0
        return byte.view(torch.float8_e4m3fn)

    def scales(*shape: int) -> torch.Tensor:
        return torch.exp2(torch.rand(shape, generator=generator) * 20 - 10)

    k_blocks = -(-k // 128)
    a = BlockScaledTensor(codes(m, k), scales(m, k_blocks), FP8_BLOCK)
    groups = len(sizes)
    b = BlockScaledTensor(codes(groups, n, k), scales(groups, -(-n // 128), k_blocks), FP8_BLOCK)
    return a, b, group_offsets(sizes), config, dtype


def emulate(seed: int) -> torch.Tensor:
    """The bits of the valid rows, by the emulator."""
    a, b, offs, config, dtype = random_problem(seed)
    out = grouped_gemm(a, b, offs, out_dtype=dtype, backend="emulator", config=config)
    return bits(out, offs)


def backend_of(arch: str) -> str:
    """The emulator's backend that runs the kernels of a GPU of ``arch``."""
    arch = kernels_arch(arch)
    return "emulator" if arch == "sm_90a" else f"emulator:{arch}"


def emulation_cost(rows: int, groups: int, n: int, k: int) -> float:
    """A number about proportional to the emulator's time for a problem: whole tiles, some of which are mostly empty."""
    return (rows + 64 * groups) * (n + 64) * (k + 64)


def _cost(seed: int) -> float:
    a, b, offs, _, _ = random_problem(seed)
    return emulation_cost(int(offs[-1]), len(offs), b.shape[1], a.shape[1])


def bits(out: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The valid rows as integers, on the CPU."""
    return out[: int(offs[-1])].cpu().view(_BITS[out.element_size()])


def check_against_emulator(problems: int = PROBLEMS, first_seed: int = 0, workers: int | None = None) -> str:
    """Raises AssertionError at the first problem whose bits differ between the GPU and the emulator."""
    seeds = range(first_seed, first_seed + problems)
    elements = 0
    with worker_pool(workers) as pool:
        outputs = in_order(pool, emulate, [(seed,) for seed in seeds], _cost)
        for seed, emulated in zip(seeds, outputs, strict=True):
            a, b, offs, config, dtype = random_problem(seed)
            on_gpu = [moved(t, DEVICE) for t in (a, b, offs)]
            out = grouped_gemm(*on_gpu, out_dtype=dtype, config=config)
            computed = bits(out, offs)
            wrong = int((computed != emulated).sum())
            assert wrong == 0, f"problem {seed} ({config}): {wrong} of {computed.numel()} elements differ"
            elements += computed.numel()
    return f"{problems} problems, {elements} elements, bit for bit the same"
