"""Speed of the emulator: `python tools/emulator_speed.py`. Warp-instructions a CPU second, best of three seeds."""

from __future__ import annotations

import os
import time
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"

import torch

import padless
from padless.emulator.fake_driver import driver_of
from padless.runtime.choices import BackendName

RUNS: tuple[tuple[str, dict[str, Any]], ...] = (("checks, exact products", {}), ("no checks", {"checks": False}),
        ("no checks, fast products", {"checks": False, "arithmetic": "fast"}))  # fmt: skip


def case(backend: BackendName, fmt: padless.formats.BlockScaledFormat, rows: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [rows // 4, 0, rows - rows // 4]
    offs = padless.group_offsets(sizes)
    options: dict[str, Any] = {} if fmt == padless.FP8_BLOCK else {"scale_layout": "blocked_groups", "offs": offs}
    a = padless.quantize(torch.randn(rows, k, generator=generator), fmt, **options)
    layout: dict[str, Any] = {} if fmt == padless.FP8_BLOCK else {"scale_layout": "blocked"}
    b = padless.quantize(torch.randn(3, n, k, generator=generator), fmt, kind="weight", **layout)
    driver = driver_of(backend)
    for name, settings in RUNS:
        best, count = 0.0, 0
        for seed in range(3):
            with driver.configured(seed=seed, **settings):
                started = time.process_time()
                padless.grouped_gemm(a, b, offs, backend=backend)
                seconds = time.process_time() - started
            assert driver.last_result is not None
            count = driver.last_result.statistics.warp_instructions
            best = max(best, count / seconds)
        print(f"{backend:18s} {fmt.name:10s} {count:7,d} warp-instructions  {name:26s} {best:9,.0f} a second")


if __name__ == "__main__":
    torch.set_num_threads(1)
    case("emulator", padless.FP8_BLOCK, 256, 256, 1024)
    case("emulator:sm_100a", padless.MXFP8, 256, 256, 1024)
