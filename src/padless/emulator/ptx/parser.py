"""Reads PTX text into the classes of `ast`. It knows the grammar and no instruction: modifiers are kept as written."""

from __future__ import annotations

import re
import struct

from padless.emulator.errors import PtxSyntaxError
from padless.emulator.ptx.ast import Call, Function, Instruction, Label, Module, Operand, Register, SourceLine, Variable
from padless.emulator.ptx.operand_parser import OperandParser
from padless.emulator.ptx.tokens import number
from padless.emulator.ptx.types import TYPES, type_size

MOST_REGISTERS = 1 << 20  # of a function: virtual ones, before any are assigned
MOST_SCOPES = 200  # one within another
MOST_BYTES = 1 << 30  # of a variable
_SPACES = {".shared", ".global", ".const", ".local", ".param", ".tex"}
_LINKAGE = {".visible", ".extern", ".weak", ".common"}


def parse(text: str | bytes, name: str = "<ptx>") -> Module:
    """Parse one PTX module. `name` is used in messages. Raises PtxSyntaxError with the line."""
    if isinstance(text, bytes):
        text = text.rstrip(b"\0").decode()
    parser = _Parser(text, name)
    try:
        return parser.module()
    except PtxSyntaxError:
        raise
    except (ValueError, LookupError) as error:  # a word where the grammar has a number, text that ends too early
        parser.at = min(parser.at, len(parser.tokens) - 1)
        parser.fail(f"this is not PTX ({error})")


