"""Lesson 4: a tile of a product by Blackwell's tensor core. ``python tcgen05_tile.py [--break NAME]``; see
tcgen05_tile.md."""

from __future__ import annotations

from lesson import Lesson, product, run_as_script
from padless.emulator import Emulator, LaunchResult


def run(emulator: Emulator) -> tuple[LaunchResult, float]:
    return product(emulator, m=128, n=32, k=64)


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
