"""The Triton kernels of `padless.nn`: equal to their definitions in the interpreter, as machine code, and on a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from support import nn_triton_cases as cases
from support.interpreter import interpreted

triton = pytest.importorskip("triton")
from support.emulated_triton import EmulatedKernel  # noqa: E402

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    """Of every case in Triton's interpreter, from one process of its own."""
    return interpreted("nn_triton_cases.py")


@pytest.mark.parametrize("name", cases.CASES)
def test_in_the_interpreter(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]


@pytest.mark.gpu(capability=None)
@pytest.mark.parametrize("name", cases.CASES)
def test_on_the_gpu(name: str) -> None:
    cases.CASES[name]("cuda")


# --- machine code for Hopper, in the emulator ------------------------------------------------------------


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedKernel]:
    """Every kernel replaced by its emulated machine code, with the hardware's arithmetic."""
    from padless.moe.triton import quantize_rows, slots
    from padless.nn.triton import activation, dequantize, looked_up, low_rank_kernels, rows, swiglu
    from padless.quantization.triton import casts, fp8_block

    monkeypatch.setattr(casts, "casts_in_hardware", lambda device: True)
    kernels = []
    for module, name in (
        (rows, "_zero_tail"),
        (rows, "_dequantize"),
        (rows, "_moved"),
        (activation, "_activation_gradient"),
        (dequantize, "_dequantize"),
        (low_rank_kernels, "down"),
        (low_rank_kernels, "up"),
        (low_rank_kernels, "up_activated"),
        (looked_up, "_combine"),
        (quantize_rows, "_quantize_rows"),
        (low_rank_kernels, "pairs"),
        (slots, "_slots_to_rows"),
        (slots, "_rows_to_slots"),
        (swiglu, "_swiglu_backward"),
        (fp8_block, "_fp8_block_activation"),
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
