"""The Triton quantizers of training: equal to their definitions in the interpreter, on a GPU and as machine code."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from support import training_quantizer_cases as cases
from support import triton_cases
from support.interpreter import interpreted

triton = pytest.importorskip("triton")

from support.emulated_triton import EmulatedKernel  # noqa: E402

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    """The outcomes of all short cases."""
    return interpreted("training_quantizer_cases.py", *(name for name in cases.CASES if name not in cases.LONG))


@pytest.mark.parametrize("name", [name for name in cases.CASES if name not in cases.LONG])
def test_in_the_interpreter(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(cases.LONG))
def test_long_in_the_interpreter(name: str) -> None:
    assert interpreted("training_quantizer_cases.py", name) == {name: None}


@pytest.mark.gpu(capability=None)
@pytest.mark.parametrize("name", cases.CASES)
def test_on_the_gpu(name: str) -> None:
    cases.CASES[name]("cuda")


@pytest.mark.gpu(capability=None)
def test_software_casts_are_the_hardware_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What older GPUs and the interpreter run, on the GPU."""
    from padless.quantization.triton import casts as triton_casts

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
    from padless.quantization.triton import casts as triton_casts
    from padless.quantization.triton import group_tiles, nvfp4_random, rows_columns, swiglu_backward, weight_both

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
        (nvfp4_random, "_nvfp4_stochastic"),
        (nvfp4_random, "_hadamard"),
    ):
        kernels.append(UnfusedKernel(getattr(module, name)))
        monkeypatch.setattr(module, name, kernels[-1])
    return kernels


QUICK = {"columns_alone", "columns_of_no_rows", "scale_boundaries"}


@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in cases.CASES if n not in cases.LONG],
)
def test_machine_code(name: str, emulated: list[EmulatedKernel]) -> None:
    cases.CASES[name]("cpu")
    assert sum(k.launches for k in emulated) > 0


# --- what the compiler makes of them, without a GPU ------------------------------------------------------

# Integers that the kernels are not specialized for.
OF_M = {"M", "row_scale_ld", "column_units", "num_scale_rows", "num_tiles"}


