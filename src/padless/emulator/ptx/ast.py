"""The parsed form of a PTX module: plain data, no behaviour beyond printing itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SourceLine:
    """Where a PTX instruction came from: the CUDA source line of the nearest `.loc`."""

    file: str
    line: int
    inlined_at: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" (inlined at {self.inlined_at})" if self.inlined_at else "")


@dataclass(frozen=True, slots=True)
class Register:
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Immediate:
    """A literal. `bits` is 0 for an integer, 32 or 64 for the bit pattern of a 0f / 0d literal."""

    value: int
    bits: int = 0

    def __str__(self) -> str:
        return hex(self.value) if self.bits else str(self.value)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, label or function name, with a byte offset."""

    name: str
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.name}+{self.offset}" if self.offset else self.name


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`, or `[base, {c0, c1, ...}]` of a tensor operand."""

    base: Operand
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()
    extra: tuple[Operand, ...] = ()

    def __str__(self) -> str:
        text = f"{self.base}" + (f"+{self.offset}" if self.offset else "")
        if self.coordinates:
            text += ", {" + ", ".join(map(str, self.coordinates)) + "}"
        return f"[{text}]"


@dataclass(frozen=True, slots=True)
class Vector:
    items: tuple[Operand, ...]

    def __str__(self) -> str:
        return "{" + ", ".join(map(str, self.items)) + "}"


@dataclass(frozen=True, slots=True)
class Pair:
    """`a|b`: two destinations."""

    first: Operand
    second: Operand

    def __str__(self) -> str:
        return f"{self.first}|{self.second}"


@dataclass(frozen=True, slots=True)
class Not:
    operand: Operand

    def __str__(self) -> str:
        return f"!{self.operand}"


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`: a result that is dropped."""

    def __str__(self) -> str:
        return "_"


Operand = Register | Immediate | Symbol | Address | Vector | Pair | Not | Sink


@dataclass(slots=True)
class Instruction:
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    line: int
    source: SourceLine | None = None
    guard: Register | None = None
    guard_negated: bool = False
    index: int = -1  # position in the prepared kernel

    @property
    def name(self) -> str:
        return ".".join((self.opcode, *self.modifiers))

    def __str__(self) -> str:
        guard = f"@{'!' if self.guard_negated else ''}{self.guard} " if self.guard else ""
        return f"{guard}{self.name} {', '.join(map(str, self.operands))}"


@dataclass(slots=True)
class Label:
    name: str
    line: int


@dataclass(slots=True)
class Call:
    """A direct call, kept apart from ordinary instructions because preparing a kernel inlines it."""

    target: str
    results: tuple[str, ...]
    arguments: tuple[str, ...]
    instruction: Instruction


Statement = Instruction | Label | Call


@dataclass(slots=True)
class Variable:
    """A variable of the module or of a function. `size` in bytes; -1 for `.extern .shared name[]`."""

    name: str
    space: str
    size: int
    alignment: int = 1
    initial: bytes | None = None
    relocations: tuple[tuple[int, str, int], ...] = ()  # (offset, symbol, addend)


@dataclass(slots=True)
class Function:
    name: str
    is_entry: bool
    parameters: list[Variable] = field(default_factory=list)
    results: list[Variable] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)  # name -> type, e.g. "b32", "pred"
    variables: list[Variable] = field(default_factory=list)  # .shared, .local, .param inside the body
    body: list[Statement] = field(default_factory=list)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    max_threads: tuple[int, int, int] | None = None
    min_ctas: int | None = None  # .minnctapersm
    max_registers: int | None = None  # .maxnreg
    cluster: tuple[int, int, int] | None = None
    line: int = 0


@dataclass(slots=True)
class Module:
    target: str
    version: str
    files: dict[int, str]
    variables: dict[str, Variable]
    functions: dict[str, Function]
    name: str = "<ptx>"

    def entries(self) -> list[str]:
        return [f.name for f in self.functions.values() if f.is_entry]
