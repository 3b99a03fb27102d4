"""The names and operands of PTX instructions, inside the scopes of a function body."""

from __future__ import annotations

from padless.emulator.ptx.ast import Address, Immediate, Not, Operand, Pair, Register, Sink, Symbol, Vector
from padless.emulator.ptx.tokens import Tokens, number

MOST_NESTED = 20  # braces, brackets and signs in one operand


class OperandParser(Tokens):
    """Reads operands. `scopes` and `labels`, innermost last, give the declared names their unique ones."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text, name)
        self.scopes: list[dict[str, str]] = []
        self.labels: list[dict[str, str]] = []
        self.scope_count = 0
        self.depth = 0  # of the operand being read

    def label(self, name: str) -> str:
        """The unique name of a label."""
        for scope in reversed(self.labels):
            if name in scope:
                return scope[name]
        return name

    def named(self, name: str) -> Operand:
        """What a name stands for: a register, a variable, a label, a special register, a constant."""
        for scope in reversed(self.scopes):
            if name in scope:
                found = scope[name]
                if found.startswith("{"):  # a vector variable, of which an instruction names all elements
                    return Vector(tuple(Register(each) for each in found[1:].split(",")))
                return Symbol(found[1:]) if found.startswith("&") else Register(found)
        if name == "_":
            return Sink()
        if name.startswith("%"):
            return Register(name)  # a special register
        if name == "WARP_SZ":
            return Immediate(32)
        return Symbol(self.label(name))

    def names(self) -> tuple[str, ...]:
        """A list in brackets, the opening one already read, as text."""
        names = []
        while not self.accept(")"):
            names.append(str(self.operand()))
            self.accept(",")
        return tuple(names)

    def operand(self) -> Operand:
        operand = self._primary()
        if self.accept("|"):
            operand = Pair(operand, self._primary())
        return operand

    def _primary(self) -> Operand:
        if self.depth == MOST_NESTED:
            self.fail(f"an operand with more than {MOST_NESTED} others, one within another")
        self.depth += 1
        operand = self._nested()
        self.depth -= 1
        return operand

    def _nested(self) -> Operand:
        token = self.token
        if self.accept("{"):
            items: list[Operand] = []
            while not self.accept("}"):
                items.append(self.operand())
                self.accept(",")
            return Vector(tuple(items))
        if self.accept("["):
            return self._address()
        if self.accept("!"):
            return Not(self._primary())
        if self.accept("-"):
            value = self._primary()
            if not isinstance(value, Immediate):
                self.fail("only a number may follow '-'")
            if value.bits:
                return Immediate(value.value ^ (1 << (value.bits - 1)), value.bits)
            return Immediate(-value.value)
        if self.accept("("):
            inner = self._primary()
            self.expect(")")
            return inner
        if self.kind == "number":
            return number(self.next())
        if self.kind == "name":
            operand = self.named(self.next())
            if isinstance(operand, Symbol) and self.token in "+-" and self.kind == "punctuation":
                operand = Symbol(operand.name, operand.offset + self._offset())
            return operand
        return self.fail(f"unexpected {token!r} in an operand")

    def _offset(self) -> int:
        total = 0
        while self.token in ("+", "-"):
            sign = -1 if self.next() == "-" else 1
            if self.accept("-"):
                sign = -sign
            total += sign * int(self.next().rstrip("U"), 0)
        return total

    def _address(self) -> Address:
        base = self._primary()
        offset = self._offset() if self.token in ("+", "-") else 0
        coordinates: tuple[Operand, ...] = ()
        extra: list[Operand] = []
        while self.accept(","):
            item = self._primary()
            if isinstance(item, Vector):
                coordinates = item.items
            else:
                extra.append(item)
        self.expect("]")
        if isinstance(base, Symbol) and base.offset:
            base, offset = Symbol(base.name), offset + base.offset
        return Address(base, offset, coordinates, tuple(extra))
