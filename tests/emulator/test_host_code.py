"""Stand-ins that programs meet: the runtime under CuTe DSL's host code, Triton's CublasLt.

A sceptic would ask whether a call that fails is noticed, and whether scales in tiles are read in their order.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np
import pytest

from padless.emulator.program.cublas import E2M1, CublasLt
from padless.emulator.program.cute_dsl import LaunchShape, ProgramCode

torch = pytest.importorskip("torch")


class Kernel:
    """A kernel of one 8-byte parameter."""

    def values_at(self, addresses: int) -> list[bytes]:
        return [ctypes.string_at(ctypes.c_uint64.from_address(addresses).value, 8)]


class Module:
    def __init__(self, name: str) -> None:
        self.name, self.kernel = name, Kernel()

    def function(self, name: str) -> Kernel | None:
        return self.kernel if name == self.name else None


def called(code: ProgramCode, name: str, *arguments: int) -> int:
    address = code.address_of(name, ("!llvm.ptr",) * len(arguments), "i32")
    return int(ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * len(arguments))(address)(*arguments))


def test_a_launch_of_host_code_reaches_the_emulator_and_failures_are_said() -> None:
    launches: list[tuple[Any, ...]] = []
    said: list[str] = []
    modules = [Module("new"), Module("old")]
    driver = {"cuTensorMapEncodeTiled": ("p", lambda place: 17)}
    code = ProgramCode(modules, lambda *given: launches.append(given) or 0, said.append, driver)
    handle, name = ctypes.c_uint64(), ctypes.create_string_buffer(b"old")
    assert called(code, "_cudaLibraryGetKernel", ctypes.addressof(handle), 0, ctypes.addressof(name)) == 0
    value = ctypes.c_uint64(123)
    pointers = ctypes.c_uint64(ctypes.addressof(value))
    config = ctypes.create_string_buffer(struct.pack("<6IQQQI", 2, 1, 1, 64, 1, 1, 4096, 0, 0, 0))
    arguments = ctypes.addressof(config), handle.value, ctypes.addressof(pointers)
    assert called(code, "_cudaLaunchKernelEx", *arguments) == 0
    shape = LaunchShape((2, 1, 1), (64, 1, 1), (1, 1, 1), 4096, False)
    assert launches == [
        (modules[1].kernel, shape.grid, shape.block, shape.cluster, 4096, [struct.pack("<Q", 123)], False)
    ]
    assert called(code, "_cuTensorMapEncodeTiled", 0) == 17  # the driver's own
    assert said == []
    missing = ctypes.create_string_buffer(b"none")
    assert called(code, "_cudaLibraryGetKernel", ctypes.addressof(handle), 0, ctypes.addressof(missing)) == 801
    assert called(code, "_cudaMallocAsync", 0) == 801
    assert ["no PTX was left for the kernel none" in said[0], "has no stand-in" in said[1]] == [True, True]


def tiled(scales: Any) -> Any:
    """(128, 4) scales as one tile of 32 x 4 x 4, element by element."""
    out = torch.empty(32, 4, 4, dtype=scales.dtype)
    for row in range(128):
        for block in range(4):
            out[row % 32, row // 32, block] = scales[row, block]
    return out.flatten()


def test_cublas_lt_is_torchs_product() -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(128, 128) for _ in range(2))
    c, d = torch.randn(128, 128), torch.empty(128, 128)
    lt = CublasLt(None)
    lt.gemm(a, b, c, d, 2.0, 0.5)
    np.testing.assert_allclose(d, 2 * a.double() @ b.double().T + 0.5 * c, atol=1e-3)
    lt.matmul(a, b, d)
    np.testing.assert_allclose(d, a.double() @ b.double().T, atol=1e-3)


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_scales_of_block_scaled_products_are_read_in_tiles(kind: str) -> None:
    torch.manual_seed(1)
    operands, wide = [], []
    for _ in range(2):
        if kind == "mxfp8":
            codes = torch.randn(128, 128).to(torch.float8_e4m3fn)
            exponents = torch.randint(120, 134, (128, 4), dtype=torch.uint8)
            values, scales, block = codes.double(), (exponents.double() - 127).exp2(), 32
            operands.append((codes, tiled(exponents)))
        else:
            nibbles = torch.randint(0, 16, (128, 64))
            codes = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).to(torch.uint8)
            given = torch.rand(128, 4).to(torch.float8_e4m3fn)
            values, scales, block = torch.tensor(E2M1).double()[nibbles], given.double(), 16
            operands.append((codes, tiled(given.view(torch.uint8)).view(torch.float8_e4m3fn)))
        wide.append(values * scales.repeat_interleave(block, 1))
    out = torch.empty(128, 128)
    (a, a_scale), (b, b_scale) = operands
    getattr(CublasLt(None), f"block_scaled_matmul_{kind}")(a, b, out, a_scale, b_scale)
    wanted = wide[0] @ wide[1].T
    np.testing.assert_allclose(out, wanted, atol=1e-4 * float(wanted.abs().max()))
