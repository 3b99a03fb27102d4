"""Prepares a parsed kernel for execution: calls inlined, registers numbered, basic blocks found, each block turned
into one generated Python function over 32 lanes.

A warp's registers are rows of numpy arrays, 32 lanes wide, one array per width. Generated code sees them as the list
`v` of row views, one entry per (register, numpy type) that the kernel uses, and `m`, the active lanes: True for all
32, else a bool array. Immediates and special registers are rows like any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import instructions
from .ast import (
    Address,
    Call,
    Function,
    Immediate,
    Instruction,
    Label,
    Module,
    Not,
    Operand,
    Pair,
    Register,
    Symbol,
    Variable,
    Vector,
)
from .control_flow import BRANCH, EXIT, INDEXED, SYNC, TERMINATORS, Block, find_blocks, find_joins
from .errors import EmulatorError, UnsupportedInstruction
from .parser import type_size
from .spaces import CLASS_OF_SIZE, STORAGE, VIEW_SIZE, VIEWS


def view_of(type_name: str) -> str:
    """The numpy view of a PTX type: b32 -> u32, f16x2 -> u32, bf16 -> u16, ..."""
    if type_name in VIEWS:
        return type_name
    if type_name in ("f16x2", "bf16x2", "tf32", "u16x2", "s16x2"):
        return "u32"
    if type_name == "bf16":
        return "u16"
    if type_name == "f32x2":
        return "u64"
    if type_name.startswith("b"):
        return "u" + type_name[1:]
    raise KeyError(type_name)


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
    uses: set[str] = field(default_factory=set)


class Preparation:
    """Shared by the emitters: allocates rows, slots, constants and names for generated code."""

    def __init__(self, module: Module, function: Function) -> None:
        self.module = module
        self.function = function
        self.register_types: dict[str, str] = dict(function.registers)
        self.rows = dict.fromkeys(STORAGE, 0)
        self.row_of: dict[str, tuple[str, int]] = {}
        self.number_of: dict[str, int] = {}
        self.slots: list[tuple[str, int, str]] = []
        self.slot_of: dict[tuple[str, int, str], int] = {}
        self.constants: list[tuple[str, int, int]] = []
        self.constant_rows: dict[tuple[str, int], int] = {}
        self.specials: list[tuple[str, str, int]] = []
        self.symbol_rows: dict[tuple[str, str, int], int] = {}
        self.names: dict[str, Any] = {"np": np}
        self.granule = 16
        self.uses: set[str] = set()

    def row(self, name: str) -> tuple[str, int]:
        """(class, row) of a register; special registers are made rows on first use."""
        found = self.row_of.get(name)
        if found:
            return found
        if name in self.register_types:
            size = type_size(self.register_types[name])
        elif name in instructions.SPECIAL_REGISTERS:
            size = instructions.SPECIAL_REGISTERS[name]
        else:
            raise EmulatorError(f"undeclared register {name}")
        cls = CLASS_OF_SIZE[size]
        row = self.rows[cls]
        self.rows[cls] += 2 if size == 16 else 1
        self.row_of[name] = (cls, row)
        self.number_of[name] = len(self.number_of)
        if name not in self.register_types:
            self.specials.append((name, cls, row))
        return cls, row

    def slot(self, cls: str, row: int, view: str) -> int:
        key = (cls, row, view)
        found = self.slot_of.get(key)
        if found is None:
            found = self.slot_of[key] = len(self.slots)
            self.slots.append(key)
        return found

    def constant(self, bits: int, view: str) -> int:
        """Slot of a constant given by its bit pattern."""
        cls = CLASS_OF_SIZE[VIEW_SIZE[view]]
        row = self.constant_rows.get((cls, bits))
        if row is None:
            row = self.constant_rows[(cls, bits)] = self.rows[cls]
            self.rows[cls] += 1
            self.constants.append((cls, row, bits))
        return self.slot(cls, row, view)

    def symbol(self, name: str, offset: int, view: str) -> int:
        cls = CLASS_OF_SIZE[VIEW_SIZE[view]]
        key = (cls, name, offset)
        row = self.symbol_rows.get(key)
        if row is None:
            row = self.symbol_rows[key] = self.rows[cls]
            self.rows[cls] += 1
        return self.slot(cls, row, view)


class Emitter:
    """What an instruction's emitter works with: operand access, and the lines of the block being generated."""

    def __init__(self, preparation: Preparation, instruction: Instruction) -> None:
        self.preparation = preparation
        self.instruction = instruction
        self.opcode = instruction.opcode
        self.modifiers = set(instruction.modifiers)
        self.operands = instruction.operands
        self.types = [t for t in instruction.modifiers if t in instructions.TYPES]
        self.lines: list[str] = []
        self.sync: Callable[..., Any] | None = None
        self.reads: list[str] = []
        self.writes: list[str] = []
        self.batch: tuple[str, Register, tuple[Any, ...]] | None = None
        self.mask = "m"
        if instruction.guard is not None:
            guard = self.source(instruction.guard, "pred")
            self.mask = f"(m & ~{guard})" if instruction.guard_negated else f"(m & {guard})"

    @property
    def type(self) -> str:
        """The last type modifier."""
        if not self.types:
            self.unsupported("no type")
        return self.types[-1]

    @property
    def view(self) -> str:
        try:
            return view_of(self.type)
        except KeyError:
            self.unsupported(f"type .{self.type}")
            raise

    def unsupported(self, why: str = "") -> None:
        raise UnsupportedInstruction(
            f"{self.preparation.module.name}:{self.instruction.line}: `{self.instruction}` is not supported"
            + (f" ({why})" if why else "")
        )

    def has(self, *modifiers: str) -> bool:
        return all(m in self.modifiers for m in modifiers)

    def only(self, *allowed: str) -> None:
        """Refuse any modifier that is neither a type nor in `allowed`, rather than ignore it."""
        for modifier in self.modifiers:
            if modifier not in allowed and modifier not in instructions.TYPES:
                self.unsupported(f"modifier .{modifier}")

    # ---- operands
    def width(self, operand: Operand) -> int:
        """Bytes of a register operand; 0 for predicates; -1 for anything that has no width of its own."""
        if isinstance(operand, Register):
            cls, _ = self.preparation.row(operand.name)
            return 0 if cls == "p" else np.dtype(STORAGE[cls]).itemsize
        return -1

    def source_slot(self, operand: Operand, view: str) -> int:
        preparation = self.preparation
        if isinstance(operand, Register):
            cls, row = preparation.row(operand.name)
            if operand.name not in self.reads:
                self.reads.append(operand.name)
            size = 0 if cls == "p" else np.dtype(STORAGE[cls]).itemsize
            if size != VIEW_SIZE[view]:
                self.unsupported(f"{operand} is {8 * size} bits wide, .{view} needs {8 * VIEW_SIZE[view]}")
            return preparation.slot(cls, row, view)
        if isinstance(operand, Immediate):
            return preparation.constant(immediate_bits(operand, view), view)
        if isinstance(operand, Symbol):
            return preparation.symbol(operand.name, operand.offset, view)
        self.unsupported(f"operand {operand}")
        raise AssertionError

    def source(self, operand: Operand, view: str) -> str:
        if isinstance(operand, Not):
            return f"~{self.source(operand.operand, view)}"
        return f"v[{self.source_slot(operand, view)}]"

    def destination_slot(self, operand: Operand, view: str) -> int:
        if not isinstance(operand, Register):
            self.unsupported(f"destination {operand}")
            raise AssertionError
        cls, row = self.preparation.row(operand.name)
        self.writes.append(operand.name)
        size = 0 if cls == "p" else np.dtype(STORAGE[cls]).itemsize
        if size != VIEW_SIZE[view]:
            self.unsupported(f"{operand} is {8 * size} bits wide, .{view} needs {8 * VIEW_SIZE[view]}")
        return self.preparation.slot(cls, row, view)

    def destination(self, operand: Operand, view: str) -> str:
        return f"v[{self.destination_slot(operand, view)}]"

    def natural_view(self, operand: Operand, kind: str = "u") -> str:
        """The view of a register at its own width."""
        size = self.width(operand)
        return "pred" if size == 0 else f"{kind}{8 * size}"

    def half(self, operand: Operand, k: int, write: bool = True) -> str:
        """One 64-bit half of a 128-bit register."""
        assert isinstance(operand, Register)
        cls, row = self.preparation.row(operand.name)
        (self.writes if write else self.reads).append(operand.name)
        return f"v[{self.preparation.slot(cls, row + k, 'u64')}]"

    # ---- code
    def emit(self, line: str) -> None:
        self.lines.append(line)

    def name(self, value: Any, stem: str = "k") -> str:
        """Make a Python object reachable from the generated code."""
        names = self.preparation.names
        name = f"{stem}{len(names)}"
        names[name] = value
        return name

    def call(self, function: Callable[..., Any], *expressions: str) -> None:
        """Emit `function(w, v, mask, *expressions)`."""
        arguments = "".join(f", {e}" for e in expressions)
        self.emit(f"{self.name(function, function.__name__)}(w, v, {self.mask}{arguments})")

    def assign(self, destination: str, value: str) -> None:
        self.emit(f"np.copyto({destination}, {value}, where={self.mask}, casting='unsafe')")

    def ufunc(self, function: str, destination: str, *sources: str, dtype: str = "") -> None:
        extra = f", dtype={dtype}, casting='unsafe'" if dtype else ""
        self.emit(f"{function}({', '.join(sources)}, out={destination}, where={self.mask}{extra})")

    def batched(self, function: str, destination: Any, *sources: Any) -> None:
        """This instruction is `destination = function(*sources)` on 32-bit registers as float32 rows: runs of the same
        function are computed at once, on one array with a row per instruction."""
        if self.instruction.guard is None and isinstance(destination, Register):
            self.batch = (function, destination, sources)

    def synchronise(self, function: Callable[..., Any]) -> None:
        """This instruction is a block of its own: `function(fragment, lanes)` returns None or what to wait for."""
        self.sync = function

    def address(self, operand: Operand) -> tuple[int, int]:
        """(slot of the base as u32 or u64, byte offset) of an address operand."""
        if not isinstance(operand, Address):
            self.unsupported(f"{operand} is not an address")
            raise AssertionError
        base = operand.base
        if isinstance(base, Register):
            return self.source_slot(base, self.natural_view(base)), operand.offset
        if isinstance(base, Immediate):
            return self.preparation.constant(base.value & (1 << 64) - 1, "u64"), operand.offset
        if isinstance(base, Symbol):
            return self.preparation.symbol(base.name, 0, "u64"), operand.offset
        self.unsupported(f"address base {base}")
        raise AssertionError


