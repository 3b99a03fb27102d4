"""DeepGEMM's FP8 kernel of Hopper as its own host code has it: tile, compilation, tensor maps, and runs in the emulator.

The sources are not part of this project: ``Kernel`` is given a tree of DeepGEMM 2.6.1 and an nvcc."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from padless.emulator import Emulator, LaunchResult
from padless.emulator.timing import Chip, Timeline, timed
from padless.emulator.timing.chip import TileTimes
from padless.emulator.units.tensor_map import encode_tiled

SHARED_BYTES = 232448  # that its host code counts on
PADDING, BLOCK_K, HALF = 128, 128, 64  # rows that groups are padded to; of K; rows of a warpgroup
SHORT, LONG = 16, 32  # K blocks of timed runs: multiples of the eight that its loop is unrolled by
U8, BF16, F32 = 0, 9, 7  # element types of tensor maps


@dataclass(frozen=True)
class Config:
    """Rows and columns of a tile, CTAs that share one B along M and one A along N, stages. grouped: not one product."""

    block_m: int
    block_n: int
    cluster_m: int
    cluster_n: int
    stages: int
    grouped: bool

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.block_m} x {self.block_n} x {self.cluster_m * self.cluster_n}"

    def shared_bytes(self, k: int) -> int:
        """Of the output's tile, 32 barriers, the scales of B, and the stages."""
        return fixed_bytes(self.block_m, self.block_n, k) + self.stages * stage_bytes(self.block_m, self.block_n)


# Two CTAs' tiles: halves of a padded tile that are multiplied in each, and whether both share what a cluster can. The
# sizes of the groups whose rows one cluster's first two tiles are.
Sort = tuple[int, int, bool]
SORTS: dict[Sort, list[int]] = {
    (2, 2, True): [256], (2, 1, True): [192], (2, 2, False): [128, 128], (1, 2, False): [64, 128],
    (2, 1, False): [128, 64], (1, 1, False): [64, 64],
}  # fmt: skip
FULL: Sort = (2, 2, True)


