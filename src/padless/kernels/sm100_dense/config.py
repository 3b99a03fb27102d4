"""Configurations of sm100_mxfp8_gemm.cu, and the one that a problem gets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from padless.formats import OUT_DTYPES, ceil_div
from padless.kernels.config import cpp_constants, fields_of, requirement_of

BLOCK_M = 128  # rows of a CTA
HALF_N = 128  # columns of a product: of a tile or of its half
STORES = ("direct", "staged")
TILE_ORDERS = ("row", "hilbert")
DATA_DTYPES: dict[torch.dtype, str] = {torch.float8_e4m3fn: "MMA_E4M3", torch.float8_e5m2: "MMA_E5M2"}


@dataclass(frozen=True)
class Sm100DenseConfig:
    """One compiled kernel. M, N and K are not here: a kernel serves all.

    Attributes:
        cta_group: CTAs that work on a tile as one, 1 or 2; the tile has 128 rows for each.
        block_n: columns of the tile, 128 or 256.
        block_k: elements of K in a stage, 128 or 256.
        num_stages: depth of the shared-memory pipeline; 0 means as many as fit.
        chunk_columns: 32, 64 or 128 columns of sums that a thread takes into registers at a time, and by which two
            accumulators of 256 columns overlap.
        store: "direct", registers to global memory in pieces of 32 bytes, or "staged", through swizzled shared memory
            and TMA.
        store_bytes: with "staged", 64 or 128 bytes of a row that one copy writes. A warp has two buffers of 32 rows.
        tile_order: "row" or "hilbert" (``kernels/sm100_dense/tile_order.cuh``).
        a_dtype, b_dtype: float8_e4m3fn or float8_e5m2.
        out_dtype: bfloat16, float16 or float32.
    """

    cta_group: int = 2
    block_n: int = 256
    block_k: int = 128
    num_stages: int = 0
    chunk_columns: int = 64
    store: str = "direct"
    store_bytes: int = 64
    tile_order: str = "row"
    a_dtype: torch.dtype = torch.float8_e4m3fn
    b_dtype: torch.dtype = torch.float8_e4m3fn
    out_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        require = requirement_of(self)
        stages = self.num_stages
        chunk_bytes = self.chunk_columns * self.out_dtype.itemsize
        require(self.cta_group in (1, 2), "cta_group", "1 or 2")
        require(self.block_n in (128, 256), "block_n", "128 or 256")
        require(self.block_k in (128, 256), "block_k", "128 or 256")
        require(stages == 0 or 2 <= stages <= 12, "num_stages", "0 (as many as fit) or 2 to 12")
        require(self.chunk_columns in (32, 64, 128), "chunk_columns", "32, 64 or 128")
        require(self.store in STORES, "store", " or ".join(STORES))
        require(self.store_bytes in (64, 128), "store_bytes", "64 or 128")
        require(self.tile_order in TILE_ORDERS, "tile_order", " or ".join(TILE_ORDERS))
        require(self.a_dtype in DATA_DTYPES, "a_dtype", " or ".join(map(str, DATA_DTYPES)))
        require(self.b_dtype in DATA_DTYPES, "b_dtype", " or ".join(map(str, DATA_DTYPES)))
        require(self.out_dtype in OUT_DTYPES, "out_dtype", "torch.bfloat16, torch.float16 or torch.float32")
        if self.store == "staged":
            require(chunk_bytes % self.store_bytes == 0, "store_bytes", f"a divisor of {chunk_bytes}")

    @property
    def tile(self) -> tuple[int, int]:
        """(rows, columns) of the tile that a worker, one CTA or a pair, computes at a time."""
        return BLOCK_M * self.cta_group, self.block_n

    def prelude(self) -> str:
        """The C++ constants that the kernel source is compiled behind."""
        constants = fields_of(self, "cta_group", "block_n", "block_k", "num_stages", "chunk_columns")
        constants["STORE_BYTES"] = self.store_bytes if self.store == "staged" else 0
        macros = {
            "TILE_ORDER": f"ORDER_{self.tile_order.upper()}",
            "FORMAT_A": DATA_DTYPES[self.a_dtype],
            "FORMAT_B": DATA_DTYPES[self.b_dtype],
            "OUT_TYPE": OUT_DTYPES[self.out_dtype],
        }
        return cpp_constants(constants, macros=macros)


@dataclass(frozen=True)
class DenseProblem:
    """Inputs of ``select_config``."""

    m: int
    n: int
    k: int
    out_dtype: torch.dtype = torch.bfloat16
    a_dtype: torch.dtype = torch.float8_e4m3fn
    b_dtype: torch.dtype = torch.float8_e4m3fn
    num_sms: int = 148
    can_stage: bool = True  # rows of the output start on 16-byte boundaries


# (cta_group, block_n): cycles of a stage of 128 of K, between two tiles, of a tile at least, and of start and end
# together. Predicted by the clock for a B200, never measured: `python tools/clock_sm100.py --tiles`.
TILE_CYCLES: dict[tuple[int, int], tuple[int, int, int, int]] = {
    (2, 256): (524, 0, 3269, 5631), (2, 128): (358, 0, 2061, 4103),
    (1, 256): (714, 251, 3273, 5949), (1, 128): (476, 0, 1898, 3785),
}  # fmt: skip
L2_BYTES = 100e6  # of a B200's 126 MB: operands up to that stay there


def select_config(problem: DenseProblem) -> Sm100DenseConfig:
    """The kernel for a problem: a pure function, by predictions.

    The tile with the least cycles, tiles of the last round cut where the kernel cuts them. The Hilbert order where the
    operands are more than L2 holds: in row order a round of tiles then reads most of B again. Direct stores: the staged
    ones take 160 cycles a tile and more longer.
    """

    def cycles(tile: tuple[int, int]) -> float:
        cta_group, block_n = tile
        stage, between, least, ends = TILE_CYCLES[tile]
        stages = ceil_div(problem.k, 128)
        products = stages * stage + between
        workers = max(problem.num_sms // cta_group, 1)
        whole, left = divmod(ceil_div(problem.m, BLOCK_M * cta_group) * ceil_div(problem.n, block_n), workers)
        if block_n == 2 * HALF_N and 0 < 2 * left <= workers:
            half, _, _, half_ends = TILE_CYCLES[cta_group, HALF_N]
            return half_ends + whole * max(products, least) + stages * half
        return ends + (whole + (left > 0) - 1) * max(products, least) + products

    pairs = problem.m > BLOCK_M and problem.num_sms > 1
    # Where all tiles of 256 columns would be cut, those of 128 are the same and have a deeper ring.
    cta_group, block_n = min((t for t in TILE_CYCLES if pairs or t[0] == 1), key=lambda t: (cycles(t), t[1]))
    return Sm100DenseConfig(
        cta_group=cta_group,
        block_n=block_n,
        tile_order="hilbert" if (problem.m + problem.n) * problem.k > L2_BYTES else "row",
        a_dtype=problem.a_dtype,
        b_dtype=problem.b_dtype,
        out_dtype=problem.out_dtype,
    )


def fit(config: Sm100DenseConfig, problem: DenseProblem) -> Sm100DenseConfig:
    """``config`` with the dtypes of the operands."""
    if config.store == "staged" and not problem.can_stage:
        raise ValueError(
            "config has store='staged' and rows of out are not all on 16-byte boundaries; use store='direct'"
        )
    return replace(config, a_dtype=problem.a_dtype, b_dtype=problem.b_dtype, out_dtype=problem.out_dtype)
