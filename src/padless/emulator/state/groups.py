"""Groups of asynchronous operations: committed together, numbered in order, waited for from the first on.

The bulk groups and the cp.async groups of a lane, the wgmma groups of a warp and the tcgen05 loads and stores of a warp
are all such. A group is event number n of the agent's column in the clocks once it has been waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from padless.emulator.ptx.ast import Instruction
from padless.emulator.state.site import Site
from padless.emulator.state.warp import Fragment, Wait, Warp


class Operation:
    """One operation in flight: has it read its source, has it written its destination."""

    __slots__ = ("after", "instruction", "read", "written")

    def __init__(self, instruction: Instruction) -> None:
        self.instruction = instruction
        self.read = self.written = False
        self.after: list[Callable[[], None]] = []  # to call once it has written

    def finish(self) -> None:
        self.read = self.written = True
        for function in self.after:
            function()


class Groups:
    """The groups of one agent: what the next commit will close, and what commits have closed."""

    def __init__(self, clocks: Any, column: int | None = None) -> None:
        new = clocks.new_column() if clocks is not None and column is None else column
        self.column: int = -1 if new is None else new
        self.open: list[Any] = []
        self.closed: list[list[Any]] = []
        self._over = {"read": 0, "written": 0}  # groups known to be so, from the first on

    @property
    def event(self) -> int:
        """Of the group that the next commit closes."""
        return len(self.closed) + 1

    def commit(self) -> None:
        self.closed.append(self.open)
        self.open = []

    def over(self, upto: int, stage: str = "written") -> bool:
        """Whether the first `upto` groups have all been read, or written."""
        at = self._over[stage]
        while at < upto:
            for x in self.closed[at]:
                if not (x.written or (stage == "read" and x.read)):
                    return False
            at += 1
            self._over[stage] = at
        return True

    def unfinished(self, upto: int, stage: str = "written") -> list[Any]:
        """Operations of the first `upto` groups that are not over."""
        return [x for group in self.closed[:upto] for x in group if not getattr(x, stage)]

    def later(self, upto: int) -> list[Any]:
        """Operations behind the first `upto` groups, committed or not."""
        return [x for group in [*self.closed[upto:], self.open] for x in group]


def groups_of(w: Warp, family: str, lane: int = -1) -> Groups:
    """The groups of a lane, or of the warp."""
    found: Groups | None = w.groups.get((family, lane))
    if found is None:
        found = w.groups[family, lane] = Groups(w.clocks)
    return found


def commit_of(family: str) -> Callable[[Site], None]:
    """A lane commits its open operations of a family."""
    return lambda site: groups_of(site.warp, family, site.lane).commit()


class GroupWait(Wait):
    """Waiting for all but the latest `pending` groups of some lanes."""

    def __init__(
        self, warp: Warp, parts: Iterable[tuple[Any, Groups]], pending: int = 0, stage: str = "written", what: str = ""
    ) -> None:
        self.warp, self.what = warp, what
        self.parts = [(rows, groups, max(len(groups.closed) - pending, 0)) for rows, groups in parts]
        self.stage = stage

    def unfinished(self) -> list[Any]:
        return [x for _, groups, upto in self.parts for x in groups.unfinished(upto, self.stage)]

    def ready(self) -> bool:
        return all(groups.over(upto, self.stage) for _, groups, upto in self.parts)

    def finish(self, fragment: Fragment) -> Wait | None:
        if self.warp.clocks is not None:
            for rows, groups, upto in self.parts:
                self.warp.clocks.observe(rows, groups.column, upto)
        return None

    def describe(self) -> str:
        return f"{len(self.unfinished())} {self.what} to " + ("be read" if self.stage == "read" else "finish")


def wait_of(family: str, pending: int = 0, stage: str = "written", commits: bool = False) -> Callable[..., Wait | None]:
    """Lanes wait for all but their latest `pending` groups of a family; `commits`: what is open is committed first."""

    def wait(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        parts = [(w.first_row + lane, groups_of(w, family, lane)) for lane in f.lanes(m).tolist()]
        for _, groups in parts:
            if commits and groups.open:
                groups.commit()
        return GroupWait(w, parts, pending, stage, f"{family} copies").begin(f)

    return wait
