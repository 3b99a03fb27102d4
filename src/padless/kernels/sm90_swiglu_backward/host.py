"""Host side of sm90_swiglu_backward.cu: which operands it takes, its configuration, the launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from padless.kernels import group_tiles
from padless.kernels.config import FEW_GROUPS, cpp_constants, fields_of, room_for_groups
from padless.kernels.launch import Prepared
from padless.runtime.driver import Driver

KERNEL = "sm90_swiglu_backward/sm90_swiglu_backward.cu"
BAND = 8
_TILE = 128


@dataclass(frozen=True)
class SwigluBackwardConfig:
    """One compiled kernel. Each field becomes a constant in the device code; no size is among them.

    Attributes:
        has_prob: the output was multiplied by a probability of its row.
        interleaved: gate and up lie in runs of 32 columns; else concatenated.
        square: 128 features of H share a scale; else each has its own.
        max_groups: room for groups.
        band: blocks of 128 features that are done tile by tile before the next ones.
    """

    has_prob: bool = True
    interleaved: bool = False
    square: bool = False
    max_groups: int = FEW_GROUPS
    band: int = BAND

    def prelude(self) -> str:
        """The C++ constants that the kernel source is compiled behind."""
        flags = fields_of(self, "has_prob", "interleaved", "square")
        return cpp_constants(fields_of(self, "max_groups", "band"), flags)


def fits(dh: torch.Tensor, z: torch.Tensor, offs: torch.Tensor) -> bool:
    """Whether the kernel takes dh (M, I) and z (M, 2 I): bfloat16, I a multiple of 128, rows at multiples of 16 bytes;
    offs of few groups.
    """
    return dh.shape[1] % _TILE == 0 and group_tiles.fits(offs, dh, z)


@dataclass(frozen=True, eq=False)
class Outputs:
    """Tensors for the results: codes uint8, scales float32.

    row_scale: (M, 2 I / 128), strides (1, ld). dz_codes, hidden_codes: (2 I, T') and (I, T'). dz_scale: (S, 2 I);
    hidden_scale: (S, I), or (S, I / 128) of square blocks. sums: (I / 128, M), dprob of each 128 columns, or None.
    """

    row_codes: torch.Tensor
    row_scale: torch.Tensor
    dz_codes: torch.Tensor
    dz_scale: torch.Tensor
    hidden_codes: torch.Tensor
    hidden_scale: torch.Tensor
    sums: torch.Tensor | None


def prepare(
    driver: Driver,
    dh: torch.Tensor,
    z: torch.Tensor,
    prob: torch.Tensor | None,
    groups: group_tiles.TokenGroups,
    out: Outputs,
    interleaved: bool,
    square: bool,
) -> Prepared:
    """Packs the launch for operands that fit, with at least one column."""
    num_rows, hidden = dh.shape
    rows = (out.row_codes, out.row_scale)
    columns = (out.dz_codes, out.dz_scale, out.hidden_codes, out.hidden_scale)
    pointers = (dh, z, prob, groups.offs, *rows, *columns, out.sums, groups.starts, groups.block_starts)
    strides = dh.stride(0), z.stride(0), out.row_scale.stride(1)
    integers = (num_rows, hidden, *strides, *groups.integers(out.dz_codes, out.dz_scale))

    def config() -> SwigluBackwardConfig:
        return SwigluBackwardConfig(prob is not None, interleaved, square, room_for_groups(groups.num_groups), BAND)

    tiles = groups.num_tiles * (hidden // _TILE)
    settings = (interleaved, square, BAND)
    return group_tiles.prepared_before(driver, KERNEL, settings, config, pointers, integers, 1, tiles)
