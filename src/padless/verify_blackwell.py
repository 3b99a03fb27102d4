"""Blackwell's dense kernel and its lists of problems on this GPU: every bit, on operands whose products nothing rounds.

Elements are small integers (FP4: any code), scales 1/2, 1 and 2, so a sum is the same in any order and by any rule of
the tensor core, and the output alone is rounded.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch

from padless.config_sm100_grouped import Sm100GroupedConfig
from padless.fence import GuardedOutput
from padless.formats import MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledFormat, BlockScaledTensor, ceil_div
from padless.grouped_gemm import gemm
from padless.grouped_gemm_list import grouped_gemm_list
from padless.layouts import to_blocked
from padless.paths.sm100_mxfp8_dense import Mxfp8GemmConfig
from padless.quantize import dequantize

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DENSE: tuple[Mxfp8GemmConfig | None, ...] = (
    None,
    Mxfp8GemmConfig(),
    Mxfp8GemmConfig(store="staged", tile_order="hilbert"),
    Mxfp8GemmConfig(block_n=128, tile_order="hilbert"),
    Mxfp8GemmConfig(cta_group=1, block_n=128),
)
LISTS: tuple[Sm100GroupedConfig | None, ...] = (
    None,
    Sm100GroupedConfig(),
    Sm100GroupedConfig(cta_group=2, mma_n=256),
    Sm100GroupedConfig(cta_group=2, mma_n=256, multicast=2),
    Sm100GroupedConfig(cta_group=2, mma_n=64, tokens_on_n=True),
)


def check_dense_mxfp8(problems: int = 20, device: str = "cuda", backend: str | None = None) -> str:
    """Raises AssertionError where a bit of a dense MXFP8 product is wrong, or one outside of it was written."""
    elements = 0
    for seed in range(problems):
        draw, generator = random.Random(f"dense {seed}"), torch.Generator().manual_seed(seed)
        m, n, k = draw.randint(1, 600), draw.randint(1, 600), 32 * draw.randint(1, 20)
        formats = draw.choice(list(itertools.product((MXFP8, MXFP8_E5M2), repeat=2)))
        dtype, config = draw.choice(DTYPES), DENSE[seed % len(DENSE)]
        if config is not None and config.store == "staged":
            n = ceil_div(n, 8) * 8  # rows on 16-byte boundaries
        a, b = (_operand(f, rows, k, draw, generator) for f, rows in zip(formats, (m, n), strict=True))
        fenced = GuardedOutput(m, n, dtype, device)
        gemm(_on(a, device), _on(b, device), out=fenced.out, backend=backend, config=config)
        fenced.check(m)
        _compare(fenced.out, _product(a, b).to(dtype), f"problem {seed}, {(m, n, k)}, {config}")
        elements += m * n
    return f"{problems} products, {elements} elements, every bit right"


def check_problem_lists(problems: int = 12, device: str = "cuda", backend: str | None = None) -> str:
    """Raises AssertionError where a bit of a list of products is wrong, or one outside of them was written."""
    elements = 0
    for seed in range(problems):
        draw, generator = random.Random(f"list {seed}"), torch.Generator().manual_seed(seed)
        fmt, dtype = (NVFP4, MXFP8, MXFP4)[seed % 3], draw.choice(DTYPES)
        column_major = draw.random() < 0.5
        sizes = [
            (draw.choice((0, 1, 72, 129, 200)), 8 * draw.randint(1, 40), 32 * draw.randint(1, 16))
            for _ in range(draw.randint(1, 5))
        ]
        sizes.append((60, 264, 160))  # one that is not empty, with tails
        operands = [[_operand(fmt, rows, k, draw, generator) for rows in (m, n)] for m, n, k in sizes]
        alpha = torch.rand(len(sizes), generator=generator) + 0.5
        fences = [GuardedOutput(*((n, m) if column_major else (m, n)), dtype, device) for m, n, _ in sizes]
        outs = [fence.out.t() if column_major else fence.out for fence in fences]
        a, b = ([_on(t, device) for t in side] for side in zip(*operands, strict=True))
        config = LISTS[seed % len(LISTS)]
        grouped_gemm_list(a, b, out=outs, alpha=alpha.to(device), backend=backend, config=config)
        for i, ((x, y), fence, out) in enumerate(zip(operands, fences, outs, strict=True)):
            fence.check(fence.out.shape[0])
            expected = (_product(x, y).float() * alpha[i]).to(dtype)
            _compare(out, expected, f"list {seed}, problem {i}, {sizes[i]}, {config}")
            elements += out.numel()
    return f"{problems} lists, {elements} elements, every bit right"


def _operand(
    fmt: BlockScaledFormat, rows: int, k: int, draw: random.Random, generator: torch.Generator
) -> BlockScaledTensor:
    if fmt.codes_per_byte == 2:
        data = torch.randint(0, 256, (rows, k // 2), generator=generator).to(torch.uint8)
    else:
        values = torch.randint(-4, 5, (rows, k), generator=generator).float()
        data = values.to(fmt.data_dtype).view(torch.uint8)
    blocks = (rows, ceil_div(k, fmt.block_k))
    exponents = torch.randint(-1, 2, blocks, generator=generator)
    scale = (exponents + 7 << 3 if fmt == NVFP4 else exponents + 127).to(torch.uint8).view(fmt.scale_dtype)
    layout = draw.choice(("plain", "blocked"))
    scale = to_blocked(scale) if layout == "blocked" else scale
    return BlockScaledTensor(data.view(fmt.data_dtype), scale, fmt, None, layout)


def _on(t: BlockScaledTensor, device: str) -> BlockScaledTensor:
    return BlockScaledTensor(t.data.to(device), t.scale.to(device), t.format, None, t.scale_layout)


def _product(a: BlockScaledTensor, b: BlockScaledTensor) -> torch.Tensor:
    x, y = (dequantize(t, torch.float32).double() for t in (a, b))
    return x @ y.t()


def _compare(out: torch.Tensor, expected: torch.Tensor, what: Any) -> None:
    wrong = out.cpu() != expected
    if wrong.any():
        row, column = torch.nonzero(wrong)[0].tolist()
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, the first in row {row}, column "
            f"{column}: {float(out[row, column])!r}, not {float(expected[row, column])!r}"
        )
