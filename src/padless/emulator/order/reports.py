"""What a run found: reports with the PTX line, the source line and the thread, each distinct pair of lines once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from padless.emulator.order.tolerated import TOLERATED, tolerance
from padless.emulator.ptx.ast import Instruction

# kind -> what it means; every report has one of these kinds.
KINDS = {
    "race": "two accesses to the same bytes with nothing that orders them",
    "race-equal": "two stores of the same value to the same bytes with nothing that orders them; a race where strict",
    "missing-proxy-fence": "an ordinary write is read by the async proxy with no fence.proxy.async on the way",
    "unread-load": "an asynchronous copy overwrites what a load has read whose value nothing has needed before",
    "uninitialised-shared": "shared memory is read before anything wrote it",
    "uninitialised-register": "a register is read before anything wrote it",
    "uninitialised-tensor-memory": "tensor memory is read before anything wrote it",
    "out-of-bounds": "an access outside every allocation",
    "misaligned": "an address that is not a multiple of what the instruction needs",
    "register-in-flight": "a register of an unfinished asynchronous instruction is touched before its wait",
    "missing-wgmma-fence": "registers of a wgmma were read or written since the last wgmma.fence",
    "mbarrier": "an mbarrier used against its rules",
    "mbarrier-init": "an mbarrier initialised against its rules, in order with all its uses and idle when made again",
    "deadlock": "no warp can go on",
    "divergence": "an .aligned or .sync instruction that not all of its lanes reach together",
    "tensor-memory": "tensor memory used outside its allocation, leaked, or freed wrongly",
    "missing-tcgen05-fence": "a tcgen05 access that no tcgen05.fence orders after the access it depends on",
    "descriptor": "a matrix or instruction descriptor with illegal fields",
    "descriptor-start": "a swizzled operand begins inside of its pattern, and its descriptor has no base offset",
    "tma": "a bulk copy with illegal operands",
    "registers": "setmaxnreg used against its rules",
    "exit": "a CTA ended with asynchronous work or memory still in use",
    "exit-covered": "a CTA ended before a tcgen05.commit had arrived, one behind it had; an exit where strict",
    "barrier": "a CTA barrier used with inconsistent thread counts",
    "grid-dependency": "a programmatic launch that touches global memory, or ends, with no griddepcontrol.wait before",
    "launch-control": "clusterlaunchcontrol used against its rules",
    "launch-control-refused": "the CTA of a refused request is taken, which is undefined",
    "fault": "what stops real hardware: trap, failed assertion",
    "tolerated": "against the ISA, and what today's chips are known to let pass; another kind's where checks are strict",
}


# What of these is tolerated only, and what it is where checks are strict.
STRICT = {"race-equal": "race", "exit-covered": "exit"}


@dataclass(frozen=True)
class Report:
    """One finding. `ptx_line` is 1-based in the PTX text; `source` is file:line of the CUDA source, from -lineinfo."""

    kind: str
    message: str
    ptx_line: int
    source: str
    cta: tuple[int, int, int]
    warp: int
    lane: int
    seed: int
    instruction: str = ""
    other: str = ""  # the earlier access, for two-sided reports

    def __str__(self) -> str:
        place = f"{self.source} " if self.source else ""
        text = f"{self.kind}: {place}(PTX line {self.ptx_line}): {self.message}"
        if self.instruction:
            text += f"\n    at    {self.instruction}"
        if self.other:
            text += f"\n    after {self.other}"
        return text + f"\n    CTA {self.cta}, warp {self.warp}, lane {self.lane}, seed {self.seed}"


def set_bits(bits: int) -> list[int]:
    """The positions of the ones of a bit set, ascending."""
    digits = bin(bits)[:1:-1]
    found, at = [], digits.find("1")
    while at >= 0:
        found.append(at)
        at = digits.find("1", at + 1)
    return found


def shorten(instruction: Instruction | None) -> str:
    if instruction is None:
        return ""
    text = str(instruction)
    return text if len(text) <= 120 else text[:100] + " ... " + text[-15:]


def place(instruction: Instruction | None) -> str:
    """An instruction with its lines, for the `other` side of a report."""
    if instruction is None:
        return ""
    source = f"{instruction.source} " if instruction.source else ""
    return f"{source}(PTX line {instruction.line}) {shorten(instruction)}"


@dataclass
class Collector:
    """Gathers the reports of one launch."""

    seed: int
    reports: list[Report] = field(default_factory=list)
    seen: set[tuple[Any, ...]] = field(default_factory=set)
    limit: int = 50  # of each kind
    ignore: frozenset[str] = frozenset()
    strict: bool = True  # else what chips tolerate is of that kind
    counts: Counter[str] = field(default_factory=Counter)

    def add(
        self,
        kind: str,
        message: str,
        instruction: Instruction | None,
        warp: Any = None,
        lane: int = -1,
        other: Instruction | None = None,
        key: Any = None,
    ) -> None:
        """`key` tells apart reports of the same two lines; by default they count once."""
        assert kind in KINDS, kind
        if self.strict:
            kind = STRICT.get(kind, kind)
        if kind in self.ignore:
            return
        if not self.strict and (sentence := tolerance(kind, instruction, other)):
            kind, message = TOLERATED, f"{kind}: {message}; {sentence}"
        identity = (kind, instruction.line if instruction else message, other.line if other else 0, key)
        if kind in self.ignore or identity in self.seen or self.counts[kind] >= self.limit:
            return
        self.seen.add(identity)
        self.counts[kind] += 1
        line, source = (instruction.line, instruction.source) if instruction else (0, None)
        cta, index = (warp.cta.index, warp.index) if warp is not None else ((-1, -1, -1), -1)
        where = line, str(source or ""), cta, index, lane, self.seed
        self.reports.append(Report(kind, message, *where, shorten(instruction), place(other)))
