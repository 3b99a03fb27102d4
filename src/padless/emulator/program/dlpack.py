"""DLPack of tensors on a GPU that is not there: their memory is the CPU's, readers are told CUDA device 0."""

from __future__ import annotations

import ctypes
import os
from types import ModuleType
from typing import Any

CUDA = 2  # DLDeviceType


def on_gpu(capsule: Any) -> Any:
    """The capsule, its tensor now one of CUDA device 0."""
    api = ctypes.pythonapi
    name_of, pointer_of = api.PyCapsule_GetName, api.PyCapsule_GetPointer
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    name = name_of(capsule)
    # DLManagedTensorVersioned has four fields of eight bytes ahead of the tensor; in which data comes first.
    ahead = 32 if name == b"dltensor_versioned" else 0
    ctypes.c_int32.from_address(pointer_of(capsule, name) + ahead + 8).value = CUDA
    return capsule


def by_capsules(torch: ModuleType) -> None:
    """A change of torch: tensors are handed over by capsules alone, and not by a table of C functions."""
    tensor, dlpack = vars(torch)["Tensor"], vars(torch)["utils"].dlpack
    if "__dlpack_c_exchange_api__" in vars(tensor):
        del tensor.__dlpack_c_exchange_api__
    os.environ |= {"TVM_FFI_DISABLE_TORCH_C_DLPACK": "1", "TVM_FFI_SKIP_DLPACK_C_EXCHANGE_API": "1"}
    read = vars(torch)["from_dlpack"]

    def from_dlpack(source: Any, *rest: Any, **options: Any) -> Any:
        return source.view_as(source) if isinstance(source, tensor) else read(source, *rest, **options)

    vars(torch)["from_dlpack"] = dlpack.from_dlpack = from_dlpack
    dlpack.to_dlpack = lambda t: t.__dlpack__()
