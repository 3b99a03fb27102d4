"""Runs a Python program that launches CUDA kernels, the kernels in the emulator: `padless emulate --program`."""

from __future__ import annotations

import runpy
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from padless.emulator.emulator import MOST_MEMORY, Emulator, LaunchResult
from padless.emulator.errors import EmulatorError, LaunchError
from padless.emulator.program.compilers import Changes, leave_ptx, private_folders, remember_compiled, remember_cubins
from padless.emulator.program.cuda_tensors import pretend
from padless.emulator.program.device import CHIPS, Memory
from padless.emulator.program.driver import OK, Driver
from padless.emulator.program.library import Library
from padless.emulator.program.modules import Function, Loader
from padless.emulator.state.memory import DeviceMemory

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
    """A stand-in that is in place. launches: what has run. refused: sentences about what could not be done."""

    driver: Driver
    library: Library
    launches: list[Launched] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

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
    say: Callable[[str], None] = print,
) -> Session:
    """Put a device without a GPU in the place of libcuda and of torch.cuda, for the rest of this process.

    chip: "H200" or "B200". num_sms: multiprocessors that the device claims, so how many CTAs a persistent kernel gets.
    The others as of `padless.emulator.Emulator`. say: is given a line for each launch, its reports, and sentences about
    what cannot be done. Raises LaunchError where another driver is open or no C compiler is found.
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
        try:
            result = emulator.launch(
                function.name,
                grid,
                block,
                values,
                cluster=cluster,
                shared_bytes=shared_bytes,
                programmatic=programmatic,
            )
        except EmulatorError as error:
            refuse(f"{function.name}: {error}")
            return NOT_SUPPORTED
        session.launches.append(Launched(function.name, grid, block, cluster, result))
        for report in result.reports:
            say(str(report))
        count = len(result.reports)
        clusters = f" cluster {shown(cluster)}" if cluster != (1, 1, 1) else ""
        say(
            f"launch {len(session.launches)}: {function.name} grid {shown(grid)} block {shown(block)}{clusters}: "
            f"{count or 'no'} report{'s' * (count != 1)}, {result.statistics.warp_instructions:,} warp-instructions, "
            f"{time.perf_counter() - started:.1f} s"
        )
        return OK

    loader = Loader(make, memory.modules, refuse)
    driver = Driver(described, memory, loader, launch, refuse)
    library = Library(driver.table(), lambda name, error: refuse(f"{name}: {type(error).__name__}: {error}"))
    driver.address_of = library.address
    session = Session(driver, library)
    private_folders(library.folder)
    Changes(
        {
            "torch": pretend(described, refuse),
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
    launches = f"{count} launch{'es' * (count != 1)}"
    say(f"{launches}, {session.errors} errors, {len(session.refused)} refusals, the program's exit code {code}")
    return 1 if session.errors else 2 if session.refused else code