def immediate_bits(immediate: Immediate, view: str) -> int:
    """The bit pattern of a literal in a given type: 0f literals widen to f64, integers become floats where asked."""
    size = 8 * VIEW_SIZE[view]
    if view == "pred":
        return int(immediate.value != 0)
    if view.startswith("f"):
        kind = VIEWS[view]
        if immediate.bits == size:
            return immediate.value
        if immediate.bits:
            source = np.uint32(immediate.value).view(np.float32) if immediate.bits == 32 else None
            number = source if source is not None else np.uint64(immediate.value).view(np.float64)
        else:
            number = np.float64(immediate.value)
        return int(np.asarray(number, dtype=np.float64).astype(kind).view(f"u{size // 8}"))
    return immediate.value & ((1 << size) - 1)


def prepare(module: Module, entry: str) -> Program:
    """Build the Program of one entry. Raises UnsupportedInstruction for the first instruction that is not modelled."""
    function = module.functions.get(entry)
    if function is None or not function.is_entry:
        raise EmulatorError(
            f"{module.name}: no entry {entry!r}; it has {', '.join(module.entries()) or 'none'}"
        )
    body, registers, variables, branch_targets = _inline(module, function)
    function = dataclasses.replace(
        function, body=body, registers=registers, variables=variables, branch_targets=branch_targets
    )
    preparation = Preparation(module, function)
    emitted: dict[int, Emitter] = {}
    ordered: list[Instruction] = []
    for statement in body:
        if isinstance(statement, Instruction):
            statement.index = len(ordered)
            ordered.append(statement)
            if statement.opcode not in TERMINATORS:
                emitted[statement.index] = emit(preparation, statement)
    blocks = find_blocks(body, emitted, branch_targets, module)
    for block in blocks:
        if block.terminator is not None and block.terminator.guard is not None:
            cls, row = preparation.row(block.terminator.guard.name)
            block.guard = preparation.slot(cls, row, "pred")
            block.guard_negated = block.terminator.guard_negated
        if block.kind == INDEXED and block.terminator is not None:
            index = block.terminator.operands[0]
            assert isinstance(index, Register)
            block.target = preparation.slot(*preparation.row(index.name), "u32")
    find_joins(blocks)
    _compile(blocks, emitted, preparation)
    return _program(entry, module, function, blocks, ordered, preparation)


