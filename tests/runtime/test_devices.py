"""Availability of backends, and the reason where one is missing."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from types import SimpleNamespace

import pytest
import torch

import padless
from padless.runtime import devices, driver, jit
from padless.runtime.architecture import BY_CAPABILITY

# `padless.backends` is the function; the module is what it was defined in.
MODULE = importlib.import_module("padless.runtime.devices")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine on which everything is there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA Pretended")
    monkeypatch.setattr(driver, "cuda_driver", lambda: object())
    monkeypatch.setattr(jit, "nvrtc_version", lambda: "13.0")
    return monkeypatch


def test_all_are_known() -> None:
    found = padless.backends()
    assert list(found) == ["cuda", "emulator", "emulator:sm_100a", "reference"] == list(MODULE.NAMES)
    for name, backend in found.items():
        assert backend.name == name
        assert isinstance(backend.available, bool)
        assert len(backend.reason) > 10


def test_the_reference_is_always_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise ImportError("no NVRTC")

    monkeypatch.setattr(jit, "nvrtc_version", missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = padless.backends()
    assert [name for name, backend in found.items() if backend.available] == ["reference"]
    for name in ("cuda", "emulator", "emulator:sm_100a"):
        assert found[name].reason != ""
    assert "NVRTC cannot be loaded (no NVRTC)" in found["emulator"].reason
    assert "install nvidia-cuda-nvrtc" in found["emulator"].reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_this_machine_has_no_gpu() -> None:
    assert padless.backends()["cuda"] == MODULE.Backend("cuda", False, "torch sees no CUDA GPU")


def test_a_hopper_gpu_is_used(hopper: pytest.MonkeyPatch) -> None:
    cuda = padless.backends()["cuda"]
    assert cuda.available
    assert cuda.reason == "NVIDIA Pretended, kernels compiled with NVRTC 13.0, verified on H200"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (99, 0)])
def test_another_architecture_is_named(hopper: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    hopper.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    cuda = padless.backends()["cuda"]
    assert not cuda.available
    said, listed = cuda.reason.split("; the kernels need one of ")
    assert said == f"NVIDIA Pretended has compute capability {capability}"
    assert listed.startswith("9.0 (Hopper), 10.0 (Blackwell), ")
    assert [each.split(" ")[0] for each in listed.split(", ")] == [f"{x}.{y}" for x, y in BY_CAPABILITY]


def test_a_missing_driver_is_named(hopper: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise driver.DriverError("no CUDA driver on this machine (libcuda.so.1)")

    hopper.setattr(driver, "cuda_driver", missing)
    assert padless.backends()["cuda"] == MODULE.Backend("cuda", False, "no CUDA driver on this machine (libcuda.so.1)")


@pytest.mark.parametrize(
    "error", [ImportError("No module named 'cuda'"), RuntimeError("libnvrtc.so.13 is broken"), OSError("?")]
)
def test_a_missing_compiler_is_named(hopper: pytest.MonkeyPatch, error: Exception) -> None:
    def missing() -> str:
        raise error

    hopper.setattr(jit, "nvrtc_version", missing)
    for name in ("cuda", "emulator", "emulator:sm_100a"):
        backend = padless.backends()[name]
        assert not backend.available
        assert str(error) in backend.reason
        assert "install" in backend.reason


def test_an_emulator_that_cannot_be_imported_is_named(hopper: pytest.MonkeyPatch) -> None:
    hopper.setitem(sys.modules, "padless.emulator", None)  # importing it raises ImportError
    hopper.delitem(sys.modules, "padless.emulator.fake_driver", raising=False)
    for name in ("emulator", "emulator:sm_100a"):
        emulator = padless.backends()[name]
        assert (emulator.name, emulator.available) == (name, False)
        assert "cannot be imported" in emulator.reason


def test_every_emulator_says_what_it_emulates() -> None:
    found = padless.backends()
    assert "Hopper" in found["emulator"].reason
    assert "Blackwell" in found["emulator:sm_100a"].reason


def test_one_emulated_device_per_architecture() -> None:
    """However it is asked for, so that settings made on it hold for the backend's launches."""
    from padless.emulator.fake_driver import driver_of, emulated_driver

    hopper, blackwell = driver_of("emulator"), driver_of("emulator:sm_100a")
    assert hopper is emulated_driver() is emulated_driver("sm_90a")
    assert blackwell is emulated_driver("sm_100a")
    assert (hopper.arch, blackwell.arch) == ("sm_90a", "sm_100a")
    with blackwell.configured(seed=5):
        assert (hopper.settings.seed, blackwell.settings.seed) == (0, 5)
    with pytest.raises(ValueError, match="arch is 'sm_80'; allowed: 'sm_90a', 'sm_100a'"):
        emulated_driver("sm_80")


