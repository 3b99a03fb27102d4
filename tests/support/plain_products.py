"""Products of plain bf16 tensors in guarded outputs, and the configurations that `padless verify` launches."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch

from padless.kernels.sm90_bf16_plain.config import Bf16PlainConfig
from padless.ops.grouped_gemm import grouped_gemm
from padless.row_groups import clamped_ends
from padless.runtime.choices import BackendName
from padless.testing.guarded import GuardedOutput

VARIANTS = tuple(
    Bf16PlainConfig(block_n=block_n, piece_slabs=slabs, out_dtype=dtype)
    for dtype, (block_n, slabs) in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32), ((256, 2), (256, 1), (128, 1))
    )
)


@dataclass(frozen=True)
class PlainShape:
    """Rows of each group, rows past the last group, N, K."""

    sizes: tuple[int, ...]
    past: int
    n: int
    k: int


@dataclass(frozen=True)
class Plain:
    """a (M, K) and b (G, N, K) bfloat16, and where groups end."""

    a: torch.Tensor
    b: torch.Tensor
    offs: torch.Tensor

    def to(self, device: str) -> Plain:
        """The same on another device."""
        return Plain(self.a.to(device), self.b.to(device), self.offs.to(device))

    @property
    def groups(self) -> list[tuple[int, int]]:
        """[start, end) of each group's rows."""
        return list(itertools.pairwise([0, *clamped_ends(self.offs.tolist(), self.a.shape[0])]))

    def n_major(self) -> Plain:
        """The same with weights of which N is contiguous."""
        return replace(self, b=self.b.transpose(1, 2).contiguous().transpose(1, 2))


def random_plain(shape: PlainShape, seed: int = 0, *, wide: bool = False) -> Plain:
    """Operands on the CPU, a function of the arguments alone: normal, or over forty powers of two (``wide``)."""
    generator = torch.Generator().manual_seed(seed + 7919 * shape.n + shape.k)

    def values(*dims: int) -> torch.Tensor:
        found = torch.randn(dims, generator=generator)
        if wide:
            found *= torch.exp2(torch.randint(-20, 21, dims, generator=generator).float())
        return found.to(torch.bfloat16)

    offs = torch.tensor(shape.sizes, dtype=torch.int64).cumsum(0).to(torch.int32)
    a = values(sum(shape.sizes) + shape.past, shape.k)
    return Plain(a, values(len(shape.sizes), shape.n, shape.k), offs)


def run(plain: Plain, config: Bf16PlainConfig, backend: BackendName | None = None) -> torch.Tensor:
    """The kernel's result in a guarded output: rows of groups alone, which may hold NaN."""
    guarded = GuardedOutput(plain.a.shape[0], plain.b.shape[1], config.out_dtype)
    grouped_gemm(plain.a, plain.b, plain.offs, out=guarded.out, backend=backend, config=config)
    last = max((end for _, end in plain.groups), default=0)
    guarded.check(last, expect_finite=False)
    return guarded.out[:last]
