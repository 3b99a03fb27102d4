"""mma.sync m16n8: a warp's matrix product with every operand in registers, and the ldmatrix and stmatrix maps.

A, C and D fragments are those of one warp of wgmma; B register i of thread t holds bytes 4 (t % 4) + 16 i .. +3 of
column t // 4 (PTX ISA, "Matrix fragments for mma.m16n8k*").
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from padless.emulator.units import arithmetic
from padless.emulator.units.number_formats import CODES, Array
from padless.emulator.units.wgmma import ELEMENT_BYTES, check_types, pack_d, unpack_a, unpack_d


def mma(
    k: int,
    d_type: str,
    a_type: str,
    b_type: str,
    a: Array,
    b: Array,
    c: Array,
    *,
    mode: str = "truncate",
    target: str = "sm_90a",
    saturate: bool = False,
) -> Array:
    """One mma.sync.aligned.m16n8kK.row.col.

    Args:
        a, b, c: (32, registers) of 32 bits by lane. A has 16 k bytes / 128 registers, B half as many.
        target: from sm_100 on, FP8 sums its products first and then adds C (bit equality with published B200
            vectors); before, and for other types, C is a term of the one fused sum of F = 25.
        saturate: .satfinite of the integer forms.

    Returns:
        D, uint32 (32, 4), or (32, 2) for f16.

    Raises:
        ValueError: for a shape or types that do not exist.
    """
    check_types(d_type, a_type, b_type)
    size = ELEMENT_BYTES[a_type]
    width = k * size
    if width not in (16, 32):
        raise ValueError(f"m16n8k{k} of {a_type} times {b_type} is not modelled; m16n8 with 16 or 32 bytes of K is")
    for name, value, count in (("a", a, width // 8), ("b", b, width // 16), ("c", c, 2 if d_type == "f16" else 4)):
        if value.shape != (32, count):
            raise ValueError(f"{name}: shape {value.shape}, (32, {count}) registers are needed")
    octets = np.ascontiguousarray(b).view(np.uint8).reshape(8, 4, -1, 4)  # t/4, t%4, i, byte
    b_codes = np.ascontiguousarray(octets.transpose(0, 2, 1, 3)).reshape(8, -1).view(CODES[size])
    if size == 1 and d_type != "s32" and mode == "truncate" and int(target.split("_")[1].rstrip("af")) >= 100:
        mode = "separate_add"
    result = arithmetic.multiply(
        unpack_a(a).view(CODES[size]), b_codes, unpack_d(np.ascontiguousarray(c).view(np.uint32), d_type),
        (d_type, a_type, b_type), arithmetic.WIDE, mode=mode, saturate=saturate,
    )  # fmt: skip
    return pack_d(result, d_type)


@lru_cache(maxsize=32)
def matrix_map(shape: str, count: int, transpose: bool) -> tuple[Array, Array]:
    """Where each byte of an ldmatrix or stmatrix fragment lies.

    Args:
        shape: "m8n8" of 16-bit elements, or "m16n8" of 8-bit ones (stmatrix, transposed).
        count: .x1, .x2 or .x4.

    Returns:
        (rows, columns), int64 (32, registers, 4) by lane, register and byte of it: the lane that supplies the row's
        address, and the byte within the row of 16 bytes.
    """
    lane, register, octet = np.arange(32)[:, None, None], np.arange(count)[None, :, None], np.arange(4)[None, None, :]
    quarter, group = lane % 4, lane // 4
    if shape == "m8n8" and transpose:
        rows, columns = 8 * register + 2 * quarter + octet // 2, 2 * group + octet % 2
    elif shape == "m8n8":
        rows, columns = 8 * register + group, 4 * quarter + octet
    elif shape == "m16n8" and transpose:
        rows, columns = 8 * register + 2 * quarter + octet % 2, group + 8 * (octet // 2)
    else:
        raise ValueError(f"shape: {shape}.x{count}{'.trans' if transpose else ''} is not modelled")
    full = np.zeros((32, count, 4), np.int64)
    return rows + full, columns + full


def ldmatrix(rows: Array, shape: str, count: int, transpose: bool) -> Array:
    """Registers uint32 (32, count) from the rows that the lanes point to, uint8 (8 count, 16)."""
    return np.ascontiguousarray(rows[matrix_map(shape, count, transpose)]).view(np.uint32)[:, :, 0]


def stmatrix(registers: Array, shape: str, transpose: bool) -> Array:
    """The reverse of ``ldmatrix``."""
    count = registers.shape[1]
    rows = np.zeros((8 * count, 16), np.uint8)
    octets = np.ascontiguousarray(registers, np.uint32).view(np.uint8).reshape(32, count, 4)
    rows[matrix_map(shape, count, transpose)] = octets
    return rows
