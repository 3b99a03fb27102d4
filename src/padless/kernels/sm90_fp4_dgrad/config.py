"""Configuration of sm90_fp4_dgrad.cu, and which one a problem gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from padless.kernels.config import check_common_fields, cpp_constants, fields_of, requirement_of, room_for_groups

BLOCK_COLUMNS = 256  # columns of a tile
BLOCK_N = 64  # of the sums, to a stage
BLOCKS_M = (32, 64, 128)
FORMATS = {"MXFP4": 4, "NVFP4": 5}  # the numbers of kernels/sm90_bf16/dequantize.cuh


@dataclass(frozen=True)
class Fp4DgradConfig:
    """One compiled kernel. Each field becomes a constant of the device code; M is not here, and must never be.

    Attributes:
        format: name of the weights' format, MXFP4 or NVFP4.
        block_m: rows of the output tile, 32, 64 or 128. It has 256 columns, 128 to each of two consumer warpgroups.
        num_stages: depth of the shared-memory pipeline, a stage being 64 of N; 0 means as many as fit.
        raster_m: m-tiles to a band of the tile order (see ``schedule.py``).
        blocked: whether the scales are in the 32x4x4 layout, else row-major.
        max_groups: room in the table of groups.
    """

    format: str
    block_m: int = 128
    num_stages: int = 0
    raster_m: int = 8
    blocked: bool = False
    max_groups: int = 256

    # What the kernels have in common: this one's output has one type.
    out_dtype = torch.bfloat16

    def __post_init__(self) -> None:
        require = requirement_of(self)
        require(self.format in FORMATS, "format", "MXFP4 or NVFP4")
        require(self.block_m in BLOCKS_M, "block_m", "32, 64 or 128")
        check_common_fields(self, require)

    def prelude(self) -> str:
        """The C++ constants that the kernel source is compiled behind."""
        constants = fields_of(self, "block_m", "num_stages", "raster_m", "max_groups")
        return cpp_constants({**constants, "FORMAT": FORMATS[self.format]}, {"SCALES_ARE_BLOCKED": self.blocked})


def select_config(format: str, m: int, num_groups: int, *, blocked: bool = False) -> Fp4DgradConfig:
    """The kernel for a problem: a pure function of the format, M and G, since the groups' sizes are on the device.

    Codes are turned into values for every tile anew, so a tile has as many rows as a group may have. One of at most 64
    rows in a tile of 128 takes half the products.
    """
    per_group = m / max(min(num_groups, m), 1)
    block_m = next((rows for rows in BLOCKS_M if per_group <= rows // 2), BLOCKS_M[-1])
    return Fp4DgradConfig(format, block_m=block_m, blocked=blocked, max_groups=room_for_groups(num_groups))
