"""The output of the calls of weight gradients: its checks, and the device whose kernel writes it."""

from __future__ import annotations

import torch

from padless.arguments import is_one_of, shown
from padless.ops.checks import describe
from padless.runtime.architecture import kernels_arch
from padless.runtime.devices import BackendName, chosen_backend, device_of
from padless.runtime.driver import Driver

OUT_DTYPES = (torch.bfloat16, torch.float32)


def gradient_output(
    shape: tuple[int, int, int],
    device: torch.device,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: bool,
) -> torch.Tensor:
    """``out`` when it is allowed, or a new tensor (G, N, K) of ``shape``. Raises ValueError."""
    if out is not None and not isinstance(out, torch.Tensor):
        raise ValueError(f"out must be a tensor (G, N, K) = {shape}, got {describe(out)}")
    dtype = out_dtype if out is None else out.dtype
    if not is_one_of(dtype, OUT_DTYPES):
        name = "out_dtype" if out is None else "out.dtype"
        raise ValueError(f"{name} is {shown(dtype)}; allowed: torch.bfloat16 or torch.float32")
    if accumulate and (out is None or dtype != torch.float32):
        given = "None" if out is None else str(out.dtype)
        raise ValueError(f"accumulate adds to float32 and out is {given}; give a float32 tensor as out")
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(out.shape) != shape or out.device != device:
        raise ValueError(f"out must be (G, N, K) = {shape} on {device}, got {describe(out)}")
    if out.stride(2) != 1:
        raise ValueError(f"out must be contiguous along K, got strides {out.stride()}; call .contiguous()")
    return out


def driver_of_gradient(out: torch.Tensor, backend: BackendName | None, arch: str, call: str) -> Driver | None:
    """The device whose kernel writes ``out``, None for the reference. Raises ValueError where there is no such kernel.

    arch: of the kernel of ``call``.
    """
    backend = chosen_backend(backend, out)
    if backend == "reference":
        return None
    driver = device_of(backend, out)
    if kernels_arch(driver.arch) != arch:
        raise ValueError(f"backend {backend!r} is {driver.arch}; {call} has a kernel for {arch}")
    check_gradient_of_kernel(out)
    return driver


def is_without_tokens(out: torch.Tensor, accumulate: bool, tokens: int) -> bool:
    """Whether there is nothing to launch for: no group, or no token; then ``out`` gets its zeros here."""
    if out.shape[0] > 0 and tokens == 0 and not accumulate:
        out.zero_()
    return out.shape[0] == 0 or tokens == 0


def check_gradient_of_kernel(out: torch.Tensor) -> None:
    """Raises ValueError unless TMA can store the rows of ``out``."""
    strides = [out.stride(i) * out.element_size() for i in (0, 1) if out.shape[i] > 1]
    if any(stride % 16 for stride in strides) or out.data_ptr() % 16 != 0:
        raise ValueError(
            f"out must have rows that start at multiples of 16 bytes, got strides {out.stride()} of "
            f"{out.element_size()} bytes at address {out.data_ptr():#x}"
        )