def emit(preparation: Preparation, instruction: Instruction) -> Emitter:
    emitter = Emitter(preparation, instruction)
    function = instructions.EMITTERS.get(instruction.opcode)
    if function is None:
        emitter.unsupported("unknown instruction")
    else:
        function(emitter)
    return emitter


def _program(
    entry: str,
    module: Module,
    function: Function,
    blocks: list[Block],
    ordered: list[Instruction],
    preparation: Preparation,
) -> Program:
    parameters, at = {}, 0
    for parameter in function.parameters:
        at = -(-at // parameter.alignment) * parameter.alignment
        parameters[parameter.name] = (at, parameter.size)
        at += parameter.size
    shared, local = {}, {}
    shared_at, local_at, alignment = 0, 0, 16
    dynamic = []
    mentioned = {name for _, name, _ in preparation.symbol_rows}
    of_module = [
        v for v in module.variables.values() if v.space == "shared" and (v.size < 0 or v.name in mentioned)
    ]
    for variable in [*of_module, *function.variables]:
        if variable.space == "shared":
            alignment = max(alignment, variable.alignment)
            if variable.size < 0:
                dynamic.append(variable)
                continue
            shared_at = -(-shared_at // variable.alignment) * variable.alignment
            shared[variable.name] = (shared_at, variable.size)
            shared_at += variable.size
        elif variable.space in ("local", "param"):
            local_at = -(-local_at // max(variable.alignment, 8)) * max(variable.alignment, 8)
            local[variable.name] = (local_at, variable.size)
            local_at += variable.size
    for variable in dynamic:
        shared_at = -(-shared_at // variable.alignment) * variable.alignment
    for variable in dynamic:
        shared[variable.name] = (shared_at, -1)
    names = list(preparation.number_of)
    return Program(
        entry, module, function, blocks, ordered, preparation.rows, preparation.slots, preparation.constants,
        preparation.specials, [(cls, row, name, off) for (cls, name, off), row in preparation.symbol_rows.items()],
        names, [preparation.row_of[n] for n in names], parameters, at, local, local_at, shared, shared_at, alignment,
        preparation.granule, preparation.uses,
    )  # fmt: skip


def _inline(
    module: Module, function: Function
) -> tuple[list[Any], dict[str, str], list[Variable], dict[str, tuple[str, ...]]]:
    """The body of an entry with every direct call replaced by the callee's body, registers and labels renamed."""
    registers = dict(function.registers)
    variables = list(function.variables)
    branch_targets = dict(function.branch_targets)
    body: list[Any] = []
    count = 0

    def rename(operand: Any, names: dict[str, str], suffix: str, own: Function) -> Any:
        if isinstance(operand, Register):
            return Register(operand.name + suffix) if operand.name in own.registers else operand
        if isinstance(operand, Symbol):
            return Symbol(names.get(operand.name, operand.name), operand.offset)
        if isinstance(operand, Address):
            return Address(
                rename(operand.base, names, suffix, own), operand.offset,
                tuple(rename(c, names, suffix, own) for c in operand.coordinates),
                tuple(rename(c, names, suffix, own) for c in operand.extra),
            )  # fmt: skip
        if isinstance(operand, Vector):
            return Vector(tuple(rename(i, names, suffix, own) for i in operand.items))
        if isinstance(operand, Pair):
            return Pair(rename(operand.first, names, suffix, own), rename(operand.second, names, suffix, own))
        if isinstance(operand, Not):
            return Not(rename(operand.operand, names, suffix, own))
        return operand

    def expand(own: Function, names: dict[str, str], suffix: str, depth: int, end: str) -> None:
        nonlocal count
        for statement in own.body:
            if isinstance(statement, Label):
                body.append(Label(names.get(statement.name, statement.name), statement.line))
            elif isinstance(statement, Call):
                call = statement
                callee = module.functions.get(call.target)
                if callee is None or not callee.body:
                    operands = tuple(
                        Symbol(names.get(a, a)) if not a.startswith("%") else Register(a + suffix)
                        for a in call.arguments
                    )
                    body.append(
                        dataclasses.replace(
                            call.instruction,
                            opcode="call.external",
                            operands=(Symbol(call.target), *operands),
                        )
                    )
                    continue
                if depth > 20:
                    raise UnsupportedInstruction(
                        f"{module.name}:{call.instruction.line}: recursive call of {call.target} is not supported"
                    )
                count += 1
                inner_suffix = f"~{count}"
                inner = {
                    p.name: names.get(a, a) for p, a in zip(callee.parameters, call.arguments, strict=False)
                }
                inner.update(
                    {p.name: names.get(a, a) for p, a in zip(callee.results, call.results, strict=False)}
                )
                for item in callee.body:
                    if isinstance(item, Label):
                        inner[item.name] = item.name + inner_suffix
                for name, targets in callee.branch_targets.items():
                    inner[name] = name + inner_suffix
                    branch_targets[name + inner_suffix] = tuple(t + inner_suffix for t in targets)
                for variable in callee.variables:
                    if variable.space != "shared":
                        inner[variable.name] = variable.name + inner_suffix
                        variables.append(dataclasses.replace(variable, name=variable.name + inner_suffix))
                    elif variable not in variables:
                        variables.append(variable)
                registers.update({name + inner_suffix: kind for name, kind in callee.registers.items()})
                done = f"$return{inner_suffix}"
                expand(callee, inner, inner_suffix, depth + 1, done)
                body.append(Label(done, call.instruction.line))
            else:
                new = dataclasses.replace(
                    statement,
                    operands=tuple(rename(o, names, suffix, own) for o in statement.operands),
                    guard=rename(statement.guard, names, suffix, own) if statement.guard else None,
                )
                if new.opcode == "ret" and end:
                    new = dataclasses.replace(new, opcode="bra", modifiers=(), operands=(Symbol(end),))
                body.append(new)

    expand(function, {}, "", 0, "")
    return body, registers, variables, branch_targets


SHORTEST_BATCH = 3


def _lines(emitters: list[Emitter], preparation: Preparation) -> list[str]:
    """The code of a block, with runs of independent instructions of one kind merged into one array operation."""
    lines: list[str] = []
    at = 0
    while at < len(emitters):
        first = emitters[at].batch
        run: list[tuple[str, Register, tuple[Any, ...]]] = []
        written: set[str] = set()
        while first is not None and at + len(run) < len(emitters):
            item = emitters[at + len(run)].batch
            if item is None or item[0] != first[0] or item[1].name in written:
                break
            if any(isinstance(o, Register) and o.name in written for o in item[2]):
                break
            written.add(item[1].name)
            run.append(item)
        if first is None or len(run) < SHORTEST_BATCH:
            lines += emitters[at].lines
            at += 1
            continue
        rows = [_rows_of(preparation, [item[1] for item in run])]
        rows += [_rows_of(preparation, [item[2][k] for item in run]) for k in range(len(first[2]))]
        names = []
        for array in rows:
            name = f"rows{len(preparation.names)}"
            preparation.names[name] = array
            names.append(name)
        lines.append(f"batch(w, m, {first[0]}, {', '.join(names)})")
        at += len(run)
    return lines


def _rows_of(preparation: Preparation, operands: list[Any]) -> Any:
    rows = []
    for operand in operands:
        if isinstance(operand, Register):
            rows.append(preparation.row(operand.name)[1])
        else:
            slot = preparation.constant(immediate_bits(operand, "f32" if operand.bits else "u32"), "u32")
            rows.append(preparation.slots[slot][1])
    return np.array(rows)


def _compile(blocks: list[Block], emitted: dict[int, Emitter], preparation: Preparation) -> None:
    text: list[str] = []
    for block in blocks:
        block.count = len(block.instructions) + (block.kind in (BRANCH, EXIT, INDEXED))
        written = 0
        under: dict[tuple[str, bool] | None, int] = {}  # guard -> what is written wherever it holds
        for instruction in block.instructions:
            emitter = emitted[instruction.index]
            guard = (instruction.guard.name, instruction.guard_negated) if instruction.guard else None
            for name in emitter.reads:
                bit = 1 << preparation.number_of[name]
                if not (written | under.get(guard, 0)) & bit and name in preparation.register_types:
                    block.reads |= bit
                block.touches |= bit
            for name in emitter.writes:
                bit = 1 << preparation.number_of[name]
                block.writes |= bit
                block.touches |= bit
                under[guard] = under.get(guard, 0) | bit
                under.pop((name, False), None)
                under.pop((name, True), None)
            written |= under.get(None, 0)
        end = block.terminator
        if end is not None and end.guard is not None and block.kind != SYNC:
            preparation.row(end.guard.name)
            bit = 1 << preparation.number_of[end.guard.name]
            block.touches |= bit
            if not written & bit:
                block.reads |= bit
        if block.kind == SYNC:
            block.sync = emitted[block.instructions[0].index].sync
            continue
        lines = _lines([emitted[i.index] for i in block.instructions], preparation)
        if lines:
            text.append(f"def block{block.index}(w, v, m):")
            text.extend("    " + line for line in lines)
    preparation.names.update(instructions.HELPERS)
    exec(compile("\n".join(text), f"<{preparation.module.name}>", "exec"), preparation.names)
    for block in blocks:
        block.run = preparation.names.get(f"block{block.index}")
