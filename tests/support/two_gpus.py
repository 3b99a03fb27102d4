"""A process with two GPUs, of which tensors are on the second and the first is current: nothing is computed.

Tensors lie in the CPU's memory and say that they are on the second GPU, but for those that are named. CUDA kernels are
launched into a libcuda that fails in a wrong context, as the real one; a stand-in for Triton's launches, which are on
the current device, asks where the tensors are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.compiler import CompiledKernel as TritonKernel
from triton.runtime.jit import KernelInterface

from padless.kernels import launch, remembered, replay
from padless.moe.triton import route
from padless.quantization.triton import launches
from padless.runtime import driver, jit
from support import libcuda
from support.hopper import MAKERS, forget_devices, on_the_cpu

SECOND = torch.device("cuda", 1)
STREAM = 0x2000  # torch's current one on the second GPU
KERNEL = jit.CompiledKernel(b"\x7fELFfake", "cubin", "the_entry", 202_752, 384, 5, 168, 0, 0, "")


class TwoGpus:
    """What was launched inside ``pretended``: how many kernels of CUDA and of Triton."""

    def __init__(self, library: ctypes.CDLL, stub: libcuda.Stub) -> None:
        self._library, self._stub, self.of_triton = library, stub, 0
        self.on_the_first: set[int] = set()  # addresses of tensors

    def index_of(self, t: torch.Tensor) -> int:
        return 0 if t.data_ptr() in self.on_the_first else SECOND.index

    @property
    def of_cuda(self) -> list[str]:
        return [call for call in self._stub.calls if call.startswith("cuLaunchKernelEx")]

    @property
    def current(self) -> int:
        return self._library.stub_device()

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        """torch.cuda.device."""
        before = self.current
        self._library.stub_set_device(device.index)
        try:
            yield
        finally:
            self._library.stub_set_device(before)

    def run_triton(self, *arguments: Any, **options: Any) -> TritonKernel:
        """Triton launches on the current device, where it loads what it compiled."""
        on = {a.get_device() for a in arguments if isinstance(a, torch.Tensor)}
        assert on == {self.current}, f"tensors are on {on} and cuda:{self.current} is current"
        self.of_triton += 1
        kinds = {torch.Tensor: "*u8", int: "i64", float: "fp32", type(None): "constexpr"}
        signature = {i: kinds[type(argument)] for i, argument in enumerate(arguments)}
        types = [{"i64": "u64", "fp32": "f32"}.get(kind, "u64") for kind in signature.values() if kind != "constexpr"]
        parameters = ", ".join(f".param .{kind} p{i}" for i, kind in enumerate([*types, "u64", "u64"]))
        found = object.__new__(TritonKernel)
        found.asm = {"ptx": f".visible .entry kernel({parameters})"}
        found.src = SimpleNamespace(signature=signature)
        launch_pdl = options.get("launch_pdl", False)
        found.metadata = SimpleNamespace(name="kernel", num_ctas=1, num_warps=4, shared=0, launch_pdl=launch_pdl)
        found.function = libcuda.FUNCTION + (self.current << 16)
        return found


@contextmanager
def pretended(library: ctypes.CDLL, capability: tuple[int, int]) -> Iterator[TwoGpus]:
    """Two GPUs of a kind inside."""
    forget_devices()
    with pytest.MonkeyPatch.context() as patch:
        stub = libcuda.installed(library, patch)
        library.stub_set_capabilities(*[10 * capability[0] + capability[1]] * 2)
        library.stub_reads_arguments(0)
        gpus = TwoGpus(library, stub)
        answers = {
            "is_available": lambda: True, "device_count": lambda: 2, "device": gpus.device,
            "current_device": lambda: gpus.current, "get_device_capability": lambda device=None: capability,
            "get_device_name": lambda device=None: "NVIDIA Pretended", "is_current_stream_capturing": lambda: False,
            "current_stream": lambda device=None: SimpleNamespace(record_event=lambda: None),
        }  # fmt: skip
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM * index, raising=False)
        for module in (launches, remembered):
            patch.setattr(module, "_KNOWN", {})
        patch.setattr(replay, "_REPLAYS", {})
        patch.setattr(driver, "current_stream", lambda index: STREAM * index)
        patch.setattr(launch, "compile_kernel", lambda *arguments: KERNEL)
        patch.setattr(jit, "nvrtc_version", lambda: "13.0")
        for kind in (KernelInterface, TritonKernel):
            patch.setattr(kind, "__getitem__", lambda kernel, grid: gpus.run_triton, raising=False)
        unset = route.empty
        patch.setattr(route, "empty", lambda *a: route.Sorted(*(t.zero_() for t in unset(*a))))
        for name in (*MAKERS, "randn"):
            patch.setattr(torch, name, on_the_cpu(getattr(torch, name)))
        patch.setattr(torch.Tensor, "to", on_the_cpu(torch.Tensor.to))
        where = property(lambda t: torch.device("cuda", gpus.index_of(t)))
        for name, of_tensors in {"is_cuda": True, "device": where, "get_device": lambda t: gpus.index_of(t)}.items():
            patch.setattr(torch.Tensor, name, of_tensors, raising=False)
        yield gpus
    forget_devices()
