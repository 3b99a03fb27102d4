"""Commands of the workflows, run as they stand there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import check_wheels


def make(tree: Path, *words: str, **environment: str) -> str:
    """What `make` with these words prints in a copy of the tree, whose .venv is the environment that runs this test.
    Nothing is installed there or downloaded: what pip is asked for has to be there, or where ``environment`` says.
    RuntimeError with all that it said where it fails.
    """
    venv = tree / ".venv"
    if not venv.exists():
        venv.symlink_to(sys.prefix)
    stamps = [word for name in ("run", "dev") for word in ("-o", f".venv/.installed-{name}")]
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    command = ["make", "--no-print-directory", *stamps, *words]
    done = subprocess.run(
        command, cwd=tree, env=os.environ | offline | environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}")
    return done.stdout


def copied(folder: Path) -> Path:
    """A copy of the tree, and a repository, for `make`."""
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return check_wheels.copy_of_the_tree(folder)
