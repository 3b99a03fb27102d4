"""The 64-bit descriptors by which wgmma (sm_90a) and tcgen05 (sm_100a) name operands in shared memory.

Both hold a start address, a leading (LBO) and a stride (SBO) byte offset, all divided by 16; they differ in
where the swizzle sits and in a constant:

    bits 0-13 start   16-29 LBO   32-45 SBO   49-51 base offset
    wgmma:   62-63 swizzle: 0 none, 1 128B, 2 64B, 3 32B
    tcgen05: 46-48 constant 1, 52 LBO mode, 61-63 swizzle: 0 none, 1 128B with 32-byte atoms, 2 128B, 4 64B, 6 32B

(PTX ISA, "Matrix descriptor format" of wgmma and "Shared memory descriptor" of tcgen05.) With x = byte along
the contiguous dimension, r = index of the other, S = bytes of the swizzle:

    K-major  none      start + (r % 8) * 16 + (r // 8) * SBO + x % 16 + (x // 16) * LBO
    K-major  swizzled  swizzle(start + (r % 8) * S + (r // 8) * SBO + x)
    MN-major none      start + x % 16 + (x // 16) * SBO + (k % 8) * 16 + (k // 8) * LBO
    MN-major swizzled  swizzle(start + x % S + (x // S) * LBO + (k % 8) * S + (k // 8) * SBO)

where "128B_32B" has groups of 4 rather than 8 rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from padless.emulator.units.number_formats import CODES, Array
from padless.emulator.units.swizzle import PERIOD, SPAN, swizzle

_WGMMA_LAYOUTS = ("none", "128B", "64B", "32B")
_TCGEN05_LAYOUTS = {0: "none", 1: "128B_32B", 2: "128B", 4: "64B", 6: "32B"}
MISPLACED = "is not in the first row of"
_WGMMA_FIELDS = 0xC00E_3FFF_3FFF_3FFF  # bits that mean something
_TCGEN05_FIELDS = 0xE01F_FFFF_3FFF_3FFF


@dataclass(frozen=True)
class MatrixDescriptor:
    """A decoded descriptor; offsets in bytes.

    Attributes:
        start: byte address in the CTA's shared memory, below 2^18.
        leading, stride: LBO and SBO.
        swizzle: name of units.swizzle.
        problems: reserved bits set, constant missing, layout unknown, and fields that are not modelled.
    """

    start: int
    leading: int
    stride: int
    swizzle: str
    problems: tuple[str, ...]


def kind_of(problem: str) -> str:
    """The kind of report that one of a unit's ``problems`` makes."""
    return "descriptor-start" if MISPLACED in problem else "descriptor"


@lru_cache(maxsize=8192)
def decode_wgmma(bits: int) -> MatrixDescriptor:
    """The sm_90a descriptor. Example: 0x4000'0040'0000'0240 starts at 0x2400, SBO 1024, 128B swizzle."""
    problems = _common_problems(bits, _WGMMA_FIELDS)
    if bits >> 46 & 7:
        problems.append("bits 46-48 are set, as in a tcgen05 descriptor; wgmma wants 0")
    return _decode(bits, _WGMMA_LAYOUTS[bits >> 62 & 3], problems)


@lru_cache(maxsize=8192)
def decode_tcgen05(bits: int) -> MatrixDescriptor:
    """The sm_100a descriptor. Example: 0x4000'4040'0001'0240 starts at 0x2400, SBO 1024, LBO 16, 128B swizzle."""
    problems = _common_problems(bits, _TCGEN05_FIELDS)
    code = bits >> 61 & 7
    if bits >> 46 & 7 != 1:
        problems.append(f"bits 46-48 are {bits >> 46 & 7}; a tcgen05 descriptor has 1 there")
    if bits >> 52 & 1:
        problems.append("bit 52, absolute leading offset, exists on sm_103a only")
    if code not in _TCGEN05_LAYOUTS:
        problems.append(f"layout code {code} in bits 61-63 is none of 0, 1, 2, 4, 6")
    return _decode(bits, _TCGEN05_LAYOUTS.get(code, "none"), problems)


def _common_problems(bits: int, fields: int) -> list[str]:
    problems = []
    reserved = bits & ~fields & ~(7 << 46)
    if reserved:
        problems.append(f"reserved bits {reserved:#x} are set")
    if bits >> 49 & 7:
        problems.append(f"base offset {bits >> 49 & 7} is not modelled; taken as 0")
    return problems


