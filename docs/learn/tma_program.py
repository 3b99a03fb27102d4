"""Lesson 1's kernel as a whole program of the CUDA driver: ``python tma_program.py`` on a GPU of compute capability 9.0.

Without one: ``padless emulate --program docs/learn/tma_program.py [--break NAME]``. It compiles with NVRTC, allocates,
encodes two tensor maps, launches, copies back and compares. Nothing in it knows of the emulator.
"""

from __future__ import annotations

import argparse
import ctypes
from typing import Any

import numpy as np
from cuda.bindings import driver, nvrtc

from lesson import broken
from padless.runtime import jit
from tma_copy import COLUMNS, LESSON, ROWS, TILE_ROWS

FLOAT32 = driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32


def checked(result: tuple[Any, ...]) -> Any:
    """Values of a call of cuda.bindings behind its code. RuntimeError for a code other than success."""
    code, *values = result
    if int(code) != 0:
        raise RuntimeError(f"{code!r}")
    return values[0] if len(values) == 1 else values


def compiled(source: str) -> bytes:
    """A cubin of the lesson's kernel."""
    headers = [(name.encode(), text.encode()) for name, text in jit.sources().items() if name.startswith("device/ptx/")]
    names, texts = [name for name, _ in headers], [text for _, text in headers]
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"tma_copy.cu", len(headers), texts, names))
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17", b"-lineinfo"]
    checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
    image = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, image))
    return image


def tensor_map(address: int) -> Any:
    """A map of ROWS x COLUMNS floats in boxes of TILE_ROWS rows: 128 bytes, encoded on a boundary of 64."""
    room = (ctypes.c_uint8 * 192)()
    place = -(-ctypes.addressof(room) // 64) * 64
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    numbers = (ctypes.c_uint64 * 2)(COLUMNS, ROWS), (ctypes.c_uint64 * 1)(4 * COLUMNS)
    boxes = (ctypes.c_uint32 * 2)(COLUMNS, TILE_ROWS), (ctypes.c_uint32 * 2)(1, 1)
    code = encode(ctypes.c_void_p(place), int(FLOAT32), 2, ctypes.c_void_p(address), *numbers, *boxes, 0, 0, 0, 0)
    if code != 0:
        raise RuntimeError(f"cuTensorMapEncodeTiled: {code}")
    return (ctypes.c_uint8 * 128).from_buffer_copy(ctypes.string_at(place, 128))


def main() -> int:
    parser = argparse.ArgumentParser(description="Doubles a matrix through shared memory.")
    parser.add_argument("--break", dest="name", help="what to break, as in tma_copy.py")
    options = parser.parse_args()

    checked(driver.cuInit(0))
    device = checked(driver.cuDeviceGet(0))
    checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(device))))
    module = checked(
        driver.cuModuleLoadData(compiled(broken(LESSON.text, options.name) if options.name else LESSON.text))
    )
    kernel = checked(driver.cuModuleGetFunction(module, b"lesson"))

    stream, (start, end) = checked(driver.cuStreamCreate(0)), [checked(driver.cuEventCreate(0)) for _ in range(2)]
    source = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    result = np.empty_like(source)
    addresses = [checked(driver.cuMemAlloc(source.nbytes)) for _ in range(2)]
    checked(driver.cuMemcpyHtoDAsync(addresses[0], source.ctypes.data, source.nbytes, stream))
    maps = [tensor_map(int(address)) for address in addresses]
    pointers = (ctypes.c_void_p * 2)(*(ctypes.addressof(m) for m in maps))
    checked(driver.cuEventRecord(start, stream))
    grid = -(-ROWS // TILE_ROWS)
    checked(driver.cuLaunchKernel(kernel, grid, 1, 1, 128, 1, 1, 0, stream, ctypes.addressof(pointers), 0))
    checked(driver.cuEventRecord(end, stream))
    checked(driver.cuMemcpyDtoHAsync(result.ctypes.data, addresses[1], result.nbytes, stream))
    checked(driver.cuStreamSynchronize(stream))
    assert checked(driver.cuEventElapsedTime(start, end)) >= 0
    for address in addresses:
        checked(driver.cuMemFree(address))
    error = float(np.abs(result - 2 * source).max())
    print(f"largest error: {error:g}")
    return 0 if error == 0 else 3


if __name__ == "__main__":
    raise SystemExit(main())
