"""Lesson 3: a ring of stages between a producer and consumers. ``python ring.py [--break NAME]``; see ring.md."""

from __future__ import annotations

import numpy as np

from lesson import Lesson, run_as_script, tiled
from padless.emulator import Emulator, LaunchResult

ROWS, COLUMNS, BLOCKS = 64, 32, 5


def run(emulator: Emulator) -> tuple[LaunchResult, float]:
    """Sums of 64 rows of 160 small integers, five blocks through a ring of two stages."""
    rng = np.random.default_rng(0)
    matrix = rng.integers(-99, 100, (ROWS, BLOCKS * COLUMNS)).astype(np.float32)
    sums = np.full(ROWS, np.nan, np.float32)
    args = [tiled(emulator, matrix, (COLUMNS, ROWS)), emulator.memory.register(sums), BLOCKS]
    result = emulator.launch("lesson", 1, 96, args)
    return result, float(np.abs(sums - matrix.sum(1)).max())


LESSON = Lesson(
    "ring.cu",
    "sm_90a",
    run,
    {
        "low-count": "mbarrier",
        "no-empty-wait": "race",
        "wrong-parity": "deadlock",
        "no-expect": "race",
        "no-full-wait": "race",
        "same-parity": "deadlock",
        "early-arrive": "race",
        "no-syncwarp": "race",
        "no-arrive": "deadlock",
    },
)

if __name__ == "__main__":
    run_as_script(LESSON)
