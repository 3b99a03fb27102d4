"""cuDNN's kernel beside padless's: what is done without its packages, and with them one call whole."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import cudnn_table
from padless import cli
from padless.emulator import Emulator
from padless.emulator.fake_driver import memory_of
from padless.emulator.program.cute_dsl import read_launch, with_driver
from padless.verify.cudnn import kernel, run
from padless.verify.cudnn.cases import CASES, OUTPUTS, case_of, operands, outputs_here
from padless.verify.cudnn.host_code import Device, OnDevice, read_parameters

ROOT = Path(__file__).parents[2]
COPY = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry copy(.param .u64 from, .param .u64 to, .param .u32 add)
{
    .reg .b32 %r<9>; .reg .b64 %rd<9>;
    ld.param.u64 %rd1, [from]; ld.param.u64 %rd2, [to]; ld.param.u32 %r1, [add];
    mov.u32 %r2, %tid.x; mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mad.lo.u32 %r5, %r3, %r4, %r2;
    mul.wide.u32 %rd3, %r5, 4; add.u64 %rd1, %rd1, %rd3; add.u64 %rd2, %rd2, %rd3;
    ld.global.b32 %r6, [%rd1]; add.u32 %r6, %r6, %r1; st.global.b32 [%rd2], %r6;
    ret;
}
"""
# What a compiled host module declares, in its dialect's text.
MODULE = """module attributes {gpu.container_module} {
  llvm.func @_cudaLaunchKernelEx(!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
  llvm.func @printf(!llvm.ptr, ...) -> i32
  llvm.func @_cudaSetDevice(i32) -> i32 attributes {llvm.linkage = "external"}
  llvm.func @cuda_dialect_get_error_name(i32) -> !llvm.ptr attributes {llvm.linkage = "external"}
  llvm.func @cuda_dialect_unload_library_once(!llvm.ptr) attributes {llvm.linkage = "external"}
  llvm.func @cuda_init(%arg0: !llvm.ptr) -> i32 {
    %4 = llvm.call @_cudaSetDevice(%0) : (i32) -> i32
  }
}
"""


class Held:
    """C memory that lives as long as this does."""

    def __init__(self, *parts: bytes) -> None:
        self.buffers = [ctypes.create_string_buffer(part, len(part)) for part in parts]
        self.addresses = [ctypes.addressof(buffer) for buffer in self.buffers]


def launch_config(grid: tuple[int, ...], block: tuple[int, ...], *attributes: tuple[int, ...]) -> Held:
    """A cudaLaunchConfig; its own address comes last."""
    entries = b"".join(
        struct.pack("<I4x", kind) + struct.pack("<16I", *v, *[7] * (16 - len(v))) for kind, *v in attributes
    )
    held = Held(entries)
    config = Held(struct.pack("<6IQQQI", *grid, *block, 216064, 0, held.addresses[0], len(attributes)))
    held.buffers += config.buffers
    held.addresses += config.addresses
    return held


def call(device: Device, name: str, *arguments: Any) -> int:
    """A call as host code makes it, through the C function."""
    types = ("i32" if name == "_cudaSetDevice" else "!llvm.ptr",) * len(arguments)
    address = device.address_of(name, types, "i32")
    c_types = [ctypes.c_int32 if t == "i32" else ctypes.c_void_p for t in types]
    return int(ctypes.CFUNCTYPE(ctypes.c_int32, *c_types)(address)(*arguments))


def test_a_launch_is_read_from_memory() -> None:
    held = launch_config((2, 1, 3), (224, 1, 1), (6, 0), (4, 2, 1, 1), (2, 0))
    shape = read_launch(held.addresses[-1])
    assert (shape.grid, shape.block, shape.cluster) == ((2, 1, 3), (224, 1, 1), (2, 1, 1))
    assert (shape.shared_bytes, shape.programmatic) == (216064, False)
    held = launch_config((1, 1, 1), (32, 4, 1), (6, 1))
    assert read_launch(held.addresses[-1]).programmatic
    assert read_launch(held.addresses[-1]).cluster == (1, 1, 1)


def test_parameters_are_read_by_their_sizes() -> None:
    held = Held(b"abc", bytes(range(128)), struct.pack("<I", 5))
    pointers = Held(struct.pack("<3Q", *held.addresses))
    assert read_parameters(pointers.addresses[0], (3, 128, 4)) == [b"abc", bytes(range(128)), b"\5\0\0\0"]


