"""Every pair of formats that has a kernel on this GPU: right against float64, the emulator's bits, nothing written past.

One place draws the random problems for both comparisons, so what was judged by float64 is also what is compared bit for
bit. Which pairs there are comes from ``padless.kernels.table``.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from padless.formats import FORMAT_BY_NAME, FP8_BLOCK, BlockScaledTensor
from padless.kernels.launch import KernelChoice, KernelConfig
from padless.kernels.sm90_bf16.config import Sm90Bf16Config, select_config
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.sm90_mxfp8.config import Sm90Mxfp8Config
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
from padless.kernels.table import BF16, ROUTES, Route, find_route, kernels_arch
from padless.ops.grouped_gemm import group_offsets, grouped_gemm
from padless.runtime.driver import cuda_driver
from padless.testing.guarded import GuardedOutput
from padless.testing.judge import values_of
from padless.testing.operands import any_codes, in_layout, moved
from padless.testing.processes import in_order, worker_pool
from padless.verify.checks import Check, Comparison
from padless.verify.emulator.kernels import backend_of, bits, emulation_cost
from padless.verify.fp8_block import CONFIGS, precision_of
from padless.verify.fuzz.judge import FLOAT32_PRECISION, Precision, Product, exact_grouped
from padless.verify.fuzz.place import Place

DEVICE = "cuda"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Problems of each route: judged by float64, and compared with the emulator; of FP8_BLOCK's alone, compared.
JUDGED, COMPARED, COMPARED_FP8_BLOCK = 6, 10, 200
# The FP8 tensor core keeps 13 bits of each sum of 32 products; a short row of widely spread values shows more of that
# than the long sums that the limit was made for.
_LIMIT_FACTOR: dict[type[KernelConfig], float] = {Sm90Mxfp8Config: 4}


def routes_of(arch: str) -> list[Route]:
    """The grouped routes of an architecture, without the one of Hopper that ``fp8_block`` is about."""
    arch = kernels_arch(arch)
    here = [route for route in ROUTES if (route.operation, route.arch) == ("grouped_gemm", arch)]
    return [route for route in here if route.config_class is not Sm90Fp8Config]


def configs_of(route: Route) -> list[KernelChoice | None]:
    """Kernels to try: the route's with the tile that it picks (None where the route is the default) and all tiles."""
    default = find_route(route.operation, route.arch, route.a, route.b) == route
    chosen: KernelChoice | None = None if default else route.config_class
    return [chosen, *_TILES[route.config_class](route)]


def _bf16_tiles(route: Route) -> list[KernelChoice]:
    promoted = "FP8_BLOCK" in (route.a, route.b)
    # 128 tokens beside FP8_BLOCK weights are not for every output: those of the kernel's own choice.
    tiles = [(m, 128, 2) for m in (8, 16, 32, 64, 128) if m < 128 or route.b != "FP8_BLOCK"]
    tiles += [(m, 256, warpgroups) for m in (8, 16, 32) for warpgroups in (2, 4)]
    tiles += [] if promoted else [(64, 256, 2)]
    tiles += [(64, 256, 4)] if not promoted and route.b in ("MXFP4", "NVFP4") else []
    configs: list[KernelChoice] = [
        Sm90Bf16Config(route.a, route.b, block_m=m, block_n=n, num_warpgroups=warpgroups) for m, n, warpgroups in tiles
    ]
    # As chosen for 32 and 64 tokens: two blocks of K to a stage, where that is done.
    return configs + [select_config(route.a, route.b, tokens, 4096, 1) for tokens in (32, 64)]


def _sm100_tiles(route: Route) -> list[KernelChoice]:
    shapes = ((False, 128), (False, 256), (True, 32), (True, 64), (True, 128), (True, 256))
    return [
        Sm100GroupedConfig(cta_group=ctas, multicast=multicast, tokens_on_n=tokens_on_n, mma_n=n)
        for ctas, multicast in ((1, 1), (1, 4), (2, 1), (2, 2))
        for tokens_on_n, n in shapes
    ]


