"""Configurations of sm90_fp8_swapped_grouped_gemm.cu, and the order of its tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from padless.formats import OUT_DTYPES, ceil_div
from padless.kernels.config import (
    FEW_GROUPS,
    check_common_fields,
    cpp_constants,
    fields_of,
    requirement_of,
    room_for_groups,
)
from padless.kernels.schedule import Tile, walk_of_groups

BLOCK_N = 256  # weights of a tile


@dataclass(frozen=True)
class Sm90Fp8SwappedConfig:
    """One compiled kernel. Each field becomes a constant of the same name in the device code.

    M is not here, and must never be: a server meets a new M at every call.

    Attributes:
        block_m: the most rows (tokens) of a tile, a multiple of ``step_m`` up to 152. A group's rows are shared out
            evenly (``tiles``). A tile has 256 columns.
        num_stages: depth of the shared-memory pipeline; 0 means as many as fit.
        num_d: slabs of 64 columns in which a warpgroup leaves its tile, 1 or 2. It has two, so with 1 the second waits
            until the first has been written.
        step_m: 8 or 16, to a multiple of which the rows of a tile are rounded up.
        keep_scales: whether the scales of a K block stay in registers for both 64 columns of a warpgroup.
        products_first: whether a stage's first products begin before its scales are waited for.
        unroll: K blocks of the main loop's body.
        raster_m: m-tiles to a band of the tile order (see ``schedule.py``).
        max_groups: room in the table of groups.
        out_dtype: bfloat16 or float16.
    """

    block_m: int = 128
    num_stages: int = 0
    num_d: int = 2
    step_m: int = 8
    keep_scales: bool = True
    unroll: int = 1
    products_first: bool = False
    raster_m: int = 8
    max_groups: int = FEW_GROUPS
    out_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        require = requirement_of(self)
        require(self.step_m in (8, 16), "step_m", "8 or 16")
        allowed = f"a multiple of step_m ({self.step_m}) from 64 to 152"
        require(64 <= self.block_m <= 152 and self.block_m % self.step_m == 0, "block_m", allowed)
        require(self.num_d in (1, 2), "num_d", "1 or 2")
        require(self.unroll in (1, 2, 4), "unroll", "1, 2 or 4")
        check_common_fields(self, require, most_stages=8)
        require(self.out_dtype != torch.float32, "out_dtype", "torch.bfloat16 or torch.float16")

    def prelude(self) -> str:
        """The C++ constants that the kernel source is compiled behind."""
        constants = fields_of(self, "block_m", "num_stages", "num_d", "step_m", "unroll", "raster_m", "max_groups")
        flags = fields_of(self, "keep_scales", "products_first")
        return cpp_constants(constants, flags, {"OUT_TYPE": OUT_DTYPES[self.out_dtype]})


def fit_config(config: Sm90Fp8SwappedConfig, num_groups: int, out_dtype: torch.dtype) -> Sm90Fp8SwappedConfig:
    """``config`` with what has to follow from the operands: output dtype and room for groups."""
    return replace(config, out_dtype=out_dtype, max_groups=room_for_groups(num_groups))


def tiles(offs: Sequence[int], m: int, n: int, block_m: int, raster_m: int) -> Iterator[Tile]:
    """All tiles, in the order of their numbers: the twin of ``kernels/sm90_fp8_swapped/order.cuh``.

    As ``schedule.tiles``, but a group's rows are shared out evenly, in eights: 200 rows are tiles of 104 and 96.
    """
    n_tiles = ceil_div(n, BLOCK_N)
    for group, start, end in walk_of_groups(offs, m):
        m_tiles = ceil_div(end - start, block_m)
        eights = ceil_div(end - start, 8)
        firsts = [start + 8 * (i * (eights // m_tiles) + min(i, eights % m_tiles)) for i in range(m_tiles)]
        ends = [*firsts[1:], end]
        for band in range(0, m_tiles, raster_m):
            for n_tile in range(n_tiles):
                for i in range(band, min(band + raster_m, m_tiles)):
                    yield Tile(group, firsts[i], ends[i] - firsts[i], n_tile * BLOCK_N)
