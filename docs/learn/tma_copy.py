"""Lesson 1: a tile through shared memory by the copy engine. ``python tma_copy.py [--break NAME]``; see tma_copy.md."""

from __future__ import annotations

import numpy as np

from lesson import Lesson, run_as_script, tiled
from padless.emulator import Emulator, LaunchResult

ROWS, COLUMNS, TILE_ROWS = 41, 32, 16  # the third tile has 9 rows


def run(emulator: Emulator) -> tuple[LaunchResult, float]:
    """Doubles 41 x 32 random floats; rows past the 41st belong to nobody and must stay as they are."""
    rng = np.random.default_rng(0)
    source = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    target = np.full((48, COLUMNS), -1.0, np.float32)
    expected = target.copy()
    expected[:ROWS] = 2 * source
    box = (COLUMNS, TILE_ROWS)
    maps = [tiled(emulator, source, box), tiled(emulator, target, box, rows=ROWS)]
    result = emulator.launch("lesson", grid=3, block=128, args=maps)
    return result, float(np.abs(target - expected).max())


LESSON = Lesson(
    "tma_copy.cu",
    "sm_90a",
    run,
    {
        "no-init-fence": "mbarrier-init",
        "no-init-sync": "mbarrier",
        "too-few-bytes": "deadlock",
        "too-many-bytes": "deadlock",
        "no-wait": "race",
        "wrong-parity": "race",
        "no-proxy-fence": "missing-proxy-fence",
        "no-sync": "race",
        "no-commit": "exit",
        "no-store-wait": "exit",
    },
)

if __name__ == "__main__":
    run_as_script(LESSON)
