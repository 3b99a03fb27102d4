"""The compiler's caller, held against NVIDIA's own binding and header of the same library."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from padless.runtime import nvrtc

TEXT = '#include "part.cuh"\nextern "C" __global__ void k(int* out) { out[threadIdx.x] = NUMBER; }\n'
HEADERS = {"other.cuh": "#define UNUSED 1\n", "part.cuh": "#define NUMBER 48271\n"}


def test_images_are_those_of_the_binding_of_the_maker() -> None:
    binding = pytest.importorskip("cuda.bindings.nvrtc")
    options = ["--gpu-architecture=sm_90a", "--std=c++17"]
    (cubin, ptx), log = nvrtc.compile_text(TEXT, "k.cu", HEADERS, options, ["cubin", "ptx"])
    _, program = binding.nvrtcCreateProgram(
        TEXT.encode(), b"k.cu", 2, [v.encode() for v in HEADERS.values()], [k.encode() for k in HEADERS]
    )
    assert int(binding.nvrtcCompileProgram(program, 2, [o.encode() for o in options])[0]) == 0
    for image, kind in ((cubin, "CUBIN"), (ptx, "PTX")):
        _, size = getattr(binding, f"nvrtcGet{kind}Size")(program)
        room = b" " * size
        getattr(binding, f"nvrtcGet{kind}")(program, room)
        assert image == room
    assert b"48271" in ptx
    assert ptx.endswith(b"\0")
    assert log == ""
    assert nvrtc.version() == ".".join(map(str, binding.nvrtcVersion()[1:]))


def test_functions_have_the_arguments_that_the_header_declares() -> None:
    """ctypes checks nothing: a function that is called by name with another number of arguments would crash."""
    headers = [Path(folder) / "cu13/include/nvrtc.h" for folder in __import__("nvidia").__path__]
    (header,) = [path for path in headers if path.is_file()]
    declared = dict(re.findall(r"nvrtcResult (nvrtc\w+)\(([^)]*)\)", header.read_text()))
    counts = {"Version": 2, "CreateProgram": 6, "CompileProgram": 3, "DestroyProgram": 1}
    counts |= {f"Get{what}{size}": 2 for what in ("ProgramLog", "CUBIN", "PTX") for size in ("", "Size")}
    assert {name: declared[f"nvrtc{name}"].count(",") + 1 for name in counts} == counts


def test_a_refused_text_says_where_and_for_what() -> None:
    with pytest.raises(nvrtc.CompileError, match=r"k.cu does not compile for sm_90a:\n(.|\n)*part.cuh"):
        nvrtc.compile_text(TEXT, "k.cu", {}, ["--gpu-architecture=sm_90a"], ["cubin"])
    with pytest.raises(nvrtc.CompileError, match="invalid"):
        nvrtc.compile_text(TEXT, "k.cu", HEADERS, ["--gpu-architecture=sm_9000a"], ["cubin"])


def test_a_layer_on_the_reference_touches_none_of_the_optional_packages() -> None:
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cuda", "typer", "rich", "click", "matplotlib", "transformers"):
            raise ImportError(name + " is not a dependency of the library")
sys.meta_path.insert(0, Absent())
import torch, padless
from padless.moe import moe
x, ids = torch.randn(9, 128, dtype=torch.bfloat16), torch.randint(3, (9, 2), dtype=torch.int32)
w13, w2 = (padless.quantize(torch.randn(3, n, k, dtype=torch.bfloat16), padless.FP8_BLOCK, kind="weight")
           for n, k in ((512, 128), (128, 256)))
y = moe(x, ids, torch.rand(9, 2), w13, w2)
assert y.shape == x.shape and y.isfinite().all() and y.abs().sum() > 0
assert padless.backends()["emulator"].available  # the compiler is found without NVIDIA's binding
from padless.__main__ import main
main()
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert found.returncode == 2, found.stderr
    assert found.stderr == "padless: the command needs typer and rich; pip install 'padless[cli]'\n"