# By the kernel's configuration: every tile of it. A kernel without an entry is not verified: KeyError.
_TILES: dict[type[KernelConfig], Callable[[Route], list[KernelChoice]]] = {
    Sm90Fp8Config: lambda route: [*CONFIGS],
    Sm90Bf16Config: _bf16_tiles,
    Sm90Mxfp8Config: lambda route: [Sm90Mxfp8Config(block_m=m, block_n=n) for m in (64, 128) for n in (64, 128)],
    Sm100GroupedConfig: _sm100_tiles,
}


@dataclass(frozen=True)
class FormatsProblem:
    """A small ragged problem on the CPU; ``config`` None takes the kernel's own choice."""

    a: BlockScaledTensor | torch.Tensor
    b: BlockScaledTensor
    offs: torch.Tensor
    dtype: torch.dtype
    config: Any


def random_formats_problem(route: Route, seed: int) -> FormatsProblem:
    """A function of the route and the seed alone: ragged sizes, tails of M, N and K, scales in any layout.

    Codes are any finite bits; scales spread over 16 powers of two (NVFP4's: any positive e4m3). FP8_BLOCK by its own
    kernel has scales over 20, and for odd seeds normal values as codes.
    """
    draw = random.Random(f"{route.module} {route.a} {route.b} {seed}")
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    sizes = [draw.choice((0, 1, 5, 63, 64, 65, 127, 129, draw.randrange(150))) for _ in range(draw.randint(1, 4))]
    of_fp8_block = route.config_class is Sm90Fp8Config
    m, n, k = sum(sizes) + draw.randrange(4), 8 * draw.randint(1, 34), (16 if of_fp8_block else 32)
    k *= draw.randint(1, 25 if of_fp8_block else 14)
    offs = group_offsets(sizes)

    def operand(name: str, shape: tuple[int, ...], kind: str, layouts: Sequence[str]) -> Any:
        if name == BF16:
            return torch.randn(shape, generator=generator).to(torch.bfloat16)
        layout = draw.choice(layouts)
        t = any_codes(FORMAT_BY_NAME[name], shape, kind, len(sizes), generator)
        return t if t.format.scale_dtype == torch.float32 else in_layout(t, layout, offs)

    a = operand(route.a, (m, k), "activation", ("plain", "blocked", "blocked_groups"))
    b = operand(route.b, (len(sizes), n, k), "weight", ("plain", "blocked"))
    if of_fp8_block:
        assert isinstance(a, BlockScaledTensor)
        a, b = (_wider(t, seed % 2 == 1, generator) for t in (a, b))
    config, dtype = draw.choice(configs_of(route)), draw.choice(DTYPES)
    if isinstance(config, Sm90Fp8Config) and dtype == torch.float32:
        config = replace(config, block_m=min(config.block_m, 128))  # twice the shared memory
    return FormatsProblem(a, b, offs, dtype, config)


def _wider(t: Any, normal: bool, generator: torch.Generator) -> BlockScaledTensor:
    data = torch.randn(t.shape, generator=generator).to(t.data.dtype) if normal else t.data
    return BlockScaledTensor(data, torch.exp2(torch.rand(t.scale.shape, generator=generator) * 20 - 10), FP8_BLOCK)


def emulate_formats(route: Route, seed: int) -> torch.Tensor:
    """The bits of the valid rows, by the emulator."""
    from padless.emulator.fake_driver import driver_of

    problem = random_formats_problem(route, seed)
    backend = backend_of(route.arch)
    with driver_of(backend).configured(num_sms=4):  # enough for the largest cluster
        out = grouped_gemm(
            problem.a, problem.b, problem.offs, out_dtype=problem.dtype, backend=backend, config=problem.config
        )
    return bits(out, problem.offs)


def problems_of(arch: str, problems: int) -> list[tuple[Route, int]]:
    """So many problems of every route, each a route and a seed."""
    return [(route, seed) for route in routes_of(arch) for seed in range(problems)]


def _cost(route: Route, seed: int) -> float:
    problem = random_formats_problem(route, seed)
    groups, n, k = problem.b.shape
    return emulation_cost(int(problem.offs[-1]), groups, n, k)


