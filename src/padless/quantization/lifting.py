"""Gradients in FP8_BLOCK, which are quantized 2^60 times as large as they are.

A scale of FP8_BLOCK is never below 1e-4 / 448, a convention made for activations: a block whose largest value is below
4e-9 has fewer bits the smaller it is, and below 2e-10 none. Gradients of a mean over a batch of millions of tokens lie
there. So what quantizes a gradient takes it times `LIFT`, and what multiplies it takes the other operand's scales times
1 / `LIFT`. Both are powers of two: where no block is below 1e-4 nothing changes, to the bit. Gradients may be 2^67.
"""

from __future__ import annotations

import torch

from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.quantization.quantize import has_triton, quantize
from padless.runtime.devices import on_device_of

LIFT = 2.0**60


def lift(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient times LIFT; in float32 where it is float16."""
    # A literal here and below: Dynamo takes a module's number for one that may change, and fails in a backward pass.
    return (gradient.float() if gradient.dtype == torch.float16 else gradient) * 2.0**60


def quantize_lifted(gradient: torch.Tensor) -> BlockScaledTensor:
    """quantize(lift(gradient), FP8_BLOCK) of rows (M, K), in one pass on a GPU."""
    if not (gradient.is_cuda and has_triton()):
        return quantize(lift(gradient), FP8_BLOCK)
    from padless.quantization.triton.fp8_block import fp8_block

    with on_device_of(gradient):
        return fp8_block(gradient, "activation", "mn", factor=LIFT)


def lowered_by_lift(t: torch.Tensor) -> torch.Tensor:
    """The tensor times 1 / LIFT."""
    return t * 2.0**-60
