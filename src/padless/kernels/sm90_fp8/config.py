"""Configurations of sm90_fp8_grouped_gemm.cu, and the one that a problem gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from padless.formats import OUT_DTYPES, ceil_div, round_up
from padless.kernels.config import (
    FEW_GROUPS,
    MANY_GROUPS,
    check_common_fields,
    cpp_constants,
    fields_of,
    requirement_of,
    room_for_groups,
)
from padless.kernels.cost_model import best_tile, cost_table
from padless.kernels.launch import most_tiles
from padless.kernels.maps import has_few_rows

STORES = ("ragged", "pool")
SCALE_MAJORS = ("mn", "k")

_KERNEL = "sm90_fp8_grouped_gemm"  # whose tiles select_config chooses among


@dataclass(frozen=True)
class Sm90Fp8Config:
    """One compiled kernel. Each field becomes a constant of the same name in the device code.

    M is not here, and must never be: a server meets a new M at every call.

    Attributes:
        block_m: rows of the output tile, 64, 128 or 256, shared out to the consumer warpgroups 64 at a time.
        block_n: columns of the output tile, a multiple of 64 up to 192.
        num_stages: depth of the shared-memory pipeline; 0 means as many as fit.
        cluster_n: CTAs that share (multicast) the rows of A, side by side along N: 1 or 2.
        raster_m: m-tiles to a band of the tile order (see ``schedule.py``).
        store: how the write of D is bounded, "ragged" (one descriptor that clips) or "pool" (boxes of 1, 2, 4 .. 64
            rows, two overlapping stores to a tail; Su et al., "TMA-Adaptive FP8 Grouped GEMM").
        scales: layout of the activation scales that the kernel reads, "mn" or "k" (row-major: over-fetched from a
            16-byte boundary, after the same paper). Scales in the other layout are copied first.
        scale_window_k_blocks: with scales = "k", the most K blocks that the window of scales has room for.
        max_groups: room in the table of groups.
        out_dtype: bfloat16, float16 or float32.
        few_rows: whether rows of A are on the side of the tensor core's columns (``sm90_fp8_few``): then block_m is 8,
            16, 32 or 64, block_n 128 or 256, cluster_n 1, store "ragged" and scales "mn".
    """

    block_m: int = 128
    block_n: int = 128
    num_stages: int = 0
    cluster_n: int = 1
    raster_m: int = 8
    store: str = "ragged"
    scales: str = "mn"
    scale_window_k_blocks: int = 0
    max_groups: int = FEW_GROUPS
    out_dtype: torch.dtype = torch.bfloat16
    few_rows: bool = False

    def __post_init__(self) -> None:
        require = requirement_of(self)
        if self.few_rows:
            require(self.block_m in (8, 16, 32, 64), "block_m", "8, 16, 32 or 64 with few_rows")
            require(self.block_n in (128, 256), "block_n", "128 or 256 with few_rows")
            require(self.cluster_n == 1, "cluster_n", "1 with few_rows")
            require(self.store == "ragged", "store", "'ragged' with few_rows")
            require(self.scales == "mn", "scales", "'mn' with few_rows")
            check_common_fields(self, require)
            return
        require(self.block_m in (64, 128, 256), "block_m", "64, 128 or 256")
        require(self.block_m * self.block_n <= 256 * 128, "block_n", "at most 128 when block_m is 256")
        require(self.block_n in (64, 128, 192), "block_n", "64, 128 or 192")
        require(self.cluster_n in (1, 2), "cluster_n", "1 or 2")
        require(self.store in STORES, "store", " or ".join(STORES))
        require(self.scales in SCALE_MAJORS, "scales", " or ".join(SCALE_MAJORS))
        check_common_fields(self, require)
        require(self.scale_window_k_blocks >= 0, "scale_window_k_blocks", "0 or more")

    @property
    def source(self) -> str:
        """The kernel's file."""
        return "sm90_fp8_few/sm90_fp8_few_grouped_gemm.cu" if self.few_rows else "sm90_fp8/sm90_fp8_grouped_gemm.cu"

    def prelude(self) -> str:
        """The C++ constants that the kernel source is compiled behind."""
        if self.few_rows:
            constants = fields_of(self, "block_m", "block_n", "num_stages", "raster_m", "max_groups")
            return cpp_constants(constants, macros={"OUT_TYPE": OUT_DTYPES[self.out_dtype]})
        tile = fields_of(self, "block_m", "block_n", "num_stages", "cluster_n", "raster_m", "max_groups")
        constants = tile | fields_of(self, "scale_window_k_blocks")
        macros = {
            "STORE_IS_POOL": int(self.store == "pool"),
            "SCALES_ARE_K_MAJOR": int(self.scales == "k"),
            "OUT_TYPE": OUT_DTYPES[self.out_dtype],
        }
        return cpp_constants(constants, macros=macros)


@dataclass(frozen=True)
class Problem:
    """Inputs of ``select_config``. The rows of each group stay on the device, so they are not here."""

    m: int
    n: int
    k: int
    num_groups: int
    out_dtype: torch.dtype = torch.bfloat16
    num_sms: int = 132