def instructions_of(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> Counter[str]:
    """How often each mnemonic is in the PTX for sm_90; pointers and the other integers are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    given = {name: types.get(name, "i32") for name in names if name not in constants}
    source = ASTSource(
        kernel,
        signature={name: given.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in given if name not in OF_M},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return Counter(re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][\w.:]*)", compiled.asm["ptx"], re.MULTILINE))


def assert_wide_and_ieee(found: Counter[str]) -> None:
    """16-byte accesses of global memory, words in shared memory, and no approximation but that of reciprocals."""
    assert found["ld.global.v4.b32"] > 0
    assert found["st.global.v4.b32"] > 0
    assert not [i for i in found if i.startswith(("ld.global", "st.global")) and i.endswith((".b8", ".b16"))]
    assert not [i for i in found if i.startswith(("st.shared", "ld.shared")) and i.endswith((".b8", ".b16"))]
    approximate = [i for i in found if ".ftz" in i or ".approx" in i or ".full" in i]
    assert approximate == ["rcp.approx.ftz.f32"]  # made correct: test_usual_reciprocals
    assert found["cvt.rn.satfinite.e4m3x2.f32"] > 0


COLUMN_TYPES = {
    "table_ptr": "*i32",
    "row_codes_ptr": "*u8",
    "row_scale_ptr": "*fp32",
    "codes_ptr": "*i32",
    "scale_ptr": "*fp32",
}


@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("input_type", ["bf16", "fp32"])
@pytest.mark.parametrize("square", [False, True])
def test_compiled_rows_columns(square: bool, input_type: str) -> None:
    from padless.quantization.triton import rows_columns

    held = input_type if input_type == "bf16" else ""
    constants = {"ROWS": True, "SQUARE": square, "HARDWARE_CAST": True, "DTYPE": held}
    types = {"x_ptr": f"*{input_type}", **COLUMN_TYPES}
    found = instructions_of(rows_columns._rows_columns, types, constants, num_warps=8)
    assert_wide_and_ieee(found)
    # 128 x 128 values, 16 bytes a load, by 256 threads; each value cast twice, two at once.
    assert found["ld.global.v4.b32"] == (8 if input_type == "bf16" else 16)
    assert found["st.global.v4.b32"] == 8
    assert found["cvt.rn.satfinite.e4m3x2.f32"] == 64


@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
def test_compiled_weight_both() -> None:
    from padless.quantization.triton import weight_both

    types = {"w_ptr": "*bf16", "codes_ptr": "*u8", "scale_ptr": "*fp32"}
    types |= {"transposed_ptr": "*i32", "transposed_scale_ptr": "*fp32"}
    constants = {"WORDS": True, "HARDWARE_CAST": True, "DTYPE": "bf16"}
    found = instructions_of(weight_both._weight_both, types, constants, num_warps=8)
    assert_wide_and_ieee(found)
    assert (found["ld.global.v4.b32"], found["st.global.v4.b32"]) == (8, 8)


@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("input_type", ["bf16", "fp16", "fp32"])
def test_a_weight_of_one_value_reads_no_unset_register(input_type: str) -> None:
    """N, K and the stride of 1 are constants then; ptxas puts R1, the stack's pointer, where a register is not set."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import compiler
    from triton.compiler import ASTSource

    from padless.quantization.triton import weight_both

    kernel = weight_both._weight_both
    names = kernel.arg_names
    constants: dict[str, Any] = {"N": 1, "K": 1, "w_stride_n": 1, "WORDS": False, "HARDWARE_CAST": True, "DTYPE": ""}
    types = {"w_ptr": f"*{input_type}", "codes_ptr": "*u8", "scale_ptr": "*fp32"}
    types |= {"transposed_ptr": "*u8", "transposed_scale_ptr": "*fp32", "w_stride_g": "i32"}
    source = ASTSource(
        kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in types},
    )
    options = {"num_warps": weight_both.NUM_WARPS, "maxnreg": weight_both.MAX_REGISTERS_OF_FLOAT32}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = "\n".join(line.split("//")[0] for line in compiled.asm["ptx"].splitlines())
    counts = Counter(re.findall(r"%(?:r|rs|rd|p)\d+\b", ptx))
    assert [register for register, count in counts.items() if count == 1] == []

    nvdisasm = Path(compiler.__file__).parent / "bin/nvdisasm"
    if not nvdisasm.exists():
        return
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        sass = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True).stdout
    assert "F2FP.SATFINITE.E4M3" in sass
    stack = [line for line in sass.splitlines() if re.search(r"\bR1\b", line) and "c[0x0][0x28]" not in line]
    assert stack == []


@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("interleaved", [False, True])
def test_compiled_swiglu_backward(interleaved: bool) -> None:
    from padless.quantization.triton import swiglu_backward

    types = {"dh_ptr": "*bf16", "z_ptr": "*bf16", "prob_ptr": "*fp32", "table_ptr": "*i32", "row_codes_ptr": "*u8"}
    types |= dict.fromkeys(["row_scale_ptr", "dz_scale_ptr", "hidden_scale_ptr", "sums_ptr"], "*fp32")
    types |= dict.fromkeys(["dz_codes_ptr", "hidden_codes_ptr"], "*i32")
    constants = {"INTERLEAVED": interleaved, "WHOLE": True, "SQUARE": False, "HARDWARE_CAST": True}
    found = instructions_of(swiglu_backward._pairs_of_blocks, types, constants, num_warps=16, enable_fp_fusion=False)
    assert_wide_and_ieee(found)
    # Every rounding is stated, so none may be fused away by the assembler either.
    assert not {"mul.f32", "add.f32", "sub.f32"} & set(found)
    assert found["ld.global.v4.b32"] == 12
