"""Operands as TMA reads them: boxes of rows, interleaved weights, rows whose last one is bounded, scales in tiles."""

from __future__ import annotations

from dataclasses import replace

import torch

from padless.formats import TILE_BYTES, BlockScaledTensor, ceil_div
from padless.layouts import to_blocked
from padless.runtime.tensor_map import DATA_TYPES, SWIZZLE_128B, TensorMapSpec, operand, outer_stride

RAGGED_B = 1 << 30  # the same number as in kernels/device/sm90/output.cuh
_RAGGED_HUGE = 0x7FFF0000
_UINT32 = 2  # CUtensorMapDataType

# As in kernels/device/sm90/row_box.cuh: rows a group on average, and of a box where there are no more.
_FEW_ROWS, _FEW_ROWS_BOX = 48, 16


def has_few_rows(m: int, num_groups: int) -> bool:
    """Whether groups are so small, on average, that a call takes as long as its weights' bytes (``row_box.cuh``)."""
    return m <= _FEW_ROWS * num_groups


def row_box(m: int, num_groups: int | None = None) -> int:
    """Rows of A in one copy of Hopper's FP8 kernels: 64, what ``m`` rows in all need, or 16 where groups are small
    (``kernels/device/sm90/row_box.cuh``). ``num_groups``: None for a kernel that does not look at that.
    """
    box = min(64, max(8, -(-m // 8) * 8))
    return min(box, _FEW_ROWS_BOX) if num_groups is not None and has_few_rows(m, num_groups) else box


def rows_operand(a: torch.Tensor, num_groups: int | None = None) -> TensorMapSpec:
    """A of Hopper's FP8 kernels, (rows, K): ``operand`` in boxes of ``row_box`` rows."""
    return operand(a, row_box(a.shape[0], num_groups))


def interleaved_operand(weight: torch.Tensor, tile_rows: int) -> TensorMapSpec:
    """Weights (G, N, K), N a multiple of 4, as a map that counts rows in fours: K, 4, N / 4, G.

    A copy moves half of ``tile_rows`` rows of 128 bytes, two of every four (see kernels/device/sm90/wgmma_fragment.cuh).
    """
    rows = tile_rows // 2
    plain = operand(weight, rows)
    (k, n, groups), (row, group) = plain.dims, plain.strides
    dims, strides, box = (k, 4, n // 4, groups), (row, 4 * row, group), (plain.box[0], 2, rows // 2, 1)
    return replace(plain, dims=dims, strides=strides, box=box)


def output_pool(d: torch.Tensor, max_rows: int) -> tuple[TensorMapSpec, ...]:
    """The descriptor pool of (M, N) output: boxes of 1, 2, 4 .. max_rows rows, 128 bytes wide."""
    data_type, size = DATA_TYPES[d.dtype]
    m, n = d.shape
    stride = (outer_stride(d, 0),)
    rows = [1 << i for i in range(max_rows.bit_length())]
    return tuple(TensorMapSpec(data_type, d.data_ptr(), (n, m), stride, (128 // size, r), SWIZZLE_128B) for r in rows)


def output_ragged(d: torch.Tensor, rows: int) -> TensorMapSpec:
    """The ragged descriptor of (M, N) output: one map whose bounds check can be put at any row.

    Dimensions N, B, huge, huge with strides 1, s, s, 2^34 - s elements, where s is the row stride and B = 2^30. At
    coordinates (c, B - left, end, B) the address is that of row end - left (modulo 2^64), and the second coordinate
    leaves its dimension at row ``end``. Method: the ragged tensor descriptors of Triton's tools/ragged_tma.py.
    """
    data_type, size = DATA_TYPES[d.dtype]
    s = outer_stride(d, 0) // size
    return TensorMapSpec(
        data_type,
        d.data_ptr(),
        (d.shape[1], RAGGED_B, _RAGGED_HUGE, _RAGGED_HUGE),
        (s * size, s * size, (2**34 - s) * size),
        (128 // size, rows, 1, 1),
        SWIZZLE_128B,
    )


def tiled_scale(t: BlockScaledTensor) -> torch.Tensor:
    """The scales in 32x4x4 tiles on a 16-byte boundary, copied where they are not; one group's "blocked_groups" are."""
    scale = to_blocked(t.scale) if t.scale_layout == "plain" else t.scale
    return scale.clone() if scale.data_ptr() % 16 != 0 else scale


def scale_tiles(t: BlockScaledTensor, k_atoms: int, row_atoms: int) -> TensorMapSpec:
    """Scales as (tile rows, tile columns, the 128 words of a 32x4x4 tile), read k_atoms x row_atoms tiles at a time."""
    columns = ceil_div(t.scale_columns, 4)
    rows = t.scale.numel() // (columns * TILE_BYTES)
    return TensorMapSpec(
        _UINT32,
        t.scale.data_ptr(),
        (TILE_BYTES // 4, columns, rows),
        (TILE_BYTES, columns * TILE_BYTES),
        (TILE_BYTES // 4, k_atoms, row_atoms),
    )
