"""Lesson 2: a tile of a product by Hopper's tensor core. ``python wgmma_tile.py [--break NAME]``; see wgmma_tile.md."""

from __future__ import annotations

import numpy as np

from lesson import WRONG_VALUES, Lesson, run_as_script, tiled, to_bfloat16
from padless.emulator import Emulator, LaunchResult

M, N, K = 64, 16, 64


def run(emulator: Emulator) -> tuple[LaunchResult, float]:
    """A (64 x 64) times B (16 x 64) transposed: small integers, so that every sum is exact."""
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
    "wgmma_tile.cu",
    "sm_90a",
    run,
    {
        "no-swizzle": WRONG_VALUES,
        "no-wait": "race",
        "no-pin": "missing-wgmma-fence",
        "no-fence": "missing-wgmma-fence",
        "long-step": "descriptor",
        "no-commit": "register-in-flight",
        "no-group-wait": "register-in-flight",
    },
)

if __name__ == "__main__":
    run_as_script(LESSON)
