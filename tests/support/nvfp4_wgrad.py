"""Problems of the NVFP4 weight gradient of Blackwell: groups of whole products, behind them scales that are NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from padless import NVFP4, BlockScaledTensor
from padless.kernels.sm100_nvfp4_wgrad import host
from padless.layouts import from_blocked, to_blocked
from support.weight_gradients import GuardedGradient

EXACT = (0.5, 1.0, 1.5, 2.0)  # scales with which float32 holds every sum


@dataclass(frozen=True)
class Problem:
    """dy (N, T), x (K, T); ends (G,). sizes: tokens of the groups, multiples of 64."""

    dy: BlockScaledTensor
    x: BlockScaledTensor
    ends: torch.Tensor
    sizes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.sizes), self.dy.shape[0], self.x.shape[0]


def random_problem(
    sizes: tuple[int, ...], behind: int, n: int, k: int, seed: int = 0, *, exact: bool = False
) -> Problem:
    """All codes, and scales of all sizes or those of `EXACT`; ``behind`` more tokens, whose scales are NaN."""
    g = torch.Generator().manual_seed(seed)
    tokens = sum(sizes) + behind

    def operand(features: int) -> BlockScaledTensor:
        codes = torch.randint(256, (features, tokens // 2), generator=g, dtype=torch.uint8)
        scale = torch.randint(0x7F, (features, tokens // 16), generator=g, dtype=torch.uint8)
        if exact:
            drawn = torch.randint(len(EXACT), scale.shape, generator=g)
            scale = torch.tensor(EXACT)[drawn].to(torch.float8_e4m3fn).view(torch.uint8)
        scale[:, sum(sizes) // 16 :] = 0x7F
        return _operand(codes, scale, torch.rand((), generator=g) + 0.5)

    return Problem(operand(n), operand(k), torch.tensor(sizes).cumsum(0).to(torch.int32), sizes)


def _operand(codes: torch.Tensor, scale: torch.Tensor, of_all: torch.Tensor | None) -> BlockScaledTensor:
    tiles = to_blocked(scale).view(torch.float8_e4m3fn)
    return BlockScaledTensor(codes.view(NVFP4.data_dtype), tiles, NVFP4, of_all, "blocked")


def tokens_of(t: BlockScaledTensor, start: int, end: int) -> BlockScaledTensor:
    """The tokens start .. end alone."""
    scale = from_blocked(t.scale.view(torch.uint8), t.shape[0], t.scale_columns)
    codes = t.data.view(torch.uint8)[:, start // 2 : end // 2].contiguous()
    return _operand(codes, scale[:, start // 16 : end // 16].contiguous(), t.global_scale)


def poisoned(t: BlockScaledTensor, start: int, end: int) -> BlockScaledTensor:
    """With NaN for the scales of the tokens start .. end."""
    scale = from_blocked(t.scale.view(torch.uint8), t.shape[0], t.scale_columns)
    scale[:, start // 16 : end // 16] = 0x7F
    return _operand(t.data.view(torch.uint8), scale, t.global_scale)


def group_of(problem: Problem, group: int) -> Problem:
    """The problem of one group alone."""
    end = sum(problem.sizes[: group + 1])
    size = problem.sizes[group]
    dy, x = (tokens_of(t, end - size, end) for t in (problem.dy, problem.x))
    return replace(problem, dy=dy, x=x, ends=torch.tensor([size], dtype=torch.int32), sizes=(size,))


def launched(driver: Any, problem: Problem, config: Any, onto: torch.Tensor | None = None) -> torch.Tensor:
    """The kernel's result, in a guarded output of NaN, or ``onto`` what was there."""
    guarded = GuardedGradient(problem.shape, config.out_dtype, onto)
    host.prepare(driver, problem.dy, problem.x, problem.ends, guarded.out, config).launch(0)
    guarded.check()
    return guarded.out
