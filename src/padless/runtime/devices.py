"""Backends of this machine: what can compute here, and why something cannot."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import get_args

import torch

from padless.arguments import shown
from padless.runtime import driver, jit
from padless.runtime.architecture import ARCHITECTURES, BY_CAPABILITY, HOPPER, Architecture, with_own_kernels
from padless.runtime.choices import BackendName as BackendName

NAMES: tuple[BackendName, ...] = get_args(BackendName)


@dataclass(frozen=True)
class Backend:
    """One way to compute, whether it is available here, and why, in a sentence."""

    name: str
    available: bool
    reason: str


def backends() -> dict[str, Backend]:
    """Every backend by name: "cuda" (the kernels), an emulator for each architecture with separate kernels (those
    kernels on the CPU), "reference" (torch)."""
    found = (
        _cuda(),
        *map(_emulator, with_own_kernels()),
        Backend("reference", True, "exact and slow, in torch on the CPU"),
    )
    return {backend.name: backend for backend in found}


_of_thread = threading.local()


@contextmanager
def backend_on_cpu(backend: BackendName) -> Iterator[None]:
    """In this block this thread's calls on a CPU that name no backend have this one, also those inside of a layer."""
    before = vars(_of_thread).get("backend", "reference")
    _of_thread.backend = backend
    try:
        yield
    finally:
        _of_thread.backend = before


def chosen_backend(backend: BackendName | None, tensor: torch.Tensor) -> BackendName:
    """``backend``; where it is None "cuda" for a tensor on a GPU, else "reference"; see `backend_on_cpu`."""
    if backend is not None:
        return backend
    return "cuda" if tensor.is_cuda else vars(_of_thread).get("backend", "reference")


def device_of(backend: BackendName, tensor: torch.Tensor) -> driver.Driver:
    """The device that executes kernels on ``tensor``: the GPU by its driver, or the emulator.

    Raises ValueError where ``backend`` is unknown, not available here, or not for the tensor's device.
    """
    if backend == "cuda" and tensor.is_cuda:
        found = _cuda_of(tensor.device)
        if found.available:
            return driver.cuda_driver(tensor.device.index)
        _cuda_of.cache_clear()  # what is missing may be there at the next call
        raise ValueError(_not_available(found))
    if backend not in NAMES:
        raise ValueError(f"backend is {shown(backend)}; allowed: None, {', '.join(map(repr, NAMES))}")
    found = backends()[backend]
    if not found.available:
        raise ValueError(_not_available(found))
    if (backend == "cuda") != tensor.is_cuda:
        raise ValueError(f"backend is {backend!r} and the tensors are on {tensor.device}; move them or leave it None")
    from padless.emulator.fake_driver import driver_of

    return driver_of(backend)


def _not_available(backend: Backend) -> str:
    return f"backend {backend.name!r} is not available here: {backend.reason}"


def hopper_driver(tensor: torch.Tensor) -> driver.Driver | None:
    """The driver of the Hopper GPU that ``tensor`` is on; None elsewhere, and where no kernel can be compiled."""
    if not tensor.is_cuda or not _cuda_of(tensor.device).available:
        return None
    found = driver.cuda_driver(tensor.device.index)
    return found if found.arch == HOPPER.name else None


def kernels_for(device: torch.device, backend: str | None = None) -> str | None:
    """The architecture whose kernels a call for tensors on ``device`` gets; None where it gets none.

    backend: on a CPU, the emulator that was asked for.
    """
    if device.type == "cuda":
        here = BY_CAPABILITY.get(capability_of(device.index or 0))
        return None if here is None else here.kernels
    return next((found.kernels for found in ARCHITECTURES if found.backend == backend), None)


@cache
def capability_of(index: int) -> tuple[int, int]:
    """Compute capability of a GPU."""
    return torch.cuda.get_device_capability(index)


def on_device_of(t: torch.Tensor) -> AbstractContextManager[object]:
    """Makes t's GPU the current one, on which Triton launches."""
    return _current(t.device)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream of a GPU; False for the CPU."""
    if device.type != "cuda":
        return False
    with _current(device):
        return torch.cuda.is_current_stream_capturing()


def _current(device: torch.device) -> AbstractContextManager[object]:
    if device.type != "cuda" or device.index == torch.cuda.current_device():  # changing it takes longer than looking
        return nullcontext()
    return torch.cuda.device(device)


@cache
def _cuda_of(device: torch.device) -> Backend:
    """The backend "cuda" on a GPU, which need not be of the kind of another one."""
    return _cuda(device)


def _compiler_missing() -> str | None:
    try:
        jit.nvrtc_version()
    except Exception as error:  # an absent or broken library raises whatever its loader likes
        return f"NVRTC cannot be loaded ({error}); install nvidia-cuda-nvrtc 13.0"
    return None


def _cuda(device: torch.device | None = None) -> Backend:
    """The backend "cuda" on a device; None is the current one."""
    if not torch.cuda.is_available():
        return Backend("cuda", False, "torch sees no CUDA GPU")
    capability = torch.cuda.get_device_capability(device)
    if (here := BY_CAPABILITY.get(capability)) is None:
        name = torch.cuda.get_device_name(device)
        needed = ", ".join(f"{major}.{minor} ({a.generation})" for (major, minor), a in BY_CAPABILITY.items())
        return Backend("cuda", False, f"{name} has compute capability {capability}; the kernels need one of {needed}")
    try:
        driver.cuda_driver()
    except driver.DriverError as error:
        return Backend("cuda", False, str(error))
    if missing := _compiler_missing():
        return Backend("cuda", False, missing)
    compiled = f"kernels compiled with NVRTC {jit.nvrtc_version()}, {here.verified}"
    return Backend("cuda", True, f"{torch.cuda.get_device_name(device)}, {compiled}")


def _emulator(architecture: Architecture) -> Backend:
    name = architecture.backend
    if missing := _compiler_missing():
        return Backend(name, False, missing)
    try:
        from padless.emulator import fake_driver  # noqa: F401
    except ImportError as error:
        return Backend(name, False, f"the emulator cannot be imported ({error})")
    return Backend(name, True, f"the {architecture.generation} kernels' PTX, executed on the CPU: exact and very slow")
