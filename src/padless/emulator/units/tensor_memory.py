"""Tensor memory of sm_100a: 128 lanes x 512 columns of 32 bits, and what copies into it, reads and writes it.

An address has the lane in bits 16-22 and the column in bits 0-8 (PTX ISA, "Tensor Memory Addressing"). Regions are
rectangles (first lane, end lane, first column, end column).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from padless.emulator.units.matrix_descriptor import SharedMatrix, decode_tcgen05
from padless.emulator.units.number_formats import Array, nibbles, six_bits

LANES, COLUMNS = 128, 512
Rectangle = tuple[int, int, int, int]

# source -> (bytes in each 16, how they are unpacked, bits that a number is shifted by to the middle of its byte)
_PACKED = {"b4x16_p64": (8, nibbles, 2), "b6x16_p32": (12, six_bits, 1)}
# shape -> (source rows, bytes per row, lanes that get row i)
_COPIES = {
    ("32x128b", "warpx4"): (32, 16, lambda i: (i, i + 32, i + 64, i + 96)),
    ("64x128b", "warpx2::02_13"): (64, 16, lambda i: (i, i + 64)),
    ("64x128b", "warpx2::01_23"): (64, 16, lambda i: (i, i + 32) if i < 32 else (i + 32, i + 64)),
    ("128x128b", ""): (128, 16, lambda i: (i,)),
    ("128x256b", ""): (128, 32, lambda i: (i,)),
}


def split_address(address: int) -> tuple[int, int]:
    """(lane, column) of an address; the bits above the lane are ignored."""
    return address >> 16 & 0x7F, address & 0x1FF


def rectangle_problems(name: str, rectangles: list[Rectangle]) -> list[str]:
    """What lies outside of the 128 x 512 words."""
    return [
        f"{name}: lanes {a}..{b - 1}, columns {c}..{d - 1} leave the 128 x 512 words of tensor memory"
        for a, b, c, d in rectangles
        if b > LANES or d > COLUMNS
    ]


@dataclass(frozen=True)
class Copy:
    """tcgen05.cp of one CTA, from shared memory to tensor memory; with cta_group::2 both CTAs do it.

    Attributes:
        shape: 32x128b, 64x128b, 128x128b or 128x256b.  multicast: warpx4, warpx2::02_13, warpx2::01_23 or "".
        descriptor: 64 bits.  address: of the destination, lane 0.
        source: b4x16_p64 or b6x16_p32, of which every 16 bytes hold 16 numbers and padding and become a byte for each
            number, in bits 2 to 5 or 1 to 6 of it; "" copies bytes.
    """

    shape: str
    multicast: str
    descriptor: int
    address: int
    source: str = ""

    def __post_init__(self) -> None:
        if self.source not in ("", *_PACKED):
            raise ValueError(f"source: {self.source!r} is not one of {', '.join(_PACKED)}")
        if (self.shape, self.multicast) not in _COPIES:
            known = ", ".join(f"{s}.{m}".rstrip(".") for s, m in _COPIES)
            raise ValueError(f"shape: tcgen05.cp {self.shape}.{self.multicast} is not modelled; {known} are")

    def problems(self) -> tuple[str, ...]:
        """Broken rules of descriptor and address."""
        found = [*self._source().problems()]
        if self.address >> 16 & 0x7F:
            found.append(f"tcgen05.cp to lane {self.address >> 16 & 0x7F}; it writes from lane 0")
        return (*found, *rectangle_problems("tcgen05.cp", self.tmem_writes()))

    def _source(self) -> SharedMatrix:
        """What is read, in words."""
        rows, width, _ = _COPIES[self.shape, self.multicast]
        return SharedMatrix(decode_tcgen05(self.descriptor), rows, width // 4, 4)

    def shared_ranges(self) -> dict[str, list[tuple[int, int]]]:
        """Merged [first, end) byte ranges read."""
        return {"source": self._source().ranges()}

    def tmem_reads(self) -> dict[str, list[Rectangle]]:
        """None: it only writes there."""
        return {}

    def tmem_writes(self) -> list[Rectangle]:
        """All 128 lanes of 4 or 8 columns."""
        column = self.address & 0x1FF
        return [(0, LANES, column, column + _COPIES[self.shape, self.multicast][1] // 4)]

    def execute(self, shared: Array, tmem: Array) -> None:
        """Copy, in place. shared: uint8 (bytes,); tmem: uint32 (128, 512)."""
        rows, width, lanes = _COPIES[self.shape, self.multicast]
        words = self._source().gather(shared)
        if self.source:
            taken, unpack, shift = _PACKED[self.source]
            packed = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 16)[:, :taken]
            words = (unpack(packed) << shift).reshape(rows, width).view(np.uint32)
        column = self.address & 0x1FF
        for copies in zip(*(lanes(i) for i in range(rows)), strict=True):
            tmem[np.array(copies), column : column + width // 4] = words


# shape -> registers for .x1, columns for .x1
LOAD_SHAPES = {"32x32b": (1, 1), "16x64b": (1, 2), "16x128b": (2, 4), "16x256b": (4, 8), "16x32bx2": (1, 1)}


@lru_cache(maxsize=512)
def _relative_map(shape: str, repeat: int, split: int) -> tuple[Array, Array]:
    if shape not in LOAD_SHAPES:
        raise ValueError(f"shape: {shape!r} is not one of {', '.join(LOAD_SHAPES)}")
    most = 128 // LOAD_SHAPES[shape][0]
    if repeat < 1 or repeat > most or repeat & (repeat - 1):
        raise ValueError(f"repeat: {shape}.x{repeat}; a power of two up to {most} is allowed")
    t = np.arange(32)[:, None]
    i = np.arange(repeat * LOAD_SHAPES[shape][0])[None, :]
    if shape == "32x32b":
        lanes, columns = t + 0 * i, i + 0 * t
    elif shape == "16x64b":
        lanes, columns = t // 4 + 8 * (t % 2) + 0 * i, t // 2 % 2 + 2 * i
    elif shape == "16x128b":
        lanes, columns = t // 4 + 8 * (i % 2), t % 4 + 4 * (i // 2)
    elif shape == "16x256b":
        lanes, columns = t // 4 + 8 * (i // 2 % 2), 2 * (t % 4) + i % 2 + 8 * (i // 4)
    else:
        lanes, columns = t % 16 + 0 * i, np.where(t < 16, i, i + split)
    return lanes, columns


@lru_cache(maxsize=512)
def register_map(
    shape: str, repeat: int, address: int, warp_quarter: int, split: int = 0, packed: bool = False
) -> tuple[Array, Array]:
    """Which words each thread's registers hold in tcgen05.ld and .st.

    Args:
        shape: 32x32b, 16x64b, 16x128b, 16x256b, 16x32bx2.  repeat: N of .xN.
        address: its lane may name the warp's own quarter or none; a 16-lane shape starts at lane 0 or 16 of it.
        warp_quarter: warp index modulo 4.
        split: the immediate of 16x32bx2.
        packed: the low halves of two words, side by side, share a register (.pack::16b, .unpack::16b).

    Returns:
        (lanes, columns), int64 (32, words), absolute; two words a register if packed.
    """
    lanes, columns = _relative_map(shape, repeat, split)
    lane, column = split_address(address)
    if packed:
        lanes = np.repeat(lanes, 2, axis=1)
        columns = np.stack([2 * columns, 2 * columns + 1], axis=2).reshape(32, -1)
    return lanes + 32 * warp_quarter + lane % 32, columns + column


def access_problems(shape: str, address: int, warp_quarter: int) -> tuple[str, ...]:
    """Broken rules of an ld's or st's address: another warp's quarter, a start inside a lane group."""
    lane, _ = split_address(address)
    found = []
    if lane // 32 not in (0, warp_quarter):
        found.append(f"lane {lane} belongs to quarter {lane // 32}, the warp may touch quarter {warp_quarter}")
    if lane % 32 not in ((0,) if shape == "32x32b" else (0, 16)):
        found.append(f"{shape} may not begin at lane {lane % 32} of a quarter")
    return tuple(found)


def load(tmem: Array, where: tuple[Array, Array], packed: bool = False) -> Array:
    """tcgen05.ld: registers uint32 (32, r) from the words of a `register_map`."""
    words = tmem[where]
    return (words[:, 0::2] & np.uint32(0xFFFF)) | (words[:, 1::2] << np.uint32(16)) if packed else words


def store(tmem: Array, where: tuple[Array, Array], registers: Array, packed: bool = False) -> None:
    """tcgen05.st, in place. The upper halves of words that stand for half a register become 0."""
    if packed:
        registers = np.stack([registers & np.uint32(0xFFFF), registers >> np.uint32(16)], axis=2).reshape(32, -1)
    tmem[where] = registers
