"""Compiles kernels ahead on all cores: those that calls ask for, found by rehearsing the calls on the CPU.

A rehearsal makes the same public calls on operands of the same shapes, on the CPU, by the emulator's backend, down to
where a kernel would be compiled: there it is written down, and nothing is compiled, loaded or launched. What all
rehearsals wrote down is then compiled by a pool of processes into the cache on disk, where the calls find it. A call
compiles for itself what a rehearsal missed or what failed, so nothing of this decides what passes or how fast it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from padless.emulator.fake_driver import EmulatedDriver, standing_in
from padless.kernels.table import kernels_arch
from padless.runtime import jit
from padless.runtime.jit import CompiledKernel, Kernel, compile_kernel
from padless.testing.judge import describe
from padless.testing.processes import worker_pool


class Gpu(NamedTuple):
    """Properties of the GPU that decide the choice of a kernel."""

    arch: str
    num_sms: int


@dataclass(frozen=True)
class Rehearsal:
    """Calls on the CPU by the emulator's backend. ``kinds``: of images that are needed, "cubin" for the GPU."""

    calls: Callable[[], object]
    kinds: tuple[str, ...] = ("cubin",)


BOTH_IMAGES = ("cubin", "ptx")


class RecordingDevice(EmulatedDriver):
    """A device that takes everything and runs nothing. ``num_sms`` None: as many as the emulator is set to."""

    def __init__(self, arch: str, kind: str, num_sms: int | None) -> None:
        super().__init__(arch)
        self.kind = kind
        self._num_sms = num_sms

    def num_sms(self, device: int) -> int:
        return super().num_sms(device) if self._num_sms is None else self._num_sms

    def load(self, kernel: CompiledKernel, device: int) -> Any:
        return None

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        return lambda stream=0: None


@contextmanager
def listing(arch: str, kind: str, num_sms: int | None = None) -> Iterator[dict[Kernel, None]]:
    """In this block this thread's calls of the emulator's backend for ``arch`` compile and run nothing: what they would
    have compiled for a GPU of ``num_sms`` multiprocessors ("cubin") or for the emulator ("ptx") comes into the yielded
    set, in order.
    """
    emulated = kernels_arch(arch)
    device = RecordingDevice(arch if kind == "cubin" else emulated, kind, num_sms)
    with standing_in(device, emulated), jit.listing() as asked:
        yield asked


def kernels_of(rehearsals: Sequence[Rehearsal], gpu: Gpu) -> tuple[list[Kernel], list[str]]:
    """Kernels that the rehearsals ask for, each once, and what kept a rehearsal from its end."""
    found: dict[Kernel, None] = {}
    problems: list[str] = []
    for rehearsal in rehearsals:
        for kind in rehearsal.kinds:
            with listing(gpu.arch, kind, gpu.num_sms if kind == "cubin" else None) as asked:
                try:
                    rehearsal.calls()
                except Exception as error:  # the check will meet it too, and says so
                    problems.append(f"a rehearsal ended with {type(error).__name__}: {error}")
            found |= asked
    return list(found), problems


@dataclass
class Ahead:
    """Kernels compiled ahead. ``problems``: a sentence for each kernel or rehearsal that failed."""

    kernels: set[Kernel]
    problems: list[str]


def _compile(kernel: Kernel) -> None:
    compile_kernel(*kernel)


def _failure(future: Future[Any]) -> str:
    """In a line, what a process failed of; "" when it did not. Raises BrokenProcessPool where the process died."""
    error = future.exception()
    if isinstance(error, BrokenProcessPool):
        raise error
    return "" if error is None else describe(error)


def compile_ahead(
    rehearsals: Sequence[Rehearsal],
    gpu: Gpu,
    progress: Callable[[int, int], None] = lambda done, total: None,
    workers: int | None = None,
) -> Ahead:
    """Compiles what the rehearsals ask for into the cache on disk, by the processes of ``worker_pool``.

    ``progress`` is called with how many parts are done and how many there are, which grows as kernels are found.
    Failures are collected and not raised: the check that needs the kernel compiles it again and reports.
    """
    ahead = Ahead(set(), [])
    try:
        with worker_pool(workers) as pool:
            listings = [pool.submit(kernels_of, [rehearsal], gpu) for rehearsal in rehearsals]
            compilations: dict[Future[None], Kernel] = {}
            done = 0
            for listed in as_completed(listings):
                failure = _failure(listed)
                kernels, problems = ([], [failure]) if failure else listed.result()
                ahead.problems += problems
                for kernel in kernels:
                    if kernel not in ahead.kernels:
                        ahead.kernels.add(kernel)
                        compilations[pool.submit(_compile, kernel)] = kernel
                done += 1
                progress(done, len(listings) + len(compilations))
            for compiled in as_completed(compilations):
                if failure := _failure(compiled):
                    ahead.problems.append(f"{compilations[compiled].source}: {failure}")
                done += 1
                progress(done, len(listings) + len(compilations))
    except BrokenProcessPool as error:
        ahead.problems.append(f"a compiling process ended: {error}")
    return ahead
