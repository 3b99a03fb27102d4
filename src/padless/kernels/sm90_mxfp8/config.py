"""Configurations of sm90_mxfp8_grouped_gemm.cu, and the one that a problem gets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from padless.formats import MXFP8_E5M2, OUT_DTYPES, BlockScaledTensor
from padless.kernels.config import (
    FEW_GROUPS,
    check_common_fields,
    cpp_constants,
    fields_of,
    requirement_of,
    room_for_groups,
)


@dataclass(frozen=True)
class Sm90Mxfp8Config:
    """One compiled kernel. Each field becomes a constant of the same name in the device code.

    M is not here, and must never be: a server meets a new M at every call.

    Attributes:
        block_m: rows of the output tile, 64 or 128: one consumer warpgroup for each 64.
        block_n: columns of the output tile, 64 or 128.
        num_stages: depth of the shared-memory pipeline; 0 means as many as fit.
        raster_m: m-tiles to a band of the tile order (see ``schedule.py``).
        a_e5m2, b_e5m2: whether the codes of activations and weights are e5m2, else e4m3.
        max_groups: room in the table of groups.
        out_dtype: bfloat16, float16 or float32.
    """

    block_m: int = 128
    block_n: int = 128
    num_stages: int = 0
    raster_m: int = 8
    a_e5m2: bool = False
    b_e5m2: bool = False
    max_groups: int = FEW_GROUPS
    out_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        require = requirement_of(self)
        require(self.block_m in (64, 128), "block_m", "64 or 128")
        require(self.block_n in (64, 128), "block_n", "64 or 128")
        check_common_fields(self, require)

    def prelude(self) -> str:
        """The C++ constants that the kernel source is compiled behind."""
        constants = fields_of(self, "block_m", "block_n", "num_stages", "raster_m", "max_groups")
        flags = fields_of(self, "a_e5m2", "b_e5m2")
        return cpp_constants(constants, flags, {"OUT_TYPE": OUT_DTYPES[self.out_dtype]})


def select_config(m: int, n: int, num_groups: int, num_sms: int) -> Sm90Mxfp8Config:
    """The kernel for a problem: a pure function of M, N, G and the number of multiprocessors.

    128 x 128 unless that leaves multiprocessors idle: half as wide then, and half as high too where groups have no more
    than 64 rows on average. 64 x 128 where they have no more than 16: what takes time there are the weights' bytes.
    """
    groups = max(1, min(num_groups, m))
    block_m = 64 if m <= 64 * groups else 128
    m_tiles = max(groups, -(-m // block_m))
    block_n = 128 if m_tiles * -(-n // 128) >= num_sms else 64
    if block_n == 128 and m > 16 * groups:  # one warpgroup alone does not keep the tensor core busy
        block_m = 128
    return Sm90Mxfp8Config(block_m=block_m, block_n=block_n)


def fit(config: Sm90Mxfp8Config, a: BlockScaledTensor, b: BlockScaledTensor, out_dtype: torch.dtype) -> Sm90Mxfp8Config:
    """``config`` with what has to follow from the operands and the output."""
    return replace(
        config,
        a_e5m2=a.format == MXFP8_E5M2,
        b_e5m2=b.format == MXFP8_E5M2,
        max_groups=room_for_groups(b.data.shape[0]),
        out_dtype=out_dtype,
    )
