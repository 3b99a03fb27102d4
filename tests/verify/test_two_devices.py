"""The check of two GPUs in one process, without any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from padless.verify import two_devices
from padless.verify.checks import Check
from padless.verify.fuzz.place import Place, place_of
from padless.verify.two_devices import CHECK, check_two_devices, parts_of


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The index of the current one of two GPUs."""
    found = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: found.__setitem__(0, index))
    return found


def checked(monkeypatch: pytest.MonkeyPatch, **parts: Callable[[Place], object]) -> str:
    monkeypatch.setattr(two_devices, "parts_of", lambda arch: {name: Check(part) for name, part in parts.items()})  # type: ignore[arg-type]
    place = replace(place_of("reference"), arch="sm_90a")
    check_two_devices(place)
    return place.judge.outcome()


def test_parts_are_made_twice_while_the_first_is_current(current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    calls = {name: lambda place, name=name: seen.append((name, *current)) for name in ("first", "second")}
    checked(monkeypatch, **calls)
    assert seen == [("first", 0), ("first", 0), ("second", 0), ("second", 0)]


def test_a_part_that_leaves_another_current_is_found(current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="bad: cuda:1 was current afterwards, and cuda:0 before"):
        checked(monkeypatch, good=lambda place: None, bad=lambda place: current.__setitem__(0, 1))
    assert current == [0]


def test_one_gpu_is_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert CHECK() == "this process sees 1 GPU"


def test_kernels_of_the_architecture_are_launched() -> None:
    assert list(parts_of("sm_100a")) == ["products", "epilogues"]
    assert list(parts_of("sm_90a")) == [
        "products", "epilogues", "grouped_gemm_wgrad", "plain.grouped_gemm", "plain.grouped_gemm_wgrad",
        "fp4_input_gradient", "moe.decode", "layer in graphs",
    ]  # fmt: skip
    assert CHECK.gpu == 1
