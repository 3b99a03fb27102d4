"""The check of two GPUs in one process, without any."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from padless.verify import two_devices
from padless.verify.two_devices import check_two_devices, parts_of


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The index of the current one of two GPUs."""
    found = [0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: found.__setitem__(0, index))
    monkeypatch.setattr(two_devices, "cuda_driver", lambda index: SimpleNamespace(arch="sm_90a"))
    return found


def test_parts_are_made_twice_while_the_first_is_current(current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    parts = {name: lambda name=name: seen.append((name, *current)) for name in ("first", "second")}
    monkeypatch.setattr(two_devices, "parts_of", lambda arch: parts)
    assert check_two_devices() == "first, second: on cuda:1 while cuda:0 was current, which it stayed"
    assert seen == [("first", 0), ("first", 0), ("second", 0), ("second", 0)]


def test_a_part_that_leaves_another_current_is_found(current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"good": lambda: None, "bad": lambda: current.__setitem__(0, 1)}
    monkeypatch.setattr(two_devices, "parts_of", lambda arch: parts)
    with pytest.raises(AssertionError, match="bad: cuda:1 was current afterwards, and cuda:0 before"):
        check_two_devices()
    assert current == [0]


def test_one_gpu_is_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert check_two_devices() == "this process sees one GPU"


def test_kernels_of_the_architecture_are_launched() -> None:
    assert list(parts_of("sm_100a")) == ["kernels"]
    assert list(parts_of("sm_90a"))[1:] == ["wgrad", "bf16.wgrad", "bf16.forward", "layer in graphs"]
    for arch in ("sm_90a", "sm_100a"):
        assert all("cuda:1" in part.args for part in parts_of(arch).values())