def _on_gpu(route: Route, seed: int) -> tuple[FormatsProblem, torch.Tensor]:
    """A problem and its output by the GPU, guarded."""
    problem = random_formats_problem(route, seed)
    a, b, offs = (moved(t, DEVICE) for t in (problem.a, problem.b, problem.offs))
    guarded = GuardedOutput(a.shape[0], b.shape[1], problem.dtype, DEVICE)
    grouped_gemm(a, b, offs, out=guarded.out, config=problem.config)
    torch.cuda.synchronize()
    guarded.check(int(offs[-1]), expect_finite=False)
    return problem, guarded.out


def check_formats_accuracy(place: Place) -> None:
    """No row is further from float64 than the output's rounding and FP8's sums explain, nothing else is written."""
    for route, seed in place.some(problems_of(place.arch, JUDGED)):
        problem = random_formats_problem(route, seed)
        a, b, offs = (place.put(t) for t in (problem.a, problem.b, problem.offs))
        guarded, valid = place.output(a.shape[0], b.shape[1], problem.dtype), int(problem.offs[-1])
        grouped_gemm(a, b, offs, out=guarded.out, backend=place.backend, config=problem.config)
        where = f"{route.name}, {route.a} x {route.b}, problem {seed}"
        place.judge.written(where, guarded, valid)
        place.judge.product(where, guarded.out[:valid], partial(_exact, a, b, offs), _precision(route, problem))


def _exact(a: Any, b: BlockScaledTensor, offs: torch.Tensor) -> Product:
    """On the operands' device."""
    return exact_grouped(values_of(a, offs), values_of(b), itertools.pairwise([0, *offs.tolist()]))


def _precision(route: Route, problem: FormatsProblem) -> Precision:
    factor = _LIMIT_FACTOR.get(route.config_class, 1)
    precision = precision_of(problem.dtype, factor)
    return precision._replace(of_sum=FLOAT32_PRECISION.of_sum) if route.config_class is Sm90Bf16Config else precision


def check_formats_against_emulator(problems: int = COMPARED, workers: int | None = None) -> str:
    """Raises AssertionError with every route whose bits differ between the GPU and the emulator."""
    return _against_emulator(problems_of(cuda_driver().arch, problems), workers)


def check_fp8_block_against_emulator(problems: int = COMPARED_FP8_BLOCK, workers: int | None = None) -> str:
    """The same of Hopper's own kernel for FP8_BLOCK."""
    return _against_emulator(fp8_block_problems(problems), workers)


def fp8_block_problems(problems: int = COMPARED_FP8_BLOCK) -> list[tuple[Route, int]]:
    """So many problems of Hopper's own kernel for FP8_BLOCK."""
    return [(find_route("grouped_gemm", "sm_90a", "FP8_BLOCK", "FP8_BLOCK"), seed) for seed in range(problems)]


def _against_emulator(jobs: list[tuple[Route, int]], workers: int | None) -> str:
    elements, wrong = 0, []
    with worker_pool(workers) as pool:
        emulated = in_order(pool, emulate_formats, jobs, _cost)
        for (route, seed), expected in zip(jobs, emulated, strict=True):
            problem, out = _on_gpu(route, seed)
            computed = bits(out, problem.offs)
            differ = int((computed != expected).sum())
            elements += computed.numel()
            if differ:
                where = f"{route.name}, {route.a} x {route.b}, problem {seed}"
                wrong.append(f"{where} ({problem.config}): {differ} of {computed.numel()} elements differ")
    assert not wrong, f"{len(wrong)} of {len(jobs)} problems: " + "; ".join(wrong[:8])
    routes = {route for route, _ in jobs}
    return f"{len(jobs)} problems of {len(routes)} routes, {elements} elements, bit for bit the same"


CHECK = Check(check_formats_accuracy, 4)
COMPARISONS = {
    "emulator agrees": Comparison(check_fp8_block_against_emulator, lambda arch: fp8_block_problems(), emulate_formats),
    "emulator agrees on formats": Comparison(
        check_formats_against_emulator, partial(problems_of, problems=COMPARED), emulate_formats
    ),
}
