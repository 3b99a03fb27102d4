"""Properties of any call, stated once: a case is a problem's operands and its call; a property makes it again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch

from padless.verify.fuzz.judge import Judge
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import Options

REPEATS = 20
# Options that change neither operands nor a reference's bits, which are of float32.
_OF_KERNELS = {"tile", "cluster", "pieces", "out", "accumulate", "properties"}
Part = Callable[[Any], Any]
# Another way to ask for the same results: what it is, the call, which part of its output is which of the case's.
Change = tuple[str, Callable[[], Any], Part, Part]
# Makes a case of the same shapes by its number.
Other = Callable[[int], Any]


class Case(Protocol):
    """A problem at a place. operands: those of its call, which a graph's replay overwrites."""

    o: Options
    place: Place
    operands: Any

    def run(self, operands: Any) -> Any:
        """Makes the call into a separate guarded output, or from poisoned memory: a tensor, or several."""
        ...

    def make(self, out: Any) -> object:
        """Makes the call on its own operands into ``out``, as a user would, with nothing but what it needs.

        out: a tensor, or several by the names of `parts_of`.
        """
        ...

    def made(self, fresh: Any) -> Any:
        """The output that `make` leaves, by what `run` gave."""
        ...

    def changes(self) -> Iterator[Change]: ...


class Modelled(Case, Protocol):
    """A case whose result is known."""

    def near(self, out: Any) -> None:
        """Compares the values with float64."""
        ...

    def reference(self) -> Any:
        """The bits, by a model of the tensor core's arithmetic; of what torch defines, on the CPU."""
        ...


def whole(t: Any) -> Any:
    return t


def turned(t: torch.Tensor) -> torch.Tensor:
    return t.flip(0)


def ends_of(sizes: list[int]) -> set[int]:
    """The first and the last group that has tokens."""
    filled = [group for group, size in enumerate(sizes) if size]
    return {*filled[:1], *filled[-1:]}


def parts_of(t: Any, name: str = "") -> dict[str, torch.Tensor]:
    """All tensors of operands or of a result, by the names of what they are part of."""
    if isinstance(t, torch.Tensor):
        return {name: t}
    inner: dict[Any, Any] = t if isinstance(t, dict) else {}
    if is_dataclass(t) and not isinstance(t, type):  # a kernel may be the class of its configurations
        inner = {f.name: getattr(t, f.name) for f in fields(t)}
    elif isinstance(t, (list, tuple)):
        inner = t._asdict() if hasattr(t, "_asdict") else dict(enumerate(t))
    named = ((f"{name} {key}".strip(), one) for key, one in inner.items())
    return {key: part for own, one in named for key, part in parts_of(one, own).items()}


def tensors_of(t: Any) -> list[torch.Tensor]:
    return [*parts_of(t).values()]


def same_parts(judge: Judge, name: str, got: Any, want: Any, *, stored: bool = False) -> None:
    """All tensors have the same bits; stored: and the same strides, and in MN-major scales the same padding."""
    ours, others = parts_of(got), parts_of(want)
    judge.wrong(f"{name}: there are {[*ours]}, not {[*others]}", ours.keys() != others.keys())
    for key in ours.keys() & others.keys():
        its, t, other = f"{name}: {key}".removesuffix(": "), ours[key], others[key]
        if stored:
            judge.wrong(f"{its}: strides {t.stride()}, not {other.stride()}", t.stride() != other.stride())
            t, other = as_stored(t), as_stored(other)
        judge.same(its, t, other.to(t.device))


def as_stored(t: torch.Tensor) -> torch.Tensor:
    """MN-major scales with their padding, (columns, rows); any other tensor as it is."""
    is_mn_major = t.dtype == torch.float32 and t.dim() == 2 and t.stride(0) == 1 < t.stride(1)
    return t.as_strided((t.shape[1], t.stride(1)), (t.stride(1), 1)) if is_mn_major else t


def reference_of(case: Case) -> tuple[type, str]:
    """Key of a case's reference, which is a function of it."""
    return type(case), str({name: value for name, value in case.o.items() if name not in _OF_KERNELS})


def _near(case: Modelled, out: Any, other: Other) -> None:
    with case.place.judge.any_nan():  # float64 has not the bits of a kernel's
        case.near(out)


def _bits(case: Any, out: Any, other: Other) -> None:
    """Of fixed problems in a row that differ in their kernels alone the reference is computed once: it is slow."""
    judge, place = case.place.judge, case.place
    with judge.any_nan(getattr(case, "any_nan", False)):
        if isinstance(out, torch.Tensor):
            judge.same("the reference's bits", out, lambda: place.once(reference_of(case), case.reference).to(out))
        else:
            same_parts(judge, "the definition's bits", out, case.reference(), stored=True)


def _changes(case: Case, out: Any, other: Other) -> None:
    for change in case.changes():
        _compare(case, out, change)


def _change(case: Case, out: Any, other: Other) -> None:
    """One of them, as the seed chooses."""
    if changes := list(case.changes()):
        _compare(case, out, random.Random(case.o["seed"]).choice(changes))


def _compare(case: Case, out: Any, change: Change) -> None:
    name, call, mine, its = change
    same_parts(case.place.judge, name, mine(call()), its(out))


def _tiles(case: Any, out: Any, other: Other) -> None:
    """Every configuration of a call that has several."""
    for change in case.tiles():
        _compare(case, out, change)


def _repeats(case: Case, out: Any, other: Other) -> None:
    for _ in case.place.times(case.o.get("times", REPEATS)):
        same_parts(case.place.judge, "moved from call to call", case.run(case.operands), out)


def _microbatches(case: Any, out: Any, other: Other) -> None:
    """Of a call that adds; see `Gradient.microbatches`."""
    case.microbatches([other(i) for i in (1, 2, 3)])


def _threads(case: Case, out: Any, other: Other) -> None:
    """Eight threads, each with its own stream and problem."""
    cases = [case, *map(other, range(1, 8))]
    expected = [one.run(one.operands) for one in cases]

    def work(index: int) -> None:
        for _ in case.place.times(case.o.get("times", REPEATS)):
            got = cases[index].run(cases[index].operands)
        case.place.judge.same(f"thread {index}", got, expected[index])

    case.place.in_threads(work, len(cases))


def _replay(case: Case, out: Any, other: Other) -> None:
    second = other(1)
    want = second.made(second.run(second.operands))
    again = {key: torch.empty_like(t) for key, t in parts_of(want).items()}
    wrong = [t.clone().fill_(torch.nan if t.is_floating_point() else 0x7F) for t in again.values()]
    targets, sources = [*tensors_of(case.operands), *again.values()], [*tensors_of(second.operands), *wrong]
    case.place.replayed(lambda: case.make(again.get("", again)), targets, sources)
    same_parts(case.place.judge, "a replay with new values and new sizes of groups", again, parts_of(want))


# "replay" leaves other values in the operands, and so comes last.
PROPERTIES: dict[str, Callable[[Any, Any, Other], None]] = {
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