def select_config(problem: Problem) -> Sm90Fp8Config:
    """The kernel for a problem: of M, N, K, G, the output dtype and the number of multiprocessors, and the table of
    costs that this process uses (``cost_model.cost_table``).

    Takes the tile with the least estimated time. Where groups have few rows it is the bytes that take time, which no
    estimate has: then tiles have at most 128 columns (`_wants_narrow_tiles`: 64), with which all sizes measured
    were as fast or up to 3% faster; and where K is short as well, what a tile costs beyond its bytes:
    ``few_rows_tile``.
    """
    few = few_rows_tile(problem, next((tokens for k, tokens in _PLAIN_TOKENS.items() if problem.k <= k), ()))
    if few is not None:
        return few
    if problem.k <= _SHORTEST_K and problem.m <= _ROWS_OF_192_COLUMNS * problem.num_groups:
        return fit_config(Sm90Fp8Config(64, 192), problem)
    costs = cost_table(_KERNEL).costs
    # A float32 tile takes twice the shared memory on its way out, and a table of many groups the place of a stage: the
    # largest would leave two stages.
    most = 128 * (128 if problem.out_dtype == torch.float32 else 192 if problem.num_groups > MANY_GROUPS else 256)
    costs = {tile: cost for tile, cost in costs.items() if tile.block_m * tile.block_n <= most}
    m, n, k = problem.m, problem.n, problem.k
    if has_few_rows(m, problem.num_groups):
        if _wants_narrow_tiles(problem):
            return fit_config(Sm90Fp8Config(64, 64), problem)
        costs = {tile: cost for tile, cost in costs.items() if max(tile.block_m, tile.block_n) <= 128}
    tile = best_tile(costs, m, n, k, problem.num_groups, problem.num_sms)
    return Sm90Fp8Config(
        block_m=tile.block_m,
        block_n=tile.block_n,
        cluster_n=tile.cluster_n if k >= _LEAST_K_OF_PAIRS else 1,
        raster_m=tile.raster_m,
        max_groups=room_for_groups(problem.num_groups),
        out_dtype=problem.out_dtype,
    )


def _wants_narrow_tiles(problem: Problem) -> bool:
    """Whether tiles of 128 columns leave most of a second round idle, and those of 64 do not: with a long K it lasts.

    By the mean number of groups with a row where each row's group is drawn.
    """
    if problem.k < _LONG_K:
        return False
    groups = problem.num_groups * (1 - (1 - 1 / problem.num_groups) ** problem.m)
    of_128, of_64 = (groups * ceil_div(problem.n, columns) / problem.num_sms for columns in (128, 64))
    return 1 < of_128 < 2 and of_64 / math.ceil(of_64) > _WORTH_NARROW * of_128 / 2


# The least K, and how much fuller rounds of narrow tiles must be (docs/kernels/sm90_fp8_few/ladder.md).
_LONG_K, _WORTH_NARROW = 8192, 1.15

# CTAs of a cluster wait for each other where a tile begins and ends: with less of K that costs more than sharing rows
# saves, 9 to 12% with K 512.
_LEAST_K_OF_PAIRS = 1024

# Where K is so short that tiles cost more than their bytes, fewer of them, of 192 columns, are up to 10% faster than
# with few_rows or 128 columns, while groups have no more rows on average.
_SHORTEST_K, _ROWS_OF_192_COLUMNS = 512, 24

# Tokens of a tile with few_rows, and the most rows that a group has on average with it: where groups have more, tiles of
# tokens on rows are as fast or faster (docs/kernels/sm90_fp8_few).
QUANTIZED_TOKENS = ((16, 1.5), (32, 8.0), (64, 16.0))  # of a SwiGLU, whose tiles of tokens on rows come in clusters
_FEWEST = ((16, 1.5), (32, 2.5))
_PLAIN_TOKENS = {512: _FEWEST, 1024: ((16, 1.5), (32, 5.0), (64, 16.0)), 2048: _FEWEST}  # by the largest K
_WIDE_TILES = 12  # of 256 columns a multiprocessor; with fewer the last ones cost more than wide ones save


def few_rows_tile(problem: Problem, tokens: Sequence[tuple[int, float]]) -> Sm90Fp8Config | None:
    """The tile with few_rows of the least ``tokens`` that suffice for the groups' rows on average; None: none does."""
    m, n, num_groups = problem.m, problem.n, problem.num_groups
    block_m = next((size for size, most in tokens if m <= most * num_groups), None)
    if block_m is None:
        return None
    is_wide = most_tiles(m, n, num_groups, block_m, 256) >= _WIDE_TILES * problem.num_sms
    return fit_config(Sm90Fp8Config(block_m, 256 if is_wide else 128, few_rows=True), problem)


def fit_config(config: Sm90Fp8Config, problem: Problem) -> Sm90Fp8Config:
    """``config`` with what has to follow from the operands: output dtype, room for groups and for scales."""
    window_bytes = 4 * config.block_m * _window_k_blocks(problem.k)
    most_bytes = _MAX_WINDOW_BYTES // (2 if problem.num_groups > MANY_GROUPS else 1)
    if config.scales == "k" and window_bytes > most_bytes:
        raise ValueError(
            f"config has scales='k' and K is {problem.k}: the scales of {config.block_m} rows take {window_bytes} bytes "
            f"of shared memory, at most {most_bytes} fit; use scales='mn' or a smaller block_m"
        )
    return replace(
        config,
        out_dtype=problem.out_dtype,
        max_groups=room_for_groups(problem.num_groups),
        scale_window_k_blocks=_window_k_blocks(problem.k) if config.scales == "k" else 0,
    )


_MAX_WINDOW_BYTES = 64 * 1024  # leaves three stages of the 128 x 128 tile


def _window_k_blocks(k: int) -> int:
    """Room for the K blocks of ``k``, in steps of 8 so that few kernels serve every K."""
    return round_up(ceil_div(k, 128), 8)
