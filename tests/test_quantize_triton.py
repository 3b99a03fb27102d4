"""The Triton quantisers: equal to the torch ones in the interpreter and on a GPU, well compiled, and fast."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton_cases

triton = pytest.importorskip("triton")

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    """The outcome of every case in Triton's interpreter, from one process of its own."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent / "src"), env.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, str(HERE / "triton_cases.py")], env=env, capture_output=True, text=True, timeout=280
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("name", triton_cases.CASES)
def test_in_the_interpreter(name: str, interpreted: dict[str, str | None]) -> None:
    assert interpreted[name] is None, interpreted[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", triton_cases.CASES)
def test_on_the_gpu(name: str) -> None:
    triton_cases.CASES[name]("cuda")


@pytest.mark.gpu
def test_quantize_uses_triton_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from padless.formats import FP8_BLOCK
    from padless.quantize import quantize

    called = []
    from padless import quantize_triton

    original = quantize_triton.fp8_block
    monkeypatch.setattr(quantize_triton, "fp8_block", lambda *args: called.append(args) or original(*args))
    x = torch.randn(33, 256, device="cuda")
    triton_cases.assert_same(quantize(x, FP8_BLOCK), quantize(x.cpu(), FP8_BLOCK), x.cpu())
    assert called


@pytest.mark.gpu
def test_software_cast_is_the_hardware_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The integer cast that older GPUs and the interpreter use, on the GPU."""
    from padless import quantize_triton

    monkeypatch.setattr(quantize_triton, "_casts_in_hardware", lambda device: False)
    triton_cases.fp8_block_code_boundaries("cuda")
    triton_cases.fp8_block_weights("cuda")


# --- what the compiler makes of them, without a GPU ------------------------------------------------------

POINTERS = {"bf16": "*bf16", "fp32": "*fp32"}


def compile_for_sm90(
    kernel: object, types: dict[str, str], constants: dict[str, object], num_warps: int
) -> str:
    """PTX of a kernel whose pointers and integers are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in types},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}).asm[
        "ptx"
    ]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("input_type", POINTERS)
@pytest.mark.parametrize("kind", ["activation", "weight"])
def test_compiled_arithmetic_and_access_widths(kind: str, input_type: str) -> None:
    """IEEE division, no fused multiply-add, no flushing of subnormals; 16-byte loads and stores."""
    from padless import quantize_triton

    if kind == "activation":
        kernel = quantize_triton._fp8_block_activation
        types = dict.fromkeys(["M", "K", "x_stride", "scale_rows", "scale_stride_m", "scale_stride_k"], "i32")
        constants = {"BLOCK_M": 64 if input_type == "bf16" else 32, "HARDWARE_CAST": True}
    else:
        kernel = quantize_triton._fp8_block_weight
        types = dict.fromkeys(["N", "K", "x_stride_g", "x_stride_n"], "i32")
        constants = {"HARDWARE_CAST": True}
    types |= {"x_ptr": POINTERS[input_type], "codes_ptr": "*u8", "scale_ptr": "*fp32"}
    ptx = compile_for_sm90(kernel, types, constants, 4 if kind == "activation" else 8)
    instructions = set(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][\w.:]*)", ptx, re.MULTILINE))
    assert "div.rn.f32" in instructions
    assert "cvt.rn.satfinite.e4m3x2.f32" in instructions
    assert not [i for i in instructions if ".ftz" in i or i.startswith(("fma", "div.full", "div.approx"))]
    assert {i for i in instructions if i.startswith("ld.global")} == {"ld.global.v4.b32"}
    assert "st.global.v4.b32" in instructions
