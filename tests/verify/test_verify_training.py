"""The training layer's check of `padless verify`, as far as a CPU runs it, and that it notices what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from padless.nn import experts_function
from padless.testing.compile_ahead import Gpu, kernels_of
from padless.verify.fuzz.place import place_of
from padless.verify.training import layer as check


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "PROBLEMS", ((144, 128),))
    monkeypatch.setattr(check, "CHECKED", {name: check.CHECKED[name] for name in ("fp8", "bf16")})


@pytest.mark.slow
def test_on_the_cpu() -> None:
    assert "elements" in check.CHECK.on("reference")


def planted_dgrad(monkeypatch: pytest.MonkeyPatch) -> None:
    right = experts_function.product

    def moved(*arguments: Any, transposed: bool, zero_tail: bool) -> torch.Tensor:
        found = right(*arguments, transposed=transposed, zero_tail=zero_tail)
        return found.roll(1, 0) if transposed else found

    monkeypatch.setattr(experts_function, "product", moved)


def planted_wgrad(monkeypatch: pytest.MonkeyPatch) -> None:
    right = experts_function.joined_columns

    def moved(saved: Any, facts: Any, offs: torch.Tensor) -> Any:
        return right([saved[0], saved[1].roll(1, 0), *saved[2:]], facts, offs)

    monkeypatch.setattr(experts_function, "joined_columns", moved)


def planted_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is not twice the same."""
    right, calls = experts_function.product, [0]

    def differing(*arguments: Any, **options: Any) -> torch.Tensor:
        calls[0] += 1
        return right(*arguments, **options) * (1 + 2**-7 * (calls[0] > 12))

    monkeypatch.setattr(experts_function, "product", differing)


def planted_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every microbatch overwrites."""
    from padless.nn import weight_gradient

    right = weight_gradient.wgrad_into
    monkeypatch.setattr(weight_gradient, "wgrad_into", lambda *a, accumulate: right(*a, accumulate=False))


def test_microbatches_that_overwrite_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, place = check.draw(144, 128, 0), place_of("reference")
    check.check_main_grad(place, problem, check.CHECKED["fp8"])
    place.judge.outcome()
    planted_store(monkeypatch)
    check.check_main_grad(place, problem, check.CHECKED["fp8"])
    with pytest.raises(AssertionError, match="main_grad"):
        place.judge.outcome()


@pytest.mark.parametrize("plant", [planted_dgrad, planted_wgrad, planted_chance])
def test_what_is_wrong_is_noticed(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CHECKED", {"fp8": check.CHECKED["fp8"]})
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check.CHECK.on("reference")


def test_what_the_rehearsal_lists() -> None:
    """Products of both directions, the activating one, and weight gradients of both modes, stored and added."""
    kernels, problems = kernels_of(check.CHECK.rehearsals("sm_90a"), Gpu("sm_90a", 132))
    assert not problems
    names = " ".join(str(kernel) for kernel in kernels)
    assert "sm90_fp8_wgrad" in names
    assert len(kernels) >= 4
