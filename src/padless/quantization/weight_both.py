"""Quantizes a weight and its transpose in one read: operands of the forward product and of the input's gradient."""

from __future__ import annotations

import torch

from padless.arguments import check_readable
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.quantization import rules as quantize_rules
from padless.quantization.quantize import INPUT_DTYPES, has_triton
from padless.runtime.devices import on_device_of
from padless.runtime.operators import register_operator


def quantize_weight_both(w: torch.Tensor) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """FP8_BLOCK weights of w and of w transposed, the second's codes and scales being the first's, transposed.

    w: (N, K) or (G, N, K) bfloat16, float16 or float32, any strides, N and K at least 1; read once.

    Returns ``(quantize(w, FP8_BLOCK, kind="weight"), the weight (.., K, N))``. Nothing is quantized a second time:
    blocks of 128 x 128 are the same values both ways, the short ones at the ends included.

    One launch on a GPU. Raises ValueError for what is not allowed above.
    """
    check_readable(w=w)
    if not isinstance(w, torch.Tensor):
        raise ValueError(f"w must be a torch.Tensor, got {type(w).__name__}")
    if w.dtype not in INPUT_DTYPES:
        raise ValueError(f"w must be bfloat16, float16 or float32, got {w.dtype}")
    if w.dim() not in (2, 3) or 0 in w.shape[-2:]:
        raise ValueError(f"w must be (N, K) or (num_groups, N, K) with N and K at least 1, got shape {tuple(w.shape)}")
    codes, scale, transposed, transposed_scale = _operator(w)
    return (
        BlockScaledTensor(codes.view(torch.float8_e4m3fn), scale, FP8_BLOCK),
        BlockScaledTensor(transposed.view(torch.float8_e4m3fn), transposed_scale, FP8_BLOCK),
    )


_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _run(w: torch.Tensor) -> _Tensors:
    on_gpu = w.is_cuda and has_triton()
    with on_device_of(w):
        if on_gpu:
            from padless.quantization.triton import weight_both

            return weight_both.weight_both(w)
        return weight_both_torch(w)


def weight_both_torch(w: torch.Tensor) -> _Tensors:
    """The Triton kernel's outputs, in plain torch."""
    codes, scale = quantize_rules.fp8_block(w, "weight")
    # Cloned, not made contiguous: one row or column is both, and outputs of an operator share no memory.
    transposed, transposed_scale = (t.mT.clone(memory_format=torch.contiguous_format) for t in (codes, scale))
    return codes, scale, transposed, transposed_scale


def _fake(w: torch.Tensor) -> _Tensors:
    shape = tuple(w.shape)
    blocks = FP8_BLOCK.scale_shape(shape, "weight")
    return (
        w.new_empty(shape, dtype=torch.uint8),
        w.new_empty(blocks, dtype=torch.float32),
        w.new_empty((*shape[:-2], shape[-1], shape[-2]), dtype=torch.uint8),
        w.new_empty((*blocks[:-2], blocks[-1], blocks[-2]), dtype=torch.float32),
    )


_operator = register_operator("quantize_weight_both(Tensor w) -> (Tensor, Tensor, Tensor, Tensor)", _run, _fake)
