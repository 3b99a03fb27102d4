"""A prepared kernel, as data: its basic blocks, its registers by row and slot, its variables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from padless.emulator.order.reports import set_bits
from padless.emulator.ptx.ast import Function, Instruction, Module

FALL, BRANCH, EXIT, INDEXED, SYNC, TRAP = range(6)
TERMINATORS = {"bra": BRANCH, "brx": INDEXED, "exit": EXIT, "ret": EXIT, "trap": TRAP, "brkpt": TRAP}

GENERATED = "<generated>"  # the file name of generated code


@dataclass(slots=True)
class Block:
    """A straight run of instructions with one way out."""

    index: int
    instructions: list[Instruction]
    terminator: Instruction | None = None
    kind: int = FALL
    target: int = -1
    next: int = -1
    targets: tuple[int, ...] = ()
    guard: int = -1  # slot of the predicate of a conditional branch
    guard_negated: bool = False
    join: int = -1  # block where the two sides of the branch meet again
    run: Callable[..., None] | None = None
    sync: Callable[..., Any] | None = None
    count: int = 0
    reads: int = 0  # registers read before written, as a bit set over register numbers
    writes: int = 0
    touches: int = 0


@dataclass(slots=True)
class Program:
    """One prepared kernel entry."""

    name: str
    module: Module
    function: Function
    blocks: list[Block]
    instructions: list[Instruction]
    rows: dict[str, int]  # class -> number of rows
    slots: list[tuple[str, int, str]]  # slot -> (class, row, view)
    constants: list[tuple[str, int, int]]  # (class, row, bit pattern)
    specials: list[tuple[str, str, int]]  # (special register, class, row)
    symbols: list[tuple[str, int, str, int]]  # (class, row, symbol, offset)
    register_names: list[str]
    register_rows: list[tuple[str, int]]
    parameters: dict[str, tuple[int, int]]  # name -> (offset, size)
    parameter_bytes: int
    local: dict[str, tuple[int, int]]
    local_bytes: int
    shared: dict[str, tuple[int, int]]
    static_shared_bytes: int
    shared_alignment: int
    granule: int  # bytes of the finest shared-memory access, the grain of the race shadow
    global_granule: int  # the same of global memory
    whose: list[Instruction]  # of each line of the generated code
    uses: set[str] = field(default_factory=set)
    late: frozenset[int] = frozenset()  # loads behind which an arrival may come before every use

    def names_of(self, bits: int) -> str:
        """The first few registers of a bit set, for a message."""
        found = [self.register_names[i] for i in set_bits(bits)]
        return ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
