"""Checks that need no GPU, to be found by name in another process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


def slow() -> str:
    time.sleep(0.2)
    return "done"


def failing() -> str:
    raise RuntimeError("planted")


def process() -> str:
    return str(os.getpid())


def pretended_jobs() -> tuple[dict[str, Callable[[], str]], list[str]]:
    """Three checks, whatever was asked for."""
    return {"slow": slow, "fails": failing, "other process": process}, []
