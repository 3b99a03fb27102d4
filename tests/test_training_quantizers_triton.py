"""The Triton quantizers of training: equal to their definitions in the interpreter, on a GPU and as machine code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import training_quantizer_cases as cases
import triton_cases

triton = pytest.importorskip("triton")

from test_quantize_emulated import EmulatedKernel  # noqa: E402

HERE = Path(__file__).parent
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def run_interpreted(names: list[str]) -> dict[str, str | None]:
    """The outcome of cases in Triton's interpreter, from one process of its own."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent / "src"), env.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "training_quantizer_cases.py"), *names]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    """The outcomes of all short cases."""
    return run_interpreted([name for name in cases.CASES if name not in cases.LONG])


@pytest.mark.parametrize("name", [name for name in cases.CASES if name not in cases.LONG])
def test_in_the_interpreter(name: str, interpreted: dict[str, str | None]) -> None:
    assert interpreted[name] is None, interpreted[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(cases.LONG))
def test_long_in_the_interpreter(name: str) -> None:
    assert run_interpreted([name]) == {name: None}


@pytest.mark.gpu(capability=None)
@pytest.mark.parametrize("name", cases.CASES)
def test_on_the_gpu(name: str) -> None:
    cases.CASES[name]("cuda")


@pytest.mark.gpu(capability=None)
def test_software_casts_are_the_hardware_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What older GPUs and the interpreter run, on the GPU."""
    from padless import triton_casts

    monkeypatch.setattr(triton_casts, "casts_in_hardware", lambda device: False)
    for name in ("columns_by_feature", "columns_by_square", "weights", "swiglu_concatenated"):
        cases.CASES[name]("cuda")


# --- machine code ----------------------------------------------------------------------------------------


class UnfusedKernel(EmulatedKernel):
    """An EmulatedKernel that passes on whether multiplications and additions are fused."""

    def _launch(self, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
        self._fuse = options.pop("enable_fp_fusion", True)
        super()._launch(grid, args, options)

    def _compile(self, runtime: dict[str, Any], constants: dict[str, Any], num_warps: int) -> Any:
        original = triton.compile

        def compile_unfused(source: Any, target: Any, options: dict[str, Any]) -> Any:
            return original(source, target=target, options=options | {"enable_fp_fusion": self._fuse})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton, "compile", compile_unfused)
            return super()._compile(runtime, constants, num_warps)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedKernel]:
    """Every kernel replaced by its emulated machine code, with the hardware's casts; inputs have NaN without signs."""
    from padless import triton_casts
    from padless.quantization.triton import group_tiles, rows_columns, swiglu_backward, weight_both

    original = triton_cases.awkward

    def awkward(*args: Any) -> torch.Tensor:
        x = original(*args)
        return x.masked_fill(x.isnan(), float("nan"))

    monkeypatch.setattr(cases, "awkward", awkward)
    monkeypatch.setattr(triton_casts, "casts_in_hardware", lambda device: True)
    kernels = []
    for module, name in (
        (group_tiles, "_group_tiles"),
        (rows_columns, "_rows_columns"),
        (weight_both, "_weight_both"),
        (swiglu_backward, "_pairs_of_blocks"),
        (swiglu_backward, "_straddling_blocks"),
        (swiglu_backward, "_sum_blocks"),
    ):
        kernels.append(UnfusedKernel(getattr(module, name)))
        monkeypatch.setattr(module, name, kernels[-1])
    return kernels


QUICK = {"columns_alone", "columns_of_no_rows", "scale_boundaries"}


@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow])
        for n in cases.CASES
        if n not in cases.LONG
    ],
)
def test_machine_code(name: str, emulated: list[EmulatedKernel]) -> None:
    cases.CASES[name]("cpu")
    assert sum(k.launches for k in emulated) > 0
