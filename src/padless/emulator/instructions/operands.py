"""Addresses as operands: in shared memory, generic, in tensor memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from padless.emulator.order.memory_order import CLUSTER, CTA, GPU
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.ptx.ast import Address, Operand, Register
from padless.emulator.state.site import Site, rows_of
from padless.emulator.state.spaces import SHARED_WINDOW
from padless.emulator.state.warp import Warp
from padless.emulator.units.number_formats import Array


class GenericOperand:
    """A 64-bit generic (or global) address operand."""

    def __init__(self, e: Emitter, operand: Operand) -> None:
        self.slot, self.offset = e.address(operand)

    def at(self, site: Site) -> int:
        return site.value(self.slot) + self.offset


class SharedOperand(GenericOperand):
    """A shared-memory address operand, 32-bit or generic."""

    def values(self, w: Warp) -> Array:
        """shared::cluster addresses of all 32 lanes."""
        where = w.v[self.slot].astype(np.int64) + self.offset
        return np.where(where >> 60 == SHARED_WINDOW >> 60, where - SHARED_WINDOW, where)

    def at(self, site: Site) -> int:
        where = super().at(site)
        return where - SHARED_WINDOW if where >> 60 == SHARED_WINDOW >> 60 else where


class TensorOperand(GenericOperand):
    """A tensor-memory address operand."""

    def __init__(self, e: Emitter, operand: Operand) -> None:
        if not isinstance(operand, Address) or not isinstance(operand.base, Register):
            e.unsupported(f"{operand} is not a tensor-memory address")
        super().__init__(e, operand)

    def at(self, site: Site) -> int:
        return super().at(site) & 0xFFFFFFFF


SCOPES = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "gl": GPU, "sys": GPU}


def scope_of(e: Emitter, default: int) -> int:
    """The scope that a modifier names."""
    return SCOPES.get(e.either(*SCOPES), default)


def of_clocks(method: str, *arguments: Any) -> Callable[..., None]:
    """What an instruction compiles to that orders the active lanes by a method of the clocks."""

    def order(w: Warp, v: Any, m: Any) -> None:
        if w.clocks is not None and np.any(m):
            getattr(w.clocks, method)(rows_of(w, m), *arguments)

    return order