def ceil_div(a: int, b: int) -> int:
    """Rounded up."""
    return -(-a // b)


def fixed_bytes(block_m: int, block_n: int, k: int) -> int:
    """Of shared memory beside the stages."""
    scales = ceil_div(k, BLOCK_K) * 4 * (1 if BLOCK_K % block_n == 0 else 2)
    return ceil_div(block_m * block_n * 2, 1024) * 1024 + 256 + ceil_div(scales, 8) * 8


def stage_bytes(block_m: int, block_n: int) -> int:
    """A, B and the scales of A."""
    return (block_m + block_n) * BLOCK_K + ceil_div(block_m * 4, 128) * 128


def select_config(m: int, n: int, k: int, grouped: bool, sms: int = 132) -> Config:
    """Its own choice (csrc/jit_kernels/heuristics/sm90.hpp) for groups padded to 128 rows, or for one product.

    The fewest cycles of L2 or shared memory over the part of the last wave that is used; the first of equals."""
    best: tuple[int, Config] | None = None
    for cluster_m, cluster_n in ((1, 1), (1, 2), (2, 1)):
        for block_m in (PADDING,) if grouped else (64, 128, 256):
            for block_n in range(16, 193, 16):
                over = block_n - BLOCK_K
                stages = min((SHARED_BYTES - fixed_bytes(block_m, block_n, k)) // stage_bytes(block_m, block_n), 16)
                too_few = stages < (4 if block_m * block_n < 128 * 192 else 3)
                too_large = block_m > 128 and block_n > 128
                if too_few or too_large or (over > 0 and block_n % over and BLOCK_K % over):
                    continue
                tiles = ceil_div(m, block_m) * ceil_div(n, block_n)
                waves = ceil_div(tiles, sms)
                stored = 2 * block_m * block_n
                from_l2 = k * (block_m // cluster_n + block_n // cluster_m) + stored
                shared = 2 * k * (block_m + block_n) + 2 * stored
                slower = max(from_l2 * tiles // int(min(64 * sms, 8e6 / 1.3e3)), shared * tiles // (128 * sms))
                cycles = int(slower * waves * sms / tiles)
                if cluster_m * cluster_n > 1 and waves <= 1:
                    continue
                if best is None or cycles < best[0]:
                    best = cycles, Config(block_m, block_n, cluster_m, cluster_n, stages, grouped)
    assert best is not None
    return best[1]


def compiled(sources: Path, nvcc: str, config: Config, n: int, k: int, groups: int, sms: int) -> tuple[str, str]:
    """PTX of the kernel, and its entry, as its host code has it compiled: N and K are template arguments."""
    arguments = (
        f"cute::UMMA::Major::K, 0, {n}, {k}, {groups}, {config.block_m}, {config.block_n}, {BLOCK_K}, 128, 128, 128, "
        f"{config.stages}, 128, 256, {config.cluster_m * config.cluster_n}, {str(config.cluster_n > 1).lower()}, {sms}, "
        f"deep_gemm::GemmType::{'MGroupedContiguous' if config.grouped else 'Normal'}, cutlass::bfloat16_t, "
        "deep_gemm::epilogue::transform::EpilogueIdentity"
    )
    source = (
        "#include <deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh>\n"
        f"auto kernel = &deep_gemm::sm90_fp8_gemm_1d2d_impl<{arguments}>;\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cu"
        path.write_text(source)
        command = [
            nvcc, "-ptx", "-std=c++20", "--gpu-architecture=sm_90a", "-O3", "--expt-relaxed-constexpr",
            "--expt-extended-lambda", "-w", f"-I{sources / 'deep_gemm' / 'include'}",
            f"-I{sources / 'third-party' / 'cutlass' / 'include'}", str(path), "-o", str(path.with_suffix(".ptx")),
        ]  # fmt: skip
        subprocess.run(command, check=True, timeout=120)
        ptx = path.with_suffix(".ptx").read_text()
    (entry,) = re.findall(r"\.entry (\w+)", ptx)
    return ptx, entry


@dataclass
class Problem:
    """Random operands as bytes of E4M3, with scales, and the output poisoned; rows of groups padded to 128."""

    sizes: Sequence[int]
    n: int
    k: int

    def __post_init__(self) -> None:
        random = np.random.default_rng(7)
        padded = [ceil_div(size, PADDING) * PADDING for size in self.sizes]
        self.m, groups, blocks = sum(padded), len(self.sizes), self.k // BLOCK_K
        self.index = np.full(self.m, -1, np.int32)
        start = 0
        for group, (size, rows) in enumerate(zip(self.sizes, padded, strict=True)):
            self.index[start : start + size] = group
            start += rows

        def values(*shape: int) -> np.ndarray[Any, Any]:
            # Any byte but a NaN's, 0x7f and 0xff.
            return (random.integers(0, 127, shape) + 128 * random.integers(0, 2, shape)).astype(np.uint8)

        self.a, self.b = values(self.m, self.k), values(groups * self.n, self.k)
        self.a[self.index < 0] = 0
        self.sfa = random.uniform(0.5, 2, (blocks, self.m)).astype(np.float32)
        self.sfb = random.uniform(0.5, 2, (groups, ceil_div(self.n, 128), blocks)).astype(np.float32)
        self.d = np.full((self.m, self.n), 0x7FC0, np.uint16)

    def launch(self, code: tuple[str, str], config: Config, **options: Any) -> LaunchResult:
        """One cluster computes all of it."""
        ptx, entry = code
        emulator = Emulator(ptx, **options)
        names = ("a", "b", "sfa", "sfb", "d", "index")
        place = {name: emulator.memory.register(getattr(self, name), name=name) for name in names}

        def tensor_map(name: str, kind: int, columns: int, rows: int, swizzle: int) -> bytes:
            array = getattr(self, name)
            dims, stride = array.shape[::-1], array.strides[0]
            return encode_tiled(kind, place[name], dims, (stride,), (columns, rows), swizzle=swizzle, l2_promotion=3)

        maps = (
            tensor_map("a", U8, BLOCK_K, config.block_m, 3), tensor_map("b", U8, BLOCK_K, config.block_n, 3),
            tensor_map("d", BF16, 64, config.block_m, 3), tensor_map("sfa", F32, config.block_m, 1, 0),
        )  # fmt: skip
        arguments = [place["sfb"], place["index"] if config.grouped else 0, self.m, self.n, self.k, *maps]
        cluster = config.cluster_m * config.cluster_n
        shared = config.shared_bytes(self.k)
        return emulator.launch(entry, cluster, 384, arguments, cluster=cluster, shared_bytes=shared)

    def leave(self, folder: Path, code: tuple[str, str], config: Config) -> None:
        """The same launch as files for ``padless emulate``: kernel.ptx, launch.toml and the buffers."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernel.ptx").write_text(code[0])
        cluster = config.cluster_m * config.cluster_n
        maps = (("a", BLOCK_K, config.block_m), ("b", BLOCK_K, config.block_n), ("d", 64, config.block_m))
        boxes = [f'buffer = "{name}", box = [{columns}, {rows}], swizzle = "128B"' for name, columns, rows in maps]
        boxes[2] += ', dtype = "bfloat16"'
        boxes.append(f'buffer = "sfa", box = [{config.block_m}, 1]')
        arguments = ['"sfb"', '"index"' if config.grouped else "0", *map(str, (self.m, self.n, self.k))]
        arguments += [f"{{ tensor_map = {{ {box} }} }}" for box in boxes]
        lines = [
            f"grid = [{cluster}, 1, 1]", "block = 384", f"cluster = [{cluster}, 1, 1]",
            f"shared_bytes = {config.shared_bytes(self.k)}", f"args = [{', '.join(arguments)}]",
        ]  # fmt: skip
        for name in ("a", "b", "sfa", "sfb", "d", "index"):
            np.save(folder / f"{name}.npy", getattr(self, name))
            lines += [f"[buffers.{name}]", f'load = "{name}.npy"']
        (folder / "launch.toml").write_text("\n".join(lines) + "\n")

    def row_errors(self) -> np.ndarray[Any, Any]:
        """Of the output, each row's error over its reference in float64, as lengths; rows of padding, which are zeros
        beside zeros, count 0."""
        a, b = (torch.from_numpy(x).view(torch.float8_e4m3fn).double().numpy() for x in (self.a, self.b))
        a = a * np.repeat(self.sfa.T.astype(np.float64), BLOCK_K, 1)
        expected = np.zeros((self.m, self.n))
        for group, scales in enumerate(self.sfb):
            scale = np.repeat(np.repeat(scales.astype(np.float64), 128, 0)[: self.n], BLOCK_K, 1)
            rows = self.index == group
            expected[rows] = a[rows] @ (b[group * self.n : (group + 1) * self.n] * scale).T
        found = (self.d.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        lengths = np.linalg.norm(expected, axis=1)
        errors: np.ndarray[Any, Any] = np.linalg.norm(found - expected, axis=1) / np.where(lengths > 0, lengths, 1)
        return errors


class Kernel:
    """One configuration, compiled for each N, K and number of groups that it meets."""

    def __init__(self, sources: Path, nvcc: str, config: Config) -> None:
        self.sources, self.nvcc, self.config = sources, nvcc, config
        self.codes: dict[tuple[int, int, int], tuple[str, str]] = {}

    def prepared(self, sizes: Sequence[int], n: int, k_blocks: int) -> tuple[Problem, tuple[str, str]]:
        """A problem for one cluster, and the code for it."""
        problem = Problem(sizes, n, k_blocks * BLOCK_K)
        key = n, problem.k, len(sizes)
        if key not in self.codes:
            cluster = self.config.cluster_m * self.config.cluster_n
            self.codes[key] = compiled(self.sources, self.nvcc, self.config, n, problem.k, len(sizes), cluster)
        return problem, self.codes[key]

    def run(self, sizes: Sequence[int], n: int, k_blocks: int, **options: Any) -> tuple[Problem, LaunchResult]:
        """One cluster's run."""
        problem, code = self.prepared(sizes, n, k_blocks)
        return problem, problem.launch(code, self.config, **options)

    def check(self) -> dict[str, Any]:
        """The product, and what the emulator has to say."""
        sizes = [200, 130, 60, 129] if self.config.grouped else [512]
        problem, result = self.run(sizes, 384 if self.config.grouped else 256, 5)
        errors = problem.row_errors()
        return {
            "kind": "product", "config": vars(self.config), "sizes": sizes, "row_error": float(errors.max()),
            "reports": [str(report).split("\n")[0] for report in result.reports],
        }  # fmt: skip

    def tile_times(self, chip: Chip) -> TileTimes:
        """As clock_h200.tile_times, of a cluster's tiles by sort."""
        period, between = {}, {}
        start = end = 0.0
        # One product has no padding: its two tiles always share A.
        sorts = SORTS if self.config.grouped else {FULL: [self.config.block_m]}
        n = self.config.block_n * self.config.cluster_n
        for i, (sort, sizes) in enumerate(sorts.items()):

            def run(count: int, blocks: int, sizes: list[int] = sizes) -> Timeline:
                rows = sizes * count if self.config.grouped else [sizes[0] * count]
                timeline: Timeline = self.run(rows, n, blocks, machine=timed(chip, record=False))[1].timeline
                return timeline

            short, long, three = run(1, SHORT), run(1, LONG), run(3, SHORT)
            period[i] = (long.cycles - short.cycles) / (LONG - SHORT)
            between[i] = (three.cycles - short.cycles) / 2 - SHORT * period[i]
            if sort == FULL:
                start = short.window()[0]
                end = short.cycles - start - SHORT * period[i]
        return TileTimes(start, max(end - between[0], 0.0), period, between)
