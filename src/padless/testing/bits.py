"""Comparison of tensors bit for bit."""

from __future__ import annotations

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bit patterns of t as integers of its elements' size, without a copy."""
    return t.view(_INTEGERS[t.element_size()])


def differing(x: torch.Tensor, y: torch.Tensor, *, any_nan: bool = False) -> torch.Tensor:
    """Elements whose bits differ, the sign of zero included and those of NaN unless any_nan; a bool tensor.

    x, y: of the same shape and dtype.
    """
    differ = bits(x) != bits(y)
    if any_nan and x.element_size() > 1 and x.is_floating_point():
        differ = differ & ~(x.isnan() & y.isnan())
    return differ


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether shapes, dtypes and all bits are equal, those of NaN and the sign of zero included."""
    return x.shape == y.shape and x.dtype == y.dtype and not bool(differing(x, y).any())
