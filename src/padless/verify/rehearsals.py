"""Which kernels the checks of ``padless verify`` will ask for, found by rehearsing their calls, and compiled ahead.

A rehearsal makes the same public calls on the same problems, on the CPU, down to where a kernel would be compiled: there
a driver writes down what was asked for and nothing is compiled, loaded or launched. What all rehearsals wrote down is
then compiled by a pool of processes into the cache on disk, where the checks find it. A check compiles for itself what a
rehearsal missed or what failed, so nothing of this decides what passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from padless.emulator import fake_driver
from padless.kernels import launch as launching
from padless.kernels.table import kernels_arch
from padless.runtime.driver import Driver
from padless.runtime.jit import CompiledKernel, compile_kernel, entry_of
from padless.testing.processes import worker_pool
from padless.verify import chains as verify_chain
from padless.verify import epilogue as verify_epilogue
from padless.verify import formats as verify_formats
from padless.verify import fp8_block as verify_checks
from padless.verify import invariance as verify_invariance
from padless.verify import moe as verify_moe
from padless.verify import small as verify_small
from padless.verify import tensor_core as verify_arithmetic
from padless.verify import wgrad as verify_wgrad
from padless.verify.against_emulator import PROBLEMS, backend_of, emulate
from padless.verify.blackwell import PROBLEM_LISTS, PRODUCTS, dense_launches, list_launches


class Kernel(NamedTuple):
    """The arguments of ``jit.compile_kernel``."""

    source: str
    prelude: str
    arch: str
    kind: str


@dataclass(frozen=True)
class Gpu:
    """What the choice of a kernel asks of the GPU."""

    arch: str
    num_sms: int


@dataclass(frozen=True)
class Rehearsal:
    """Calls on the CPU by the emulator's backend. ``kinds``: of images that the check needs, "cubin" for the GPU."""

    calls: Callable[[], object]
    kinds: tuple[str, ...] = ("cubin",)


_BOTH = ("cubin", "ptx")


# --- which calls -----------------------------------------------------------------------------------------


def rehearsals_of(arch: str, checks: Iterable[str], modules: Iterable[str]) -> list[Rehearsal]:
    """The calls of the checks of these names and of these modules of small launches, in parts of about a second."""
    found: list[Rehearsal] = []
    for name in checks:
        found += _CHECKS[name](arch) if name in _CHECKS else [_of_check(name, arch)]
    for module in modules:
        found += _MODULES[module](arch)
    return found


def _of_check(name: str, arch: str) -> Rehearsal:
    return Rehearsal(partial(verify_checks.rehearse, name, backend_of(arch)))


def _arithmetic(arch: str) -> list[Rehearsal]:
    return [Rehearsal(partial(_wgmmas, arch), _BOTH)]


def _wgmmas(arch: str) -> None:
    driver = fake_driver.emulated_driver(kernels_arch(arch))
    for pair in verify_arithmetic.PAIRS:
        for _, operands in verify_arithmetic.problems_of(pair, 1, 0):
            verify_arithmetic.run_wgmma(driver, pair, *operands)


def _compared(arch: str) -> list[Rehearsal]:
    return [Rehearsal(partial(emulate, seed), _BOTH) for seed in range(PROBLEMS)]


def _formats(problems: int, kinds: tuple[str, ...], arch: str) -> list[Rehearsal]:
    jobs = verify_formats.problems_of(arch, problems)
    return [Rehearsal(partial(verify_formats.emulate_formats, *job), kinds) for job in jobs]


def _epilogues(arch: str) -> list[Rehearsal]:
    jobs = verify_epilogue.problems_of(arch)
    return [Rehearsal(partial(verify_epilogue.rehearse_epilogue, *job)) for job in jobs]


def _epilogues_compared(arch: str) -> list[Rehearsal]:
    jobs = verify_epilogue.problems_of(arch)
    return [Rehearsal(partial(verify_epilogue.emulate_epilogue, *job), _BOTH) for job in jobs]


def _launches(launches: Callable[..., Iterator[object]], problems: int, arch: str) -> list[Rehearsal]:
    return [Rehearsal(partial(_exhaust, launches, problems, backend_of(arch)))]


