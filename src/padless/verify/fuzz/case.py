"""Properties of any call, stated once: a case is a problem's operands and its call; a property makes it again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch

from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import Options

REPEATS = 20
# Options that change neither operands nor a reference's bits, which are of float32.
_OF_KERNELS = {"tile", "cluster", "pieces", "out", "accumulate", "properties"}
Part = Callable[[torch.Tensor], torch.Tensor]
# Another way to ask for the same results: what it is, the call, which part of its output is which of the case's.
Change = tuple[str, Callable[[], torch.Tensor], Part, Part]
# Makes a case of the same shapes by its number.
Other = Callable[[int], Any]


class Case(Protocol):
    """A problem at a place. operands: those of its call, which a graph's replay overwrites."""

    o: Options
    place: Place
    operands: Any

    def run(self, operands: Any) -> torch.Tensor:
        """Makes the call into a guarded output of its own."""
        ...

    def make(self, out: torch.Tensor) -> object:
        """Makes the call on its own operands into ``out``, as a user would, with nothing but what it needs."""
        ...

    def made(self, fresh: torch.Tensor) -> torch.Tensor:
        """The output that `make` leaves, by what `run` gave."""
        ...

    def changes(self) -> Iterator[Change]: ...


class Modelled(Case, Protocol):
    """A case whose result is known."""

    def near(self, out: torch.Tensor) -> None:
        """Compares the values with float64."""
        ...

    def reference(self) -> torch.Tensor:
        """The bits, by a model of the tensor core's arithmetic."""
        ...


def whole(t: torch.Tensor) -> torch.Tensor:
    return t


def turned(t: torch.Tensor) -> torch.Tensor:
    return t.flip(0)


def ends_of(sizes: list[int]) -> set[int]:
    """The first and the last group that has tokens."""
    filled = [group for group, size in enumerate(sizes) if size]
    return {*filled[:1], *filled[-1:]}


def tensors_of(t: Any) -> list[torch.Tensor]:
    """All tensors of operands."""
    if isinstance(t, torch.Tensor):
        return [t]
    if isinstance(t, type):  # a kernel, by the class of its configurations
        return []
    inner = [getattr(t, f.name) for f in fields(t)] if is_dataclass(t) else t if isinstance(t, (list, tuple)) else ()
    return [part for one in inner for part in tensors_of(one)]


def reference_of(case: Case) -> tuple[type, str]:
    """What a case's reference is a function of."""
    return type(case), str({name: value for name, value in case.o.items() if name not in _OF_KERNELS})


def _near(case: Modelled, out: torch.Tensor, other: Other) -> None:
    case.near(out)


def _bits(case: Modelled, out: torch.Tensor, other: Other) -> None:
    """Of fixed problems in a row that differ in their kernels alone the reference is computed once: it is slow."""
    judge, place = case.place.judge, case.place
    judge.same("the reference's bits", out, lambda: place.once(reference_of(case), case.reference).to(out.dtype))


def _changes(case: Case, out: torch.Tensor, other: Other) -> None:
    for change in case.changes():
        _compare(case, out, change)


def _change(case: Case, out: torch.Tensor, other: Other) -> None:
    """One of them, as the seed chooses."""
    if changes := list(case.changes()):
        _compare(case, out, random.Random(case.o["seed"]).choice(changes))


def _compare(case: Case, out: torch.Tensor, change: Change) -> None:
    name, call, mine, its = change
    case.place.judge.same(name, mine(call()), its(out))


def _tiles(case: Any, out: torch.Tensor, other: Other) -> None:
    """Every configuration of a call that has several."""
    for change in case.tiles():
        _compare(case, out, change)


def _repeats(case: Case, out: torch.Tensor, other: Other) -> None:
    for _ in case.place.times(case.o.get("times", REPEATS)):
        case.place.judge.same("moved from call to call", case.run(case.operands), out)


def _microbatches(case: Any, out: torch.Tensor, other: Other) -> None:
    """Of a call that adds; see `Gradient.microbatches`."""
    case.microbatches([other(i) for i in (1, 2, 3)])


def _threads(case: Case, out: torch.Tensor, other: Other) -> None:
    """Eight threads, each with its own stream and problem."""
    cases = [case, *map(other, range(1, 8))]
    expected = [one.run(one.operands) for one in cases]

    def work(index: int) -> None:
        for _ in case.place.times(case.o.get("times", REPEATS)):
            got = cases[index].run(cases[index].operands)
        case.place.judge.same(f"thread {index}", got, expected[index])

    case.place.in_threads(work, len(cases))


def _replay(case: Case, out: torch.Tensor, other: Other) -> None:
    second = other(1)
    want = second.made(second.run(second.operands))
    again = torch.empty_like(want)
    targets, sources = tensors_of(case.operands), tensors_of(second.operands)
    case.place.replayed(lambda: case.make(again), [*targets, again], [*sources, torch.full_like(again, torch.nan)])
    case.place.judge.same("a replay with new values and new sizes of groups", again, want)


# "replay" leaves other values in the operands, and so comes last.
PROPERTIES: dict[str, Callable[[Any, torch.Tensor, Other], None]] = {
    "near": _near,
    "bits": _bits,
    "changes": _changes,
    "change": _change,
    "tiles": _tiles,
    "repeats": _repeats,
    "threads": _threads,
    "microbatches": _microbatches,
    "replay": _replay,
}


def _other(o: Options, number: int) -> Options:
    """The same shapes with other values and groups of other sizes."""
    other = o | {"seed": o["seed"] + number}
    if "sizes" in o:
        turn = number % len(o["sizes"])
        other |= {"sizes": [*o["sizes"][turn:], *o["sizes"][:turn]], "nan_group": -1}
    return other


def judge_case(make: Callable[[Options, Place], Case], o: Options, place: Place) -> None:
    """Makes the call and asks for those of the properties that the problem names."""
    case: Any = make(o, place)
    if o.get("hostile"):
        case.hostile()
        return
    out = case.run(case.operands)
    for name in PROPERTIES:
        if name in o["properties"]:
            PROPERTIES[name](case, out, lambda number: make(_other(o, number), place))
