"""Random problems of plain bf16 tensors, and products of them in guarded outputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from padless.kernels.sm90_bf16_plain.config import Bf16PlainConfig
from padless.ops.grouped_gemm import group_offsets, grouped_gemm
from padless.runtime.choices import BackendName
from padless.testing.gradients import Rows
from padless.testing.guarded import GuardedOutput
from padless.testing.operands import spans

# The configurations of products that `padless verify` launches.
VARIANTS = tuple(
    Bf16PlainConfig(block_n=block_n, piece_slabs=slabs, out_dtype=dtype)
    for dtype, (block_n, slabs) in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32), ((256, 2), (256, 1), (128, 1))
    )
)


@dataclass(frozen=True)
class Shape:
    """Rows of each group, rows past the last group, N, K."""

    sizes: tuple[int, ...]
    past: int
    n: int
    k: int

    @property
    def rows(self) -> int:
        return sum(self.sizes) + self.past

    def values(self, seed: int, wide: bool, *dims: tuple[int, ...]) -> Iterator[torch.Tensor]:
        """bfloat16 numbers, a function of the arguments alone: normal, or over forty powers of two (``wide``)."""
        generator = torch.Generator().manual_seed(seed + 7919 * self.n + self.k)
        for one in dims:
            found = torch.randn(one, generator=generator)
            if wide:
                found *= torch.exp2(torch.randint(-20, 21, one, generator=generator).float())
            yield found.to(torch.bfloat16)


@dataclass(frozen=True)
class Plain:
    """a (M, K) and b (G, N, K) bfloat16, and where groups end."""

    a: torch.Tensor
    b: torch.Tensor
    offs: torch.Tensor

    @property
    def groups(self) -> list[tuple[int, int]]:
        """[start, end) of each group's rows."""
        return spans(self.offs.tolist(), self.a.shape[0])

    def n_major(self) -> Plain:
        """The same with weights of which N is contiguous."""
        return replace(self, b=self.b.transpose(1, 2).contiguous().transpose(1, 2))


def random_plain(shape: Shape, seed: int = 0, *, wide: bool = False) -> Plain:
    """Operands of a product, on the CPU; see `Shape.values`."""
    a, b = shape.values(seed, wide, (shape.rows, shape.k), (len(shape.sizes), shape.n, shape.k))
    return Plain(a, b, group_offsets(shape.sizes))


def random_rows(shape: Shape, seed: int = 0, *, wide: bool = False) -> Rows:
    """Operands of a weight gradient, on the CPU; see `Shape.values`."""
    dy, x = shape.values(seed, wide, (shape.rows, shape.n), (shape.rows, shape.k))
    return Rows(dy, x, group_offsets(shape.sizes))


def run(plain: Plain, config: Bf16PlainConfig, backend: BackendName | None = None) -> torch.Tensor:
    """The kernel's result in a guarded output: rows of groups alone, which may hold NaN."""
    guarded = GuardedOutput(plain.a.shape[0], plain.b.shape[1], config.out_dtype)
    grouped_gemm(plain.a, plain.b, plain.offs, out=guarded.out, backend=backend, config=config)
    last = max((end for _, end in plain.groups), default=0)
    guarded.check(last, expect_finite=False)
    return guarded.out[:last]
