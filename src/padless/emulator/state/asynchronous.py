"""Asynchronous operations: work that an instruction starts and that finishes at a moment the schedule picks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from padless.emulator.state.work import Work


class AsyncOperation:
    """`steps` run one by one, each at its own moment; operations of one queue run in order."""

    __slots__ = ("description", "steps", "work")

    def __init__(self, description: str, *steps: Callable[[], None], work: Work | None = None) -> None:
        self.description = description
        self.steps = deque(steps)
        self.work = work
