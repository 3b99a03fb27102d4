"""Problems of the MXFP8 weight gradient of Blackwell: groups in rows that belong to nobody, scales along the tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from padless import MXFP8, quantize
from padless.formats import ceil_div
from padless.kernels.sm100_mxfp8_wgrad import host
from support.weight_gradients import GuardedGradient

Operand = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Columns:
    """dy, x: (codes (M, features), scale (4 * T, features)). sizes: rows of the groups."""

    dy: Operand
    x: Operand
    offs: torch.Tensor
    sizes: tuple[int, ...]


def columns_of(rows: torch.Tensor, sizes: tuple[int, ...]) -> Operand:
    """Rows quantized along the tokens of each group by the public call, group by group; what is of no group is NaN."""
    m, features = rows.shape
    codes = torch.full((m, features), 0x7F, dtype=torch.uint8)
    scale = torch.full((4 * (m // 128 + len(sizes)), features), 0xFF, dtype=torch.uint8)
    start = first = 0
    for size in sizes:
        if size:
            whole = torch.zeros(ceil_div(size, 32) * 32, features)
            whole[:size] = rows[start : start + size]
            made = quantize(whole.T.contiguous(), MXFP8)
            codes[start : start + size] = made.data.view(torch.uint8).T[:size]
            scale[first : first + ceil_div(size, 32)] = made.scale.view(torch.uint8).T
        start, first = start + size, first + 4 * ceil_div(size, 128)
    return codes.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)


def random_columns(sizes: tuple[int, ...], behind: int, n: int, k: int, seed: int = 0) -> Columns:
    """Normal values whose blocks have scales of many powers of two, and ``behind`` rows of NaN past the last group."""
    generator = torch.Generator().manual_seed(seed)
    m = sum(sizes) + behind
    rows = [torch.randn(m, features, generator=generator) for features in (n, k)]
    rows = [t * torch.exp2(torch.randint(-6, 7, (m, 1), generator=generator).float()) for t in rows]
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return Columns(columns_of(rows[0], sizes), columns_of(rows[1], sizes), offs, sizes)


def group_of(problem: Columns, group: int) -> Columns:
    """The problem of one group alone."""
    end = sum(problem.sizes[: group + 1])
    start, tile = end - problem.sizes[group], sum(ceil_div(s, 128) for s in problem.sizes[:group])
    size = problem.sizes[group]
    own = slice(4 * tile, 4 * tile + 4 * (size // 128 + 1))
    dy, x = ((codes[start:end].clone(), scale[own].contiguous()) for codes, scale in (problem.dy, problem.x))
    return replace(problem, dy=dy, x=x, offs=torch.tensor([size], dtype=torch.int32), sizes=(size,))


def launched(driver: Any, problem: Columns, config: Any, onto: torch.Tensor | None = None) -> torch.Tensor:
    """The kernel's result, in a guarded output of NaN, or ``onto`` what was there."""
    shape = (len(problem.sizes), problem.dy[0].shape[1], problem.x[0].shape[1])
    guarded = GuardedGradient(shape, config.out_dtype, onto)
    host.prepare(driver, problem.dy, problem.x, problem.offs, guarded.out, config).launch(0)
    guarded.check()
    return guarded.out
