"""Triton kernels that were compiled before they were installed: what Triton would compile and launch, or none at all."""

from __future__ import annotations

import gc
import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")
from triton import knobs  # noqa: E402
from triton.runtime.jit import JITCallable, JITFunction  # noqa: E402

import build_cubins  # noqa: E402
from padless.moe import moe  # noqa: E402
from padless.quantization.triton import compiled, launches  # noqa: E402
from padless.runtime import devices, jit, shipped  # noqa: E402
from padless.testing.compile_ahead import Gpu, Rehearsal, kernels_of  # noqa: E402
from support import hopper  # noqa: E402

KERNELS = """
import triton
import triton.language as tl

FACTOR = tl.constexpr(3)

@triton.jit
def helper(x):
    return x * FACTOR

@triton.jit(do_not_specialize=["rows"])
def kernel(x_ptr, bias_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr, OUT: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = helper(tl.load(x_ptr + at * columns, mask=at < rows, other=0.0))
    if bias_ptr is not None:
        x += tl.load(bias_ptr + at, mask=at < rows, other=0.0)
    tl.store(out_ptr + at, x.to(OUT), mask=at < rows)
"""
OPTIONS = {"BLOCK": 32, "OUT": triton.language.float32, "num_warps": 1}


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv("PADLESS_CUBINS", raising=False)
    monkeypatch.delitem(sys.modules, shipped.PACKAGE, raising=False)
    shipped._installed.cache_clear()
    yield monkeypatch
    shipped._installed.cache_clear()


