"""Kernels of other libraries, compiled here from their own sources, against known answers.

Not in the default run: PADLESS_FOREIGN_PTX names a folder with any of

    deepgemm/include       the include folder of DeepGEMM with CUTLASS's beside it
    programs/NAME          a CUDA program built as tests/foreign_programs.py says; arguments.txt has its arguments, and
                           expected.txt, where there is one, the kinds of report it is known to give

PADLESS_CUDA names the CUDA toolkit (its nvcc and headers), by default /usr/local/cuda.
"""

# ruff: noqa: E501  (lines of CUDA are kept whole)

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from padless.emulator import Emulator, LaunchResult
from padless.emulator.units import tensor_map
from support.emulator_cuda import kinds
from support.ragged import ROOT

torch = pytest.importorskip("torch")
FOLDER = Path(os.environ.get("PADLESS_FOREIGN_PTX", "/nonexistent"))
CUDA = Path(os.environ.get("PADLESS_CUDA", "/usr/local/cuda"))
DEEPGEMM = FOLDER / "deepgemm" / "include"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="PADLESS_FOREIGN_PTX names no folder")
needs_deepgemm = pytest.mark.skipif(not DEEPGEMM.is_dir(), reason="no DeepGEMM sources")


def compile_ptx(tmp_path: Path, source: str, arch: str) -> str:
    (tmp_path / "k.cu").write_text(source)
    subprocess.run(
        [CUDA / "bin" / "nvcc", "-std=c++20", f"-gencode=arch=compute_{arch},code=compute_{arch}", "-O3", "-ptx", "-w",
         "--expt-relaxed-constexpr", f"-I{DEEPGEMM}", tmp_path / "k.cu", "-o", tmp_path / "k.ptx"],
        check=True,
    )  # fmt: skip
    return (tmp_path / "k.ptx").read_text()


class Launch:
    """Registers tensors and encodes maps for one emulator."""

    def __init__(self, ptx: str, seed: int) -> None:
        self.emulator = Emulator(ptx, seed=seed, name="k.ptx")
        self.addresses: dict[int, int] = {}

    def address(self, array: np.ndarray) -> int:
        if id(array) not in self.addresses:
            self.addresses[id(array)] = self.emulator.memory.register(array)
        return self.addresses[id(array)]

    def map(self, array: np.ndarray, kind: int, box: tuple[int, ...], swizzle: int) -> bytes:
        return tensor_map.encode_tiled(
            kind, self.address(array), array.shape[::-1], array.strides[::-1][1:], box, swizzle=swizzle
        )

    def run(self, grid: int, block: int, args: list[Any], **options: Any) -> LaunchResult:
        (entry,) = self.emulator.module.entries()
        return self.emulator.launch(entry, grid, block, args, **options)


def e4m3(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def widened(codes: np.ndarray) -> np.ndarray:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float64).numpy()


def bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@needs_deepgemm
@pytest.mark.parametrize("seed", [0, 1, 5])
def test_deepgemm_grouped_on_hopper(tmp_path: Path, seed: int) -> None:
    """m-grouped contiguous FP8 with 1x128 and 128x128 scales: rows padded to 128 a group, -1 where there is none."""
    n, k, groups, rows = 256, 512, 3, 512
    ptx = compile_ptx(tmp_path, f"""
#include <deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh>
using namespace deep_gemm;
template __global__ void deep_gemm::sm90_fp8_gemm_1d2d_impl<cute::UMMA::Major::K, 0, {n}, {k}, {groups}, 128, 128, 128, 128, 128, 128, 4,
    128, 256, 1, false, 2, GemmType::MGroupedContiguous, cutlass::bfloat16_t, epilogue::transform::EpilogueIdentity>(
    float*, int*, uint32_t, uint32_t, uint32_t, const __grid_constant__ cute::TmaDescriptor, const __grid_constant__ cute::TmaDescriptor,
    const __grid_constant__ cute::TmaDescriptor, const __grid_constant__ cute::TmaDescriptor);
""", "90a")  # fmt: skip
    rng = np.random.default_rng(seed)
    a, b = (
        e4m3(rng.standard_normal((rows, k)).astype(np.float32)),
        e4m3(rng.standard_normal((groups * n, k)).astype(np.float32)),
    )
    sfa = rng.uniform(0.5, 2, (k // 128, rows)).astype(np.float32)
    sfb = rng.uniform(0.5, 2, (groups, n // 128, k // 128)).astype(np.float32)
    layout = np.repeat(np.array([0, 2, 2, 1], np.int32), 128)
    d = np.full((rows, n), 0x7FFF, np.uint16)
    launch = Launch(ptx, seed)
    maps = [launch.map(a, 0, (128, 128), 3), launch.map(b, 0, (128, 128), 3), launch.map(d, 9, (64, 128), 3),
            launch.map(sfa, 7, (128, 1), 0)]  # fmt: skip
    result = launch.run(
        2, 384, [launch.address(sfb), launch.address(layout), rows, n, k, *maps], shared_bytes=220 * 1024
    )
    assert kinds(result) == {"exit"}  # it ends without waiting for its last stores to have read shared memory
    wide_a = widened(a) * np.repeat(sfa.T.astype(np.float64), 128, 1)
    for block, group in enumerate(layout[::128]):
        part = slice(128 * block, 128 * block + 128)
        wide_b = widened(b[group * n : group * n + n]) * np.repeat(
            np.repeat(sfb[group].astype(np.float64), 128, 0), 128, 1
        )
        exact, size = wide_a[part] @ wide_b.T, np.abs(wide_a[part]) @ np.abs(wide_b).T
        assert (np.abs(bf16(d[part]) - exact) <= 2.0**-8 * np.abs(exact) + 2.0**-9 * size / 8).all()


@needs_deepgemm
@pytest.mark.parametrize(("seed", "multicast"), [(0, 1), (1, 1), (0, 2), (3, 2)])
def test_deepgemm_on_blackwell(tmp_path: Path, seed: int, multicast: int) -> None:
    """MXFP8 with 32-element scales, four to a word, by one CTA and by pairs; integers, so the answer is exact."""
    m, n, k = 256, 256, 512
    ptx = compile_ptx(tmp_path, f"""
#include <deep_gemm/impls/sm100_fp8_fp4_gemm_1d1d.cuh>
using namespace deep_gemm;
template __global__ void deep_gemm::sm100_fp8_fp4_gemm_1d1d_impl<cute::UMMA::Major::K, cute::UMMA::Major::K, 32, 32, 32, 0, {n}, {k}, 128, 128, 128, 1,
    128, 128, 128, 4, 128, 128, {multicast}, false, 2, false, false, GemmType::Normal, false, cutlass::float_e4m3_t,
    cutlass::float_e4m3_t, cutlass::bfloat16_t, epilogue::transform::EpilogueIdentity>(int*, uint32_t, uint32_t, uint32_t,
    const __grid_constant__ cute::TmaDescriptor, const __grid_constant__ cute::TmaDescriptor, const __grid_constant__ cute::TmaDescriptor,
    const __grid_constant__ cute::TmaDescriptor, const __grid_constant__ cute::TmaDescriptor);
""", "100a")  # fmt: skip
    rng = np.random.default_rng(seed)
    x, y = (rng.integers(-2, 3, (rows, k)).astype(np.float32) for rows in (m, n))
    a, b = e4m3(x), e4m3(y)
    scales = [rng.integers(126, 129, (rows, k // 32)).astype(np.uint8) for rows in (m, n)]
    packed = [np.ascontiguousarray(s.view(np.uint32).T) for s in scales]  # (k / 128, rows)
    d = np.full((m, n), 0x7FFF, np.uint16)
    launch = Launch(ptx, seed)
    maps = [
        launch.map(a, 0, (128, 128), 3), launch.map(b, 0, (128, 128 // multicast), 3),
        launch.map(packed[0], 2, (128, 1), 0), launch.map(packed[1], 2, (128, 1), 0), launch.map(d, 9, (64, 128), 3),
    ]  # fmt: skip
    result = launch.run(2, 256, [0, m, n, k, *maps], cluster=multicast, shared_bytes=220 * 1024)
    # With pairs its cluster barriers are relaxed, which orders nothing: the address from tcgen05.alloc, the dealloc.
    assert kinds(result) == ({"exit", "race"} if multicast == 2 else {"exit"})
    wide = [v * np.repeat(2.0 ** (s.astype(float) - 127), 32, 1) for v, s in zip((x, y), scales, strict=True)]
    exact = wide[0] @ wide[1].T
    nearest = torch.from_numpy(exact).to(torch.bfloat16).to(torch.float64).numpy()
    assert (bf16(d) == nearest).all()


PROGRAMS = sorted(p.parent.name for p in FOLDER.glob("programs/*/arguments.txt"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    """The program's own check passes (exit code 0, no "Failed"), and the emulator reports what is known and no more."""
    folder = FOLDER / "programs" / name
    command = [sys.executable, ROOT / "tests/support/foreign_programs.py", folder, "--cuda", CUDA]
    done = subprocess.run(
        [*command, *(folder / "arguments.txt").read_text().split()], capture_output=True, text=True, timeout=3000
    )
    assert done.returncode in (0, 3), done.stderr[-3000:]
    assert "ailed" not in done.stdout, done.stdout[-3000:]
    expected = folder / "expected.txt"
    found = {line.split(":")[0] for line in done.stderr.splitlines() if ": " in line and "(PTX line" in line}
    assert found == set(expected.read_text().split() if expected.exists() else []), done.stderr[-3000:]
