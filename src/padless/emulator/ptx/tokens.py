"""PTX text as tokens, and the place where a parser is among them."""

from __future__ import annotations

import re
import struct
from typing import NoReturn

from padless.emulator.errors import PtxSyntaxError
from padless.emulator.ptx.ast import Immediate

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r]+)
  | (?P<newline>\n)
  | (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<line>\.(?:loc|file)\b[^\n]*)
  | (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|\d+\.\d*(?:[eE][+-]?\d+)?|\d+U?)
  | (?P<name>[A-Za-z_$%.][\w$.]*(?:::[\w$.]+)*)
  | (?P<punctuation>[{}()\[\],;:<>|=+\-!@*~&/])
    """,
    re.VERBOSE | re.DOTALL,
)


class Tokens:
    """The tokens of a text as (kind, text, line); `at` is the next one."""

    def __init__(self, text: str, name: str) -> None:
        self.file_name = name
        self.tokens: list[tuple[str, str, int]] = []
        self._tokenize(text)
        self.at = 0

    def _tokenize(self, text: str) -> None:
        line, at, match = 1, 0, _TOKEN.match
        append = self.tokens.append
        while at < len(text):
            found = match(text, at)
            if not found:
                raise PtxSyntaxError(f"{self.file_name}:{line}: unexpected character {text[at]!r}")
            kind = found.lastgroup or ""
            at = found.end()
            if kind == "newline":
                line += 1
            elif kind == "comment":
                line += found.group().count("\n")
            elif kind != "space":
                append((kind, found.group(), line))
        append(("end", "", line))

    def fail(self, message: str) -> NoReturn:
        raise PtxSyntaxError(f"{self.file_name}:{self.tokens[self.at][2]}: {message}")

    @property
    def token(self) -> str:
        return self.tokens[self.at][1]

    @property
    def kind(self) -> str:
        return self.tokens[self.at][0]

    @property
    def line(self) -> int:
        return self.tokens[self.at][2]

    def next(self) -> str:
        kind, token, _ = self.tokens[self.at]
        if kind == "end":
            self.fail("unexpected end of the text")
        self.at += 1
        return token

    def skip_to(self, token: str) -> None:
        """Up to the next such token, and behind it."""
        while self.next() != token:
            pass

    def accept(self, token: str) -> bool:
        if self.tokens[self.at][1] == token:
            self.at += 1
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.accept(token):
            self.fail(f"expected {token!r}, found {self.token!r}")


def number(token: str) -> Immediate:
    """The value of a token of kind "number"."""
    head = token[:2].lower()
    if head == "0f":
        return Immediate(int(token[2:], 16), 32)
    if head == "0d":
        return Immediate(int(token[2:], 16), 64)
    if "." in token:
        return Immediate(struct.unpack("<Q", struct.pack("<d", float(token)))[0], 64)
    text = token.rstrip("U")
    if len(text) > 1 and text[0] == "0" and text.isdigit():
        return Immediate(int(text, 8))
    return Immediate(int(text, 0))
