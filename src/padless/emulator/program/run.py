"""Runs a Python program that launches CUDA kernels, the kernels in the emulator: `padless emulate --program`."""

from __future__ import annotations

import runpy
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from padless.emulator.annotation import annotation
from padless.emulator.emulator import MOST_MEMORY, Emulator, LaunchResult
from padless.emulator.errors import EmulatorError, LaunchError
from padless.emulator.order.reports import KINDS, Report
from padless.emulator.program.compilers import (
    Changes,
    leave_ptx,
    one_run_a_benchmark,
    private_folders,
    remember_compiled,
    remember_cubins,
)
from padless.emulator.program.cublas import without_cublas
from padless.emulator.program.cuda_tensors import pretend
from padless.emulator.program.cute_dsl import CuteDsl
from padless.emulator.program.device import CHIPS, Memory
from padless.emulator.program.device_time import DeviceTime
from padless.emulator.program.driver import OK, Driver
from padless.emulator.program.library import Library
from padless.emulator.program.modules import Function, Loader
from padless.emulator.state.memory import DeviceMemory
from padless.emulator.timing.kernel import KernelTime, kernel_time
from padless.emulator.timing.rates import CHIPS as TIMED

NOT_SUPPORTED = 801


@dataclass(frozen=True)
class Launched:
    """One launch of a program and what it found."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    result: LaunchResult


@dataclass
class Session:
    """A stand-in that is in place. launches: what has run. refused: sentences about what could not be done. shown: of a
    kind of report, how many are said in full."""

    driver: Driver
    library: Library
    time: DeviceTime
    shown: int = 3
    launches: list[Launched] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    _said: set[tuple[str, int]] = field(default_factory=set)
    _places: Counter[str] = field(default_factory=Counter)

    def new(self, reports: Sequence[Report]) -> list[Report]:
        """Of a launch's reports those to be said in full: the first of a kind, and of a place in a kernel once."""
        said = []
        for report in reports:
            if (
                self._places[report.kind] < self.shown
                and (place := (report.message, report.ptx_line)) not in self._said
            ):
                self._said.add(place)
                self._places[report.kind] += 1
                said.append(report)
        return said

    def counts(self) -> list[str]:
        """A line for each kind of report: how many, in which kernels, what it means, and how to do without."""
        kernels: dict[str, Counter[str]] = {}
        for launch in self.launches:
            for report in launch.result.reports:
                kernels.setdefault(report.kind, Counter())[launch.name] += 1
        return [
            f"{kind}: {found.total()} in {', '.join(found)} ({KINDS[kind]}); --ignore {kind} leaves them out"
            for kind, found in sorted(kernels.items(), key=lambda item: -item[1].total())
        ]

    @property
    def errors(self) -> int:
        """Reports of all launches that are not tolerated."""
        return sum(len(launch.result.errors) for launch in self.launches)


