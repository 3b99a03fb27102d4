"""Names of the package as a user meets them: on a fresh import, and by a type checker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import padless
from padless import formats
from padless.compat.cudnn import operands
from padless.distributed import backend as distributed_backend
from padless.distributed import checks
from padless.epilogue import COLUMN_LAYOUTS, ROW_LAYOUTS
from padless.moe import activation
from padless.nn import experts, recipe
from padless.nn.lora import peft_files
from padless.quantization import quantize, swiglu_backward
from padless.runtime import choices, devices
from support.ragged import ROOT

FRESH = """
import sys
import padless
names = dir(padless)
assert "torch" not in sys.modules, "torch was imported"
print(*names)
"""


def test_dir_of_a_fresh_import_has_every_public_name() -> None:
    """And none of them has been imported by then."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    shown = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True, env=environment)
    names = shown.stdout.split()
    assert {*padless.__all__, "moe", "nn", "autograd", "distributed", "__version__"} <= {*names}
    assert names == sorted(names)
    assert "nosuch" not in names
    with pytest.raises(AttributeError, match="module 'padless' has no attribute 'nosuch'"):
        padless.nosuch  # type: ignore[attr-defined]  # noqa: B018


def test_a_package_that_is_called_names_the_layer() -> None:
    with pytest.raises(TypeError, match=r"padless\.moe is a package; the layer is padless\.moe\.moe\("):
        padless.moe(1, 2)  # type: ignore[operator]


def test_types_of_strings_are_the_strings_that_calls_take() -> None:
    rules = [rule for allowed in quantize.SCALE_RULES.values() for rule in allowed]
    allowed = {
        "ActivationKind": activation.KINDS,
        "AdapterLayout": peft_files.LAYOUTS,
        "BackendName": devices.NAMES,
        "Exchange": distributed_backend.BACKENDS,
        "GateUp": activation.GATE_UP,
        "Kind": formats.KINDS,
        "OutputLayout": ROW_LAYOUTS,
        "Saved": recipe.SAVED,
        "ScaleLayout": formats.SCALE_LAYOUTS,
        "ScaleMajor": quantize.SCALE_MAJORS,
        "ScaleRule": rules,
        "Score": experts.SCORES,
        "Semantics": operands.SEMANTICS,
        "Sums": checks.SUMS,
        "SwigluGateUp": swiglu_backward.GATE_UP,
        "WgradMode": recipe.WGRAD_MODES,
    }
    typed = {name: {*get_args(t)} for name, t in vars(choices).items() if get_args(t)}
    assert typed == {name: {*values} for name, values in allowed.items()}
    assert typed["ScaleLayout"] == {*COLUMN_LAYOUTS}


# What a user writes, and whether a type checker has to refuse it.
LINES = {
    "padless.nosuch": True,
    "padless.quantize(x, padless.MXFP8, kind='weights')": True,
    "padless.quantize(x, padless.MXFP8, kind='weight')": False,
    "padless.quantize(x, padless.FP8_BLOCK, scale_major='m')": True,
    "padless.quantize(x, padless.FP8_BLOCK, scale_major='k')": False,
    "padless.quantize(x, padless.MXFP8, scale_rule='ceil')": True,
    "padless.quantize(x, padless.MXFP8, scale_layout='tiles')": True,
    "padless.quantize(x, padless.MXFP8, scale_rule='floor', scale_layout='blocked')": False,
    "padless.swiglu_backward_quantize(x, x, x, gate_up='alternating')": True,
    "padless.swiglu_backward_quantize(x, x, x, gate_up='interleaved')": False,
    "padless.grouped_gemm_quant(a_tensor=x, b_tensor=x, padded_offsets=x, semantics='cudnn')": True,
    "padless.grouped_gemm_quant(a_tensor=x, b_tensor=x, padded_offsets=x, row_layout='mn')": True,
    "padless.grouped_gemm_quant(a_tensor=x, b_tensor=x, padded_offsets=x, row_layout='plain_mn')": False,
    "padless.grouped_gemm_swiglu_quant(gate_up='both', a_tensor=x, b_tensor=x, padded_offsets=x)": True,
    "moe.moe(x, x, x, w, w, activation='swiglu', gate_up='alternating')": False,
    "moe.moe(x, x, x, w, w, activation='swish')": True,
    "moe.moe(x, x, x, w, w, backend='gpu')": True,
    "moe.moe(x, x, x, w, w, backend='reference')": False,
    "padless.grouped_gemm(w, w, x, backend='cdua')": True,
    "padless.grouped_gemm(w, w, x, backend='emulator:sm_100a')": False,
    "padless.gemm(w, w, backend='cpu')": True,
    "padless.gemm(w, w, backend='cuda')": False,
    "padless.grouped_gemm_list([w], [w], backend='emulater')": True,
    "padless.grouped_gemm_wgrad(x, x, offs=x, backend='emulator:sm_90a')": True,
    "padless.grouped_gemm_wgrad(x, x, offs=x, backend='emulator')": False,
    "padless.grouped_gemm_epilogue(w, w, x, padless.Epilogue(amax=True), backend='torch')": True,
    "padless.grouped_gemm_quant(a_tensor=x, b_tensor=x, padded_offsets=x, backend='sm90')": True,
    "padless.distributed.ExpertParallel(None, 8, 8, 2, 8, backend='nccl')": True,
    "padless.distributed.ExpertParallel(None, 8, 8, 2, 8, backend='collective')": False,
    "nn.Recipe(save='fp4')": True,
    "nn.Recipe(save='fp8', wgrad_mode='2d2d')": True,
    "nn.MoE(8, 8, 8, 2, score='top')": True,
    "nn.MoE(8, 8, 8, 2, score='sigmoid')": False,
}


@pytest.mark.slow
def test_a_type_checker_refuses_names_and_strings_that_there_are_not(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = ["import torch", "import padless", "from padless import moe, nn"]
    program += ["x: torch.Tensor", "w: padless.BlockScaledTensor", *LINES]
    path = tmp_path / "program.py"
    path.write_text("\n".join(program) + "\n")
    call = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--ignore-missing-imports", "--no-pretty"]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*call, f"--cache-dir={tmp_path}", str(path)], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    refused = {int(line) for line in re.findall(r"^program\.py:(\d+): error", done.stdout, re.MULTILINE)}
    lines = {program[line - 1] for line in refused}
    assert lines == {line for line, wrong in LINES.items() if wrong}, done.stdout + done.stderr
