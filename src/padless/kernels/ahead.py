"""Operands that a launch may read while the one ahead of it still runs: products find groups and fetch weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

MOST_SLOTS = 1024  # of a layer; with more, when its first weights come no longer matters


@dataclass(frozen=True, eq=False)
class Ready:
    """Weights, and ids (T, k) int32 or int64 of the experts by which rows are sorted; None: the ends of the groups."""

    ids: torch.Tensor | None = None


_of_thread = threading.local()


@contextmanager
def ready(what: Ready | None) -> Iterator[None]:
    """Products inside the block are of operands of which this much was there before the launch right ahead began.

    And that launch lets the next one begin only after it has itself waited for those ahead of it, and, where it is a
    product, not before its last tiles: products of FP8_BLOCK do, and Triton's passes. Launches that read nothing ahead
    may then begin early too (`padless.moe.combine`). Kernels that cannot use it wait for everything.
    """
    before = current()
    _of_thread.ready = what
    try:
        yield
    finally:
        _of_thread.ready = before


def current() -> Ready | None:
    """The operands that are ready in this thread's block."""
    return getattr(_of_thread, "ready", None)


def facts() -> tuple[object, ...] | None:
    """All that a launch depends on of it."""
    what = current()
    if what is None:
        return None
    return () if what.ids is None else (what.ids.data_ptr(), what.ids.shape, what.ids.dtype, what.ids.is_contiguous())