def _decode(bits: int, mode: str, problems: list[str]) -> MatrixDescriptor:
    start = (bits & 0x3FFF) << 4
    if start % PERIOD[mode] >= SPAN[mode]:
        problems.append(f"start {start:#x} {MISPLACED} a {PERIOD[mode]}-byte pattern of swizzle {mode} (base offset 0)")
    return MatrixDescriptor(
        start,
        (bits >> 16 & 0x3FFF) << 4,
        (bits >> 32 & 0x3FFF) << 4,
        mode,
        tuple(f"descriptor {bits:#018x}: {p}" for p in problems),
    )


@lru_cache(maxsize=1024)
def _offsets(
    phase: int, leading: int, stride: int, mode: str, rows: int, k: int, element_bytes: int, major: str
) -> Array:
    """Addresses for a start of ``phase`` = start mod 1024: the swizzle looks no higher."""
    row, col = np.arange(rows)[:, None], np.arange(k)[None, :]
    if major == "k":
        x = col * element_bytes
        if mode == "none":
            at = phase + (row % 8) * 16 + (row // 8) * stride + x % 16 + (x // 16) * leading
        else:
            at = phase + (row % 8) * SPAN[mode] + (row // 8) * stride + x
    elif major == "mn":
        x = row * element_bytes
        if mode == "none":
            at = phase + x % 16 + (x // 16) * stride + (col % 8) * 16 + (col // 8) * leading
        else:
            span, group = SPAN[mode], 4 if mode == "128B_32B" else 8
            at = phase + x % span + (x // span) * leading + (col % group) * span + (col // group) * stride
    else:
        raise ValueError(f"major: {major!r} is neither 'k' nor 'mn'")
    at = np.asarray(swizzle(at, mode))
    at.flags.writeable = False
    return at


@lru_cache(maxsize=1024)
def _ranges(*place: Any) -> list[tuple[int, int]]:
    """Of `_offsets` with these arguments, merged."""
    size = place[6]
    at = np.unique(_offsets(*place))
    breaks = np.flatnonzero(np.diff(at) > size) + 1
    return [(int(p[0]), int(p[-1]) + size) for p in np.split(at, breaks)]


@dataclass(frozen=True)
class SharedMatrix:
    """An operand in shared memory, ``rows`` x ``k`` elements.

    Attributes:
        major: "k" (K contiguous) or "mn".
    """

    descriptor: MatrixDescriptor
    rows: int
    k: int
    element_bytes: int
    major: str = "k"

    @property
    def _base(self) -> int:
        return self.descriptor.start & ~1023

    @property
    def _place(self) -> tuple[Any, ...]:
        d = self.descriptor
        return d.start % 1024, d.leading, d.stride, d.swizzle, self.rows, self.k, self.element_bytes, self.major

    def problems(self) -> tuple[str, ...]:
        """What is wrong with the descriptor, and with reading this operand through it."""
        d, k_bytes = self.descriptor, self.k * self.element_bytes
        span = SPAN[d.swizzle]
        if self.major != "k":
            return d.problems
        if d.swizzle != "none" and d.start % span + k_bytes > span:
            leaves = f"{k_bytes} bytes along K from byte {d.start % span} leave the {span}-byte row of the swizzle"
            return (*d.problems, leaves)
        if d.swizzle == "128B_32B":
            return (*d.problems, "the 128B swizzle with 32-byte atoms is for MN-major operands")
        return d.problems

    def addresses(self) -> Array:
        """int64 (rows, k): the byte address in shared memory of each element."""
        return _offsets(*self._place) + self._base

    def ranges(self) -> list[tuple[int, int]]:
        """Merged byte ranges [first, end) of shared memory, ascending."""
        return [(a + self._base, b + self._base) for a, b in _ranges(*self._place)]

    def gather(self, shared: Array) -> Array:
        """Codes (rows, k), uint8, uint16 or uint32. Raises ValueError if the operand reaches past ``shared``."""
        place, step = self._place, self.element_bytes
        if self.major == "k" and self.k * step % 16 == 0:
            # Whole 16-byte chunks stay together under every swizzle.
            place = (*place[:5], self.k * step // 16, 16, "k")
            step = 16
        index = (_offsets(*place) + self._base) // step
        pieces = shared[: len(shared) // step * step].reshape(-1, step)
        if int(index.max()) >= len(pieces):
            raise ValueError(f"descriptor: the operand reaches byte {int(index.max() + 1) * step} of {len(shared)}")
        return np.ascontiguousarray(pieces[index].reshape(self.rows, -1)).view(CODES[self.element_bytes])
