"""Operands that a launch may read while the one ahead of it still runs: products find groups and fetch weights."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
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
    product, not before its last tiles: sm90_fp8, sm90_fp8_few and sm90_bf16 do, and Triton's passes. Launches that read
    nothing ahead may then begin early too (`padless.moe.combine`). Kernels that cannot use it wait for everything.
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


@dataclass(frozen=True, eq=False)
class Use:
    """Tensors that a launch reads ahead of its wait: all of ``tensors``, ``ids`` among them; by default none."""

    tensors: tuple[torch.Tensor, ...] = ()
    ids: torch.Tensor | None = None

    @property
    def is_ready(self) -> bool:
        """Whether there are any."""
        return bool(self.tensors)

    def arguments(self) -> list[tuple[int, int]]:
        """The kernel's: is_ready, ids, id_bytes, each with its size."""
        address, size = (0, 0) if self.ids is None else (self.ids.data_ptr(), self.ids.element_size())
        return [(int(self.is_ready), 4), (address, 8), (size, 4)]

    def addresses(self) -> tuple[int, ...]:
        """`padless.runtime.driver.LaunchShape.ready`."""
        return tuple(t.data_ptr() for t in self.tensors)


def usable(offs: torch.Tensor | None, m: int, weights: Iterable[torch.Tensor], *, counts: bool = False) -> Use:
    """A kernel's use of what is ready: the ends of the groups of ``offs``, or, where it counts, ids (T, k) of m rows.
    ``weights``: what it reads of them."""
    what = current()
    if what is None or offs is None:
        return Use()
    if what.ids is None:
        return Use((*weights, offs))
    if counts and what.ids.numel() == m and what.ids.is_contiguous():
        return Use((*weights, what.ids), what.ids)
    return Use()


def facts() -> tuple[object, ...] | None:
    """All that a launch depends on of it."""
    what = current()
    if what is None:
        return None
    return () if what.ids is None else (what.ids.data_ptr(), what.ids.shape, what.ids.dtype, what.ids.is_contiguous())
