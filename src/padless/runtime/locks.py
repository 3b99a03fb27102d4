"""Locks around what a process keeps, which no forked process inherits locked."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet


class ProcessLock:
    """A lock, taken by ``with guard.lock:``, which is a new one in a forked process.

    The thread that had the old one is not there to let it go.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        _LOCKS.add(self)


_LOCKS: WeakSet[ProcessLock] = WeakSet()


def _renew() -> None:
    for each in _LOCKS:
        each.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
