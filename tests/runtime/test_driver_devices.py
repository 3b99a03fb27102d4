"""Calls on the tensors' device, whichever is current in the thread, and which is current afterwards."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from padless.runtime import driver as driver_module
from padless.runtime.driver import CudaDriver, DriverError, LaunchShape
from padless.runtime.jit import CompiledKernel
from padless.runtime.tensor_map import TensorMapSpec
from support import libcuda
from support.libcuda import Stub, in_new_thread

KERNEL = CompiledKernel(b"\x7fELFfake", "cubin", "the_entry", 202_752, 384, 5, 168, 0, 0, "")
CONTEXTS = (0xC0000000000, 0xC0000000001)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return libcuda.built(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture
def stub(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Stub:
    return libcuda.installed(library, monkeypatch)


class On:
    """Stands in for a tensor of a device."""

    def __init__(self, device: int) -> None:
        self.device = torch.device("cuda", device)


def launch_on(driver: CudaDriver, device: int) -> Callable[[int], None]:
    """A launch of a kernel that is loaded on ``device``."""
    arguments: list[Any] = [bytes(256), (0x123456789AB0, 8), (-7, 4)]
    function = driver.load(KERNEL, device)
    return driver.prepare(function, KERNEL, LaunchShape(130, 384, 1), arguments, [On(device)])  # type: ignore[list-item]


def launched_in(stub: Stub) -> list[int]:
    """Contexts of all launches."""
    return [int(context, 16) for context in re.findall(r"cuLaunchKernelEx .*context=(\S+)", "\n".join(stub.calls))]


@pytest.mark.parametrize("current", [0, 1])
def test_the_tensors_decide_and_the_current_device_stays(stub: Stub, current: int) -> None:
    """First calls and repeated ones, of kernels of both devices in turn."""
    stub.library.stub_set_device(current)
    driver = CudaDriver()
    launches = [launch_on(driver, device) for device in (0, 1)]
    assert stub.context == CONTEXTS[current]
    for device in (1, 0, 0, 1, 1):
        launches[device](0x10)
        assert stub.context == CONTEXTS[current]
    assert launched_in(stub) == [CONTEXTS[device] for device in (1, 0, 0, 1, 1)]


def test_on_the_current_device_a_launch_is_one_call(stub: Stub) -> None:
    stub.library.stub_set_device(1)
    launch = launch_on(CudaDriver(), 1)
    stub.forget()
    launch(0x10)
    launch(0x20)
    assert [call.split()[0] for call in stub.calls] == ["cuLaunchKernelEx"] * 2


@pytest.mark.parametrize("device", [0, 1])
def test_a_thread_without_a_context_has_none_afterwards(stub: Stub, device: int) -> None:
    driver = CudaDriver()
    launch = launch_on(driver, device)

    def work() -> None:
        assert stub.context is None
        launch_on(driver, device)(0x10)
        launch(0x10)
        driver.encode(TensorMapSpec(0, 16, (1,), (), (16,)))
        assert stub.context is None

    in_new_thread(work)
    assert launched_in(stub) == [CONTEXTS[device]] * 2


def test_a_device_that_torch_names_before_its_context_is_current(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes a device without a context current lazily: what it names need not be what the driver has."""
    driver = CudaDriver()
    launch = launch_on(driver, 1)
    monkeypatch.setattr(driver_module, "current_device", lambda: 1)
    launch(0x10)
    assert launched_in(stub) == [CONTEXTS[1]]
    assert stub.context == CONTEXTS[0]


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("name", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernelEx"])
def test_the_current_device_stays_after_an_error(stub: Stub, name: str, device: int) -> None:
    driver = CudaDriver()
    stub.fail(name, 1)
    with pytest.raises(DriverError, match=f"{name}.*CUresult 1"):
        launch_on(driver, device)(0x10)
    assert stub.context == CONTEXTS[0]


def test_every_device_has_a_driver_of_its_architecture(stub: Stub) -> None:
    driver_module._driver_of.cache_clear()
    try:
        first, second = driver_module.cuda_driver(0), driver_module.cuda_driver(1)
        assert (first.arch, second.arch) == ("sm_103a", "sm_90a")
        assert driver_module.cuda_driver(1) is second
        assert driver_module.cuda_driver() is first
    finally:
        driver_module._driver_of.cache_clear()
