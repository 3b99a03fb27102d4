"""Mutants of a kernel: its PTX with one synchronisation deleted or weakened, to see which of them are noticed.

A mutant that is not noticed on any schedule is either equivalent to the kernel or a blind spot of whoever judges: the
checks, and the outputs of this problem.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from padless.emulator.emulator import Emulator, LaunchResult
from padless.emulator.errors import EmulatorError, KernelFault, LaunchError
from padless.emulator.ptx.ast import Immediate, Instruction, Module, Sink
from padless.emulator.run.machine import Machine
from padless.emulator.state.program import Block, Program
from padless.emulator.state.warp import Fragment

Array = np.ndarray[Any, Any]
Runner = Callable[[Emulator, int], tuple[LaunchResult, dict[str, Array]]]  # a launch with a seed, and what it wrote
# What may go, by opcode: the instruction has one of these modifiers; no set means any.
DELETED: dict[str, frozenset[str] | None] = {
    "fence": None,
    "membar": None,
    "griddepcontrol": frozenset({"wait"}),
    "bar": frozenset({"sync", "arrive"}),
    "barrier": frozenset({"sync", "arrive", "wait"}),
    "wgmma": frozenset({"fence", "commit_group", "wait_group"}),
    "cp": frozenset({"commit_group", "wait_group", "wait_all", "mbarrier"}),
    "tcgen05": frozenset(
        {"wait::ld", "wait::st", "fence::before_thread_sync", "fence::after_thread_sync", "commit", "dealloc"}
    ),
    "mbarrier": frozenset({"arrive", "arrive_drop", "expect_tx", "complete_tx"}),
}
ACCESSES = ("ld", "st", "atom", "red", "mbarrier", "fence")
ORDERING = ("release", "acquire", "acq_rel")
BROADER = ("cluster", "gpu", "gl", "sys")
SLACK = 20  # times the blocks that the kernel itself runs, after which a mutant is taken not to end


@dataclass(frozen=True)
class Mutant:
    """One change. instruction: as it was. after: as it is, None if it is gone. change: what was done to it."""

    instruction: Instruction
    change: str
    after: Instruction | None


@dataclass(frozen=True)
class Verdict:
    """killed_by: a kind of report, "output", or "" for a survivor."""

    mutant: Mutant
    killed_by: str


def changes(ins: Instruction) -> Iterator[tuple[str, Instruction | None]]:
    """Every way to delete or weaken one instruction."""
    opcode, modifiers = ins.opcode, set(ins.modifiers)
    proxy = bool(modifiers & {"proxy", "mbarrier_init"})
    if opcode in DELETED and not modifiers & {"red", "mma_async"}:
        wanted = DELETED[opcode]
        returns = opcode == "mbarrier" and not (len(ins.operands) < 2 or _is_address(ins) or _drops(ins))
        if (wanted is None or modifiers & wanted) and not returns:
            yield "deleted", None
    if opcode == "mbarrier" and modifiers & {"try_wait", "test_wait"}:
        zero = Immediate(0)
        operands = (ins.operands[0], zero, zero)
        yield ("not waited for", dataclasses.replace(ins, opcode="setp", modifiers=("eq", "u32"), operands=operands))
    if opcode in ACCESSES[:-1]:
        for word in ORDERING:
            if word in modifiers:
                yield f".{word} relaxed", _with(ins, word, "relaxed")
        if opcode == "mbarrier" and modifiers & {"arrive", "try_wait"} and not modifiers & {*ORDERING, "relaxed"}:
            yield "relaxed", dataclasses.replace(ins, modifiers=(*ins.modifiers, "relaxed", "cta"))
    if (opcode in ACCESSES or opcode == "membar") and not proxy and "async" not in modifiers:
        for word in BROADER:
            if word in modifiers:
                yield f".{word} narrowed", _with(ins, word, "cta")
    if opcode == "barrier" and {"cluster", "arrive"} <= modifiers and "relaxed" not in modifiers:
        rest = tuple(m for m in ins.modifiers if m != "release")
        yield "relaxed", dataclasses.replace(ins, modifiers=(*rest, "relaxed"))
    if "wait_group" in modifiers and ins.operands and isinstance(ins.operands[0], Immediate):
        later = Immediate(ins.operands[0].value + 1)
        yield "waits for one group fewer", dataclasses.replace(ins, operands=(later,))
        if "bulk" in modifiers and "read" not in modifiers:
            yield "waits for reads alone", dataclasses.replace(ins, modifiers=(*ins.modifiers, "read"))


def _is_address(ins: Instruction) -> bool:
    return str(ins.operands[0]).startswith("[")


def _drops(ins: Instruction) -> bool:
    return isinstance(ins.operands[0], Sink)


def _with(ins: Instruction, old: str, new: str) -> Instruction:
    return dataclasses.replace(ins, modifiers=tuple(new if m == old else m for m in ins.modifiers))


def mutants_of(program: Program, executed: Iterable[int]) -> list[Mutant]:
    """All mutants of the instructions in the blocks of these numbers, by line."""
    found = []
    for number in sorted(executed):
        for ins in program.blocks[number].instructions:
            found += [Mutant(ins, change, after) for change, after in changes(ins)]
    return found


def mutated(program: Program, mutant: Mutant) -> Module:
    """The kernel's module with one instruction changed."""
    body = []
    for statement in program.function.body:
        if not isinstance(statement, Instruction) or statement.index != mutant.instruction.index:
            body.append(statement)
        elif mutant.after is not None:
            body.append(mutant.after)
    function = dataclasses.replace(program.function, body=body)
    return dataclasses.replace(program.module, functions={**program.module.functions, program.name: function})


