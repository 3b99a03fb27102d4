"""Blackwell's dense kernel and its lists of problems on this GPU: every bit, on operands whose products nothing rounds.

Elements are small integers (FP4: any code), scales 1/2, 1 and 2, so a sum is the same in any order and by any rule of
the tensor core, and the output alone is rounded.
"""

from __future__ import annotations

import itertools
import random

import torch

from padless.formats import MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledFormat, BlockScaledTensor, ceil_div
from padless.kernels.sm100_dense.config import Sm100DenseConfig
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
from padless.ops.grouped_gemm import gemm
from padless.ops.grouped_gemm_list import grouped_gemm_list
from padless.testing.guarded import GuardedOutput
from padless.testing.judge import values_of
from padless.testing.operands import in_layout
from padless.verify.checks import Check
from padless.verify.fuzz.place import Place

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PRODUCTS, PROBLEM_LISTS = 20, 12
DENSE: tuple[Sm100DenseConfig | None, ...] = (
    None,
    Sm100DenseConfig(),
    Sm100DenseConfig(store="staged", tile_order="hilbert"),
    Sm100DenseConfig(block_n=128, tile_order="hilbert"),
    Sm100DenseConfig(cta_group=1, block_n=128),
)
LISTS: tuple[Sm100GroupedConfig | None, ...] = (
    None,
    Sm100GroupedConfig(),
    Sm100GroupedConfig(cta_group=2, mma_n=256),
    Sm100GroupedConfig(cta_group=2, mma_n=256, multicast=2),
    Sm100GroupedConfig(cta_group=2, mma_n=64, tokens_on_n=True),
)


def dense_products(place: Place, problems: int | None = None) -> None:
    """Every bit of so many random dense MXFP8 products, and none outside of them was written."""
    for seed in range(PRODUCTS if problems is None else problems):
        draw, generator = random.Random(f"dense {seed}"), torch.Generator().manual_seed(seed)
        m, n, k = draw.randint(1, 600), draw.randint(1, 600), 32 * draw.randint(1, 20)
        formats = draw.choice(list(itertools.product((MXFP8, MXFP8_E5M2), repeat=2)))
        dtype, config = draw.choice(DTYPES), DENSE[seed % len(DENSE)]
        if config is not None and config.store == "staged":
            n = ceil_div(n, 8) * 8  # rows on 16-byte boundaries
        a, b = (_operand(f, rows, k, draw, generator) for f, rows in zip(formats, (m, n), strict=True))
        guarded = place.output(m, n, dtype)
        gemm(place.put(a), place.put(b), out=guarded.out, backend=place.backend, config=config)
        place.judge.now(f"dense problem {seed}, {(m, n, k)}, {config}:")
        _judge_product(place, guarded, guarded.out, a, b)


def problem_lists(place: Place, problems: int | None = None) -> None:
    """The same of so many random lists of products."""
    for seed in range(PROBLEM_LISTS if problems is None else problems):
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
        fences = [place.output(*((n, m) if column_major else (m, n)), dtype) for m, n, _ in sizes]
        outs = [fence.out.t() if column_major else fence.out for fence in fences]
        a, b = ([place.put(t) for t in side] for side in zip(*operands, strict=True))
        config = LISTS[seed % len(LISTS)]
        grouped_gemm_list(a, b, out=outs, alpha=place.put(alpha), backend=place.backend, config=config)
        for i, (pair, fence, out) in enumerate(zip(operands, fences, outs, strict=True)):
            place.judge.now(f"list {seed}, problem {i}, {sizes[i]}, {config}:")
            _judge_product(place, fence, out, pair[0], pair[1], alpha[i])


def _judge_product(
    place: Place,
    guarded: GuardedOutput,
    out: torch.Tensor,
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    alpha: torch.Tensor | None = None,
) -> None:
    """``out`` is all of ``guarded``, or its transpose."""
    place.judge.written("fences", guarded)

    def expected() -> torch.Tensor:
        product = _product(a, b)
        found: torch.Tensor = place.put((product if alpha is None else product.float() * alpha).to(out.dtype))
        return found

    place.judge.same("the exact product's bits", out, expected)


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
    plain = BlockScaledTensor(data.view(fmt.data_dtype), scale, fmt)
    return in_layout(plain, draw.choice(("plain", "blocked")))


def _product(a: BlockScaledTensor, b: BlockScaledTensor) -> torch.Tensor:
    return values_of(a) @ values_of(b).t()


DENSE_CHECK, LISTS_CHECK = Check(dense_products), Check(problem_lists)
