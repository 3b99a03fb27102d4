"""Addresses as operands: in shared memory, generic, in tensor memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.order.race import CLUSTER, CTA, GPU
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.ptx.ast import Address, Operand, Register
from padless.emulator.state.spaces import SHARED_WINDOW
from padless.emulator.state.warp import Warp

Array = np.ndarray[Any, Any]


class SharedOperand:
    """A shared-memory address operand, 32-bit or generic."""

    def __init__(self, e: Emitter, operand: Operand) -> None:
        self.slot, self.offset = e.address(operand)

    def values(self, w: Warp) -> Array:
        """shared::cluster addresses of all 32 lanes."""
        where = w.v[self.slot].astype(np.int64) + self.offset
        return np.where(where >> 60 == SHARED_WINDOW >> 60, where - SHARED_WINDOW, where)

    def one(self, w: Warp, lane: int) -> int:
        where = int(w.v[self.slot][lane]) + self.offset
        return where - SHARED_WINDOW if where >> 60 == SHARED_WINDOW >> 60 else where


class GenericOperand:
    """A 64-bit generic (or global) address operand."""

    def __init__(self, e: Emitter, operand: Operand) -> None:
        self.slot, self.offset = e.address(operand)

    def one(self, w: Warp, lane: int) -> int:
        return int(w.v[self.slot][lane]) + self.offset


SCOPES = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "gl": GPU, "sys": GPU}


def scope_of(e: Emitter, default: int) -> int:
    """The scope that a modifier names."""
    return next((SCOPES[m] for m in e.instruction.modifiers if m in SCOPES), default)


def tensor_address(e: Emitter, operand: Any) -> tuple[int, int]:
    if not isinstance(operand, Address) or not isinstance(operand.base, Register):
        e.unsupported(f"{operand} is not a tensor-memory address")
    return e.source_slot(operand.base, "u32"), operand.offset


def value(v: Any, slot: tuple[int, int], lane: int) -> int:
    return (int(v[slot[0]][lane]) + slot[1]) & 0xFFFFFFFF
