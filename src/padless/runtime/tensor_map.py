"""Tensor maps: descriptions of tensors for TMA (CUDA driver API, cuTensorMapEncodeTiled).

A map is described here by a ``TensorMapSpec`` and encoded by the driver at hand, the GPU's or the emulator's. All
tuples are innermost dimension first, as in the driver's call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

RAGGED_B = 1 << 30  # the same number as in kernels/device/sm90/output.cuh
_RAGGED_HUGE = 0x7FFF0000

# (CUtensorMapDataType, bytes) of what the kernels move.
_DATA_TYPES: dict[torch.dtype, tuple[int, int]] = {
    torch.float8_e4m3fn: (0, 1),  # UINT8
    torch.uint8: (0, 1),
    torch.float16: (6, 2),
    torch.float32: (7, 4),
    torch.bfloat16: (9, 2),
}
SWIZZLE_NONE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B = range(4)
L2_PROMOTION_NONE, L2_PROMOTION_64B, L2_PROMOTION_128B, L2_PROMOTION_256B = range(4)


@dataclass(frozen=True)
class TensorMapSpec:
    """Arguments of one tensor map, innermost dimension first.

    Attributes:
        data_type: CUtensorMapDataType.
        address: bytes, a multiple of 16.
        dims: elements.
        strides: bytes, of every dimension but the innermost; multiples of 16.
        box: elements that one copy moves.
        swizzle: CUtensorMapSwizzle.
        l2_promotion: CUtensorMapL2promotion.
    """

    data_type: int
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = SWIZZLE_NONE
    l2_promotion: int = L2_PROMOTION_256B


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


def operand(tensor: torch.Tensor, block_rows: int) -> TensorMapSpec:
    """A K-major operand, (rows, K) or (G, rows, K) of one-byte elements, read in boxes of ``block_rows`` x 128 bytes."""
    data_type, _ = _DATA_TYPES[tensor.dtype]
    dims = tuple(reversed(tensor.shape))
    strides = tuple(outer_stride(tensor, dim) for dim in range(tensor.dim() - 2, -1, -1))
    box = (128, block_rows) + (1,) * (len(dims) - 2)
    return TensorMapSpec(data_type, tensor.data_ptr(), dims, strides, box, SWIZZLE_128B)


def outer_stride(tensor: torch.Tensor, dim: int) -> int:
    """Stride of an outer dimension, bytes. Where its length is 1 torch allows any; a map wants a multiple of 16."""
    size = tensor.element_size()
    if tensor.shape[dim] == 1:
        return -(-tensor.shape[-1] * size // 16) * 16
    return tensor.stride(dim) * size


def mn_major_scales(scale: torch.Tensor, rows: int) -> TensorMapSpec:
    """Scales (M, k_blocks) with strides (1, ld), read ``rows`` at a time out of one K block."""
    data_type, size = _DATA_TYPES[scale.dtype]
    m, k_blocks = scale.shape
    return TensorMapSpec(data_type, scale.data_ptr(), (m, k_blocks), (scale.stride(1) * size,), (rows, 1))


def flat(tensor: torch.Tensor, elements: int) -> TensorMapSpec:
    """A contiguous tensor as one row of elements, read ``elements`` at a time."""
    data_type, _ = _DATA_TYPES[tensor.dtype]
    return TensorMapSpec(data_type, tensor.data_ptr(), (tensor.numel(),), (), (elements,))


def output_pool(d: torch.Tensor, max_rows: int) -> tuple[TensorMapSpec, ...]:
    """The descriptor pool of (M, N) output: boxes of 1, 2, 4 .. max_rows rows, 128 bytes wide."""
    data_type, size = _DATA_TYPES[d.dtype]
    m, n = d.shape
    stride = (outer_stride(d, 0),)
    rows = [1 << i for i in range(max_rows.bit_length())]
    return tuple(
        TensorMapSpec(data_type, d.data_ptr(), (n, m), stride, (128 // size, r), SWIZZLE_128B) for r in rows
    )


def output_ragged(d: torch.Tensor, rows: int) -> TensorMapSpec:
    """The ragged descriptor of (M, N) output: one map whose bounds check can be put at any row.

    Dimensions N, B, huge, huge with strides 1, s, s, 2^34 - s elements, where s is the row stride and B = 2^30. At
    coordinates (c, B - left, end, B) the address is that of row end - left (modulo 2^64), and the second coordinate
    leaves its dimension at row ``end``. Method: the ragged tensor descriptors of Triton's tools/ragged_tma.py.
    """
    data_type, size = _DATA_TYPES[d.dtype]
    s = outer_stride(d, 0) // size
    return TensorMapSpec(
        data_type,
        d.data_ptr(),
        (d.shape[1], RAGGED_B, _RAGGED_HUGE, _RAGGED_HUGE),
        (s * size, s * size, (2**34 - s) * size),
        (128 // size, rows, 1, 1),
        SWIZZLE_128B,
    )
