"""Blackwell's dense kernel and its lists of problems on this GPU: every bit, on operands whose products nothing rounds.

Elements are small integers (FP4: any code), scales 1/2, 1 and 2, so a sum is the same in any order and by any rule of
the tensor core, and the output alone is rounded.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial

import torch

from padless.formats import MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledFormat, BlockScaledTensor, ceil_div
from padless.kernels.sm100_dense.config import Sm100DenseConfig
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
from padless.ops.grouped_gemm import gemm
from padless.ops.grouped_gemm_list import grouped_gemm_list
from padless.runtime.choices import BackendName
from padless.testing.guarded import GuardedOutput
from padless.testing.judge import values_of
from padless.testing.operands import in_layout, moved
from padless.verify.checks import Check
from padless.verify.fuzz.place import Place

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PRODUCTS, PROBLEM_LISTS = 20, 12
# Looks at what a launch wrote: the number of elements that it judged. Raises AssertionError.
Judge = Callable[[], int]
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


def check_dense_mxfp8(place: Place) -> None:
    """Every bit of dense MXFP8 products is right, and none outside of them was written."""
    for judge in dense_launches(PRODUCTS, str(place.device), place.backend):
        place.judge.ask(judge)


def dense_launches(problems: int, device: str, backend: BackendName | None) -> Iterator[Judge]:
    """Launches random dense products one by one, each time with its judge."""
    for seed in range(problems):
        draw, generator = random.Random(f"dense {seed}"), torch.Generator().manual_seed(seed)
        m, n, k = draw.randint(1, 600), draw.randint(1, 600), 32 * draw.randint(1, 20)
        formats = draw.choice(list(itertools.product((MXFP8, MXFP8_E5M2), repeat=2)))
        dtype, config = draw.choice(DTYPES), DENSE[seed % len(DENSE)]
        if config is not None and config.store == "staged":
            n = ceil_div(n, 8) * 8  # rows on 16-byte boundaries
        a, b = (_operand(f, rows, k, draw, generator) for f, rows in zip(formats, (m, n), strict=True))
        guarded = GuardedOutput(m, n, dtype, device)
        gemm(moved(a, device), moved(b, device), out=guarded.out, backend=backend, config=config)
        what = f"problem {seed}, {(m, n, k)}, {config}"
        yield partial(_judge_product, guarded, guarded.out, (a, b), None, what)


def check_problem_lists(place: Place) -> None:
    """Every bit of lists of products is right, and none outside of them was written."""
    for judge in list_launches(PROBLEM_LISTS, str(place.device), place.backend):
        place.judge.ask(judge)


def list_launches(problems: int, device: str, backend: BackendName | None) -> Iterator[Judge]:
    """Launches random lists one by one, each time with the judges of its products."""
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
        a, b = ([moved(t, device) for t in side] for side in zip(*operands, strict=True))
        config = LISTS[seed % len(LISTS)]
        grouped_gemm_list(a, b, out=outs, alpha=alpha.to(device), backend=backend, config=config)
        for i, (pair, fence, out) in enumerate(zip(operands, fences, outs, strict=True)):
            what = f"list {seed}, problem {i}, {sizes[i]}, {config}"
            yield partial(_judge_product, fence, out, tuple(pair), alpha[i], what)


def _judge_product(
    guarded: GuardedOutput,
    out: torch.Tensor,
    operands: tuple[BlockScaledTensor, ...],
    alpha: torch.Tensor | None,
    what: str,
) -> int:
    """``out`` is all of ``guarded``, or its transpose."""
    guarded.check(guarded.out.shape[0])
    product = _product(*operands)
    expected = (product if alpha is None else product.float() * alpha).to(out.dtype)
    wrong = out.cpu() != expected
    if wrong.any():
        row, column = torch.nonzero(wrong)[0].tolist()
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, the first in row {row}, column "
            f"{column}: {float(out[row, column])!r}, not {float(expected[row, column])!r}"
        )
    return out.numel()


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


DENSE_CHECK, LISTS_CHECK = Check(check_dense_mxfp8), Check(check_problem_lists)
