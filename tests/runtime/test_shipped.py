"""Cubins that were compiled before they were installed: found without a compiler, or not at all."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import setuptools

import build_cubins
import check_wheels
from padless.runtime import jit, nvrtc, shipped
from padless.testing.compile_ahead import Gpu
from support.recipes import copied, make

PRELUDE = '#define KINDS "e4m3.e4m3"\n#define WGMMA_K "32"\n#define TRANSPOSES ""\n'
SMALL = jit.Kernel("wgmma_probe/wgmma_probe.cu", PRELUDE, "sm_90a", "cubin")


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that knows nothing yet, with an empty cache; the package is where ``installed`` puts it."""
    monkeypatch.setenv("PADLESS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PADLESS_CUBINS", raising=False)
    monkeypatch.delitem(sys.modules, shipped.PACKAGE, raising=False)
    forget(monkeypatch)
    yield monkeypatch
    shipped._installed.cache_clear()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_in_memory", {})
    monkeypatch.setattr(jit, "_locks", {})
    shipped._installed.cache_clear()
    importlib.invalidate_caches()


def installed(folder: Path, kernel: jit.Kernel, monkeypatch: pytest.MonkeyPatch) -> jit.CompiledKernel:
    """``kernel`` compiled for the package at ``folder``, which can be imported from here on."""
    compiled = jit.compile_kernel(*kernel)
    name = jit.cache_name(jit.nvrtc_version(), kernel)
    shipped.write(folder, jit.nvrtc_version(), {name: (compiled.image, {"log": compiled.log})}, "0.0")
    monkeypatch.syspath_prepend(str(folder))
    forget(monkeypatch)
    monkeypatch.setenv("PADLESS_CACHE_DIR", str(folder / "another_cache"))
    return compiled


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any) -> Any:
        raise AssertionError("the compiler was asked")

    for name in ("_nvrtc", "version", "compile_text"):
        monkeypatch.setattr(nvrtc, name, refused)


def test_a_shipped_kernel_is_the_compiled_one_and_needs_no_compiler(
    process: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled = installed(tmp_path / "wheel", SMALL, process)
    without_compiler(process)
    assert jit.compile_kernel(*SMALL) == compiled
    assert not (tmp_path / "wheel" / "another_cache").exists()
    process.setenv("PADLESS_CUBINS", "0")
    forget(process)
    with pytest.raises(AssertionError, match="the compiler was asked"):
        jit.compile_kernel(*SMALL)


@pytest.mark.parametrize("changed", ["source", "header", "prelude", "options", "architecture"])
def test_a_kernel_of_anything_else_is_compiled(changed: str, process: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(tmp_path / "wheel", SMALL, process)
    without_compiler(process)
    asked = SMALL
    if changed in ("source", "header"):
        texts = dict(jit.sources())
        used = [name for name in jit._used_sources(SMALL.source)[::2] if name.endswith(".cuh") == (changed == "header")]
        assert used, "the kernel has no header, and the test would say nothing"
        texts[used[0]] += "// another comment\n"
        process.setattr(jit, "sources", lambda: texts)
    elif changed == "prelude":
        asked = SMALL._replace(prelude=SMALL.prelude + "#define MORE 1\n")
    elif changed == "options":
        process.setattr(jit, "_OPTIONS", (*jit._OPTIONS, "--use_fast_math"))
    else:
        asked = SMALL._replace(arch="sm_100a")
    with pytest.raises(AssertionError, match="the compiler was asked"):
        jit.compile_kernel(*asked)


def test_a_damaged_image_is_compiled_again_with_a_warning(process: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled = installed(tmp_path / "wheel", SMALL, process)
    (path,) = (tmp_path / "wheel" / shipped.PACKAGE).glob("*.cubin")
    image = bytearray(path.read_bytes())
    image[len(image) // 2] ^= 1
    path.write_bytes(image)
    with pytest.warns(RuntimeWarning, match="is damaged"):
        assert jit.compile_kernel(*SMALL).image == compiled.image
    (path.parent / "index.json").write_text("{")
    forget(process)
    process.setenv("PADLESS_CACHE_DIR", str(tmp_path / "third_cache"))
    with pytest.warns(RuntimeWarning, match="no index"):
        assert jit.compile_kernel(*SMALL).image == compiled.image


def test_nothing_installed_is_no_warning(process: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shipped.shipped() is None


def test_a_familys_image_serves_its_members_alone(process: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel = next(iter(build_cubins.asked_of_model("Qwen3-30B", Gpu("sm_100a", 148), 1).kernels))
    compiled = installed(tmp_path / "wheel", kernel._replace(arch="sm_100f"), process)
    without_compiler(process)
    for member in ("sm_100a", "sm_103a"):
        assert jit.compile_kernel(*kernel._replace(arch=member)).image == compiled.image
    for other in ("sm_110a", "sm_120a", "sm_90a"):
        with pytest.raises(AssertionError, match="the compiler was asked"):
            jit.compile_kernel(*kernel._replace(arch=other))


def test_rehearsals_of_layers_find_kernels_of_both_products() -> None:
    kernels = build_cubins.asked_of_model("Qwen3-30B", Gpu("sm_90a", 132), 64).kernels
    assert len(kernels) >= 2
    assert {(kernel.arch, kernel.kind) for kernel in kernels} == {("sm_90a", "cubin")}
    assert len({kernel.prelude for kernel in kernels}) == len(kernels)


@pytest.mark.skipif(
    int(setuptools.__version__.split(".")[0]) < 77, reason="building a wheel needs setuptools 77, as make installs"
)
def test_the_tool_compiles_what_a_layer_asks_for_and_the_package_is_found(
    process: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`make cubins` for the layer of one token: its wheel has the kernels, and no compiler is needed."""
    tree, out, triton = copied(tmp_path / "tree"), tmp_path / "site", metadata.version("triton")
    check_wheels.stand_in("triton", tmp_path / "index")
    of_one = "CUBINS=--model Qwen3-30B --format FP8_BLOCK --arch sm_90a --tokens 1"
    said = make(tree, "cubins", of_one, f"TRITON={triton}", PIP_FIND_LINKS=str(tmp_path / "index"))
    assert re.search(rf"^0 kernels and \d+ of Triton {re.escape(triton)} to compile", said, re.MULTILINE), "added"
    (wheel,) = (tree / "dist").glob("padless_cubins-*.whl")
    zipfile.ZipFile(wheel).extractall(out)
    process.syspath_prepend(str(out))
    process.setenv("PADLESS_CACHE_DIR", str(tmp_path / "empty"))
    forget(process)
    kernels = list(build_cubins.asked_of_model("Qwen3-30B", Gpu("sm_90a", 132), 1).kernels)
    assert kernels
    without_compiler(process)
    assert all(jit.compile_kernel(*kernel).image[:4] == b"\x7fELF" for kernel in kernels)
    with pytest.raises(AssertionError, match="the compiler was asked"):
        jit.compile_kernel(*kernels[0]._replace(prelude=kernels[0].prelude + "#define MORE 1\n"))
