"""Tensor copies of the copy engine: which global bytes go to which shared bytes, and what fills the rest.

A copy is planned as granules: pieces of at most 16 bytes that are contiguous on both sides and wholly inside or outside
of the tensor. Box element (i0, i1, ..) is tensor element (c0 + i0, c1 + i1 * step1, ..) at ``address + sum(coordinate *
stride)`` modulo 2^64; in shared memory elements are packed with i0 fastest and the swizzle permutes absolute addresses.
Rules: PTX ISA, "Tensors" and "cp.async.bulk.tensor".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from padless.emulator.units import number_formats
from padless.emulator.units import tensor_map as maps
from padless.emulator.units.number_formats import Array
from padless.emulator.units.swizzle import swizzle
from padless.emulator.units.tensor_map import TensorMap

# Elements of padded sub-byte types come in 16s: bytes of data in each 16 bytes of shared memory. The others are
# undefined (PTX ISA, "Sub-byte types"): here a NaN of every 8-bit format.
_PADDED = {"b4x16_p64": 8, "b6x16_p32": 12}
_UNDEFINED = 0x7F


@dataclass(frozen=True)
class Transfer:
    """One planned copy.

    Attributes:
        granule: bytes per piece: 16, 8, 4, 2 or 1.
        global_address: uint64 (n,), of each piece; meaningless where not in bounds.
        shared_address: int64 (n,), swizzled byte offsets; n pieces cover the box, padding bytes excepted.
        in_bounds: bool (n,).
        transaction_bytes: what a load counts on its mbarrier: the whole box, out-of-bounds elements included,
            padding excluded.
        problems: broken rules, one sentence each.
        fill: uint8 (granule,), what an out-of-bounds piece reads as.
        data: bytes of every 16 of shared memory that a load writes; it leaves the others undefined.
        tf32: a load rounds its 32-bit elements to TF32.
    """

    granule: int
    global_address: Array
    shared_address: Array
    in_bounds: Array
    transaction_bytes: int
    problems: tuple[str, ...]
    fill: Array
    data: int = 16
    tf32: bool = False


def plan(
    m: TensorMap, coordinates: Sequence[int], shared_address: int, *, store: bool = False, mode: str = "tile"
) -> Transfer:
    """Plan one copy.

    Args:
        coordinates: signed 32-bit start of the box, innermost first; (c0, row0, row1, row2, row3) for
            "gather4" (loads) and "scatter4" (stores), where each row is one box of one row.
        shared_address: byte offset of the unswizzled box.
        store: from shared to global memory.
        mode: "tile", "gather4" or "scatter4".
    """
    coordinates = [((int(c) + (1 << 31)) & 0xFFFFFFFF) - (1 << 31) for c in coordinates]
    problems = list(maps.problems(m))
    rows = None
    if mode in ("gather4", "scatter4"):
        if len(coordinates) != 5 or m.rank != 2:
            raise ValueError(
                f"coordinates: {mode} takes 5 and a map of rank 2, got {len(coordinates)} and rank {m.rank}"
            )
        if m.box[1] != 1:
            problems.append(f"{mode}: box[1] of the tensor map is {m.box[1]}, it must be 1")
        rows = coordinates[1:]
    elif mode != "tile":
        raise ValueError(f"mode: {mode!r} is not one of tile, gather4, scatter4")
    elif len(coordinates) != m.rank:
        raise ValueError(f"coordinates: {len(coordinates)} for a tensor map of rank {m.rank}")
    _check(m, coordinates, shared_address, store, problems)

    # Pieces of one row: bytes in the tensor, and where they go in the row's shared image.
    data = _PADDED.get(m.element)
    start_bits = coordinates[0] * m.element_bits
    row_bytes = m.box[0] * m.element_bits // 8
    granule = math.gcd(data or 16, start_bits // 8, m.dims[0] * m.element_bits // 8, row_bytes, shared_address)
    inside_row = np.arange(0, row_bytes, granule)
    image = inside_row if data is None else inside_row // data * 16 + inside_row % data
    pitch = m.box[0] * m.shared_bits // 8
    position = start_bits // 8 + inside_row
    good = (position >= 0) & (position < m.dims[0] * m.element_bits // 8)

    # Rows of the box, dimension 1 fastest.
    row_address = np.array([m.address & (1 << 64) - 1], np.uint64)
    row_good = np.ones(1, bool)
    for i in range(1, m.rank):
        if rows is None:
            index = coordinates[i] + np.arange(0, m.box[i], m.element_strides[i], dtype=np.int64)
        else:
            index = np.array(rows, np.int64)
        stride = np.uint64(m.strides[i - 1])
        row_address = (index.astype(np.uint64) * stride)[:, None] + row_address[None, :]
        row_good = ((index >= 0) & (index < m.dims[i]))[:, None] & row_good[None, :]
        row_address, row_good = row_address.reshape(-1), row_good.reshape(-1)

    count = len(row_address)
    linear = shared_address + (np.arange(count)[:, None] * pitch + image).reshape(-1)
    elements = count * m.box[0]
    return Transfer(
        granule,
        (row_address[:, None] + position.astype(np.uint64)).reshape(-1),
        np.asarray(swizzle(linear, m.swizzle)),
        (row_good[:, None] & good).reshape(-1),
        elements * m.element_bits // 8,
        tuple(problems),
        _fill(m, granule),
        data or 16,
        m.element == "tf32",
    )


def _check(m: TensorMap, coordinates: Sequence[int], shared_address: int, store: bool, problems: list[str]) -> None:
    if shared_address % 128:
        problems.append(f"shared address {shared_address:#x} of a tensor copy is not a multiple of 128")
    if not store and coordinates[0] * m.element_bits % 128:
        problems.append(
            f"innermost start coordinate {coordinates[0]} is {coordinates[0] * m.element_bits / 8:g} bytes into its "
            "row, not a multiple of 16: an illegal instruction on hardware"
        )
    if m.element in _PADDED:
        if coordinates[0] % 128:
            problems.append(f"innermost start coordinate {coordinates[0]} of {m.element} is not a multiple of 128")
        if store:
            problems.append(f"{m.element} can be loaded only")
    if store and min(coordinates) < 0:
        problems.append(f"a tensor store with a negative coordinate, {tuple(coordinates)}: not defined")


def _fill(m: TensorMap, granule: int) -> Array:
    nan = b"\xff" * (m.element_bits // 8 - 1) + b"\x7f"
    return np.frombuffer((nan * 16 if m.nan_fill else bytes(16))[:granule], np.uint8)


def load(transfer: Transfer, gather: Callable[[Array, int], Array], shared: Array) -> None:
    """Global to shared memory. ``gather(addresses, granule)`` returns uint8 (n, granule) of the in-bounds pieces."""
    data = np.broadcast_to(transfer.fill, (len(transfer.in_bounds), transfer.granule))
    if transfer.in_bounds.all():
        data = gather(transfer.global_address, transfer.granule)
    elif transfer.in_bounds.any():
        data = data.copy()
        data[transfer.in_bounds] = gather(transfer.global_address[transfer.in_bounds], transfer.granule)
    if transfer.tf32:
        data = _round_to_tf32(data)
    _pieces(shared, transfer.granule)[transfer.shared_address // transfer.granule] = data
    if transfer.data < 16:
        _pieces(shared, 16)[np.unique(transfer.shared_address // 16), transfer.data :] = _UNDEFINED


def _round_to_tf32(data: Array) -> Array:
    """Float32 bytes rounded to nearest even at ten bits of mantissa, infinities and NaN as they are: what hardware was
    seen to do (triton-lang/triton pull request 11751, on sm_120)."""
    bits = np.ascontiguousarray(data).view(np.uint32)
    rounded = bits + 0xFFF + (bits >> 13 & 1) & 0xFFFFE000
    return np.where(bits & 0x7F800000 == 0x7F800000, bits, rounded).astype(np.uint32).view(np.uint8)


def store(transfer: Transfer, shared: Array, scatter: Callable[[Array, Array], None]) -> None:
    """Shared to global memory: ``scatter(addresses, data)`` with the in-bounds pieces, uint8 (n, granule)."""
    keep = transfer.in_bounds
    if keep.any():
        index = transfer.shared_address[keep] // transfer.granule
        scatter(transfer.global_address[keep], _pieces(shared, transfer.granule)[index])


def _pieces(shared: Array, granule: int) -> Array:
    return shared[: len(shared) // granule * granule].reshape(-1, granule)


_INTEGERS = {"u8": "u1", "u16": "u2", "u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8", "b32": "u4", "b64": "u8"}


def reduce_values(old: Array, new: Array, element: str, operation: str) -> Array:
    """cp.reduce: old (op) new on bytes, uint8 of any equal shape whose last axis holds whole elements.

    ``operation`` is add, min, max, inc, dec, and, or, xor; floating-point sums are rounded to nearest even. Raises
    ValueError for a pair that does not exist.
    """
    if element in ("f16", "bf16") and operation in ("add", "min", "max"):
        a, b = (number_formats.decode(np.ascontiguousarray(x).view(np.uint16), element) for x in (old, new))
        total = {"add": np.add, "min": np.fmin, "max": np.fmax}[operation](a, b)
        return number_formats.encode(total, element).view(np.uint8)
    if element in ("f32", "f64") and operation == "add":
        kind = np.float32 if element == "f32" else np.float64
        return np.asarray(np.ascontiguousarray(old).view(kind) + np.ascontiguousarray(new).view(kind)).view(np.uint8)
    if element in _INTEGERS:
        a, b = (np.ascontiguousarray(x).view(_INTEGERS[element]) for x in (old, new))
        functions: dict[str, Any] = {
            "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
            "xor": np.bitwise_xor, "inc": lambda a, b: np.where(a >= b, 0, a + 1),
            "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - 1),
        }  # fmt: skip
        if operation in functions:
            with np.errstate(over="ignore"):
                return functions[operation](a, b).astype(a.dtype).view(np.uint8)
    raise ValueError(f"operation: {operation!r} of {element!r} does not exist")
