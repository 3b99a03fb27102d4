"""Errors planted in the device code that `padless verify --against-emulator` compares with the emulator.

In the GPU's place stands an emulated device that runs an edited copy of the sources; what it is compared with, the
emulator of the check, runs the sources as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from padless.emulator.fake_driver import EmulatedDriver, standing_in
from padless.kernels import launch
from padless.runtime import jit
from padless.verify.emulator import products
from padless.verify.emulator.kernels import settings_of
from padless.verify.fuzz.place import Place, place_of
from padless.verify.fuzz.problem import Options, Problem
from support.emulator_cuda import compile_ptx
from support.emulator_variants import Edit, replace_nth

pytestmark = pytest.mark.usefixtures("one_thread")

ARCH, BACKEND = "sm_90a", "emulator"
# One bit of a lane's sum of 128 of K, and of what NVFP4's scales are multiplied with.
SUM = (
    "sm90_fp8/multiply.cuh",
    "d[w][4 * i + 0] = fmaf(p[4 * i + 0],",
    "d[w][4 * i + 0] = fmaf(__uint_as_float(__float_as_uint(p[4 * i + 0]) ^ (i == 0 && lane == 0)),",
)
NVFP4 = ("sm90_bf16/dequantize.cuh", "mul_f16x2(halves, 0x54005400)", "mul_f16x2(halves, 0x54005401)")


class Here:
    """A pool of processes that is this one: it computes what it is given at once, the same once."""

    def __init__(self) -> None:
        self._known: dict[str, Future[Any]] = {}

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        found = self._known.setdefault(repr(arguments), Future())
        if not found.done():
            found.set_result(function(*arguments))
        return found


def smallest(check: str, *pairs: tuple[str, str]) -> list[Options]:
    """Of each pair of formats the problem of the check that takes the emulator least."""
    jobs = products.COMPARISONS[check].jobs(ARCH)
    jobs = sorted((job for job in jobs if sum(job[2]["sizes"])), key=lambda job: products.cost(*job))
    return [next(o for _, _, o in jobs if (o["a"], o["b"]) == pair) for pair in pairs]


@pytest.fixture
def agrees(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The check of these problems with a GPU whose sources have these edits."""

    pool = Here()

    def check(lines: list[Options], *edits: Edit) -> str:
        gpu, texts, device = place_of(BACKEND), dict(jit.sources()), EmulatedDriver(ARCH)
        for file, old, new in edits:
            texts[file] = replace_nth(texts[file], old, new, 0, file)
        computed, compiled = products.computed, launch.compile_kernel

        def edited(source: str, prelude: str, arch: str, kind: str) -> Any:
            image = compile_ptx(prelude + texts[source], source, arch.removeprefix("sm_"), texts)
            return replace(compiled(source, prelude, arch, kind), image=image)

        def on_the_gpu(call: str, o: Options, place: Place) -> Any:
            if place is not gpu:
                return computed(call, o, place)
            with monkeypatch.context() as there, standing_in(device, ARCH), settings_of(BACKEND):
                there.setattr(launch, "compile_kernel", edited if edits else compiled)
                return computed(call, o, place)

        @contextmanager
        def here(workers: int | None) -> Iterator[Here]:
            yield pool

        with monkeypatch.context() as patch:
            patch.setattr(products, "computed", on_the_gpu)
            patch.setattr(products, "place_of", lambda backend: gpu if backend == "cuda" else place_of(backend))
            patch.setattr(products, "cuda_driver", lambda: SimpleNamespace(arch=ARCH))
            patch.setattr(products, "worker_pool", here)
            return products.compare("grouped_gemm", lambda arch: lines)

    return check


def test_a_sum_of_another_bit_is_found(agrees: Callable[..., str]) -> None:
    lines = smallest("emulator agrees", ("FP8_BLOCK", "FP8_BLOCK"))
    assert "1 problems, " in agrees(lines)
    with pytest.raises(AssertionError, match=r"1 wrong: .* the emulator's bits"):
        agrees(lines, SUM)


def test_a_format_of_another_bit_is_found_and_no_other(agrees: Callable[..., str]) -> None:
    pairs = ("FP8_BLOCK", "MXFP4"), ("FP8_BLOCK", "NVFP4")
    lines = smallest("emulator agrees on formats", *pairs)
    assert "2 problems, " in agrees(lines)
    with pytest.raises(AssertionError, match=r"1 wrong: .* the emulator's bits") as error:
        agrees(lines, NVFP4)
    assert str(Problem("grouped_gemm", lines[1])) in str(error.value)