def install(folder: Path, images: build_cubins.Images, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped.write(folder, jit.nvrtc_version(), images, "0.0")
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    shipped._installed.cache_clear()


@contextmanager
def no_compiler() -> Iterator[None]:
    def asked(*arguments: Any, **options: Any) -> None:
        raise AssertionError("Triton was asked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", asked)
        yield


# --- a layer's passes ------------------------------------------------------------------------------------


def layer(tokens: int, ids: torch.dtype = torch.int64, backend: Any = None) -> Callable[[], torch.Tensor]:
    """A layer of 6 experts, two for a token."""
    draw = torch.Generator().manual_seed(tokens)
    w13, w2 = build_cubins.weights(6, 512, 256), build_cubins.weights(6, 256, 256)
    x = torch.randn(tokens, 256, generator=draw).bfloat16()
    chosen = torch.rand(tokens, 6, generator=draw).topk(2)
    return partial(moe, x, chosen.indices.to(ids), chosen.values, w13, w2, backend=backend)


def test_a_layers_passes_are_found_and_launched_as_by_triton(nothing_known: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With few tokens and with many, on a GPU that is not there: rehearsed on a CPU and compiled, all passes are found
    without Triton, have the images that it compiles, and grid, options and every argument that it launches with."""
    tokens = (20, 2100)
    images: build_cubins.Images = {}
    for t in tokens:
        with build_cubins.passes_listed() as passes:
            assert kernels_of([Rehearsal(layer(t, backend="emulator"))], Gpu("sm_90a", 132))[1] == []
        for one in passes.values():
            images |= build_cubins.image_of_pass(one, 90)
    names = {name.rpartition("-sm_90-")[0] for name in images}
    assert names == {"quantize_rows", "combine", "rank", "scan", "place"}
    install(tmp_path, images, nothing_known)

    found: list[bytes] = []
    theirs: list[bytes] = []
    with hopper.pretended() as gpu:
        calls: list[tuple[Any, ...]] = []
        launch = launches._launch

        def noted(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
            calls.append((kernel, programs, arguments, options))
            launch(kernel, programs, *arguments, **options)

        nothing_known.setattr(launches, "_launch", noted)
        with no_compiler():
            for t in tokens:
                layer(t)()
        nothing_known.setattr(launches, "_launch", launch)
        launches._KNOWN.clear()
        gpu.launched.clear()
        load = hopper.handle_of

        def loaded(what: Any) -> int:
            found.append(what[0].image)
            return load(what)

        with no_compiler():
            nothing_known.setattr(hopper, "handle_of", loaded)
            for kernel, programs, arguments, options in calls:
                launches.launch(kernel, programs)(*arguments, **options)
            nothing_known.setattr(hopper, "handle_of", load)
        ours, gpu.launched = gpu.launched, []
        for kernel, programs, arguments, options in calls:
            theirs.append(kernel[(programs,)](*arguments, **options).asm["cubin"])
    assert len(calls) == len(theirs) == 7
    assert [replace(one, kernel=0) for one in ours] == [replace(one, kernel=0) for one in gpu.launched]
    # The weighted sum of few tokens begins early: one image, loaded for both.
    assert (len(found), len(set(found))) == (7, 6)
    assert list(dict.fromkeys(found)) == list(dict.fromkeys(theirs))


@pytest.mark.parametrize("gpu", [Gpu("sm_90a", 132), Gpu("sm_100a", 148)], ids=str)
def test_a_models_passes_are_those_of_any_number_of_tokens(gpu: Gpu) -> None:
    asked = build_cubins.asked_of_model("DeepSeek-V3 / 8", gpu, 256)
    experts, top_k, hidden, intermediate, _ = build_cubins.MODELS["DeepSeek-V3 / 8"]
    w13 = build_cubins.weights(experts, 2 * intermediate, hidden)
    w2 = build_cubins.weights(experts, hidden, intermediate)
    backend = build_cubins.BACKENDS[gpu.arch]
    for t in [9, 33, *random.Random(5).sample(range(1, 257), 12)]:
        x, ids = torch.empty(t, hidden, dtype=torch.bfloat16), torch.zeros(t, top_k, dtype=torch.int64)
        with build_cubins.passes_listed() as passes:
            call = partial(moe, x, ids, torch.ones(t, top_k), w13, w2, backend=backend)
            kernels, problems = kernels_of([Rehearsal(call)], gpu)
        assert not problems
        assert kernels
        assert passes.keys() <= asked.passes.keys(), t
        assert {*kernels} <= asked.kernels.keys(), t


# --- anything else is compiled ---------------------------------------------------------------------------


def module(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of Triton kernels with this text."""
    (folder / "some_kernels.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "some_kernels", raising=False)
    importlib.invalidate_caches()
    return importlib.import_module("some_kernels")


def tensors(dtype: torch.dtype = torch.float32, offset: int = 0) -> list[torch.Tensor]:
    return [torch.empty(80, dtype=dtype)[offset : offset + 64] for _ in range(3)]


@pytest.fixture
def one_shipped(nothing_known: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Any, list[Any]]:
    """A kernel that is shipped for float32, with its arguments."""
    (tmp_path / "modules").mkdir()
    kernel = module(tmp_path / "modules", KERNELS, nothing_known).kernel
    arguments = [*tensors(), 64, 7]
    given = tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in arguments)
    one = build_cubins.Pass("some_kernels", "kernel", given, OPTIONS, launches._facts(kernel, tuple(arguments)))
    install(tmp_path / "package", build_cubins.image_of_pass(one, 90), nothing_known)
    return kernel, arguments


def found(kernel: Any, arguments: list[Any], capability: tuple[int, int] = (9, 0), **options: Any) -> bool:
    """Whether a launch on a GPU, else a Hopper one, finds the kernel; otherwise Triton is asked."""
    with hopper.pretended() as gpu, no_compiler(), mock.patch.object(devices, "capability_of", return_value=capability):
        try:
            launches.launch(kernel, 5)(*arguments, **OPTIONS | options)
        except AssertionError:
            assert not gpu.launched
            return False
        return len(gpu.launched) == 1


def test_a_kernel_of_other_arguments_is_compiled(one_shipped: tuple[Any, list[Any]]) -> None:
    kernel, arguments = one_shipped
    x, bias, out, rows, columns = arguments
    assert found(kernel, arguments)
    assert found(kernel, [*tensors(), 1, -9])  # other addresses and numbers of the same kind
    for others in (
        [tensors(torch.float16)[0], bias, out, rows, columns],
        [tensors(offset=1)[0], bias, out, rows, columns],
        [x, None, out, rows, columns],
        [x, bias, out, 1 << 40, columns],
        [x, bias, out, rows, 1],
        [x, bias, out, rows, 32],
        [x, bias, out, rows, 1 << 33],
    ):
        assert not found(kernel, others), others[3:]
    for options in ({"BLOCK": 64}, {"OUT": triton.language.float16}, {"num_warps": 2}, {"enable_fp_fusion": False}):
        assert not found(kernel, arguments, **options), options


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "another version of Triton": lambda patch: patch.setattr(triton, "__version__", "3.5.9"),
    "debugging": lambda patch: patch.setattr(knobs.runtime, "debug", True),
    "always compiling": lambda patch: patch.setattr(knobs.compilation, "always_compile", True),
    "kernels of the user's": lambda patch: patch.setattr(knobs.compilation, "override", True),
    "an environment": lambda patch: patch.setenv("DISABLE_LLVM_OPT", "1"),
    "a default of fusion": lambda patch: patch.setattr(knobs.language, "default_fp_fusion", False),
    "no cubins": lambda patch: patch.setenv("PADLESS_CUBINS", "0"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_kernel_that_something_else_is_asked_of_is_compiled(
    change: str, one_shipped: tuple[Any, list[Any]], nothing_known: pytest.MonkeyPatch
) -> None:
    assert found(*one_shipped)
    CHANGES[change](nothing_known)
    assert not found(*one_shipped)


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_a_kernel_for_another_gpu_is_compiled(capability: tuple[int, int], one_shipped: tuple[Any, list[Any]]) -> None:
    assert not found(*one_shipped, capability=capability)


@pytest.mark.parametrize(
    ("old", "new"),
    [("FACTOR)", "FACTOR)  "), ("x * FACTOR", "x + FACTOR"), ("constexpr(3)", "constexpr(4)"), ("x += ", "x -= ")],
    ids=["nothing", "what it calls", "a constant", "itself"],
)
def test_a_kernel_of_other_sources_is_compiled(
    old: str, new: str, one_shipped: tuple[Any, list[Any]], nothing_known: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    text = KERNELS.replace(old, new)
    kernel = module(tmp_path / "other", text, nothing_known).kernel
    assert found(kernel, one_shipped[1]) == (text == KERNELS)


def test_a_name_does_not_depend_on_what_the_process_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton's key of a kernel does."""
    from padless.moe.triton.quantize_rows import _quantize_rows as kernel
    from padless.moe.triton.topk import _topk as other

    reached: list[Any] = [
        one for one in gc.get_objects() if issubclass(type(one), JITCallable) and hasattr(one, "_hash_lock")
    ]
    names, keys = set(), set()
    for first in (kernel, other):
        for function in reached:
            monkeypatch.setattr(function, "hash", None)
        compiled.sources_of.cache_clear()
        keys.add((first.cache_key, kernel.cache_key)[1])
        names.add(compiled.name_of(kernel, 90, [], {}))
    assert len(names) == 1
    assert len(keys) == 2, "Triton's key no longer depends on the order: it can be used again"


def test_a_damaged_image_is_compiled_with_a_warning(one_shipped: tuple[Any, list[Any]], tmp_path: Path) -> None:
    (path,) = (tmp_path / "package" / shipped.PACKAGE).glob("kernel-sm_90-*.cubin")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="is damaged"):
        assert not found(*one_shipped)
    path.unlink()
    with pytest.warns(RuntimeWarning, match="is damaged"):
        assert not found(*one_shipped)


def test_kernels_of_another_triton_are_added_and_those_of_another_nvrtc_refused(tmp_path: Path) -> None:
    shipped.write(tmp_path, "13.0", {"a": (b"1", {"log": ""})}, "0.0")
    shipped.write(tmp_path, "13.0", {"b": (b"2", {"entry": "e"})}, "0.0")
    index = json.loads((tmp_path / shipped.PACKAGE / "index.json").read_text())
    assert index["kernels"].keys() == {"a", "b"}
    with pytest.raises(ValueError, match=r"is of NVRTC 13\.0 and this one is 13\.1"):
        shipped.write(tmp_path, "13.1", {}, "0.0")


def test_what_padless_does_not_launch_is_not_shipped(nothing_known: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel = module(tmp_path, KERNELS, nothing_known).kernel
    given = (*(torch.float32,) * 3, 64, 7)
    assert compiled.compile_for(kernel, 90, given, OPTIONS) is not None
    assert compiled.compile_for(kernel, 90, given, OPTIONS | {"num_ctas": 2}) is None
