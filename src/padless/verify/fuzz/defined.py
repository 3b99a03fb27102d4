"""Calls that torch defines on a CPU, bit for bit: their results on any device, written over poison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from padless.testing.operands import moved
from padless.verify.fuzz.case import Change, parts_of
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import Options


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Fills what torch.empty allocates with NaN, or with 0x7F."""
    original = torch.empty

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        t = original(*args, **options)
        return t.fill_(torch.nan if t.is_floating_point() else 0x7F)

    with mock.patch.object(torch, "empty", empty):
        yield


class Defined:
    """A case whose operands are named as its call takes them. any_nan: a NaN's bits may be other than on the CPU."""

    any_nan = False

    def __init__(self, o: Options, place: Place, **operands: torch.Tensor | None) -> None:
        self.o, self.place = o, place
        self.operands: dict[str, Any] = operands

    def call(self, *_: Any, **operands: Any) -> Any:
        """Tensors, in whatever the call returns."""
        raise NotImplementedError

    def definition(self, *_: Any, **operands: Any) -> Any:
        """The same of operands on the CPU."""
        return self.call(**operands)

    def near(self, out: Any) -> None:
        """Compares the result with other rules, or float64."""
        raise NotImplementedError

    def run(self, operands: dict[str, Any]) -> Any:
        with _poisoned_memory():
            return self.call(**operands)

    def make(self, out: dict[str, torch.Tensor]) -> None:
        for name, t in parts_of(self.call(**self.operands)).items():
            out[name].copy_(t)

    def made(self, fresh: Any) -> Any:
        return fresh

    def reference(self) -> Any:
        return self.definition(**{name: moved(t, "cpu") for name, t in self.operands.items()})

    def changes(self) -> Iterator[Change]:
        yield from ()

    def hostile(self) -> None:
        """Wrong offsets mean the groups that ascending ones within the rows would be."""
        self.near(self.run(self.operands))
