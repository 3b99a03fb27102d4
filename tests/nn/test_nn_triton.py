"""The Triton kernels of `padless.nn`: equal to their definitions in the interpreter, as machine code, and on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from support import nn_triton_cases as cases
from support.ragged import ROOT

triton = pytest.importorskip("triton")
from support.emulated_triton import EmulatedKernel  # noqa: E402

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    """The outcome of every case in Triton's interpreter, from one process of its own."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), env.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "tests/support/nn_triton_cases.py")]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("name", cases.CASES)
def test_in_the_interpreter(name: str, interpreted: dict[str, str | None]) -> None:
    assert interpreted[name] is None, interpreted[name]


@pytest.mark.gpu(capability=None)
@pytest.mark.parametrize("name", cases.CASES)
def test_on_the_gpu(name: str) -> None:
    cases.CASES[name]("cuda")


# --- machine code for Hopper, in the emulator ------------------------------------------------------------


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedKernel]:
    """Every kernel replaced by its emulated machine code, with the hardware's arithmetic."""
    from padless.moe.triton import slots
    from padless.nn.triton import rows, swiglu
    from padless.quantization.triton import casts

    monkeypatch.setattr(casts, "casts_in_hardware", lambda device: True)
    kernels = []
    for module, name in (
        (rows, "_zero_tail"),
        (rows, "_dequantize"),
        (slots, "_slots_to_rows"),
        (slots, "_rows_to_slots"),
        (swiglu, "_swiglu_backward"),
    ):
        kernels.append(EmulatedKernel(getattr(module, name)))
        monkeypatch.setattr(module, name, kernels[-1])
    return kernels


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", cases.CASES)
def test_machine_code(name: str, emulated: list[Any]) -> None:
    cases.CASES[name]("cpu")
    assert sum(kernel.launches for kernel in emulated) > 0


def test_a_case_notices_a_bit() -> None:
    values = torch.ones(3)
    with pytest.raises(AssertionError):
        cases.assert_bits("values", values, torch.nextafter(values, 2 * values))
