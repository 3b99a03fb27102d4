"""Compiles CUDA to PTX for the emulator's tests, with one wrapper per instruction that their small kernels use."""

# ruff: noqa: E501  (lines of PTX and CUDA are kept whole)

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np

from padless.emulator import Emulator, LaunchResult

HEADER = r"""
using uint8_t = unsigned char; using uint16_t = unsigned short; using uint32_t = unsigned; using uint64_t = unsigned long long;
struct alignas(64) TensorMap { uint64_t opaque[16]; };
#define DEVICE __device__ __forceinline__
DEVICE uint32_t smem(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
DEVICE void init(uint32_t b, uint32_t n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
DEVICE void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void arrive(uint32_t b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
DEVICE void expect(uint32_t b, uint32_t n) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
DEVICE void wait(uint32_t b, uint32_t parity) {
  asm volatile("{\n.reg .pred p;\nW:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra W;\nD:\n}" ::"r"(b), "r"(parity) : "memory");
}
DEVICE uint32_t mapa(uint32_t a, uint32_t rank) { uint32_t d; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(rank)); return d; }
DEVICE void arrive_remote(uint32_t b) { asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(b) : "memory"); }
DEVICE void cluster_sync() { asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }
DEVICE uint32_t cluster_rank() { uint32_t r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
DEVICE void bulk_load(uint32_t d, const void* s, uint32_t n, uint32_t b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(d), "l"(s), "r"(n), "r"(b) : "memory");
}
DEVICE void bulk_store(void* d, uint32_t s, uint32_t n) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(d), "r"(s), "r"(n) : "memory");
}
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
DEVICE void tma_load(const TensorMap& m, uint32_t d, uint32_t b, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(d), "l"(&m), "r"(b), "r"(x), "r"(y) : "memory");
}
DEVICE void tma_load_multicast(const TensorMap& m, uint32_t d, uint32_t b, int x, int y, uint16_t mask) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(d), "l"(&m), "r"(b), "r"(x), "r"(y), "h"(mask) : "memory");
}
DEVICE void tma_store(const TensorMap& m, uint32_t s, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&m), "r"(s), "r"(x), "r"(y) : "memory");
}
DEVICE void tma_reduce_add(const TensorMap& m, uint32_t s, int x, int y) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&m), "r"(s), "r"(x), "r"(y) : "memory");
}
"""


@lru_cache(maxsize=128)
def compile_cuda(source: str, arch: str = "90a") -> str:
    """PTX of `source` behind the wrappers; line numbers are those of the test's own text."""
    return compile_ptx(HEADER + '#line 1 "test.cu"\n' + source, "test.cu", arch).rstrip(b"\0").decode()


def compile_ptx(text: str, name: str, arch: str, files: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """PTX of `text`, which may include the headers among `files`."""
    from cuda.bindings import nvrtc

    headers = [(k, v) for k, v in files.items() if k.endswith(".cuh")]
    result, program = nvrtc.nvrtcCreateProgram(
        text.encode(), name.encode(), len(headers), [v.encode() for _, v in headers],
        [k.encode() for k, _ in headers],
    )  # fmt: skip
    assert int(result) == 0
    options = [f"--gpu-architecture=compute_{arch}", "--std=c++17", "-lineinfo", "--device-as-default-execution-space"]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if int(result):
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.decode())
    _, size = nvrtc.nvrtcGetPTXSize(program)
    image = b" " * size
    nvrtc.nvrtcGetPTX(program, image)
    return image


def launch(source: str, arguments: list[Any], *, arch: str = "90a", **options: Any) -> LaunchResult:
    """Compile, register the numpy arrays among the arguments, and run entry `k`.

    An argument that is a function is called with the emulator's memory and the addresses so far, for tensor maps.
    """
    seed = options.pop("seed", 0)
    settings = {name: options.pop(name) for name in ("checks", "arithmetic", "strict") if name in options}
    emulator = Emulator(compile_cuda(source, arch), seed=seed, name="test.ptx", **settings)
    addresses: dict[int, int] = {}
    values = []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            addresses[id(argument)] = emulator.memory.register(argument)
            values.append(addresses[id(argument)])
        elif callable(argument):
            values.append(argument(lambda array: addresses.setdefault(id(array), emulator.memory.register(array))))
        else:
            values.append(argument)
    return emulator.launch("k", options.pop("grid", 1), options.pop("block", 128), values, **options)


def tiled(array: np.ndarray, box: tuple[int, ...], swizzle: int = 0) -> Any:
    """A tensor map of a numpy array for `launch`; box and dims innermost first."""
    from padless.emulator.units import tensor_map

    codes = {"uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "float16": 6, "float32": 7}

    def make(register: Any) -> bytes:
        return tensor_map.encode_tiled(
            codes[str(array.dtype)], register(array), array.shape[::-1], array.strides[::-1][1:], box, swizzle=swizzle
        )

    return make


def kinds(result: LaunchResult) -> set[str]:
    return {r.kind for r in result.reports}
