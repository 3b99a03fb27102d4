"""What the emitters of instructions share: rows, slots, constants and names, and the lines of generated code.

A warp's registers are rows of numpy arrays, 32 lanes wide, one array per width. Generated code sees them as the list
`v` of row views, one entry per (register, numpy type) that the kernel uses, and `m`, the active lanes: True for all
32, else a bool array. Immediates and special registers are rows like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np

from padless.emulator.errors import EmulatorError, refusal
from padless.emulator.ptx.ast import (
    Address,
    Function,
    Immediate,
    Instruction,
    Module,
    Not,
    Operand,
    Register,
    Symbol,
    Vector,
)
from padless.emulator.ptx.types import SPECIAL_REGISTERS, TYPES, type_size
from padless.emulator.state.site import Site, lanes_of
from padless.emulator.state.spaces import CLASS_OF_SIZE, STORAGE, VIEW_SIZE, VIEWS
from padless.emulator.units.number_formats import Array

OTHER_VIEWS = {
    "f16": "u16", "bf16": "u16", "f32x2": "u64", **dict.fromkeys(("f16x2", "bf16x2", "tf32", "u16x2", "s16x2"), "u32"),
    **{f"b{bits}": f"u{bits}" for bits in (8, 16, 32, 64, 128)},
}  # fmt: skip


def view_of(type_name: str) -> str:
    """The numpy view of a PTX type: b32 -> u32, f16x2 -> u32, bf16 -> u16, ..."""
    if type_name in VIEWS:
        return type_name
    return OTHER_VIEWS[type_name]


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
        self.granule = self.global_granule = 16
        self.uses: set[str] = set()

    def row(self, name: str) -> tuple[str, int]:
        """(class, row) of a register; special registers are made rows on first use."""
        found = self.row_of.get(name)
        if found:
            return found
        if name in self.register_types:
            size = type_size(self.register_types[name])
        elif name in SPECIAL_REGISTERS:
            size = SPECIAL_REGISTERS[name]
        else:
            raise EmulatorError(f"undeclared register {name}")
        cls = CLASS_OF_SIZE[size]
        row = self._new_row(cls, 2 if size == 16 else 1)
        self.row_of[name] = (cls, row)
        self.number_of[name] = len(self.number_of)
        if name not in self.register_types:
            self.specials.append((name, cls, row))
        return cls, row

    def slot(self, cls: str, row: int, view: str) -> int:
        key = (cls, row, view)
        if key not in self.slot_of:
            self.slot_of[key] = len(self.slots)
            self.slots.append(key)
        return self.slot_of[key]

    def constant(self, bits: int, view: str) -> int:
        """Slot of a constant given by its bit pattern."""
        cls = CLASS_OF_SIZE[VIEW_SIZE[view]]
        if (cls, bits) not in self.constant_rows:
            row = self.constant_rows[cls, bits] = self._new_row(cls)
            self.constants.append((cls, row, bits))
        return self.slot(cls, self.constant_rows[cls, bits], view)

    def symbol(self, name: str, offset: int, view: str) -> int:
        key = cls, _, _ = CLASS_OF_SIZE[VIEW_SIZE[view]], name, offset
        if key not in self.symbol_rows:
            self._check_symbol(name)
            self.symbol_rows[key] = self._new_row(cls)
        return self.slot(cls, self.symbol_rows[key], view)

    def _check_symbol(self, name: str) -> None:
        own = (v.name for v in (*self.function.parameters, *self.function.variables))
        if name not in self.module.variables and name not in self.module.functions and name not in own:
            raise EmulatorError(f"unknown symbol {name}")

    def _new_row(self, cls: str, count: int = 1) -> int:
        self.rows[cls] += count
        return self.rows[cls] - count


class Emitter:
    """What an instruction's emitter works with: operand access, and the lines of the block being generated."""

    def __init__(self, preparation: Preparation, instruction: Instruction) -> None:
        self.preparation = preparation
        self.instruction = instruction
        self.opcode = instruction.opcode
        self.modifiers = set(instruction.modifiers)
        self.operands = instruction.operands
        self.types = [t for t in instruction.modifiers if t in TYPES]
        self.lines: list[str] = []
        self.sync: Callable[..., Any] | None = None
        self.reads: list[str] = []
        self.writes: list[str] = []
        self.own: list[str] = []  # registers that the checks of blocks do not see
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

    def unsupported(self, why: str = "") -> NoReturn:
        raise refusal(self.preparation.module, self.instruction, why)

    def has(self, *modifiers: str) -> bool:
        return all(m in self.modifiers for m in modifiers)

    def only(self, *allowed: str) -> None:
        """Refuse any modifier that is neither a type nor in `allowed`, rather than ignore it."""
        for modifier in self.modifiers:
            if modifier not in allowed and modifier not in TYPES:
                self.unsupported(f"modifier .{modifier}")

    # ---- operands
    def items(self, operand: Operand) -> tuple[Operand, ...]:
        """The elements of a vector; else the operand itself."""
        return operand.items if isinstance(operand, Vector) else (operand,)

    def width(self, operand: Operand) -> int:
        """Bytes of a register operand; 0 for predicates; -1 for anything that has no width of its own."""
        if isinstance(operand, Register):
            cls, _ = self.preparation.row(operand.name)
            return 0 if cls == "p" else np.dtype(STORAGE[cls]).itemsize
        return -1

    def _register_slot(self, register: Register, view: str, names: list[str]) -> int:
        cls, row = self.preparation.row(register.name)
        if register.name not in names:
            names.append(register.name)
        size = self.width(register)
        if size != VIEW_SIZE[view]:
            self.unsupported(f"{register} is {8 * size} bits wide, .{view} needs {8 * VIEW_SIZE[view]}")
        return self.preparation.slot(cls, row, view)

    def source_slot(self, operand: Operand, view: str) -> int:
        if isinstance(operand, Register):
            return self._register_slot(operand, view, self.reads)
        if isinstance(operand, Immediate):
            return self.preparation.constant(immediate_bits(operand, view), view)
        if isinstance(operand, Symbol):
            return self.preparation.symbol(operand.name, operand.offset, view)
        return self.unsupported(f"operand {operand}")

    def source(self, operand: Operand, view: str) -> str:
        if isinstance(operand, Not):
            return f"~{self.source(operand.operand, view)}"
        return f"v[{self.source_slot(operand, view)}]"

    def destination_slot(self, operand: Operand, view: str) -> int:
        if not isinstance(operand, Register):
            self.unsupported(f"destination {operand}")
        return self._register_slot(operand, view, self.writes)

    def destination(self, operand: Operand, view: str) -> str:
        return f"v[{self.destination_slot(operand, view)}]"

    def own_rows(self, operands: Iterable[Operand]) -> tuple[Array, int]:
        """Rows of 32-bit registers that the checks of blocks do not see, as the instruction has its own, and their bit
        set."""
        rows, bits = [], 0
        for operand in operands:
            if self.width(operand) != 4 or not isinstance(operand, Register):
                self.unsupported(f"{operand} is no 32-bit register")
            self.own.append(operand.name)
            rows.append(self.preparation.row(operand.name)[1])
            bits |= 1 << self.preparation.number_of[operand.name]
        return np.array(rows), bits

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

    def compute(self, views: str, value: str, modifiers: str = "") -> None:
        """The destination becomes ``value`` of the sources: a numpy function, or an expression of {0}, {1}, ... in which
        {m} is the mask and {name} says whether that one of ``modifiers`` is there. ``views`` of destination and sources:
        * is the type's, u* the unsigned one of its width, 2* the one of twice its width.
        """
        names = modifiers.split()
        own = self.view if "*" in views else ""
        known = {"*": own, "u*": f"u{own[1:]}", "2*": f"{own[:1]}{2 * int(own[1:] or 0)}" if own != "pred" else own}
        to, *kinds = (known.get(view, view) for view in views.split())
        d, *operands = self.operands
        destination = self.destination(d, to)
        sources = [self.source(operand, kind) for operand, kind in zip(operands, kinds, strict=True)]
        if "{" in value:
            flags: dict[str, Any] = {name: self.has(name) for name in names}
            self.assign(destination, value.format(*sources, m=self.mask, **flags))
        else:
            self.ufunc(value, destination, *sources, dtype="" if to == kinds[0] else f"{destination}.dtype")

    def batched(self, function: str, destination: Any, *sources: Any) -> None:
        """This instruction is `destination = function(*sources)` on 32-bit registers as float32 rows: runs of the same
        function are computed at once, on one array with a row per instruction."""
        if self.instruction.guard is None and isinstance(destination, Register):
            self.batch = (function, destination, sources)

    def synchronise(self, function: Callable[..., Any]) -> None:
        """This instruction is a block of its own: `function(fragment, lanes)` returns None or what to wait for."""
        self.sync = function

    def synchronise_lanes(self, function: Callable[[Site], Any]) -> None:
        """A block of its own, which waits for nothing: `function` of one active lane after the other."""
        ins = self.instruction

        def lane_after_lane(f: Any, m: Any) -> None:
            for lane in f.lanes(m).tolist():
                function(Site(f.warp, ins, lane))

        self.synchronise(lane_after_lane)

    def call_lanes(self, function: Callable[[Site], Any]) -> None:
        """Emit a call of `function` for one active lane after the other."""
        ins = self.instruction

        def lane_after_lane(w: Any, v: Any, m: Any) -> None:
            for lane in lanes_of(m).tolist():
                function(Site(w, ins, lane))

        self.call(lane_after_lane)

    def limit_granule(self, size: int) -> None:
        """This instruction touches as little as `size` bytes of shared memory: the grain of the race shadow."""
        self.preparation.granule = min(self.preparation.granule, size)

    def limit_global_granule(self, size: int) -> None:
        """The same of global memory."""
        self.preparation.global_granule = min(self.preparation.global_granule, size)

    def either(self, *modifiers: str, default: str = "") -> str:
        """The first of the instruction's modifiers that is one of these."""
        return next((m for m in self.instruction.modifiers if m in modifiers), default)

    def address(self, operand: Operand) -> tuple[int, int]:
        """(slot of the base as u32 or u64, byte offset) of an address operand."""
        if not isinstance(operand, Address):
            self.unsupported(f"{operand} is not an address")
        base = operand.base
        if isinstance(base, Register):
            return self.source_slot(base, self.natural_view(base)), operand.offset
        if isinstance(base, Immediate):
            return self.preparation.constant(base.value & (1 << 64) - 1, "u64"), operand.offset
        if isinstance(base, Symbol):
            return self.preparation.symbol(base.name, 0, "u64"), operand.offset
        return self.unsupported(f"address base {base}")


def immediate_bits(immediate: Immediate, view: str) -> int:
    """The bit pattern of a literal in a given type: 0f literals widen to f64, integers become floats where asked."""
    size = 8 * VIEW_SIZE[view]
    if view == "pred":
        return int(immediate.value != 0)
    if view.startswith("f"):
        kind = VIEWS[view]
        if immediate.bits == size:
            return immediate.value
        if immediate.bits == 32:
            number: Any = np.uint32(immediate.value).view(np.float32)
        elif immediate.bits:
            number = np.uint64(immediate.value).view(np.float64)
        else:
            number = immediate.value
        return int(np.asarray(number, dtype=np.float64).astype(kind).view(f"u{size // 8}"))
    return immediate.value & ((1 << size) - 1)
