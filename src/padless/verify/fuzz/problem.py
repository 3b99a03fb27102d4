"""Random problems as text that can be read back, a call and its options, all of them literals; how they are drawn."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from padless.runtime.choices import BackendName
from padless.verify.fuzz.place import Place

EVERYWHERE = ("reference", "sm_90a", "sm_100a")
_DRAWN = 300  # problems whose options are compared with those of one that was typed
_TRIES = 256  # draws of a problem of one kind, the rarest of which is one in a hundred

Options = dict[str, Any]
Kind = tuple[Any, ...]
KindOf = Callable[[Options], Kind]
Choice = TypeVar("Choice")

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}


@dataclass(frozen=True)
class Problem:
    """One call of ``call``. ``str`` gives ``call(option=value, ..)``, which ``parse`` reads."""

    call: str
    options: Options

    def __str__(self) -> str:
        return f"{self.call}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"

    def but(self, **changes: Any) -> Problem:
        """The same call with other options."""
        return replace(self, options=self.options | changes)

    @classmethod
    def parse(cls, text: str) -> Problem:
        """Reads what ``str`` wrote. Raises ValueError for anything else."""
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ValueError(f"problem is {text!r}; it must be call(option=value, ..): {reason}") from None
        if not isinstance(tree, ast.Call) or tree.args or any(one.arg is None for one in tree.keywords):
            raise ValueError(f"problem is {text!r}; it must be call(option=value, ..): no call by keywords")
        options = {}
        for one in tree.keywords:
            try:
                options[str(one.arg)] = ast.literal_eval(one.value)
            except ValueError:
                shown = f"{one.arg}={ast.unparse(one.value)}"
                allowed = "numbers, strings, lists, True, False or None"
                raise ValueError(f"problem is {text!r}, and has {shown}; its values must be {allowed}") from None
        return cls(ast.unparse(tree.func), options)


@dataclass(frozen=True)
class Limits:
    """Sizes of the largest problems: groups, rows of a group, N and K in multiples of what a format needs."""

    groups: int
    rows: int
    n: int
    k: int


# Small enough that drawing and judging, not multiplying, takes the time; the emulator runs a few thousand instructions
# a second.
LIMITS = {"cuda": Limits(8, 300, 512, 1024), "reference": Limits(4, 24, 96, 192), "emulator": Limits(3, 20, 64, 128)}


class Draw(random.Random):
    """A seeded source of options, within limits."""

    def __init__(self, seed: str, backend: BackendName) -> None:
        super().__init__(seed)
        self.backend = backend
        self.limits = LIMITS[backend.split(":")[0]]

    def maybe(self, chance: float) -> bool:
        return self.random() < chance

    def one(self, choices: Sequence[Choice]) -> Choice:
        return self.choice(choices)

    def data_seed(self) -> int:
        return self.randrange(2**31)

    def multiple(self, of: int, most: int) -> int:
        """A multiple of ``of``, at least one of it and at most ``most`` where that is possible."""
        return of * self.randint(1, max(1, most // of))

    def sizes(self, most_groups: int | None = None) -> list[int]:
        """Rows of each group: empty ones, one row, the borders of tiles, few and many groups."""
        most = self.limits.rows
        groups = self.randint(1, most_groups or self.limits.groups)
        if most_groups is None and self.backend == "cuda" and self.maybe(0.006):
            return [self.one((0, 0, 1, 1, 2, 5)) for _ in range(self.one((30, 255, 257, 400)))]
        borders = [size for size in (0, 0, 1, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65) if size <= most]
        if most > 129:
            borders += [127, 128, 129, 255, 257]
        large = [127, 128, 129] if self.maybe(0.03) and self.backend == "reference" else []
        sizes = [self.one(borders) if self.maybe(0.6) else self.randint(0, most) for _ in range(groups)]
        for size in large[:1]:
            sizes[self.randrange(groups)] = size + self.randint(0, 2)
        return sizes

    def past(self) -> int:
        """Rows that belong to no group."""
        return self.one((0, 0, 0, 1, 3, 17))

    def hostile_ends(self, groups: int, rows: int) -> list[int]:
        """End offsets that are no partition: descending, negative, past M, extreme."""
        wild = (-1, -(2**31), 2**31 - 1, rows + 1, rows + 1000, -rows, 2**30)
        return [self.one(wild) if self.maybe(0.4) else self.randint(0, max(rows, 1)) for _ in range(groups)]


@dataclass(frozen=True)
class Model:
    """Common part of a worker's problems of a call, so that one compilation serves many of them."""

    constants: Options
    kind: Kind


@dataclass(frozen=True)
class Subject:
    """One call.

    constants: draws what kernels are compiled for. rest: draws the other options, given those.
    judge: makes the call and says what is wrong to the place's judge; a ValueError means that the call was refused.
    share: how many problems out of all subjects' sum.
    variants: how many draws of constants a worker has, so that compiling does not take its time.
    kernels: architectures whose kernels make the call, with "reference" for torch on a CPU.
    emulated: whether the emulator has something to do with it.
    kind: of a problem's options; see `padless.verify.fuzz.kinds`.
    lines: options of the fixed problems that `padless verify` runs on an architecture.
    """

    constants: Callable[[Draw], Options]
    rest: Callable[[Draw, Options], Options]
    judge: Callable[[Options, Place], None]
    share: int
    variants: int
    kernels: tuple[str, ...] = EVERYWHERE
    emulated: bool = False
    kind: KindOf = lambda options: ()
    lines: Callable[[str], Iterable[Options]] = lambda arch: ()

    def draw(self, name: str, draw: Draw, model: Model | None = None) -> Problem:
        """A problem: any, or one as the model's."""
        fixed = self.constants(draw) if model is None else model.constants
        options = fixed | self.rest(draw, fixed)
        for _ in range(0 if model is None else _TRIES):
            if model is None or self.kind(options) == model.kind:
                break
            options = fixed | self.rest(draw, fixed)
        return Problem(name, options)

    def check(self, problem: Problem) -> None:
        """Raises ValueError for options that, by name, type or a string's letters, no drawn or fixed problem has."""
        places: tuple[BackendName, ...] = ("cuda", "reference", "emulator", "emulator:sm_100a")
        seen = [self.draw("", Draw(str(i), place)).options for place in places for i in range(_DRAWN)]
        seen += [options for arch in EVERYWHERE[1:] for options in self.lines(arch)]
        takes = f"{problem.call} takes {', '.join(dict.fromkeys(name for options in seen for name in options))}"
        for name in seen[0]:
            if name not in problem.options and all(name in options for options in seen):
                raise ValueError(f"problem has no {name}; {takes}")
        for name, value in problem.options.items():
            known = [options[name] for options in seen if name in options]
            if not known:
                raise ValueError(f"problem has {name}; {takes}")
            if type(value) not in (types := {type(one) for one in known}):
                allowed = " or ".join(sorted(one.__name__ for one in types))
                raise ValueError(f"problem has {name}={value!r}; it must be of type {allowed}")
            if isinstance(value, str) and value not in known:
                allowed = ", ".join(sorted({repr(one) for one in known}))
                raise ValueError(f"problem has {name}={value!r}; allowed: {allowed}")

    def model(self, draw: Draw) -> Model:
        fixed = self.constants(draw)
        return Model(fixed, self.kind(fixed | self.rest(draw, fixed)))
