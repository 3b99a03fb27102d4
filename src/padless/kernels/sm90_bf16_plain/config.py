"""Configuration of the plain bf16 kernel, and which one a problem gets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from padless.formats import OUT_DTYPES, ceil_div
from padless.kernels.config import check_common_fields, cpp_constants, fields_of, requirement_of, room_for_groups
from padless.kernels.launch import most_tiles

BLOCK_M = 128  # rows of a tile, 64 to a consumer warpgroup
BLOCKS_N = (128, 256)


@dataclass(frozen=True)
class Bf16PlainConfig:
    """One compiled kernel. Each field becomes a constant in the device code; M is not here, and must never be.

    Attributes:
        block_n: columns of the output tile (weight rows), 128 or 256. A tile has 128 rows of activations, 64 to each of
            two consumer warpgroups.
        num_stages: depth of the shared-memory pipeline, a stage being 64 of K; 0 means as many as fit.
        piece_slabs: 128-byte columns, 1 or 2, of a buffer through which a finished tile is stored; a warpgroup has two.
        raster_m: m-tiles to a band of the tile order (see ``schedule.py``).
        n_major: whether N is contiguous in the weights, else K.
        max_groups: room in the table of groups.
        out_dtype: bfloat16, float16 or float32.
    """

    block_n: int = 256
    num_stages: int = 0
    piece_slabs: int = 1
    raster_m: int = 16
    n_major: bool = False
    max_groups: int = 256
    out_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        require = requirement_of(self)
        require(self.block_n in BLOCKS_N, "block_n", "128 or 256")
        check_common_fields(self, require)
        two_pieces = self.piece_slabs * 128 <= self.block_n // 2 * self.out_dtype.itemsize
        allowed = "1, or 2 unless block_n is 128 and out_dtype has 16 bits"
        require(self.piece_slabs in (1, 2) and two_pieces, "piece_slabs", allowed)

    def prelude(self) -> str:
        """The C++ constants that the kernel source is compiled behind."""
        constants = fields_of(self, "block_n", "num_stages", "piece_slabs", "raster_m", "max_groups")
        return cpp_constants(constants, {"B_IS_N_MAJOR": self.n_major}, {"OUT_TYPE": OUT_DTYPES[self.out_dtype]})


# Cycles of 64 of K by the columns of the tile, and of an element's bytes of the output: as in the bf16 weight gradients.
_BLOCK_CYCLES = {256: 1024, 128: 640}
_OUTPUT_CYCLES_PER_BYTE = 2 / 128


def select_config(
    m: int,
    n: int,
    k: int,
    num_groups: int,
    *,
    n_major: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    num_sms: int = 132,
) -> Bf16PlainConfig:
    """The kernel for a problem: the tile with the least estimated time, the larger of equals. No tile changes a bit."""

    def cycles(block_n: int) -> float:
        rounds = ceil_div(most_tiles(m, n, num_groups, BLOCK_M, block_n), num_sms)
        output = BLOCK_M * block_n * out_dtype.itemsize * _OUTPUT_CYCLES_PER_BYTE
        return rounds * (ceil_div(k, 64) * _BLOCK_CYCLES[block_n] + output)

    block_n = min(sorted(BLOCKS_N, reverse=True), key=cycles)
    config = Bf16PlainConfig(block_n=block_n)
    return fit_config(config, num_groups, n_major, out_dtype)


def fit_config(config: Bf16PlainConfig, num_groups: int, n_major: bool, out_dtype: torch.dtype) -> Bf16PlainConfig:
    """``config`` with what has to follow from the operands: order of the weights, output dtype, room for groups."""
    return replace(config, n_major=n_major, out_dtype=out_dtype, max_groups=room_for_groups(num_groups))