class _Parser(OperandParser):
    def __init__(self, text: str, name: str) -> None:
        super().__init__(text, name)
        self.files: dict[int, str] = {}
        self.source: SourceLine | None = None
        for kind, token, _ in self.tokens:  # .file directives stand at the end of the text
            if kind == "line" and token.startswith(".file"):
                found = re.match(r'\.file\s+(\d+)\s+"([^"]*)"', token)
                if found:
                    self.files[int(found[1])] = found[2]
        self.variables: dict[str, Variable] = {}

    # ---- module
    def module(self) -> Module:
        version, target = "", ""
        functions: dict[str, Function] = {}
        while self.kind != "end":
            token = self.token
            if self.kind == "line":
                self._location(self.next())
            elif self.accept(".version"):
                version = self.next()
            elif self.accept(".target"):
                target = self.next()
                while self.accept(","):
                    self.next()
            elif self.accept(".address_size"):
                self.next()
            elif token == ".section":
                self._skip_section()
            elif token in (".alias", ".pragma"):
                self.skip_to(";")
            else:
                self._declaration(functions)
        if not target:
            self.fail("no .target: is this PTX?")
        return Module(target, version, self.files, self.variables, functions, self.file_name)

    def _skip_section(self) -> None:
        self.skip_to("{")
        depth = 1
        while depth and self.kind != "end":
            token = self.next()
            depth += (token == "{") - (token == "}")

    def _location(self, text: str) -> None:
        found = re.match(r"\.loc\s+(\d+)\s+(\d+)", text)
        if found:
            outer = re.search(r"inlined_at\s+(\d+)\s+(\d+)", text)
            at = f"{self.files.get(int(outer[1]), '?')}:{outer[2]}" if outer else ""
            self.source = SourceLine(self.files.get(int(found[1]), f"file{found[1]}"), int(found[2]), at)

    def _declaration(self, functions: dict[str, Function]) -> None:
        external = False
        while self.token in _LINKAGE:
            external |= self.next() == ".extern"
        if self.token in (".entry", ".func"):
            function = self._function()
            known = functions.get(function.name)
            if known is None or not known.body:
                functions[function.name] = function
        elif self.token in _SPACES:
            variable = self._variable()
            if not (external and variable.name in self.variables):
                self.variables[variable.name] = variable
        else:
            self.fail(f"unexpected {self.token!r} at module level")

    def _variable(self, in_body: bool = False) -> Variable:
        space = self.next()[1:].split("::")[0]
        alignment, type_name, vector = 0, "", 1
        while self.token.startswith("."):
            token = self.next()
            if token == ".align":
                alignment = int(self.next())
            elif token in (".ptr", ".global", ".shared", ".const", ".local", ".managed", ".attribute", ".unified"):
                if token == ".attribute":
                    self.skip_to(")")
            elif token in (".v2", ".v4"):
                vector = int(token[2:])
            else:
                type_name = token[1:]
        name = self.next()
        size = (type_size(type_name) if type_name in TYPES else 8) * vector
        element, unsized = size, False
        while self.accept("["):
            if self.accept("]"):
                unsized = True
                continue
            size *= int(self.next(), 0)
            self.expect("]")
        if size > MOST_BYTES:
            self.fail(f"variable {name} has {size} bytes, allowed are {MOST_BYTES}")
        initial: bytes | None = None
        relocations: list[tuple[int, str, int]] = []
        if self.accept("="):
            initial, relocations = self._initializer(element)
            if unsized:
                size, unsized = len(initial), False
            initial = initial.ljust(size, b"\0")
        if in_body or self.token == ";":
            self.expect(";")
        return Variable(name, space, -1 if unsized else size, alignment or element, initial, tuple(relocations))

    def _initializer(self, element: int) -> tuple[bytes, list[tuple[int, str, int]]]:
        data, relocations = bytearray(), []
        depth = 0
        while True:
            if self.accept("{"):
                depth += 1
            elif self.accept("}"):
                depth -= 1
            elif self.accept(","):
                pass
            else:
                negative = self.accept("-")
                if self.kind == "number":
                    value = number(self.next())
                    if value.bits and value.bits != 8 * element:
                        data += struct.pack("<f", struct.unpack("<d", struct.pack("<Q", value.value))[0])
                    else:
                        whole = -value.value if negative else value.value
                        data += (whole % (1 << 8 * element)).to_bytes(element, "little")
                else:
                    symbol = self.next()
                    if symbol == "generic":
                        self.expect("(")
                        symbol = self.next()
                        self.expect(")")
                    addend = int(self.next(), 0) if self.accept("+") else 0
                    relocations.append((len(data), symbol, addend))
                    data += bytes(element)
            if depth == 0:
                return bytes(data), relocations

    def _parameters(self) -> list[Variable]:
        parameters: list[Variable] = []
        self.expect("(")
        while not self.accept(")"):
            if self.accept(".reg"):
                type_name = self.next()[1:]
                parameters.append(Variable(self.next(), "reg", type_size(type_name)))
            else:
                parameters.append(self._variable())
            self.accept(",")
        return parameters

    def _function(self) -> Function:
        line = self.line
        is_entry = self.next() == ".entry"
        results = self._parameters() if self.token == "(" else []
        function = Function(self.next(), is_entry, results=results, line=line)
        if self.token == "(":
            function.parameters = self._parameters()
        while self.token not in ("{", ";"):
            directive = self.next()
            if directive in (".maxntid", ".reqntid", ".reqnctapercluster", ".minnctapersm", ".maxnctapersm"):
                values = [int(self.next())]
                while self.accept(","):
                    values.append(int(self.next()))
                x, y, z = [*values, 1, 1][:3]
                if directive == ".reqnctapercluster":
                    function.cluster = x, y, z
                elif directive in (".maxntid", ".reqntid"):
                    function.max_threads = x, y, z
                elif directive == ".minnctapersm":
                    function.min_ctas = x
            elif directive == ".maxnreg":
                function.max_registers = int(self.next())
            elif directive == ".maxclusterrank":
                self.next()
            elif directive not in (".noreturn", ".explicitcluster", ".blocksareclusters"):
                self.at -= 1
                self.fail(f"unknown performance directive {directive!r}")
        if self.accept(";"):
            return function
        self.source = None
        self.scopes, self.labels = [], []
        self._block(function)
        return function

    # ---- function bodies
    def _declared_labels(self) -> dict[str, str]:
        """Labels of the scope that opens here, so that a branch forward inside it finds its own."""
        labels: dict[str, str] = {}
        depth, at = 0, self.at
        suffix = f"@{self.scope_count}" if self.scopes else ""
        statement_start = True
        while True:
            kind, token, _ = self.tokens[at]
            depth += (token == "{") - (token == "}")
            if depth < 0:
                return labels
            if kind == "end":
                self.fail("missing '}'")
            if statement_start and depth == 0 and kind == "name" and self.tokens[at + 1][1] == ":":
                labels[token] = token + suffix
                at += 1
            else:
                statement_start = token in ("{", "}", ";") or kind == "line"
            at += 1

    def _block(self, function: Function) -> None:
        self.expect("{")
        if len(self.scopes) == MOST_SCOPES:
            self.fail(f"more than {MOST_SCOPES} scopes, one within another")
        self.scope_count += 1
        self.labels.append(self._declared_labels())
        self.scopes.append({})
        while not self.accept("}"):
            self._statement(function)
        self.scopes.pop()
        self.labels.pop()

    def _statement(self, function: Function) -> None:
        kind, token, line = self.tokens[self.at]
        if kind == "line":
            self._location(self.next())
        elif token == "{":
            self._block(function)
        elif token == ";":
            self.next()
        elif token == ".reg":
            self._register_declaration(function)
        elif token.split("::")[0] in _SPACES:
            variable = self._variable(in_body=True)
            if len(self.scopes) > 1:
                unique = f"{variable.name}@{self.scope_count}"
                self.scopes[-1][variable.name] = "&" + unique
                variable.name = unique
            function.variables.append(variable)
        elif token == ".pragma":
            self.skip_to(";")
        elif self.tokens[self.at + 1][1] == ":" and kind == "name":
            self.at += 2
            name = self.labels[-1].get(token, token)
            if self.accept(".branchtargets"):
                targets = []
                while not self.accept(";"):
                    targets.append(self.label(self.next()))
                    self.accept(",")
                function.branch_targets[name] = tuple(targets)
            elif self.token in (".callprototype", ".calltargets"):
                self.skip_to(";")
            else:
                function.body.append(Label(name, line))
        elif token.startswith("."):
            self.fail(f"unknown directive {token!r} in a function body")
        else:
            self._instruction(function)

    def _register_declaration(self, function: Function) -> None:
        self.next()
        type_name = self.next()[1:]
        vector = ""
        if type_name in ("v2", "v4"):
            vector, type_name = type_name, self.next()[1:]
        top = len(self.scopes) == 1
        while True:
            name = self.next()
            names = [name]
            if self.accept("<"):
                count = int(self.next())
                if len(function.registers) + count > MOST_REGISTERS:
                    self.fail(f"{name}<{count}> makes more than {MOST_REGISTERS} registers in {function.name}")
                names = [f"{name}{i}" for i in range(count)]
                self.expect(">")
            own = "" if top else f"@{self.scope_count}"
            if vector:
                parts = {n: [f"{n}.{c}" for c in "xyzw"[: int(vector[1:])]] for n in names}
                names = [part for each in parts.values() for part in each]
                self.scopes[-1] |= {n: "{" + ",".join(part + own for part in each) for n, each in parts.items()}
            for each in names:
                self.scopes[-1][each] = unique = each + own
                function.registers[unique] = type_name
            if not self.accept(","):
                break
        self.expect(";")

    def _instruction(self, function: Function) -> None:
        guard, negated = None, False
        line = self.line
        if self.accept("@"):
            negated = self.accept("!")
            operand = self.named(self.next())
            if not isinstance(operand, Register):
                self.fail(f"the guard {operand} is not a predicate register")
            guard = operand
        if self.kind != "name":
            self.fail(f"expected an instruction, found {self.token!r}")
        opcode, *modifiers = self.next().split(".")
        instruction = Instruction(opcode, tuple(modifiers), (), line, self.source, guard, negated)
        if opcode == "call":
            self._call(function, instruction)
            return
        operands: list[Operand] = []
        while not self.accept(";"):
            operands.append(self.operand())
            if not self.accept(",") and self.token != ";":
                self.fail(f"expected ',' or ';' in {opcode}, found {self.token!r}")
        instruction.operands = tuple(operands)
        function.body.append(instruction)

    def _call(self, function: Function, instruction: Instruction) -> None:
        results: tuple[str, ...] = ()
        arguments: tuple[str, ...] = ()
        if self.accept("("):
            results = self.names()
            self.expect(",")
        target = self.next()
        if isinstance(self.named(target), Register):
            self.fail("indirect calls are not supported")
        if self.accept(",") and self.accept("("):
            arguments = self.names()
        self.skip_to(";")
        function.body.append(Call(target, results, arguments, instruction))