def test_declared_functions_of_the_driver_get_bodies_and_nothing_else_changes() -> None:
    asked = []

    def address_of(name: str, types: tuple[str, ...], result: str | None) -> int:
        asked.append((name, types, result))
        return 4096 + len(asked)

    text = with_driver(MODULE, address_of)
    assert asked == [
        ("_cudaLaunchKernelEx", ("!llvm.ptr",) * 3, "i32"),
        ("_cudaSetDevice", ("i32",), "i32"),
        ("cuda_dialect_unload_library_once", ("!llvm.ptr",), None),
    ]
    assert "@_cudaSetDevice(%a0: i32) -> i32 {\n    %c = llvm.mlir.constant(4098 : i64) : i64\n" in text
    assert "    llvm.call %p(%a0) : !llvm.ptr, (!llvm.ptr) -> ()\n    llvm.return\n" in text
    untouched = [line for line in MODULE.splitlines() if "_cudaLaunch" not in line and "linkage" not in line]
    untouched.append(
        '  llvm.func @cuda_dialect_get_error_name(i32) -> !llvm.ptr attributes {llvm.linkage = "external"}'
    )
    assert set(untouched) <= set(text.splitlines())
    assert text.count("llvm.func") == MODULE.count("llvm.func")


def loaded(device: Device, name: bytes) -> int:
    """A kernel's handle, as host code gets it."""
    handle, text = Held(bytes(8)), Held(name + b"\0")
    assert call(device, "_cudaLibraryGetKernel", handle.addresses[0], 0, text.addresses[0]) == 0
    return int(struct.unpack("<Q", handle.buffers[0].raw)[0])


def test_a_launch_of_the_host_code_runs_in_the_emulator() -> None:
    source, target = torch.arange(64, dtype=torch.int32), torch.full((64,), -1, dtype=torch.int32)
    device = Device()
    assert call(device, "_cudaSetDevice", 0) == 0
    other, copy = loaded(device, b"other"), loaded(device, b"copy")
    assert (other, copy) == (1, 2)
    device.emulator = Emulator(COPY, memory=memory_of([source, target]))
    held = Held(*(struct.pack("<Q", t.data_ptr()) for t in (source, target)), struct.pack("<I", 100))
    pointers = Held(struct.pack("<3Q", *held.addresses))
    config = launch_config((2, 1, 1), (32, 1, 1))
    assert call(device, "_cudaLaunchKernelEx", config.addresses[-1], copy, pointers.addresses[0]) == 0
    device.raise_error()
    assert torch.equal(target, source + 100)
    assert [shape.grid for shape in device.launches] == [(2, 1, 1)]
    assert (device.reports, device.instructions > 0) == (Counter(), True)


def test_what_goes_wrong_inside_of_the_host_code_is_raised_after_it() -> None:
    device = Device()
    assert call(device, "_cudaMalloc", 0) == 801
    with pytest.raises(NotImplementedError, match="calls _cudaMalloc, which has no stand-in"):
        device.raise_error()
    source = torch.arange(32, dtype=torch.int32)
    device = Device(emulator=Emulator(COPY, memory=memory_of([source])), kernels=["copy"])
    held = Held(*(struct.pack("<Q", t) for t in (source.data_ptr(), 4096)), struct.pack("<I", 0))
    pointers, config = Held(struct.pack("<3Q", *held.addresses)), launch_config((1, 1, 1), (32, 1, 1))
    assert call(device, "_cudaLaunchKernelEx", config.addresses[-1], 1, pointers.addresses[0]) == 801
    with pytest.raises(RuntimeError, match="out-of-bounds"):
        device.raise_error()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu])
@pytest.mark.parametrize("options", [{}, {"max_version": (1, 1)}])
def test_a_cpu_tensor_is_handed_over_as_a_gpus(dtype: torch.dtype, options: dict[str, Any]) -> None:
    tensor = torch.arange(24, dtype=torch.uint8).view(6, 4).view(dtype)
    shown = OnDevice(tensor)
    capsule = shown.__dlpack__(stream=0, **options)
    name = b"dltensor_versioned" if options else b"dltensor"
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    at = pointer_of(capsule, name) + (32 if options else 0)
    data, kind, index, rank = struct.unpack("<QiiI", ctypes.string_at(at, 20))
    assert (data, kind, index, rank) == (tensor.data_ptr(), 2, 0, 2)
    assert shown.__dlpack_device__() == (2, 0)


