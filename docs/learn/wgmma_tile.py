"""Lesson 2: a tile of a product by Hopper's tensor core. ``python wgmma_tile.py [--break NAME]``; see wgmma_tile.md."""

from __future__ import annotations

from lesson import WRONG_VALUES, Lesson, product, run_as_script
from padless.emulator import Emulator, LaunchResult


def run(emulator: Emulator) -> tuple[LaunchResult, float]:
    return product(emulator, m=64, n=16, k=64)


LESSON = Lesson(
    "wgmma_tile.cu",
    "sm_90a",
    run,
    {
        "no-swizzle": WRONG_VALUES,
        "no-wait": "race",
        "no-pin": "missing-wgmma-fence",
        "no-fence": "missing-wgmma-fence",
        "long-step": "descriptor-start",
        "no-commit": "register-in-flight",
        "no-group-wait": "register-in-flight",
    },
)

if __name__ == "__main__":
    run_as_script(LESSON)
