"""Block-scaled GEMMs of cuDNN's frontend for SM100, compiled by its own classes on a CPU and run in the emulator."""

from __future__ import annotations

import atexit
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from padless.emulator import Emulator
from padless.emulator.fake_driver import memory_of
from padless.emulator.program.cute_dsl import with_driver
from padless.verify.cudnn.host_code import Device, OnDevice

Tensors = dict[str, torch.Tensor | None]
MODULES = {"nvidia-cudnn-frontend": "cudnn", "nvidia-cutlass-dsl": "cutlass", "apache-tvm-ffi": "tvm_ffi"}
# Classes of its frontend, with their modules.
GROUPED = ("cudnn.gemm.cutedsl.grouped.quant.api", "GroupedGemmQuantSm100")
DENSE = ("cudnn.gemm.cutedsl.dense.amax.api", "GemmAmaxSm100")


def missing() -> str:
    """The reason why cuDNN's kernel cannot be compiled here, or nothing where it can."""
    absent = [package for package, module in MODULES.items() if not importlib.util.find_spec(module)]
    if not absent:
        return ""
    return f"cuDNN's kernel needs packages that are not installed: {', '.join(absent)}; pip install 'padless[cudnn]'"


def versions() -> dict[str, str]:
    """Versions of the packages that compile the kernel."""
    return {package: importlib.metadata.version(package) for package in MODULES}


class CudnnKernel:
    """One compiled configuration of a class of cuDNN's, for tensors like those given.

    tensors: its operands and outputs on the CPU by its names, None for those that are left out. program: GROUPED or
    DENSE. options: keywords of the class; with num_experts weights are given to it by pointers. clusters: how many its
    persistent kernel may count on.
    """

    def __init__(
        self, program: tuple[str, str], tensors: Tensors, options: dict[str, Any], *, clusters: int = 2, seed: int = 0
    ) -> None:
        self.device, (module, name) = Device(seed), program
        self.by_pointers = ("b", "sfb") if "num_experts" in options else ()
        with _without_gpu(module, self.device, clusters) as api:
            logging.getLogger(name).setLevel(logging.ERROR)  # or every class says that it is experimental
            samples = {f"sample_{name}": t for name, t in tensors.items() if name not in self.by_pointers}
            self.call = getattr(api, name)(**samples, **options)
            self.call.check_support()
            self.call.compile()
        (ptx,) = _dumps().glob("*.ptx")
        self.ptx = ptx.read_text()
        ptx.unlink()

    def run(self, tensors: Tensors) -> Device:
        """Runs the host code on these tensors, and so the kernel in the emulator; returns what happened."""
        workspace = getattr(self.call, "_workspace", None)
        pointers = {f"{name}_ptrs_device": _pointers(tensors[name]) for name in self.by_pointers}
        memory = memory_of([t for t in (*tensors.values(), *pointers.values(), workspace) if t is not None])
        self.device.emulator = Emulator(self.ptx, memory=memory, strict=False, name="cudnn.ptx")
        arguments: dict[str, Any] = {
            name if name == "padded_offsets" else f"{name}_tensor": None if tensor is None else OnDevice(tensor)
            for name, tensor in tensors.items()
            if name not in self.by_pointers
        }
        if "d" in tensors:  # as the class's own call fills in what is left out
            arguments["row_scale_tensor"] = None
            arguments["d_col_tensor"] = arguments["d_col_tensor"] or arguments["d_tensor"]
        try:
            self.call._compiled_kernel(**arguments, **pointers, stream=0)
        except Exception:
            self.device.raise_error()
            raise
        self.device.raise_error()
        return self.device


@cache
def _dumps() -> Path:
    """The folder of this process that the compiler leaves PTX in. It reads its settings once, when it is imported."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ |= {"CUTE_DSL_ARCH": "sm_100a", "CUTE_DSL_KEEP": "ptx", "CUTE_DSL_DUMP_DIR": str(folder)}
    return folder


@contextmanager
def _without_gpu(module: str, device: Device, clusters: int) -> Iterator[Any]:
    """A module of cuDNN's, believing that there is a Blackwell GPU, with ``device`` as driver of what it compiles."""
    _dumps()
    api = importlib.import_module(module)
    import cutlass
    from cutlass._mlir import ir
    from cutlass.cutlass_dsl import tvm_ffi_provider

    to_bytes = tvm_ffi_provider._aot_support.export_module_to_bytes

    def export(host: Any, **options: Any) -> bytes:
        with host.context:
            linked = ir.Module.parse(with_driver(str(host), device.address_of))
        exported: bytes = to_bytes(linked, **options)
        return exported

    class Hardware:
        def get_max_active_clusters(self, size: int, stream: Any = None) -> int:
            return clusters

    with ExitStack() as stack:
        for owner, name, value in (
            (api, "cuda_is_available", lambda: True),
            (api, "get_compute_capability", lambda *_: (10, 0)),
            (cutlass.utils, "HardwareInfo", Hardware),
            (tvm_ffi_provider._aot_support, "export_module_to_bytes", export),
        ):
            stack.enter_context(patch.object(owner, name, value))
        if hasattr(api, "allocate_byte_workspace"):
            read = api.from_dlpack
            stack.enter_context(patch.object(api, "allocate_byte_workspace", _workspace))
            stack.enter_context(patch.object(api, "from_dlpack", lambda t, **options: read(OnDevice(t), **options)))
        yield api


def _pointers(weights: torch.Tensor | None) -> torch.Tensor:
    """Addresses of the groups, which are the last dimension."""
    assert weights is not None
    return torch.tensor([weights[..., group].data_ptr() for group in range(weights.shape[-1])])


def _workspace(framework: str, size: int, device: torch.device) -> torch.Tensor:
    """So many bytes at a multiple of 128."""
    raw = torch.zeros(max(size, 1) + 127, dtype=torch.uint8)
    start = -raw.data_ptr() % 128
    return raw[start : start + max(size, 1)]