def install(
    chip: str = "H200",
    *,
    num_sms: int = 4,
    seed: int = 0,
    checks: bool = True,
    arithmetic: str = "truncate",
    ignore: Collection[str] = (),
    strict: bool = False,
    max_memory: int = MOST_MEMORY,
    reports: int = 3,
    github: bool = False,
    say: Callable[[str], None] = print,
) -> Session:
    """Put a device without a GPU in the place of libcuda and of torch.cuda, for the rest of this process.

    chip: "H200" or "B200". num_sms: multiprocessors that the device claims, so how many CTAs a persistent kernel gets.
    reports: how many of a kind are said in full. github: as annotations, too. The others as of
    `padless.emulator.Emulator`. say: is given a line for each launch, its reports, and sentences about what cannot be
    done. Raises LaunchError where another driver is open or no C compiler is found.
    """
    if chip not in CHIPS:
        raise LaunchError(f"--chip is {chip!r}, with --program allowed are {', '.join(CHIPS)}")
    described = CHIPS[chip]
    described = type(described)(described.name, described.capability, described.memory, num_sms)
    memory = Memory()
    session: Session

    def refuse(sentence: str) -> None:
        session.refused.append(sentence)
        say(f"refused: {sentence}")

    def make(ptx: str, variables: DeviceMemory) -> Emulator:
        return Emulator(
            ptx, seed=seed, arithmetic=arithmetic, checks=checks, memory=variables, ignore=ignore, strict=strict,
            max_memory=max_memory, name=f"module {len(session.driver.modules)}",
        )  # fmt: skip

    def launch(
        function: Function, grid: Any, block: Any, cluster: Any, shared_bytes: int, values: Sequence[bytes],
        programmatic: bool,
    ) -> int:  # fmt: skip
        emulator = function.emulator
        emulator.memory = memory.visible()
        started = time.perf_counter()
        shape = {"cluster": cluster, "shared_bytes": shared_bytes, "programmatic": programmatic}

        def work_out() -> KernelTime:
            return kernel_time(emulator, function.name, grid, block, values, TIMED[chip], **shape)

        try:
            if clock.wanted or clock.benchmark:
                clock.launch((function, grid, block, cluster, shared_bytes, *values), function.name, work_out)
            if clock.benchmark:
                return OK
            result = emulator.launch(function.name, grid, block, values, **shape)
        except EmulatorError as error:
            refuse(f"{function.name}: {error}")
            return NOT_SUPPORTED
        session.launches.append(Launched(function.name, grid, block, cluster, result))
        for report in session.new(result.reports):
            say(str(report))
            if github:
                say(annotation(report, emulator.module.name))
        count = len(result.reports)
        clusters = f" cluster {shown(cluster)}" if cluster != (1, 1, 1) else ""
        say(
            f"launch {len(session.launches)}: {function.name} grid {shown(grid)} block {shown(block)}{clusters}: "
            f"{count or 'no'} report{'s' * (count != 1)}, {result.statistics.warp_instructions:,} warp-instructions, "
            f"{time.perf_counter() - started:.1f} s"
        )
        return OK

    clock = DeviceTime(say)
    loader = Loader(make, memory.modules, refuse)
    driver = Driver(described, memory, loader, launch, refuse, clock)
    library = Library(driver.table(), lambda name, error: refuse(f"{name}: {type(error).__name__}: {error}"))
    driver.address_of = library.address
    session = Session(driver, library, clock, shown=reports)
    private_folders(library.folder)
    cute = CuteDsl(library.folder / "cute", described, loader.make_module, launch, refuse, say, driver.table())
    Changes(
        {
            **cute.changes(),
            "torch": pretend(described, refuse, clock),
            "triton._C.libtriton": without_cublas,
            "triton.testing": one_run_a_benchmark(clock, say),
            "cuda.bindings.nvrtc": remember_cubins(loader.remember),
            "padless.runtime.nvrtc": remember_compiled(loader.remember),
            "triton.backends.nvidia.compiler": leave_ptx,
        }
    )
    return session


def shown(dimensions: tuple[int, int, int]) -> str:
    return "x".join(map(str, dimensions))


def run_program(script: Path, arguments: Sequence[str], **options: Any) -> int:
    """Run a program to its end; options as of `install`.

    Returns 1 if anything was found, 2 if something could not be run, else the program's own exit code.
    """
    if not script.is_file():
        raise LaunchError(f"--program is {script}, there is no such file")

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    session = install(say=say, **options)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent.resolve()))
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            say(leaving.code)
    except Exception:
        traceback.print_exc()
        code = 1
    count = len(session.launches)
    for line in session.counts():
        say(line)
    if session.time.benchmarks:
        say(f"{session.time.benchmarks} benchmarks, each timed once by the clock, not run")
    launches = f"{count} launch{'es' * (count != 1)}"
    say(f"{launches}, {session.errors} errors, {len(session.refused)} refusals, the program's exit code {code}")
    return 1 if session.errors else 2 if session.refused else code
