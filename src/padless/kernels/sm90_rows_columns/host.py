"""Host side of sm90_rows_columns.cu: which operands it takes, its configuration, the launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from padless.formats import ceil_div
from padless.kernels import group_tiles
from padless.kernels.config import FEW_GROUPS, cpp_constants, fields_of, room_for_groups
from padless.kernels.launch import Prepared
from padless.runtime.driver import Driver

KERNEL = "sm90_rows_columns/sm90_rows_columns.cu"
CTAS_PER_SM = 2  # the same number as in kernels/sm90_rows_columns/storage.cuh
BAND = 2
_TILE = 128


@dataclass(frozen=True)
class RowsColumnsConfig:
    """One compiled kernel. Each field becomes a constant in the device code; no size is among them.

    Attributes:
        has_rows: rows are quantized too, not the columns alone.
        square: 128 features of the columns share a scale; else each has its own.
        gathers: the rows are those of a larger tensor that a list names.
        max_groups: room for groups.
        band: blocks of 128 features that are done tile by tile before the next ones.
    """

    has_rows: bool = True
    square: bool = False
    gathers: bool = False
    max_groups: int = FEW_GROUPS
    band: int = BAND

    def prelude(self) -> str:
        """The C++ constants that the kernel source is compiled behind."""
        return cpp_constants(fields_of(self, "max_groups", "band"), fields_of(self, "has_rows", "square", "gathers"))


def fits(x: torch.Tensor, offs: torch.Tensor) -> bool:
    """Whether the kernel takes x (T, F): bfloat16, F a multiple of 8, rows at multiples of 16 bytes; few groups."""
    return x.shape[1] % 8 == 0 and group_tiles.fits(offs, x)


def prepare(
    driver: Driver,
    x: torch.Tensor,
    tokens: torch.Tensor | None,
    groups: group_tiles.TokenGroups,
    row_codes: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    codes: torch.Tensor,
    scale: torch.Tensor,
    square: bool,
) -> Prepared:
    """Packs the launch for an x that fits, with at least one column.

    tokens: (M,) int32, contiguous, where the rows are x[tokens]; those that x does not have are zeros.
    row_codes (M, F) uint8, row_scale (ld, ceil(F / 128)) float32 with strides (1, ld), padding included: None without
    rows. codes (F, T') uint8; scale (S, F), or (S, ceil(F / 128)) of square blocks.
    """
    num_source_rows, features = x.shape
    num_rows = num_source_rows if tokens is None else tokens.shape[0]
    pointers = (x, tokens, groups.offs, row_codes, row_scale, codes, scale, groups.starts, groups.block_starts)
    ld = 0 if row_scale is None else row_scale.stride(1)
    integers = (num_rows, num_source_rows, features, x.stride(0), ld, *groups.integers(codes, scale))
    has_rows, gathers = row_codes is not None, tokens is not None

    def config() -> RowsColumnsConfig:
        return RowsColumnsConfig(has_rows, square, gathers, room_for_groups(groups.num_groups), BAND)

    tiles = groups.num_tiles * ceil_div(features, _TILE)
    settings = (square, BAND)
    return group_tiles.prepared_before(driver, KERNEL, settings, config, pointers, integers, CTAS_PER_SM, tiles)
