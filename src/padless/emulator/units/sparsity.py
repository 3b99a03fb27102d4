"""Structured sparsity: where the stored half of A's elements lie along K, as the metadata of wgmma.mma_async.sp says.

Four bits describe a chunk of K: of four elements the positions of the two that are stored, two bits each, the first in
the low ones; of two 32-bit elements 0b0100 (the first is stored) or 0b1110 (the second). Chunks of ascending K follow
one another from the low bits of a register on (PTX ISA, "Sparse matrix storage" of wgmma.mma_async.sp). Thread t of a
warp, with elements of 16 and 32 bits, if t % 4 // 2 is the selector: the half of K of number t % 2, of row t // 4 in its
low 16 bits and of row t // 4 + 8 in the high ones. With elements of 8 bits: the half of number t % 4 // 2 of row
t // 4 + 8 (t % 2). The ISA has this in figures; as layouts it stands in CUTLASS (`mma_traits_sm90_gmma_sparse.hpp`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.units import arithmetic, number_formats
from padless.emulator.units.number_formats import Array

_INVALID = (0b0000, 0b0101, 0b1010, 0b1111)  # one position twice
_OF_PAIRS = (0b0100, 0b1110)


def check_selector(selector: int, element_bytes: int) -> None:
    """ValueError for a selector that the ISA leaves undefined."""
    allowed = 1 if element_bytes == 1 else 2
    if not 0 <= selector < allowed:
        raise ValueError(f"sp-sel: {selector} of {8 * element_bytes}-bit elements is not below {allowed}")


def unpack(registers: Array, element_bytes: int, selector: int) -> Array:
    """Metadata uint32 by thread (32 w,) to uint8 (16 w, chunks), one chunk's four bits each."""
    warps = len(registers) // 32
    words = np.ascontiguousarray(registers, np.uint32).reshape(warps, 8, 2, 2)  # w, t/4, t%4/2, t%2
    if element_bytes == 1:
        rows = words.transpose(0, 3, 1, 2)  # w, row / 8, row % 8, half of K
        nibbles = rows[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)
    else:
        halves = words[:, :, selector, :, None] >> np.array([0, 16], np.uint32)  # w, row % 8, half of K, row / 8
        nibbles = halves.transpose(0, 3, 1, 2)[..., None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
    return np.ascontiguousarray(nibbles.reshape(16 * warps, -1)).astype(np.uint8)


def problem(chunks: Array, element_bytes: int) -> str:
    """A sentence on the first chunk whose bits mean nothing, or ""."""
    wrong = ~np.isin(chunks, _OF_PAIRS) if element_bytes == 4 else np.isin(chunks, _INVALID)
    if not wrong.any():
        return ""
    row, chunk = np.argwhere(wrong)[0]
    return f"the metadata of row {row}, chunk {chunk} of K is 0b{chunks[row, chunk]:04b}, which is undefined"


def positions(chunks: Array, element_bytes: int) -> Array:
    """int (rows, K / 2): the place along K of each stored element."""
    if element_bytes == 4:
        return 2 * np.arange(chunks.shape[1]) + (chunks >> 3).astype(np.intp)
    pairs = np.stack([chunks & 3, chunks >> 2], axis=2).astype(np.intp)
    return (pairs + 4 * np.arange(chunks.shape[1])[:, None]).reshape(len(chunks), -1)


def multiply(
    a: Array, b: Array, c: Array | None, where: Array, types: tuple[str, str, str], rule: arithmetic.Rule, *, mode: str,
    negate: tuple[bool, bool], saturate: bool,
) -> Array:  # fmt: skip
    """`arithmetic.multiply` of the stored codes (M, K / 2) at `where` and codes (N, K).

    With zeros put in between, which add nothing, except where B has a NaN or an infinity: those that no element of A
    meets do not count.
    """
    options: dict[str, Any] = {"mode": mode, "negate": negate, "saturate": saturate}
    if types[0] == "s32" or np.isfinite(number_formats.decode(b, types[2])).all():
        whole = np.zeros((len(a), b.shape[1]), a.dtype)
        np.put_along_axis(whole, where, a, axis=1)
        return arithmetic.multiply(whole, b, c, types, rule, **options)
    rows = [
        arithmetic.multiply(a[i : i + 1], b[:, where[i]], None if c is None else c[i : i + 1], types, rule, **options)
        for i in range(len(a))
    ]
    return np.concatenate(rows)