def some_outputs() -> dict[str, torch.Tensor | None]:
    draw = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (64, 32, 1), generator=draw, dtype=torch.uint8)
    scales = torch.randint(0, 256, (1, 2, 3, 32, 4, 4), generator=draw, dtype=torch.uint8).permute(3, 4, 1, 5, 2, 0)
    return {
        "d": torch.randn(64, 32, generator=draw).to(torch.bfloat16).as_strided((64, 32, 1), (32, 1, 2048)),
        "d_col": codes.view(torch.float8_e4m3fn),
        "amax": torch.rand(3, 1, generator=draw),
        "sfd_row": scales.view(torch.float8_e8m0fnu),
        "sfd_col": None,
    }


def test_every_byte_is_compared() -> None:
    sizes, differing = run.differences(some_outputs(), some_outputs())
    assert sizes == {"d": 4096, "d_col": 2048, "amax": 12, "sfd_row": 3072}
    assert differing == dict.fromkeys(sizes, 0)


@pytest.mark.parametrize("name", ["d", "d_col", "amax", "sfd_row"])
def test_a_planted_bit_is_found(name: str) -> None:
    theirs, ours = some_outputs(), some_outputs()
    planted = ours[name]
    assert planted is not None
    planted.untyped_storage()[planted.untyped_storage().nbytes() - 3] ^= 64
    _, differing = run.differences(theirs, ours)
    assert differing == dict.fromkeys(differing, 0) | {name: 1}
    found = run.Comparison("x", "MXFP8", "bfloat16", (1, 2, 3, 4), "", bytes={"d": 1}, differing=differing)
    assert not found.same
    assert f"differing: 1 of {name}" in str(found)


@pytest.mark.parametrize(
    ("name", "wrong"), [("d", torch.zeros(64, 16, 1).bfloat16()), ("d", torch.zeros(64, 32, 1).half()), ("amax", None)]
)
def test_an_output_of_another_shape_or_type_or_none_is_no_match(name: str, wrong: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match=f"{name}: cuDNN's is .*, padless's"):
        run.differences(some_outputs(), some_outputs() | {name: wrong})


def test_columns_of_fp4_which_padless_has_not_are_left_out_and_nothing_else_is() -> None:
    for case in CASES:
        assert (case.compared == OUTPUTS) == (case.d_dtype != torch.float4_e2m1fn_x2)
    assert case_of("MXFP8 to e2m1, rows").compared == ("d", "amax", "sfd_row", "c")
    theirs = some_outputs() | {"d_col": None}
    sizes, _ = run.differences(theirs, some_outputs(), ("d", "sfd_row"))
    assert set(sizes) == {"d", "sfd_row"}


def test_nothing_compared_is_not_the_same() -> None:
    assert not run.Comparison("x", "MXFP8", "bfloat16", (1, 2, 3, 4), "").same
    assert not run.Comparison("x", "MXFP8", "bfloat16", (1, 2, 3, 4), "", bytes={"d": 1}, error="no").same


def test_operands_are_a_function_of_the_seed_and_outputs_are_poisoned() -> None:
    case = case_of("bf16 bias, e4m3")
    x, y, other = operands(case, 1), operands(case, 1), operands(case, 2)
    for name, tensor in x.items():
        assert tensor is not None or name == "amax"
        if tensor is not None:
            there, elsewhere = y[name], other[name]
            assert there is not None
            assert elsewhere is not None
            assert torch.equal(run._bytes(tensor), run._bytes(there))
            drawn = name not in OUTPUTS and name != "padded_offsets"
            assert drawn != torch.equal(run._bytes(tensor), run._bytes(elsewhere))
    for name in ("d", "d_col", "sfd_row", "sfd_col"):
        assert set(run._bytes(x[name]).tolist()) == {0xA5}  # type: ignore[arg-type]


def test_cases_differ_in_what_the_docs_say() -> None:
    assert {case.format for case in CASES} == {"MXFP8", "MXFP8_E5M2", "MXFP4", "NVFP4"}
    assert len({case.d_dtype for case in CASES}) >= 5
    assert len({case.cudnn.get("cluster_shape_mn") for case in CASES}) >= 5
    assert len({case.bias for case in CASES}) == 4
    assert any(0 in case.sizes for case in CASES)
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(size % 256 == 0 for case in CASES if not case.dense for size in case.sizes)


