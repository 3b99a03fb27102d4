"""Programs of tests/support that run in a process of their own and print what they found as one JSON object."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run_pretended(module: str, *arguments: str) -> dict[str, Any]:
    """The record of `python -m support.MODULE`, where torch's "cuda" is the emulator; nothing of it was refused."""
    pytest.importorskip("triton")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests")))}
    done = subprocess.run(
        [sys.executable, "-m", f"support.{module}", *arguments],
        capture_output=True, text=True, cwd=ROOT, check=False, timeout=240, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    assert not record["refused"]
    return record
