"""Plain Triton as a contender: a grouped product as frameworks' fused Mixture-of-Experts kernels launch it.

One launch over the rows sorted by expert (`padless.bench.peers.triton_moe_kernels`), with the fastest of
`configurations` at every point, each timed alone beforehand. It is own code in the style that vLLM, SGLang and
TensorRT-LLM share, since no library of these is needed for it, and it is given more than they give theirs: rows are
sorted and quantized before the clock starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from padless.bench.group_sizes import Point
from padless.bench.peers import Contender, Peer
from padless.bench.problem import GroupedProblem
from padless.formats import ceil_div
from padless.layouts import plain_scale
from padless.testing.judge import attempt
from padless.testing.processes import cpus
from padless.testing.timing import Timer

NAME = "triton"
SWEPT_CALLS = 3  # timed calls of a configuration


@dataclass(frozen=True)
class TritonConfig:
    """One compiled kernel: sizes of the tile, warps, and depth of the software pipeline."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.block_m} x {self.block_n} x {self.block_k}, {self.num_warps} warps, {self.num_stages} stages"

    @property
    def options(self) -> dict[str, int]:
        """As the kernels take it."""
        sizes = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        return sizes | {"num_warps": self.num_warps, "num_stages": self.num_stages}


def configurations(largest: int) -> list[TritonConfig]:
    """Those that are tried where the largest group has so many rows: 24 for each height of a tile that it half fills."""
    return [
        TritonConfig(block_m, block_n, block_k, warps, stages)
        for block_m in (16, 32, 64)
        if block_m == 16 or 2 * largest > block_m
        for block_n in (32, 64, 128)
        for block_k in (64, 128, 256)
        for warps in ((4, 8) if block_n == 128 else (4,))
        for stages in ((2, 3) if block_k == 256 else (3, 5))
    ]


class SortedRows(NamedTuple):
    """Rows by group, every group's filled up to a multiple of a tile's rows with the number of all rows.

    rows: (blocks * BLOCK_M,) int32, room for any sizes of the groups. groups: (blocks,) int32. used: (1,) int32, rows in
    use.
    """

    rows: torch.Tensor
    groups: torch.Tensor
    used: torch.Tensor


def sorted_rows(sizes: list[int], block_m: int, device: torch.device) -> SortedRows:
    """The order of `SortedRows` for groups of these sizes, one after the other."""
    total = sum(sizes)
    blocks = ceil_div(total + min(total, len(sizes)) * (block_m - 1), block_m)
    rows = torch.full((blocks * block_m,), total, dtype=torch.int32)
    groups = torch.zeros(blocks, dtype=torch.int32)
    block, start = 0, 0
    for group, size in enumerate(sizes):
        rows[block * block_m : block * block_m + size] = torch.arange(start, start + size, dtype=torch.int32)
        groups[block : block + ceil_div(size, block_m)] = group
        block, start = block + ceil_div(size, block_m), start + size
    used = torch.tensor([block * block_m], dtype=torch.int32)
    return SortedRows(rows.to(device), groups.to(device), used.to(device))


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid, its arguments and its configuration."""

    kernel: Any
    grid: tuple[int]
    operands: tuple[Any, ...]
    config: TritonConfig

    def __call__(self) -> None:
        self.kernel[self.grid](*self.operands, **self.config.options)

    def compile(self) -> None:
        self.kernel.warmup(*self.operands, grid=self.grid, **self.config.options)


def launches(problem: GroupedProblem, out: torch.Tensor, configs: list[TritonConfig]) -> list[Launch]:
    """The product of a problem into out (M, N) bfloat16 with each configuration."""
    from padless.bench.peers import triton_moe_kernels as kernels  # Triton only where it is used

    b, p = problem.b, problem.point
    operands: tuple[torch.Tensor, ...]
    if problem.bf16_rows is not None:
        scales = plain_scale(b).contiguous().view(torch.uint8)
        kernel, operands = kernels.mxfp4_product, (problem.bf16_rows, b.data.view(torch.uint8), scales)
    else:
        a = problem.a_row_major
        kernel, operands = kernels.fp8_block_product, (a.data, a.scale, b.data, b.scale)
    found, orders = [], dict[int, SortedRows]()
    for config in configs:
        if config.block_m not in orders:
            orders[config.block_m] = sorted_rows(problem.sizes, config.block_m, problem.device)
        order = orders[config.block_m]
        grid = (order.groups.numel() * ceil_div(p.N, config.block_n),)
        found.append(Launch(kernel, grid, (*operands, out, *order, p.M, p.N, p.K), config))
    return found


class TritonMoe(Peer):
    """The adapter."""

    name = NAME
    licence = "MIT"
    by_default = False  # its sweep takes longer than all that products are otherwise compared with
    formats = ("FP8_BLOCK", "MXFP4")
    loading = "import triton"

    def __init__(self) -> None:
        super().__init__()
        self._fastest: dict[tuple[Point, str], TritonConfig] = {}
        self._timer: Timer | None = None

    def obstacle(self) -> str:
        return "" if torch.cuda.is_available() else "needs a CUDA GPU"

    def load(self) -> Any:
        import triton

        return triton

    def decode(self, problem: GroupedProblem) -> list[Contender]:
        """The product with the configuration that was fastest at the first problem of its sizes and rows."""
        out = problem.empty_out()
        key = _key(problem)
        if key not in self._fastest:
            self._fastest[key] = self.sweep(problem, out)
            out.fill_(float("nan"))
        (launch,) = launches(problem, out, [self._fastest[key]])
        return [Contender(NAME, launch, lambda: out, buffer=out)]

    def choices(self, problems: Sequence[GroupedProblem]) -> list[str]:
        return [str(found) for problem in problems if (found := self._fastest.get(_key(problem)))]

    def sweep(self, problem: GroupedProblem, out: torch.Tensor) -> TritonConfig:
        """The fastest configuration that runs; all are compiled first, side by side."""
        if self._timer is None:
            self._timer = Timer(SWEPT_CALLS)
        calls = launches(problem, out, configurations(max(problem.sizes)))
        compile_all(calls)
        fitting = {str(i): call for i, call in enumerate(calls) if attempt(str(i), call, {})[0]}
        times = self._timer.gpu(fitting)
        fastest = min(times, key=lambda name: times[name].median_us)
        return fitting[fastest].config


def _key(problem: GroupedProblem) -> tuple[Point, str]:
    """Sizes and format: problems that share them take one configuration."""
    return problem.point, problem.b.format.name


def compile_all(wanted: list[Launch]) -> None:
    """Compiles by as many threads as there are cores. What fails, such as a tile too large, fails again when called."""
    import triton

    with ThreadPoolExecutor(cpus()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for launch in wanted:
            launch.compile()
