"""Asynchronous operations: work that an instruction starts and that finishes at a moment the schedule picks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Processor(Protocol):
    """Where an operation runs: the CTA, of which a clock needs the multiprocessor."""

    slot: int


@dataclass(frozen=True, slots=True)
class Work:
    """What an operation asks of the hardware, for a clock; functional runs do not read it.

    unit: "load", "store", "remote", "small_load", "wgmma", "mma", "cp", "commit", "tmem_ld", "tmem_st" or "other".
    cta: whose multiprocessor does it, for a load the one that receives. size: bytes. detail: the unit's own description.
    source: the CTA that issued a load. first: False for the further receivers of one multicast.
    """

    unit: str
    cta: Processor
    size: int = 0
    detail: Any = None
    source: Processor | None = None
    first: bool = True


class AsyncOperation:
    """`steps` run one by one, each at its own moment; operations of one queue run in order."""

    __slots__ = ("description", "steps", "work")

    def __init__(self, description: str, *steps: Callable[[], None], work: Work | None = None) -> None:
        self.description = description
        self.steps = deque(steps)
        self.work = work