@dataclass
class Coverage:
    """Which blocks have run, and how many in the longest launch."""

    blocks: set[int] = field(default_factory=set)
    longest: int = 0


class Recorder(Machine):
    """A machine that notes which blocks run, and gives up after `most` of them."""

    def __init__(self, *arguments: Any, coverage: Coverage, most: float = float("inf"), **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.coverage = coverage
        self.most = most
        self.count = 0
        self.observe = self._note

    def _note(self, f: Fragment, b: Block) -> bool:
        self.coverage.blocks.add(b.index)
        self.coverage.longest = max(self.coverage.longest, self.count)
        self.count += 1
        if self.count > self.most:
            ins = b.instructions[0] if b.instructions else b.terminator
            self.report("deadlock", f"not over after {self.count - 1} blocks", ins, f.warp)
            raise KernelFault("not over")
        return False


class Survey:
    """Runs a kernel and its mutants. run: one launch with a seed. Raises LaunchError if the kernel itself is
    reported."""

    def __init__(self, emulator: Emulator, entry: str, run: Runner, seeds: Iterable[int]) -> None:
        self.emulator, self.run, self.seeds = emulator, run, list(seeds)
        self.program = emulator.program(entry)
        self.coverage = Coverage()
        emulator.machine = partial(Recorder, coverage=self.coverage)
        self.expected: dict[int, dict[str, Array]] = {}
        for seed in self.seeds:
            result, self.expected[seed] = run(emulator, seed)
            if result.errors:
                raise LaunchError(f"the kernel itself is reported with seed {seed}: {result.errors[0]}")
        self.mutants = mutants_of(self.program, self.coverage.blocks)

    def sample(self, count: int, seed: int) -> list[Mutant]:
        """`count` mutants drawn with a seed, in the order of the text; 0 is all of them."""
        if not count or count >= len(self.mutants):
            return self.mutants
        chosen = random.Random(seed).sample(range(len(self.mutants)), count)
        return [self.mutants[i] for i in sorted(chosen)]

    def judge(self, mutant: Mutant) -> Verdict:
        """Run one mutant on every seed until something notices it."""
        emulator = self.emulator.with_module(mutated(self.program, mutant))
        most = SLACK * self.coverage.longest + 10_000
        emulator.machine = partial(Recorder, coverage=Coverage(), most=most)
        for seed in self.seeds:
            try:
                result, arrays = self.run(emulator, seed)
            except EmulatorError as error:
                return Verdict(mutant, f"refused: {error}")
            if result.errors:
                return Verdict(mutant, result.errors[0].kind)
            expected = self.expected[seed]
            if any(arrays[name].tobytes() != expected[name].tobytes() for name in expected):
                return Verdict(mutant, "output")
        return Verdict(mutant, "")


def table(verdicts: list[Verdict]) -> list[str]:
    """Lines for a terminal: how many of each sort were noticed, by what, and the survivors one by one."""
    sorts: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        name = f"{verdict.mutant.instruction.opcode} {verdict.mutant.change}"
        sorts.setdefault(name, []).append(verdict)
    width = max((len(name) for name in sorts), default=0)
    lines = []
    for name, found in sorted(sorts.items()):
        by = sorted({v.killed_by for v in found if v.killed_by})
        lines.append(
            f"{name:{width}}  {sum(bool(v.killed_by) for v in found):4d} of {len(found):4d} killed"
            + (f"  by {', '.join(by)}" if by else "")
        )
    for verdict in verdicts:
        if not verdict.killed_by:
            ins = verdict.mutant.instruction
            source = f"{ins.source} " if ins.source else ""
            lines.append(f"survives: {source}(PTX line {ins.line}) {verdict.mutant.change}: {ins}")
    killed = sum(bool(v.killed_by) for v in verdicts)
    lines.append(f"{killed} of {len(verdicts)} mutants killed")
    return lines
