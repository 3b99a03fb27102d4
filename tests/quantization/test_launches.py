"""Launches that skip Triton's search for a compiled kernel: the same kernel, with the same arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from padless.quantization.triton import launches  # noqa: E402


class _Utils:
    def load_binary(self, *arguments: Any) -> tuple[int, ...]:
        return 1, 2, 3, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 228000, "multiprocessor_count": 132}


class _Driver:
    """A Hopper GPU that writes down its launches: hash of the kernel's code, number of programs, arguments."""

    def __init__(self) -> None:
        self.utils = _Utils()
        self.launched: list[tuple[Any, ...]] = []

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(programs: int, *rest: Any) -> None:
            # Behind the other two sizes of the grid: stream, function, metadata of two kinds, two hooks, arguments.
            self.launched.append((metadata.hash, programs, rest[:2], rest[2], *rest[8:]))

        return launch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 77

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


_GPU = _Driver()  # one, since Triton keeps a compiled kernel's launcher


@triton.jit(do_not_specialize=["rows"])
def _kernel(x_ptr, bias_ptr, more_ptr, out_ptr, rows, columns, factor, BLOCK: tl.constexpr, OUT: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at * columns, mask=at < rows, other=0.0) * factor
    if bias_ptr is not None:
        x += tl.load(bias_ptr + at, mask=at < rows, other=0.0)
    if more_ptr is not None:
        x *= tl.load(more_ptr + at, mask=at < rows, other=0.0)
    tl.store(out_ptr + at, x.to(OUT), mask=at < rows)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    monkeypatch.setattr(driver, "_active", _GPU)
    monkeypatch.setattr(launches, "_KNOWN", {})
    _GPU.launched = []
    return _GPU


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


def test_the_second_launch_is_the_first_one_again(gpu: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel, stream and arguments as by Triton's own search, which the second round does not reach."""
    calls = _calls()
    for arguments, options in calls:
        _kernel[(5,)](*arguments, **options)
    wanted, gpu.launched = gpu.launched, []
    assert len({launched[0] for launched in wanted}) == len(calls) - 1
    for arguments, options in calls:
        launches.launch(_kernel, 5)(*arguments, **options)
    monkeypatch.setattr(JITFunction, "run", lambda *arguments, **options: pytest.fail("Triton searched again"))
    for arguments, options in reversed(calls):
        launches.launch(_kernel, 5)(*arguments, **options)
    assert _comparable(gpu.launched[: len(calls)]) == _comparable(wanted)
    assert _comparable(gpu.launched[len(calls) :]) == _comparable(reversed(wanted))


def test_other_tensors_of_the_same_kind_are_launched_with(gpu: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"BLOCK": 32, "OUT": tl.float32, "num_warps": 1}
    launches.launch(_kernel, 5)(*_tensors(), 64, 3, 0.5, **options)
    monkeypatch.setattr(JITFunction, "run", lambda *arguments, **options: pytest.fail("Triton searched again"))
    others = _tensors()
    launches.launch(_kernel, 6)(*others, 65, 7, 1.5, **options)
    assert gpu.launched[1][1] == 6
    assert _comparable(gpu.launched)[1][4:11] == (*(t.data_ptr() for t in others), 65, 7, 1.5)


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


def _comparable(launched: Any) -> list[tuple[Any, ...]]:
    return [tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in each) for each in launched]
