"""Values of slots in the order of rows, and back: definitions in torch, and where Triton computes them."""

from __future__ import annotations

import torch

from padless.moe.checks import on_device_of, runs_triton


def slots_to_rows(values: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """(T * k,) float32: the value (T, k) of each row's slot; also for rows of the tail."""
    if runs_triton(values) and values.numel() > 0:
        from padless.moe.triton import slots as kernels

        with on_device_of(values):
            return kernels.slots_to_rows(values.contiguous(), inverse)
    out = torch.empty(inverse.numel(), dtype=torch.float32, device=values.device)
    return out.scatter_(0, _rows_of(inverse), values.reshape(-1).to(torch.float32))


def rows_to_slots(values: torch.Tensor, inverse: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """(T, k): the value (T * k,) of each slot's row, 0 for slots of no expert."""
    if runs_triton(values) and values.numel() > 0:
        from padless.moe.triton import slots as kernels

        with on_device_of(values):
            return kernels.rows_to_slots(values, inverse, out_dtype)
    found = values[_rows_of(inverse)].view(inverse.shape)
    return torch.where(inverse >= 0, found, 0.0).to(out_dtype)


def _rows_of(inverse: torch.Tensor) -> torch.Tensor:
    flat = inverse.reshape(-1).to(torch.int64)
    return torch.where(flat < 0, -1 - flat, flat)
