"""What the calls of weight gradients have in common: checks of the output, and launches that are remembered."""

from __future__ import annotations

from typing import Any

import torch

from padless.ops.checks import describe
from padless.runtime.driver import PreparedLaunch

OUT_DTYPES = (torch.bfloat16, torch.float32)


def gradient_output(
    shape: tuple[int, int, int],
    device: torch.device,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: bool,
) -> torch.Tensor:
    """``out`` when it is allowed, or a new tensor (G, N, K) of ``shape``. Raises ValueError."""
    dtype = out_dtype if out is None else out.dtype
    if dtype not in OUT_DTYPES:
        name = "out_dtype" if out is None else "out.dtype"
        raise ValueError(f"{name} is {dtype}; allowed: torch.bfloat16 or torch.float32")
    if accumulate and (out is None or dtype != torch.float32):
        given = "None" if out is None else str(out.dtype)
        raise ValueError(f"accumulate adds to float32 and out is {given}; give a float32 tensor as out")
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(out.shape) != shape or out.device != device:
        raise ValueError(f"out must be (G, N, K) = {shape} on {device}, got {describe(out)}")
    if out.stride(2) != 1:
        raise ValueError(f"out must be contiguous along K, got strides {out.stride()}; call .contiguous()")
    if any(stride < size for stride, size in _overlapping(out)):
        raise ValueError(
            f"out has rows that overlap, with strides {out.stride()}; give a tensor of distinct elements"
        )
    return out


def _overlapping(out: torch.Tensor) -> list[tuple[int, int]]:
    """(stride, elements that it has to leave room for) of the outer dimensions."""
    groups, n, k = out.shape
    rows = [(out.stride(1), k)] if n > 1 else []
    return rows + ([(out.stride(0), (n - 1) * out.stride(1) + k if n > 1 else k)] if groups > 1 else [])


def check_gradient_of_kernel(out: torch.Tensor) -> None:
    """Raises ValueError unless the copy engine can store the rows of ``out``."""
    strides = [out.stride(i) * out.element_size() for i in (0, 1) if out.shape[i] > 1]
    if any(stride % 16 for stride in strides) or out.data_ptr() % 16 != 0:
        raise ValueError(
            f"out must have rows that start at multiples of 16 bytes, got strides {out.stride()} of "
            f"{out.element_size()} bytes at address {out.data_ptr():#x}"
        )


# A packed launch depends on addresses, shapes and strides alone; all of them are compared again at every call, and no
# operand is kept alive.
_LAUNCHES: dict[tuple[Any, ...], PreparedLaunch] = {}
_MOST_LAUNCHES = 4096


def known_launch(facts: tuple[Any, ...] | None) -> PreparedLaunch | None:
    """The launch that was packed from ``facts`` before."""
    return None if facts is None else _LAUNCHES.get(facts)


def remember_launch(facts: tuple[Any, ...], launch: PreparedLaunch) -> None:
    """Keeps a launch by everything that it depends on."""
    if len(_LAUNCHES) >= _MOST_LAUNCHES:
        _LAUNCHES.clear()
    _LAUNCHES[facts] = launch
