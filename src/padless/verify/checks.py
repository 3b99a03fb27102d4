"""A check: calls, and what must hold of their results, on any place. Its rehearsal is the check, where nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from padless.kernels.table import kernels_arch
from padless.runtime.choices import BackendName
from padless.runtime.devices import backend_on_cpu
from padless.testing.compile_ahead import BOTH_IMAGES, Rehearsal
from padless.verify.emulator.kernels import backend_of, settings_of
from padless.verify.fuzz.judge import Discarding, Judge
from padless.verify.fuzz.place import Place, place_of


@dataclass(frozen=True)
class Check:
    """calls: makes the calls, and says what is wrong to the place's judge. parts: into how many its rehearsal is cut, 0
    where Triton alone compiles for it. gpu: the index of the one that tensors are on."""

    calls: Callable[[Place], None]
    parts: int = 1
    gpu: int = 0

    def __call__(self) -> str:
        """On the GPU. Raises AssertionError with what is wrong."""
        if self.gpu and torch.cuda.device_count() <= self.gpu:
            return f"this process sees {torch.cuda.device_count()} GPU"
        return self.on("cuda")

    def on(self, backend: BackendName, arch: str | None = None) -> str:
        """Sentence of what was compared, by any backend. Raises AssertionError with what is wrong.

        arch: whose kernels the check is about, None for the backend's own.
        """
        with settings_of(backend), backend_on_cpu("reference" if backend == "cuda" else backend):
            place = replace(place_of(backend, self.gpu), judge=Judge(any_nan=False))
            place.arch = place.arch if arch is None else arch
            self.calls(place)
            return place.judge.outcome()

    def rehearsals(self, arch: str) -> list[Rehearsal]:
        """The check itself on the CPU, in parts of about a second."""
        return [Rehearsal(partial(rehearse, self, arch, i)) for i in range(self.parts)]


@dataclass(frozen=True)
class Comparison:
    """A check against the emulator. emulate: makes a job's calls by the emulator; jobs: on an architecture."""

    check: Callable[[], str]
    jobs: Callable[[str], list[tuple[Any, ...]]]
    emulate: Callable[..., object]
    parts = 1

    def __call__(self) -> str:
        return self.check()

    def rehearsals(self, arch: str) -> list[Rehearsal]:
        return [Rehearsal(partial(self.emulate, *job), BOTH_IMAGES) for job in self.jobs(arch)]


def rehearse(check: Check, arch: str, part: int) -> None:
    """The calls of a part of a check where nothing is launched and results are discarded; see `compile_ahead`."""
    backend = backend_of(arch)
    with settings_of(backend), backend_on_cpu(backend):
        check.calls(Place(torch.device("cpu"), backend, kernels_arch(arch), Discarding(), (part, check.parts)))


def small_of(module: str) -> Check:
    """The small launches of a module, for compute-sanitizer."""
    name, *calls = module.split()
    found = import_module(name).small_of(*calls)
    assert isinstance(found, Check)
    return found


def rehearsals_of(arch: str, checks: Iterable[Callable[[], str]], modules: Iterable[str]) -> list[Rehearsal]:
    """The calls of these checks and of these modules of small launches."""
    both = [*checks, *map(small_of, modules)]
    return [
        rehearsal for check in both if isinstance(check, Check | Comparison) for rehearsal in check.rehearsals(arch)
    ]
