"""mma.sync m16n8: a warp's matrix product with every operand in registers, and the ldmatrix and stmatrix
maps.

Fragments of thread t, the same for every type when counted in bytes along K: A register i holds bytes 4 (t %
4) + 16 (i // 2) .. +3 of row t // 4 + 8 (i % 2); B register i those of column t // 4 at 4 (t % 4) + 16 i; a
32-bit C or D register i holds row t // 4 + 8 (i // 2), column 2 (t % 4) + i % 2; a float16 one columns 2 (t %
4) and the next of row t // 4 + 8 i (PTX ISA, "Matrix fragments for mma.m16n8k*").
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from padless.emulator.units import arithmetic, number_formats
from padless.emulator.units.number_formats import Array
from padless.emulator.units.wgmma import ELEMENT_BYTES, integers

_CODES = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def mma(
    m: int,
    n: int,
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
    if a_type not in ELEMENT_BYTES or b_type not in ELEMENT_BYTES:
        raise ValueError(f"a_type, b_type: {a_type} and {b_type}; known are {', '.join(ELEMENT_BYTES)}")
    size = ELEMENT_BYTES[a_type]
    width = k * size
    if (m, n) != (16, 8) or width not in (16, 32) or ELEMENT_BYTES[b_type] != size:
        raise ValueError(f"m{m}n{n}k{k} of {a_type} times {b_type} is not modelled; m16n8 with 16 or 32 bytes of K is")
    whole = [t in ("s8", "u8", "s32") for t in (d_type, a_type, b_type)]
    if d_type not in ("f32", "f16", "s32") or any(whole) != all(whole):
        raise ValueError(f"d_type: {d_type!r} of {a_type} times {b_type} does not exist")
    for name, value, count in (("a", a, width // 8), ("b", b, width // 16), ("c", c, 2 if d_type == "f16" else 4)):
        if value.shape != (32, count):
            raise ValueError(f"{name}: shape {value.shape}, (32, {count}) registers are needed")
    a_codes = _unpack_a(a).view(_CODES[size])
    b_codes = _unpack_b(b).view(_CODES[size])
    accumulator = _unpack_c(np.ascontiguousarray(c).view(np.uint32), d_type)
    if d_type == "s32":
        total = arithmetic.integer_dot_add(
            integers(a_codes, a_type), integers(b_codes, b_type), accumulator, saturate=saturate
        )
        return _pack_d(total, d_type)
    if size == 1 and mode == "truncate" and int(target.split("_")[1].rstrip("af")) >= 100:
        mode = "separate_add"
    result = arithmetic.dot_product_add(
        arithmetic.decode_operand(a_codes, a_type),
        arithmetic.decode_operand(b_codes, b_type),
        accumulator,
        arithmetic.WIDE,
        mode=mode,
        result=d_type,
    )
    return _pack_d(result, d_type)


def _unpack_a(registers: Array) -> Array:
    """(32, r) registers to uint8 (16, 8 r): r = 2 or 4."""
    octets = np.ascontiguousarray(registers).view(np.uint8).reshape(8, 4, -1, 2, 4)  # t/4, t%4, i/2, i%2, byte
    return np.ascontiguousarray(octets.transpose(3, 0, 2, 1, 4)).reshape(16, -1)


def _unpack_b(registers: Array) -> Array:
    """(32, r) registers to uint8 (8, 16 r): r = 1 or 2."""
    octets = np.ascontiguousarray(registers).view(np.uint8).reshape(8, 4, -1, 4)  # t/4, t%4, i, byte
    return np.ascontiguousarray(octets.transpose(0, 2, 1, 3)).reshape(8, -1)


def _unpack_c(bits: Array, d_type: str) -> Array:
    if d_type == "f16":
        halves = bits.view(np.uint16).reshape(8, 4, 2, 2)  # t/4, t%4, i, half
        return number_formats.decode(halves.transpose(2, 0, 1, 3).reshape(16, 8), "f16").astype(np.float32)
    words = np.ascontiguousarray(bits.reshape(8, 4, 2, 2).transpose(2, 0, 1, 3)).reshape(16, 8)
    return words.view(np.int32 if d_type == "s32" else np.float32)


def _pack_d(matrix: Array, d_type: str) -> Array:
    if d_type == "f16":
        codes = number_formats.encode(matrix, "f16").reshape(2, 8, 4, 2)
        return np.ascontiguousarray(codes.transpose(1, 2, 0, 3)).reshape(32, 4).view(np.uint32)
    words = np.ascontiguousarray(matrix).view(np.uint32).reshape(2, 8, 4, 2)
    return np.ascontiguousarray(words.transpose(1, 2, 0, 3)).reshape(32, 4)


@lru_cache(maxsize=32)
def matrix_map(shape: str, count: int, transpose: bool) -> tuple[Array, Array]:
    """Where each byte of an ldmatrix or stmatrix fragment lies.

    Args:
        shape: "m8n8" of 16-bit elements, "m16n16" of 8-bit ones (ldmatrix, transposed) or "m16n8" of 8-bit
            ones (stmatrix, transposed); the latter two after the copy traits of CUTLASS, untried on hardware.
        count: .x1, .x2 or .x4.

    Returns:
        (rows, columns), int64 (32, registers, 4) by lane, register and byte of it: the lane that supplies the
        row's address, and the byte within the row of 16 bytes.
    """
    lane = np.arange(32)[:, None, None]
    quarter, group = lane % 4, lane // 4
    octet = np.arange(4)[None, None, :]
    if shape == "m8n8" and count in (1, 2, 4):
        register = np.arange(count)[None, :, None]
        if transpose:
            rows, columns = 8 * register + 2 * quarter + octet // 2, 2 * group + octet % 2
        else:
            rows, columns = 8 * register + group, 4 * quarter + octet
    elif shape == "m16n16" and transpose and count in (1, 2):
        register = np.arange(2 * count)[None, :, None]
        rows = 16 * (register // 2) + 4 * quarter + 2 * (register % 2) + octet % 2
        columns = group + 8 * (octet // 2)
    elif shape == "m16n8" and transpose and count in (1, 2, 4):
        register = np.arange(count)[None, :, None]
        rows, columns = 8 * register + 2 * quarter + octet % 2, group + 8 * (octet // 2)
    else:
        raise ValueError(f"shape: {shape}.x{count}{'.trans' if transpose else ''} is not modelled")
    out = np.broadcast_arrays(rows, columns, register + 0 * octet + 0 * lane)[:2]
    return np.ascontiguousarray(out[0]), np.ascontiguousarray(out[1])


def ldmatrix(shared: Array, addresses: Array, shape: str, count: int, transpose: bool) -> Array:
    """Registers uint32 (32, r) from uint8 ``shared`` at the row addresses of the lanes, int (32,) or
    fewer."""
    rows, columns = matrix_map(shape, count, transpose)
    octets = shared[np.asarray(addresses)[rows] + columns]
    return np.ascontiguousarray(octets).view(np.uint32)[:, :, 0]


def stmatrix(shared: Array, addresses: Array, registers: Array, shape: str, count: int, transpose: bool) -> None:
    """The reverse of ``ldmatrix``: writes ``shared`` in place."""
    rows, columns = matrix_map(shape, count, transpose)
    octets = np.ascontiguousarray(registers, np.uint32).view(np.uint8).reshape(rows.shape)
    shared[np.asarray(addresses)[rows] + columns] = octets
