"""FP4 weights beside 8-bit activations on Blackwell: codes that the copy engine spreads to 8 bits, and their map."""

from __future__ import annotations

import torch

from padless.formats import MXFP4, MXFP8, MXFP8_E5M2, BlockScaledTensor, round_up
from padless.runtime.tensor_map import SWIZZLE_128B, TensorMapSpec, outer_stride

_U4_PADDED_TO_16_BYTES = 14  # CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B


def has_padded_b(a: BlockScaledTensor, b: BlockScaledTensor) -> bool:
    """Whether B is FP4 beside 8-bit A: its codes are spread to 8 bits as they are copied."""
    return a.format in (MXFP8, MXFP8_E5M2) and b.format == MXFP4


def spreadable(a: BlockScaledTensor, b: BlockScaledTensor, copies: list[torch.Tensor]) -> BlockScaledTensor:
    """``b``; FP4 beside 8-bit ``a`` with codes that the copy engine can spread: a copy for it is added to ``copies``.

    It spreads 64 values at a time, 128 or more of a row, from 32-byte boundaries.
    """
    strides = [outer_stride(b.data, dim) for dim in (0, 1) if b.data.shape[dim] > 1]
    *rows, half = b.data.shape
    if not has_padded_b(a, b) or (half >= 64 and not any(x % 32 for x in (half, b.data.data_ptr(), *strides))):
        return b
    whole = torch.zeros((*rows, max(round_up(half, 32), 64)), dtype=torch.uint8, device=b.device)
    codes = whole[..., :half].copy_(b.data.view(torch.uint8)).view(b.data.dtype)
    copies.append(whole)
    return BlockScaledTensor(codes, b.scale, b.format, None, b.scale_layout)


def padded_fp4(codes: torch.Tensor, block_rows: int) -> TensorMapSpec:
    """FP4 codes as kind::mxf8f6f4 of tcgen05 reads them, in boxes of ``block_rows`` x 128 values.

    codes: (G, rows, K / 2) bytes of two e2m1 each, addresses and strides multiples of 32; behind the last row as many
    bytes as K is short of a multiple of 64, or of 128. The type unpacks: 8 bytes of memory, 16 values, become 16 bytes
    of shared memory whose second half means nothing, so a box has the size and the swizzle of one of 8-bit codes. It
    takes rows of whole 128 values alone, and K may end with 64: so the dimensions are 128 values, windows that begin
    every 64 values, rows, groups. The last window ends with the last 64 of K that are begun.
    """
    groups, rows, half = codes.shape
    strides = (32, *(-(-outer_stride(codes, dim) // 32) * 32 for dim in (1, 0)))
    dims, box = (128, max(-(-half // 32), 2) - 1, rows, groups), (128, 1, block_rows, 1)
    return TensorMapSpec(_U4_PADDED_TO_16_BYTES, codes.data_ptr(), dims, strides, box, SWIZZLE_128B)
