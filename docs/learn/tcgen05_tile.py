"""Lesson 4: a tile of a product by Blackwell's tensor core. ``python tcgen05_tile.py [--break NAME]``; see
tcgen05_tile.md."""

from __future__ import annotations

import numpy as np

from lesson import Lesson, run_as_script, tiled, to_bfloat16
from padless.emulator import Emulator, LaunchResult

M, N, K = 128, 32, 64


def run(emulator: Emulator) -> tuple[LaunchResult, float]:
    """A (128 x 64) times B (32 x 64) transposed: small integers, so that every sum is exact."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 9, (rows, K)).astype(np.float32) for rows in (M, N))
    out = np.full((M, N), np.nan, np.float32)
    maps = [
        tiled(emulator, to_bfloat16(x), (K, rows), element="bfloat16", swizzle=True)
        for x, rows in ((a, M), (b, N))
    ]
    result = emulator.launch("lesson", 1, 128, [*maps, emulator.memory.register(out)])
    return result, float(np.abs(out - a @ b.T).max())


LESSON = Lesson(
    "tcgen05_tile.cu",
    "sm_100a",
    run,
    {
        "hopper-descriptor": "descriptor",
        "no-full-wait": "race",
        "no-overwrite": "uninitialised-tensor-memory",
        "no-commit": "deadlock",
        "no-done-wait": "race",
        "no-fence": "missing-tcgen05-fence",
        "wrong-lanes": "tensor-memory",
        "no-load-wait": "register-in-flight",
        "no-last-sync": "race",
        "no-dealloc": "tensor-memory",
    },
)

if __name__ == "__main__":
    run_as_script(LESSON)