def _exhaust(launches: Callable[..., Iterator[object]], problems: int, backend: str) -> None:
    for _ in launches(problems, "cpu", backend):
        pass


def _nothing() -> None:
    """The calls of a check of Triton's kernels alone, which Triton compiles."""


_CHECKS: dict[str, Callable[[str], list[Rehearsal]]] = {
    "emulator's tensor core agrees": _arithmetic,
    "emulator agrees": _compared,
    "emulator agrees on formats": partial(_formats, verify_formats.COMPARED, _BOTH),
    "emulator agrees on epilogues": _epilogues_compared,
    "dense MXFP8": partial(_launches, dense_launches, PRODUCTS),
    "lists of problems": partial(_launches, list_launches, PROBLEM_LISTS),
    "formats": partial(_formats, verify_formats.JUDGED, ("cubin",)),
    "epilogues": _epilogues,
    "passes of the MoE layer": lambda arch: [Rehearsal(_nothing)],
    "MoE layer": lambda arch: [Rehearsal(partial(verify_moe.rehearse, arch, backend_of(arch)))],
    "chains": lambda arch: [Rehearsal(partial(verify_chain.rehearse, arch))],
    "batch invariance": lambda arch: [
        Rehearsal(partial(verify_invariance.rehearse, *job)) for job in verify_invariance.problems_of(arch)
    ],
    "weight gradients": lambda arch: [Rehearsal(partial(verify_wgrad.rehearse, backend_of(arch)))],
}
_MODULES: dict[str, Callable[[str], list[Rehearsal]]] = {
    "padless.verify.fp8_block": lambda arch: [_of_check(verify_checks.SMALL, arch)],
    "padless.verify.small": lambda arch: [Rehearsal(partial(verify_small.rehearse, arch, backend_of(arch)))],
    "padless.verify.wgrad": lambda arch: [Rehearsal(partial(verify_wgrad.rehearse, backend_of(arch)))],
}


# --- which kernels ---------------------------------------------------------------------------------------


class _Listing(fake_driver.EmulatedDriver):
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
    """In this block calls of the emulator's backend for ``arch`` compile and run nothing: what they would have compiled
    for a GPU of ``num_sms`` multiprocessors ("cubin") or for the emulator ("ptx") comes into the yielded set, in order.

    For a process with one thread and nothing else to do: it replaces the emulated device and the compiler of them all.
    """
    asked: dict[Kernel, None] = {}

    def write_down(source: str, prelude: str, arch: str, kind: str = "cubin") -> CompiledKernel:
        asked[Kernel(source, prelude, arch, kind)] = None
        return CompiledKernel(b"", kind, entry_of(source), 0, 128, 1, 0, 0, 0, "")

    emulated = kernels_arch(arch)
    driver: Driver = _Listing(arch if kind == "cubin" else emulated, kind, num_sms)
    users: Sequence[Any] = (launching, verify_arithmetic)
    device, compilers = fake_driver._DRIVERS[emulated], [user.compile_kernel for user in users]
    fake_driver._DRIVERS[emulated] = driver  # type: ignore[assignment]
    for user in users:
        user.compile_kernel = write_down
    try:
        yield asked
    finally:
        fake_driver._DRIVERS[emulated] = device
        for user, compiler in zip(users, compilers, strict=True):
            user.compile_kernel = compiler


def kernels_of(rehearsals: Sequence[Rehearsal], gpu: Gpu) -> tuple[list[Kernel], list[str]]:
    """What the rehearsals ask for, each kernel once, and what kept a rehearsal from its end."""
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


# --- compiling -------------------------------------------------------------------------------------------


@dataclass
class Ahead:
    """What was compiled ahead. ``problems``: a sentence for each kernel or rehearsal that failed."""

    kernels: set[Kernel]
    problems: list[str]


def _compile(kernel: Kernel) -> None:
    compile_kernel(*kernel)


def _failure(future: Future[Any]) -> str:
    """In a line, what a process failed of; "" when it did not. Raises BrokenProcessPool where the process died."""
    error = future.exception()
    if isinstance(error, BrokenProcessPool):
        raise error
    return "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]


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