def test_the_device_of_a_backend() -> None:
    from padless.emulator.fake_driver import emulated_driver

    t = torch.empty(1)
    assert devices.device_of("emulator", t) is emulated_driver("sm_90a")
    assert devices.device_of("emulator:sm_100a", t) is emulated_driver("sm_100a")
    with pytest.raises(ValueError, match=r"backend is 'tpu'; allowed: None, 'cuda', 'emulator'"):
        devices.device_of("tpu", t)


def test_the_emulator_takes_no_tensors_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    with pytest.raises(
        ValueError, match=r"backend is 'emulator' and the tensors are on .*; move them or leave it None"
    ):
        devices.device_of("emulator", torch.empty(1))


def test_the_chosen_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    t = torch.empty(1)
    assert devices.chosen_backend(None, t) == "reference"
    assert devices.chosen_backend("emulator", t) == "emulator"
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    assert devices.chosen_backend(None, t) == "cuda"


def test_the_default_on_the_cpu_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the emulator, which would be very slow, and not an error."""
    a = padless.quantize(torch.randn(4, 128), padless.FP8_BLOCK)
    b = padless.quantize(torch.randn(1, 8, 128), padless.FP8_BLOCK, kind="weight")
    offs = padless.group_offsets([4])
    calls = []
    module = importlib.import_module("padless.ops.grouped_gemm")
    product = module.grouped_gemm_reference
    monkeypatch.setattr(
        module, "grouped_gemm_reference", lambda *arguments, **named: (calls.append(1), product(*arguments, **named))[1]
    )
    by_default = padless.grouped_gemm(a, b, offs)
    assert calls == [1]
    assert torch.equal(by_default, padless.grouped_gemm(a, b, offs, backend="reference"))


def test_the_tensors_device_is_asked(hopper: pytest.MonkeyPatch) -> None:
    """Not the current one, nor the first: a GPU that no kernel is for may be among them."""
    hopper.setattr(devices, "_cuda_of", cache(devices._cuda_of.__wrapped__))
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index else (7, 5))
    hopper.setattr(driver, "cuda_driver", lambda index=0: SimpleNamespace(arch="sm_90a", index=index))
    first, second = (SimpleNamespace(is_cuda=True, device=torch.device("cuda", i)) for i in (0, 1))
    for _ in range(2):
        assert devices.device_of("cuda", second).index == devices.hopper_driver(second).index == 1
        assert devices.hopper_driver(first) is None
        with pytest.raises(ValueError, match=r"backend 'cuda' is not available here: .* compute capability \(7, 5\)"):
            devices.device_of("cuda", first)


def test_the_driver_of_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """None on a CPU, on another GPU, and where kernels cannot be compiled."""
    t = torch.empty(1)
    drivers = {arch: SimpleNamespace(arch=arch) for arch in ("sm_90a", "sm_100a")}
    there = MODULE.Backend("cuda", True, "pretended")
    monkeypatch.setattr(devices, "_cuda_of", lambda device: there)
    monkeypatch.setattr(devices.driver, "cuda_driver", lambda device: drivers["sm_90a"])
    assert devices.hopper_driver(t) is None
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    assert devices.hopper_driver(t) is drivers["sm_90a"]
    monkeypatch.setattr(devices.driver, "cuda_driver", lambda device: drivers["sm_100a"])
    assert devices.hopper_driver(t) is None
    there = MODULE.Backend("cuda", False, "taken away")
    assert devices.hopper_driver(t) is None
