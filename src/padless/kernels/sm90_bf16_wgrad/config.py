"""Configuration of the bf16 weight-gradient kernel, and which one a problem gets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from padless.formats import OUT_DTYPES, ceil_div
from padless.kernels.config import cpp_constants, fields_of, requirement_of, room_for_groups
from padless.kernels.wgrad import band_height, check_gradient_fields

BLOCK_M = 128  # rows of a tile, 64 to a consumer warpgroup
BLOCKS_N = (128, 256)
BLOCKS_T = (32, 64)


@dataclass(frozen=True)
class Bf16WgradConfig:
    """One compiled kernel. Each field becomes a constant in the device code. The number of tokens is not among them.

    Attributes:
        block_n: columns of the output tile (features of X), 128 or 256. A tile has 128 rows (features of dY), 64 to
            each of two consumer warpgroups.
        block_t: tokens of a stage of the shared-memory pipeline, 32 or 64.
        num_stages: depth of the pipeline; 0 means as many as fit.
        piece_slabs: 128-byte columns, 1 or 2, of a buffer through which a finished tile is stored; a warpgroup has two.
        raster_m: row tiles to a band of the tile order (see ``device/longest_first.cuh``).
        max_groups: room in the table of groups.
        out_dtype: bfloat16 or float32.
        accumulate: adds to what the output holds, float32 alone.
    """

    block_n: int = 256
    block_t: int = 32
    num_stages: int = 0
    piece_slabs: int = 1
    raster_m: int = 8
    max_groups: int = 256
    out_dtype: torch.dtype = torch.bfloat16
    accumulate: bool = False

    def __post_init__(self) -> None:
        require = requirement_of(self)
        require(self.block_n in BLOCKS_N, "block_n", "128 or 256")
        require(self.block_t in BLOCKS_T, "block_t", "32 or 64")
        check_gradient_fields(self, require)
        two_pieces = self.piece_slabs * 128 <= self.block_n // 2 * self.out_dtype.itemsize
        allowed = "1, or 2 unless block_n is 128 and out_dtype bfloat16"
        require(self.piece_slabs in (1, 2) and two_pieces, "piece_slabs", allowed)

    def prelude(self) -> str:
        """The C++ constants that the kernel source is compiled behind."""
        constants = fields_of(self, "block_n", "block_t", "num_stages", "piece_slabs", "raster_m", "max_groups")
        return cpp_constants(constants, fields_of(self, "accumulate"), {"OUT_TYPE": OUT_DTYPES[self.out_dtype]})


@dataclass(frozen=True)
class Bf16WgradProblem:
    """Inputs of ``select_config``. The tokens of each group stay on the device, so they are not here."""

    n: int
    k: int
    tokens: int
    num_groups: int
    out_dtype: torch.dtype
    num_sms: int = 132
    accumulate: bool = False


def tiles_of(problem: Bf16WgradProblem, block_n: int) -> int:
    """Tiles of all groups."""
    return problem.num_groups * ceil_div(problem.n, BLOCK_M) * ceil_div(problem.k, block_n)


# Cycles of 64 tokens by the columns of the tile, counted: of the tensor core, or of shared memory where that takes
# longer (what the copy engine writes and wgmma reads). For the output: what is staged, and what the copy engine reads.
_BLOCK_CYCLES = {256: 1024, 128: 640}
_OUTPUT_CYCLES_PER_BYTE = 2 / 128


def estimated_cycles(problem: Bf16WgradProblem, block_n: int) -> float:
    """Cycles of the CTA that works longest, if all groups have as many tokens as each other."""
    blocks = ceil_div(ceil_div(problem.tokens, max(problem.num_groups, 1)), 64)
    output = BLOCK_M * block_n * problem.out_dtype.itemsize * _OUTPUT_CYCLES_PER_BYTE
    rounds = ceil_div(tiles_of(problem, block_n), problem.num_sms)
    return rounds * (blocks * _BLOCK_CYCLES[block_n] + output)


# Tokens a group. Up to so many bytes bind what is added and what is stored as float32, and smaller tiles are faster.
_FEW_ADDED, _FEW_STORED, _LONG = 768, 192, 1024


def select_config(problem: Bf16WgradProblem) -> Bf16WgradConfig:
    """The kernel for a problem: the tile with the least estimated time, the larger of equals; the smaller one where few
    tokens make float32."""
    is_float = problem.out_dtype == torch.float32

    def has_fewer_than(tokens: int) -> bool:
        return problem.tokens < tokens * problem.num_groups

    is_short = is_float and has_fewer_than(_FEW_ADDED if problem.accumulate else _FEW_STORED)
    allowed = [128] if is_short else sorted(BLOCKS_N, reverse=True)
    block_n = min(allowed, key=lambda block_n: estimated_cycles(problem, block_n))
    # Two columns of 128 bytes to a buffer cost stages of the ring. Measured, that does not pay for float32 that is
    # stored where products and bytes take about as long as each other.
    is_between = not problem.accumulate and not is_short and has_fewer_than(_LONG)
    slabs = 1 if (is_between if is_float else block_n == 128) else 2
    band = band_height(problem.tokens, problem.num_groups, problem.k, 2)
    config = Bf16WgradConfig(block_n=block_n, piece_slabs=slabs, raster_m=band, out_dtype=problem.out_dtype)
    return fit_config(config, problem)


def fit_config(config: Bf16WgradConfig, problem: Bf16WgradProblem) -> Bf16WgradConfig:
    """``config`` with what has to follow from the call: room for groups, output dtype, accumulation."""
    room = room_for_groups(problem.num_groups)
    return replace(config, max_groups=room, out_dtype=problem.out_dtype, accumulate=problem.accumulate)
