"""A sequence of operations as a problem: options, and a list of (operation's name, number), run one after the other.

The number is the seed of all that the operation chooses, so that an operation means the same whichever of the others are
dropped. One that does not apply to what is there does nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import Draw, Options

LONGEST = 12


class State(Protocol):
    """The subject of operations. check: compares its result with that of a fresh one; ``after`` says when that was."""

    def check(self, after: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Operation:
    """run: changes a state, with a source of choices.

    share: how many operations out of the sum of all. where: the devices that have it, "cpu", "cuda" or "" for both.
    """

    run: Callable[[Any, random.Random], None]
    share: float = 1.0
    where: str = ""


Operations = Mapping[str, Operation]


def table(
    *functions: Callable[[Any, random.Random], None], share: float = 1.0, where: str = ""
) -> dict[str, Operation]:
    """Operations by the names of their functions."""
    return {function.__name__: Operation(function, share, where) for function in functions}


def drawn(draw: Draw, operations: Operations) -> list[tuple[str, int]]:
    """3 to 12 operations that there are on the backend's device."""
    device = "cuda" if draw.backend == "cuda" else "cpu"
    here = {name: one.share for name, one in operations.items() if one.where in ("", device)}
    names = draw.choices(list(here), list(here.values()), k=draw.randint(3, LONGEST))
    return [(name, draw.randrange(1000)) for name in names]


def judge(make: Callable[[Options, Place], State], operations: Operations, o: Options, place: Place) -> None:
    """Runs a sequence, with a comparison at the start and after every operation."""
    for name, _ in o["operations"]:
        if name not in operations:
            raise ValueError(f"operation is {name!r}; allowed: {', '.join(operations)}")
    state = make(o, place)
    try:
        state.check("at the start")
        for name, number in o["operations"]:
            operations[name].run(state, random.Random(number))
            state.check(f"after {name}")
    finally:
        state.close()
