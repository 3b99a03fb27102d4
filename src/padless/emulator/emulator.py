"""The public face of the emulator: load a module, launch an entry, look at what was found."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from padless.emulator import instructions as instructions  # fills the table of instructions
from padless.emulator.errors import LaunchError
from padless.emulator.order.reports import KINDS, Report
from padless.emulator.order.tolerated import TOLERATED
from padless.emulator.prepare.program import prepare
from padless.emulator.ptx.ast import Module
from padless.emulator.ptx.parser import parse
from padless.emulator.run.machine import Machine
from padless.emulator.state.launch import Statistics, bytes_needed, shape_of
from padless.emulator.state.memory import DeviceMemory
from padless.emulator.state.program import Program

MOST_CTAS = 1 << 20
MOST_CLUSTER = 16
MOST_MEMORY = 8 << 30
ARITHMETICS = ("truncate", "exact", "separate_add", "fast")


@dataclass(frozen=True)
class LaunchResult:
    """What a launch found and counted."""

    reports: tuple[Report, ...]
    statistics: Statistics
    timeline: Any = None  # of a timed machine (padless.emulator.timing)

    @property
    def errors(self) -> tuple[Report, ...]:
        """The reports but those of the kind "tolerated"."""
        return tuple(report for report in self.reports if report.kind != TOLERATED)

    def raise_on_reports(self) -> LaunchResult:
        """Raise LaunchError with every report, if there is one that is not tolerated."""
        if self.errors:
            raise LaunchError(f"{len(self.reports)} reports:\n" + "\n".join(map(str, self.reports)))
        return self


class Emulator:
    """One PTX module on one emulated device.

    ptx: the module's text. seed: of the schedule; the same seed gives the same run. arithmetic: how the tensor cores
    round: "truncate" (bit for bit what Hopper does, and the published model of Blackwell), "exact" (one rounding a
    step), "separate_add" (the products' sum rounded, then added), "fast" (float32 matrix products). checks: look for
    races and misuse. trace: called with one line per instruction. memory: shared with other modules if given. ignore:
    kinds of report to leave out (KINDS). max_memory: bytes that the module's variables, or the CTAs that run at once,
    may take on this machine; a launch that needs more is refused. strict: False gives what today's chips are known to
    let pass the kind "tolerated". machine: what runs a launch, Machine or `padless.emulator.timing.timed(chip)`.
    """

    def __init__(
        self,
        ptx: str | bytes,
        *,
        seed: int = 0,
        arithmetic: str = "truncate",
        checks: bool = True,
        trace: Callable[[str], None] | None = None,
        memory: DeviceMemory | None = None,
        name: str = "<ptx>",
        ignore: Collection[str] = (),
        max_memory: int = MOST_MEMORY,
        strict: bool = True,
        machine: Callable[..., Machine] = Machine,
    ) -> None:
        if arithmetic not in ARITHMETICS:
            raise LaunchError(f"arithmetic is {arithmetic!r}, allowed are {', '.join(ARITHMETICS)}")
        if unknown := set(ignore) - set(KINDS):
            raise LaunchError(f"ignore names {sorted(unknown)}, the kinds of report are {', '.join(KINDS)}")
        self.ignore = frozenset(ignore)
        self.max_memory = max_memory
        self.strict = strict
        self.module = parse(ptx, name)
        self.seed = seed
        self.machine = machine
        self.arithmetic = arithmetic
        self.checks = checks
        self.trace = trace
        self.memory = memory if memory is not None else DeviceMemory()
        self._programs: dict[str, Program] = {}
        self.symbols: dict[str, int] = {}
        self._arrays: list[Any] = []
        self._place_variables()

    def _place_variables(self) -> None:
        variables = [v for v in self.module.variables.values() if v.space in ("global", "const")]
        self.check_memory(sum(max(v.size, 0) for v in variables), "the module's variables")
        for variable in variables:
            data = np.zeros(-(-max(variable.size, 1) // 16) * 16, np.uint8)
            initial = variable.initial or b""
            data[: len(initial)] = np.frombuffer(initial, np.uint8)
            self._arrays.append(data)
            constant = variable.space == "const"
            self.symbols[variable.name] = self.memory.register(data, name=variable.name, constant=constant)
        for variable, data in zip(variables, self._arrays, strict=True):
            for offset, symbol, addend in variable.relocations:
                value = self.symbols.get(symbol, 0) + addend
                data[offset : offset + 8] = np.frombuffer(struct.pack("<Q", value), np.uint8)

    def check_memory(self, needed: int, what: str) -> None:
        """Raise LaunchError if `what` needs more bytes than max_memory."""
        if needed > self.max_memory:
            raise LaunchError(
                f"{what} take about {needed >> 20:,} MiB, allowed are {self.max_memory >> 20:,}; "
                "max_memory (--max-memory, in MiB) raises the bound"
            )

    def with_memory(self, memory: DeviceMemory) -> Emulator:
        """The same prepared module on another device memory, its variables as the module initialises them."""
        other = object.__new__(Emulator)
        other.__dict__.update(self.__dict__)
        other.memory, other.symbols, other._arrays = memory, {}, []
        other._place_variables()
        return other

    def with_module(self, module: Module) -> Emulator:
        """The same device with another module, such as a changed one."""
        other = self.with_memory(DeviceMemory())
        other.module, other._programs = module, {}
        return other

    def program(self, entry: str) -> Program:
        """The prepared entry; raises UnsupportedInstruction if it uses what is not modelled."""
        if entry not in self._programs:
            self._programs[entry] = prepare(self.module, entry)
        return self._programs[entry]

    def launch(
        self,
        entry: str,
        grid: Sequence[int] | int,
        block: Sequence[int] | int,
        args: Sequence[Any],
        *,
        cluster: Sequence[int] | int = (1, 1, 1),
        shared_bytes: int = 0,
        seed: int | None = None,
        programmatic: bool = False,
    ) -> LaunchResult:
        """Run one kernel to its end.

        args: one per parameter: int, float, bytes (a struct, a tensor map), or a numpy scalar; addresses are ints from
        `memory.register`. shared_bytes: dynamic shared memory. programmatic: the launch may begin before the kernels
        ahead of it have ended, so the kernel has to execute griddepcontrol.wait. Raises LaunchError if args and
        dimensions do not fit the entry. What goes wrong in the kernel is in the reports, faults and deadlocks included.
        """
        program = self.program(entry)
        grid, block, cluster = shape_of(program, grid, block, cluster)
        threads, ctas, limit = math.prod(block), math.prod(cluster), program.function.max_threads
        if any(g % c for g, c in zip(grid, cluster, strict=True)):
            raise LaunchError(f"grid {grid} is not a multiple of cluster {cluster}")
        if math.prod(grid) > MOST_CTAS:
            raise LaunchError(f"grid {grid} has more CTAs than the emulator runs, which is {MOST_CTAS}")
        if not 1 <= threads <= 1024:
            raise LaunchError(f"block {block} has {threads} threads, allowed are 1 to 1024")
        if limit is not None and threads > math.prod(limit):
            raise LaunchError(f"block {block} has {threads} threads, {entry} was compiled for at most {limit}")
        if not isinstance(shared_bytes, int) or shared_bytes < 0:
            raise LaunchError(f"shared_bytes is {shared_bytes!r}, it must be an integer of at least 0")
        if ctas > MOST_CLUSTER:
            raise LaunchError(f"cluster {cluster} has {ctas} CTAs, allowed are {MOST_CLUSTER}")
        needed = bytes_needed(program, threads, ctas, shared_bytes, self.checks)
        self.check_memory(needed, "the CTAs that run at once")
        machine = self.machine(
            program, self.memory, self.symbols, pack_parameters(program, args), grid, block, cluster, shared_bytes,
            self.seed if seed is None else seed, self.arithmetic, self.checks, self.trace,
            self.ignore, programmatic, self.strict,
        )  # fmt: skip
        machine.run()
        return LaunchResult(tuple(machine.collector.reports), machine.statistics, getattr(machine, "timeline", None))


def pack_parameters(program: Program, args: Sequence[Any]) -> bytes:
    """The parameter block of a launch."""
    parameters = program.function.parameters
    if len(args) != len(parameters):
        raise LaunchError(f"{program.name} takes {len(parameters)} parameters, got {len(args)}")
    block = bytearray(max(program.parameter_bytes, 16))
    for argument, parameter in zip(args, parameters, strict=True):
        offset, size = program.parameters[parameter.name]
        if isinstance(argument, bytes | bytearray):
            raw = bytes(argument)
        elif isinstance(argument, np.generic):
            raw = argument.tobytes()
        elif isinstance(argument, bool | int):
            raw = (int(argument) % (1 << 8 * size)).to_bytes(size, "little")
        elif isinstance(argument, float):
            raw = struct.pack("<f" if size == 4 else "<d", argument)
        else:
            raise LaunchError(f"parameter {parameter.name}: cannot pass a {type(argument).__name__}")
        if len(raw) != size:
            raise LaunchError(f"parameter {parameter.name} is {size} bytes, got {len(raw)}")
        block[offset : offset + size] = raw
    return bytes(block)
