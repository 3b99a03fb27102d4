"""Checks of `padless verify` on Blackwell beside the grouped routes, here in the emulator, and that it sees errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from padless.emulator.fake_driver import emulated_driver
from padless.testing.compile_ahead import Gpu, kernels_of
from padless.verify import blackwell as verify_blackwell
from padless.verify import run as verify
from padless.verify import small as verify_small
from padless.verify.blackwell import DENSE_CHECK, LISTS_CHECK
from padless.verify.checks import Check

EMULATED = "emulator:sm_100a"


@pytest.fixture(autouse=True)
def _four_multiprocessors() -> Iterator[None]:
    with emulated_driver("sm_100a").configured(num_sms=4, checks=False, arithmetic="fast"):
        yield


@pytest.mark.parametrize("count", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_dense_products_are_checked(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_blackwell, "PRODUCTS", count)
    assert "elements" in DENSE_CHECK.on(EMULATED)


@pytest.mark.parametrize("count", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_lists_are_checked(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_blackwell, "PROBLEM_LISTS", count)
    assert "elements" in LISTS_CHECK.on(EMULATED)


@pytest.mark.parametrize("check", [DENSE_CHECK, LISTS_CHECK])
def test_one_wrong_bit_is_seen(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_blackwell, "PRODUCTS", 1)
    monkeypatch.setattr(verify_blackwell, "PROBLEM_LISTS", 1)
    right = verify_blackwell._product

    def wrong(a: object, b: object) -> torch.Tensor:
        product = right(a, b)
        if product.numel():
            product.view(-1)[-1] += 2.0 ** torch.frexp(product.view(-1)[-1]).exponent
        return product

    monkeypatch.setattr(verify_blackwell, "_product", wrong)
    with pytest.raises(AssertionError, match=r"problem 0, .*the exact product's bits"):
        check.on(EMULATED)


def test_verify_runs_them_on_blackwell_alone() -> None:
    names = {"dense MXFP8", "lists of problems"}
    for arch in ("sm_100a", "sm_103a"):
        assert names <= set(verify.jobs_of(arch)[0])
        assert not names & set(verify.jobs_of(arch, ["quantizers agree"])[0])
    assert not names & set(verify.jobs_of("sm_90a")[0])


def test_the_sanitizer_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_small, "small_routes", lambda arch: [])
    monkeypatch.setattr(verify_small, "quant_routes", lambda arch: [])
    sources = [rehearsed(arch) for arch in ("sm_100a", "sm_90a")]
    assert all(any(kernel in source for source in sources[0]) for kernel in ("sm100_dense", "sm100_grouped"))
    assert sources[1] == set()


def rehearsed(arch: str) -> set[str]:
    """Sources of what the small launches ask for."""
    kernels, problems = kernels_of(verify_small.SMALL.rehearsals(arch), Gpu(arch, 148))
    assert not problems
    return {kernel.source for kernel in kernels}