def test_missing_packages_are_named_in_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("cudnn", "tvm_ffi") else found("json")
    )
    with pytest.raises(ValueError, match="not installed: nvidia-cudnn-frontend, apache-tvm-ffi; pip install 'padless"):
        run.run_verify_cudnn()
    monkeypatch.setattr(sys, "argv", ["padless", "verify", "--against-cudnn"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "pip install 'padless[cudnn]'" in "".join(capsys.readouterr())


def test_the_command_hands_its_options_over(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(run, "run_verify_cudnn", lambda **options: seen.append(options) or 0)
    options = ["--check", "one group", "--workers", "1", "--out", "there"]
    monkeypatch.setattr(sys, "argv", ["padless", "verify", "--against-cudnn", *options])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    assert seen == [{"out": Path("there"), "checks": ["one group"], "workers": 1}]


def comparison(name: str, **changes: Any) -> run.Comparison:
    given = {
        "bytes": {"d": 4096, "amax": 8},
        "differing": {"d": 0, "amax": 0},
        "reports": {"exit": 2},
        "grid": (2, 1, 1),
    }
    return run.Comparison(name, "NVFP4", "bfloat16", (512, 320, 416, 1), "", **(given | changes))


def test_a_run_says_what_differs_and_leaves_a_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = {"one group": {"differing": {"d": 3, "amax": 0}}, "without prob": {"error": "ValueError: no"}}
    monkeypatch.setattr(run, "missing", lambda: "")
    monkeypatch.setattr(run, "versions", lambda: {"nvidia-cudnn-frontend": "1.32.0"})
    monkeypatch.setattr(run, "compare", lambda name: comparison(name, **wrong.get(name, {})))
    console = Console(record=True, width=200)
    names = ["MXFP8 to bf16", "one group", "without prob"]
    assert run.run_verify_cudnn(tmp_path, checks=names, workers=1, console=console) == 1
    text = console.export_text()
    assert "same  MXFP8 to bf16: 4,104 bytes of d, amax, differing: none" in text
    assert "FAIL  one group: 4,104 bytes of d, amax, differing: 3 of d" in text
    assert "FAIL  without prob: ValueError: no" in text
    assert "1 of 3 calls give the same bytes" in text
    record = json.loads((tmp_path / run.FILE).read_text())
    assert [case["case"] for case in record["cases"]] == names
    assert record["about"]["packages"] == {"nvidia-cudnn-frontend": "1.32.0"}
    table = cudnn_table.table(record)
    assert "1 of 3" in table
    assert "| one group | NVFP4 | bfloat16 | 512 x 320 x 416, 1 | 3 of 4,104 |" in table
    assert "| without prob | NVFP4 | bfloat16 | 512 x 320 x 416, 1 | ValueError: no |" in table


def test_an_unknown_case_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "missing", lambda: "")
    with pytest.raises(ValueError, match=r"checks has 'nothing'; allowed are 'MXFP8 to bf16', "):
        run.run_verify_cudnn(checks=["nothing"])


def test_the_docs_have_the_table_of_the_newest_record() -> None:
    assert cudnn_table.with_table((ROOT / cudnn_table.PAGE).read_text()) == (ROOT / cudnn_table.PAGE).read_text()


@pytest.mark.skipif(bool(kernel.missing()), reason="nvidia-cudnn-frontend and nvidia-cutlass-dsl are not installed")
def test_cudnns_kernel_and_ours_write_the_same_bytes() -> None:
    found = run.compare("a narrow product")
    assert found.error == ""
    assert found.same, found
    assert found.bytes == {"d": 512 * 64 * 2, "amax": 8}


@pytest.mark.skipif(bool(kernel.missing()), reason="nvidia-cudnn-frontend and nvidia-cutlass-dsl are not installed")
def test_another_alpha_is_seen() -> None:
    case = case_of("a narrow product")
    tensors = operands(case, 1)
    kernel.CudnnKernel(case.program, tensors, {"sf_vec_size": 32}).run(tensors)
    alpha = tensors["alpha"]
    assert alpha is not None
    alpha[1] *= 1.001
    _, differing = run.differences(tensors, outputs_here(case, tensors))
    assert differing["amax"] > 0
    assert differing["d"] > 0
