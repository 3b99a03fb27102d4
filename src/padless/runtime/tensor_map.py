"""Tensor maps: descriptions of tensors for TMA (CUDA driver API, cuTensorMapEncodeTiled).

A map is described here by a ``TensorMapSpec`` and encoded by the driver at hand, the GPU's or the emulator's. All
tuples are innermost dimension first, as in the driver's call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# (CUtensorMapDataType, bytes) of what the kernels move.
DATA_TYPES: dict[torch.dtype, tuple[int, int]] = {
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


def operand(tensor: torch.Tensor, block_rows: int) -> TensorMapSpec:
    """A K-major operand, (rows, K) or (G, rows, K), read in boxes of ``block_rows`` x 128 bytes."""
    data_type, size = DATA_TYPES[tensor.dtype]
    dims = tuple(reversed(tensor.shape))
    strides = tuple(outer_stride(tensor, dim) for dim in range(tensor.dim() - 2, -1, -1))
    box = (128 // size, block_rows) + (1,) * (len(dims) - 2)
    return TensorMapSpec(data_type, tensor.data_ptr(), dims, strides, box, SWIZZLE_128B)


def gate_up_operand(tensor: torch.Tensor, block_rows: int, run: int) -> TensorMapSpec:
    """(G, 2 I, K), gate above up, in boxes of ``block_rows`` x 128 bytes: ``run`` rows of gate and of up in turn.

    By K, row of a run, gate or up, run, group.
    """
    data_type, size = DATA_TYPES[tensor.dtype]
    groups, n, k = tensor.shape
    row, group = (outer_stride(tensor, dim) for dim in (1, 0))
    dims, strides = (k, run, 2, n // 2 // run, groups), (row, n // 2 * row, run * row, group)
    box = (128 // size, run, 2, block_rows // (2 * run), 1)
    return TensorMapSpec(data_type, tensor.data_ptr(), dims, strides, box, SWIZZLE_128B)


def code_tiles(codes: torch.Tensor, rows: int, k: int) -> TensorMapSpec:
    """Repacked codes (G, N, K / 2), tiles of 512 bytes for 16 rows x 64 of K (`padless.layouts.to_repacked`).

    A box has rows x k of a group: 8 rows are half a tile. By line of 128 bytes of a tile, tile along K, 16 rows, group.
    """
    groups, n, row_bytes = codes.shape
    along_k, of_group = row_bytes // 32, outer_stride(codes, 0) if groups > 1 else n * row_bytes
    dims, strides = (128, 4, along_k, n // 16, groups), (128, 512, 512 * along_k, of_group)
    return TensorMapSpec(0, codes.data_ptr(), dims, strides, (128, min(rows, 16) // 4, k // 64, max(rows // 16, 1), 1))


def outer_stride(tensor: torch.Tensor, dim: int) -> int:
    """Stride of an outer dimension, bytes. Where its length is 1 torch allows any; a map wants a multiple of 16."""
    size = tensor.element_size()
    if tensor.shape[dim] == 1:
        return -(-tensor.shape[-1] * size // 16) * 16
    return tensor.stride(dim) * size


def mn_major_scales(scale: torch.Tensor, rows: int) -> TensorMapSpec:
    """Scales (M, k_blocks) with strides (1, ld), read ``rows`` at a time out of one K block."""
    data_type, size = DATA_TYPES[scale.dtype]
    m, k_blocks = scale.shape
    return TensorMapSpec(data_type, scale.data_ptr(), (m, k_blocks), (scale.stride(1) * size,), (rows, 1))


def flat(tensor: torch.Tensor, elements: int) -> TensorMapSpec:
    """A contiguous tensor as one row of elements, read ``elements`` at a time."""
    data_type, _ = DATA_TYPES[tensor.dtype]
    return TensorMapSpec(data_type, tensor.data_ptr(), (tensor.numel(),), (), (elements,))
