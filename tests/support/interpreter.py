"""Cases of Triton kernels, which a GPU runs directly and Triton's interpreter in a process of its own.

The interpreter needs TRITON_INTERPRET=1 before triton is imported: a module of cases is a program, which ends in
``main(CASES)`` and is run by ``interpreted``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch

from support.ragged import ROOT

Case = Callable[[str], None]


class Cases(dict[str, Case]):
    """Functions of a device by name. Each raises where a kernel is wrong."""

    def add(self, function: Case) -> Case:
        self[function.__name__] = function
        return function


def run(cases: Cases, names: Iterable[str]) -> dict[str, str | None]:
    """Outcomes of cases in the interpreter of this process: a traceback, or None."""
    accept_one_element()
    outcome: dict[str, str | None] = {}
    for name in names:
        try:
            cases[name]("cpu")
            outcome[name] = None
        except BaseException:  # pytest's own failures are no Exception
            outcome[name] = traceback.format_exc(limit=-3)
    return outcome


def main(cases: Cases) -> None:
    """Runs the cases named on the command line, or all, and prints one JSON object, case -> error or null."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    torch.set_num_threads(1)
    json.dump(run(cases, sys.argv[1:] or cases), sys.stdout)


def interpreted(program: str, *arguments: str) -> dict[str, str | None]:
    """What a program of tests/support prints as JSON, with kernels in Triton's interpreter."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), env.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "tests/support" / program), *arguments]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    outcome: dict[str, str | None] = json.loads(ran.stdout)
    return outcome


def accept_one_element() -> None:
    """Lets values of shape (1,), such as `tl.program_id`, be bounds of `range` in kernels interpreted from here on.

    The interpreter of Triton 3.6 converts the array as a whole, which NumPy 2.5 refuses; that of 3.7 drops the axis.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if getattr(patch, "accepts_one_element", False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched.accepts_one_element = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched
