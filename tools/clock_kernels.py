"""The clock's time of whole launches next to an H200's: a copy, a reduction and a matmul, all by Triton.

    python tools/clock_kernels.py                # predictions, on any machine
    python tools/clock_kernels.py --out FILE     # on an H200: measures too, and leaves a JSON line for each point

Measured: the median of 20 launches by `padless.testing.timing`, nothing of theirs in L2. The same PTX is predicted by
`padless.emulator.timing.kernel.kernel_time`, in the same process.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from padless.emulator import Emulator
from padless.emulator.timing import H200
from padless.emulator.timing.kernel import KernelTime, kernel_time
from padless.testing.timing import Timer

REPEATS = 20


@triton.jit
def copy(x, y, n, B: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def row_sums(x, y, n, B: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    total = tl.zeros((B,), tl.float32)
    for start in range(0, n, B):
        i = start + tl.arange(0, B)
        total += tl.load(x + row * n + i, mask=i < n, other=0.0)
    tl.store(y + row, tl.sum(total, 0))


@triton.jit
def matmul(a, b, c, n, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.cdiv(n, BN)
    m = tl.program_id(0) // columns * BM + tl.arange(0, BM)
    k, at = tl.arange(0, BK), tl.program_id(0) % columns * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, n, BK):
        left = tl.load(a + m[:, None] * n + start + k[None, :])
        total = tl.dot(left, tl.load(b + (start + k)[:, None] * n + at[None, :]), total)
    tl.store(c + m[:, None] * n + at[None, :], total.to(tl.float16))


@dataclass(frozen=True)
class Point:
    """One launch. shapes: of its arrays. n: the kernel's number. constants: its compile-time ones."""

    name: str
    kernel: Any
    shapes: tuple[int, ...]
    kind: str
    n: int
    grid: int
    constants: dict[str, int]
    warps: int


def points() -> list[Point]:
    """Sizes in which the launch, L2, memory and the tensor cores set the pace."""
    found = [Point(f"copy {n >> 18} MB", copy, (n, n), "fp32", n, n // 4096, {"B": 4096}, 8)
             for n in (1 << 18, 1 << 22, 1 << 26)]  # fmt: skip
    found += [
        Point(f"row sums {rows} x {n}", row_sums, (rows * n, rows), "fp32", n, rows, {"B": 1024}, 4)
        for rows, n in ((132, 4096), (4096, 4096), (8192, 8192))
    ]
    tile = {"BM": 128, "BN": 256, "BK": 64}
    found += [
        Point(f"matmul {n}", matmul, (n * n,) * 3, "fp16", n, (n // 128) * (n // 256), tile, 8)
        for n in (1024, 2048, 4096)
    ]
    return found


def compiled(point: Point) -> Any:
    """Triton's kernel for an H200."""
    names = point.kernel.arg_names[: len(point.shapes)]
    types = dict.fromkeys(names, f"*{point.kind}") | {"n": "i32"} | dict.fromkeys(point.constants, "constexpr")
    aligned: Any = {(i,): [["tt.divisibility", 16]] for i in range(len(point.shapes) + 1)}
    source = ASTSource(point.kernel, types, point.constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": point.warps, "num_stages": 3})


def predict(point: Point) -> KernelTime:
    """The clock's time of the PTX."""
    kernel = compiled(point)
    emulator = Emulator(kernel.asm["ptx"])
    size = {"fp32": 4, "fp16": 2}[point.kind]
    arguments: list[Any] = [emulator.memory.register(np.zeros(n * size, np.uint8)) for n in point.shapes]
    arguments.append(point.n)
    count = len(emulator.program(kernel.name).function.parameters)
    arguments += [0] * (count - len(arguments))  # Triton's scratch, which these kernels do not use
    block = int(re.findall(r"\.reqntid\s+(\d+)", kernel.asm["ptx"])[0])
    shared = kernel.metadata.shared
    return kernel_time(emulator, kernel.name, point.grid, block, arguments, H200, shared_bytes=shared)


def measure(point: Point, timer: Timer) -> float:
    """Microseconds on the GPU."""
    kind = {"fp32": torch.float32, "fp16": torch.float16}[point.kind]
    arrays = [torch.randn(n, device="cuda").to(kind) for n in point.shapes]

    def call() -> None:
        point.kernel[(point.grid,)](*arrays, point.n, **point.constants, num_warps=point.warps, num_stages=3)

    return timer.gpu({point.name: call})[point.name].median_us


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="measure on this machine's GPU as well, and write JSON lines")
    arguments = parser.parse_args()
    timer = Timer(REPEATS) if arguments.out else None
    rows = []
    for point in points():
        found = predict(point)
        row: dict[str, Any] = {
            "point": point.name,
            "predicted_us": found.low_ns / 1e3,
            "known": found.known,
            "says": str(found),
        }
        if timer is not None:
            row["measured_us"] = measure(point, timer)
            row["ratio"] = row["predicted_us"] / row["measured_us"]
        rows.append(row)
        print(*(f"{v:.3g}" if isinstance(v, float) else v for v in row.values()), sep=" | ", flush=True)
    if arguments.out:
        session = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        with open(arguments.out, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in (session, *rows))


if __name__ == "__main__":
    main()
