"""Launches that skip Triton's search for a compiled kernel: the same kernel, with the same arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from padless.quantization.triton import launches  # noqa: E402
from padless.quantization.triton.compiled import Description  # noqa: E402
from support.hopper import Gpu  # noqa: E402


@triton.jit(do_not_specialize=["rows"])
def _kernel(x_ptr, bias_ptr, more_ptr, out_ptr, rows, columns, factor, BLOCK: tl.constexpr, OUT: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at * columns, mask=at < rows, other=0.0) * factor
    if bias_ptr is not None:
        x += tl.load(bias_ptr + at, mask=at < rows, other=0.0)
    if more_ptr is not None:
        x *= tl.load(more_ptr + at, mask=at < rows, other=0.0)
    tl.store(out_ptr + at, x.to(OUT), mask=at < rows)


def _tensors(dtype: torch.dtype = torch.float32, offset: int = 0) -> list[torch.Tensor]:
    return [torch.empty(80, dtype=dtype)[offset : offset + 64] for _ in range(4)]


def _calls() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls that differ in one thing each, all of which make another kernel, but for the second: that has other rows."""
    x, bias, more, out = _tensors()
    half = _tensors(torch.float16)
    shifted = _tensors(offset=1)
    constants = {"BLOCK": 32, "OUT": tl.float32, "num_warps": 1}
    return [
        ((x, bias, more, out, 64, 3, 0.5), constants),
        ((x, bias, more, out, 1, 3, 2.5), constants),
        ((x, bias, more, out, 1 << 40, 3, 0.5), constants),
        ((x, bias, more, out, 64, 1, 0.5), constants),
        ((x, bias, more, out, 64, 32, 0.5), constants),
        ((x, bias, more, out, 64, 1 << 33, 0.5), constants),
        ((x, None, more, out, 64, 3, 0.5), constants),
        ((x, bias, None, out, 64, 3, 0.5), constants),
        ((half[0], bias, more, out, 64, 3, 0.5), constants),
        ((shifted[0], bias, more, out, 64, 3, 0.5), constants),
        ((x, bias, more, shifted[3], 64, 3, 0.5), constants),
        ((x, bias, more, out, 64, 3, 0.5), constants | {"BLOCK": 64}),
        ((x, bias, more, out, 64, 3, 0.5), constants | {"OUT": tl.float16}),
        ((x, bias, more, out, 64, 3, 0.5), constants | {"num_warps": 2}),
        ((x, bias, more, out, 64, 3, 0.5), constants | {"enable_fp_fusion": False}),
    ]


def test_the_second_launch_is_the_first_one_again(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel, stream and arguments as by Triton's own search and launcher, which the second round does not reach."""
    calls = _calls()
    for arguments, options in calls:
        _kernel[(5,)](*arguments, **options)
    wanted, gpu.launched = gpu.launched, []
    assert len({launched.kernel for launched in wanted}) == len(calls) - 1
    for arguments, options in calls:
        launches.launch(_kernel, 5)(*arguments, **options)
    assert gpu.launched == wanted
    gpu.launched, by_triton = [], gpu.by_triton
    monkeypatch.setattr(JITFunction, "run", lambda *arguments, **options: pytest.fail("Triton searched again"))
    for arguments, options in reversed(calls):
        launches.launch(_kernel, 5)(*arguments, **options)
    assert gpu.launched == wanted[::-1]
    assert gpu.by_triton == by_triton


def test_other_tensors_of_the_same_kind_are_launched_with(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"BLOCK": 32, "OUT": tl.float32, "num_warps": 1}
    launches.launch(_kernel, 5)(*_tensors(), 64, 3, 0.5, **options)
    others = _tensors()
    _kernel[(6,)](*others, -65, 7, 1.5, **options)
    monkeypatch.setattr(JITFunction, "run", lambda *arguments, **options: pytest.fail("Triton searched again"))
    launches.launch(_kernel, 6)(*others, -65, 7, 1.5, **options)
    assert gpu.launched[2] == gpu.launched[1]
    assert gpu.launched[2].arguments[:4] == tuple(t.data_ptr().to_bytes(8, "little") for t in others)


# What Triton could compile and padless does not launch by itself.
STRANGE: dict[str, dict[str, Any]] = {
    "a cluster": {"num_ctas": 2},
    "scratch memory": {"global_scratch_size": 128},
    "scratch of a profiler": {"profile_scratch_size": 128},
    "a cooperative launch": {"launch_cooperative_grid": True},
}


@pytest.mark.parametrize("strange", [*STRANGE, "another parameter", "fewer parameters", "a double", "a late argument"])
def test_what_is_launched_in_another_way_is_launched_by_triton(gpu: Gpu, strange: str) -> None:
    options = {"BLOCK": 32, "OUT": tl.float32, "num_warps": 1}
    arguments = (*_tensors(), 64, 3, 0.5)
    compiled = _kernel[(5,)](*arguments, **options)
    assert Description.of(compiled, len(arguments)) is not None
    ptx, kinds = compiled.asm["ptx"], dict(compiled.src.signature)
    changed = SimpleNamespace(
        asm={"ptx": ptx}, metadata=SimpleNamespace(**compiled.metadata._asdict() | STRANGE.get(strange, {})),
        src=SimpleNamespace(signature=kinds), function=compiled.function,
    )  # fmt: skip
    if strange == "another parameter":
        changed.asm["ptx"] = ptx.replace(".param .u32", ".param .u64 extra,\n .param .u32", 1)
    elif strange == "fewer parameters":
        changed.asm["ptx"] = ptx.replace("(\n\t.param .u64", "(\n\t.nothing .u64", 1)
    elif strange == "a double":
        kinds["factor"] = "fp64"
    elif strange == "a late argument":
        kinds["OUT"] = "i32"
    assert Description.of(changed, len(arguments)) is None


def test_what_stands_in_for_a_kernel_is_called() -> None:
    called = []

    class StandIn:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: called.append((grid, arguments, options))

    launches.launch(StandIn(), 3)("x", BLOCK=2)
    assert called == [((3,), ("x",), {"BLOCK": 2})]


def test_which_launches_begin_early(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert launches.programmatic(cpu) == launches.programmatic(cpu, early=False) == {"PROGRAMMATIC": 0}
    for capability, early in (((8, 9), False), ((9, 0), True), ((10, 0), True)):
        launches.is_programmatic.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert launches.is_programmatic(gpu) == early
        assert launches.programmatic(gpu).get("launch_pdl", False) == early
        assert launches.programmatic(gpu, early=False) == {"PROGRAMMATIC": 2 * early}
        assert launches.programmatic(gpu, early=False, releases=False) == {"PROGRAMMATIC": early}
    launches.is_programmatic.cache_clear()
    monkeypatch.setenv("PADLESS_PROGRAMMATIC_LAUNCH", "0")
    assert not launches.is_programmatic(gpu)
    launches.is_programmatic.cache_clear()
