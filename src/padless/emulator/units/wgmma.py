"""wgmma.mma_async: a warpgroup's D (64 x n) = A (64 x k) * B (k x n) [+ D], D in registers, B in shared
memory.

Fragments, for thread t of warp w of the warpgroup: A register i holds bytes 4 (t % 4) + 16 (i // 2) .. +3 of
row 16 w + t // 4 + 8 (i % 2); a 32-bit D register i holds row 16 w + t // 4 + 8 ((i % 4) // 2), column 8 (i
// 4) + 2 (t % 4) + i % 2; a float16 D register i holds two columns, 8 (i // 2) + 2 (t % 4) in the low half,
of row 16 w + t // 4 + 8 (i % 2) (PTX ISA, "Register fragments and shared memory matrix layouts" of wgmma).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from padless.emulator.units import arithmetic, number_formats
from padless.emulator.units import matrix_descriptor as descriptors
from padless.emulator.units.number_formats import Array

ELEMENT_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
M = 64


@dataclass(frozen=True)
class Wgmma:
    """One instruction with its run-time descriptors.

    Attributes:
        n: 8 to 256 in steps of 8.
        d_type: f32, f16 or s32.  a_type, b_type: f16, bf16, tf32, e4m3, e5m2, s8, u8.
        a_descriptor: 64 bits, or None where A comes from registers.
        scale_d: whether D is added to.
        negate_a, negate_b: imm-scale of -1.
        a_major, b_major: "k", or "mn" for a transposed 16-bit operand in shared memory.
        saturate: .satfinite of the integer form.
    """

    n: int
    d_type: str
    a_type: str
    b_type: str
    a_descriptor: int | None
    b_descriptor: int
    scale_d: bool = True
    negate_a: bool = False
    negate_b: bool = False
    a_major: str = "k"
    b_major: str = "k"
    saturate: bool = False

    def __post_init__(self) -> None:
        for name, value in (("a_type", self.a_type), ("b_type", self.b_type)):
            if value not in ELEMENT_BYTES:
                raise ValueError(f"{name}: {value!r} is not one of {', '.join(ELEMENT_BYTES)}")
        if ELEMENT_BYTES[self.a_type] != ELEMENT_BYTES[self.b_type]:
            raise ValueError(f"a_type, b_type: {self.a_type} and {self.b_type} differ in width")
        integers = [t in ("s8", "u8", "s32") for t in (self.d_type, self.a_type, self.b_type)]
        if self.d_type not in ("f32", "f16", "s32") or any(integers) != all(integers):
            raise ValueError(f"d_type: {self.d_type!r} of {self.a_type} times {self.b_type} does not exist")
        if self.n % 8 or not 8 <= self.n <= 256:
            raise ValueError(f"n: {self.n} is not a multiple of 8 in 8..256")

    @property
    def k(self) -> int:
        return 32 // ELEMENT_BYTES[self.a_type]

    def problems(self) -> tuple[str, ...]:
        """Broken rules of the descriptors and operand layouts, one sentence each."""
        found: list[str] = []
        for name, descriptor, major in (("A", self.a_descriptor, self.a_major), ("B", self.b_descriptor, self.b_major)):
            if descriptor is None:
                continue
            d = descriptors.decode_wgmma(descriptor)
            found += [f"{name} {p}" for p in (*d.problems, *descriptors.operand_problems(d, 32, major))]
            if major == "mn" and ELEMENT_BYTES[self.a_type] != 2:
                found.append(f"{name} is MN-major; only 16-bit operands may be")
        return tuple(found)

    def shared_ranges(self) -> dict[str, list[tuple[int, int]]]:
        """Merged [first, end) byte ranges of shared memory read for "a" (empty from registers) and "b"."""
        size = ELEMENT_BYTES[self.a_type]
        ranges: dict[str, list[tuple[int, int]]] = {"a": []}
        if self.a_descriptor is not None:
            d = descriptors.decode_wgmma(self.a_descriptor)
            ranges["a"] = descriptors.operand_ranges(d, M, self.k, size, self.a_major)
        d = descriptors.decode_wgmma(self.b_descriptor)
        ranges["b"] = descriptors.operand_ranges(d, self.n, self.k, size, self.b_major)
        return ranges

    def execute(self, shared: Array, d: Array, a_registers: Array | None = None, mode: str = "truncate") -> Array:
        """Multiply.

        Args:
            shared: uint8 (bytes,) of the CTA.
            d: (128, n / 2) of 32-bit elements, or (128, n / 4) for d_type f16: the accumulator registers by
                thread.
            a_registers: (128, 4) 32-bit, where A comes from registers.
            mode: of arithmetic.dot_product_add.

        Returns:
            The new registers, with the shape and dtype of ``d``.
        """
        size = ELEMENT_BYTES[self.a_type]
        if (a_registers is None) != (self.a_descriptor is not None):
            raise ValueError("a_registers: needed exactly if there is no descriptor of A")
        if a_registers is not None:
            a = unpack_a(a_registers, size)
        else:
            assert self.a_descriptor is not None
            where = descriptors.decode_wgmma(self.a_descriptor)
            a = descriptors.gather(shared, where, M, self.k, size, self.a_major)
        b = descriptors.gather(shared, descriptors.decode_wgmma(self.b_descriptor), self.n, self.k, size, self.b_major)
        bits = np.ascontiguousarray(d).view(np.uint32)
        c = unpack_d(bits, self.n, self.d_type) if self.scale_d else None
        if self.d_type == "s32":
            result = arithmetic.integer_dot_add(
                integers(a, self.a_type), integers(b, self.b_type), c, saturate=self.saturate
            )
        else:
            x, y = arithmetic.decode_operand(a, self.a_type), arithmetic.decode_operand(b, self.b_type)
            x, y = x.negated() if self.negate_a else x, y.negated() if self.negate_b else y
            rule = arithmetic.HOPPER_FP8 if size == 1 else arithmetic.WIDE
            result = arithmetic.dot_product_add(x, y, c, rule, mode=mode, result=self.d_type)
        return pack_d(result, self.d_type).view(d.dtype)


def integers(codes: Array, name: str) -> Array:
    """uint8 codes as the integers of "s8" or "u8"."""
    return codes.view(np.int8) if name == "s8" else codes


def unpack_a(registers: Array, element_bytes: int) -> Array:
    """A fragments, (128, 4) 32-bit registers by thread, to codes (64, 32 / element_bytes)."""
    octets = np.ascontiguousarray(registers).view(np.uint8).reshape(4, 8, 4, 2, 2, 4)  # w, t/4, t%4, i/2, i%2, byte
    rows = np.ascontiguousarray(octets.transpose(0, 4, 1, 3, 2, 5)).reshape(M, 32)
    return rows.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[element_bytes])


def unpack_d(bits: Array, n: int, d_type: str) -> Array:
    """D registers as uint32 by thread to a matrix (64, n): float32, or int32 for s32."""
    if d_type == "f16":
        halves = bits.view(np.uint16).reshape(4, 8, 4, n // 8, 2, 2)  # w, t/4, t%4, i/2, i%2, half
        codes = halves.transpose(0, 4, 1, 3, 2, 5).reshape(M, n)
        return number_formats.decode(codes, "f16").astype(np.float32)
    words = bits.reshape(4, 8, 4, n // 8, 2, 2)  # w, t/4, t%4, i/4, (i%4)/2, i%2
    matrix = np.ascontiguousarray(words.transpose(0, 4, 1, 3, 2, 5)).reshape(M, n)
    return matrix.view(np.int32 if d_type == "s32" else np.float32)


def pack_d(matrix: Array, d_type: str) -> Array:
    """A matrix (64, n) to D registers: uint32 (128, n / 2), or (128, n / 4) for f16."""
    n = matrix.shape[1]
    if d_type == "f16":
        codes = number_formats.encode(matrix, "f16").reshape(4, 2, 8, n // 8, 4, 2)
        return np.ascontiguousarray(codes.transpose(0, 2, 4, 3, 1, 5)).reshape(128, n // 2).view(np.uint32)
    words = np.ascontiguousarray(matrix).view(np.uint32).reshape(4, 2, 8, n // 8, 4, 2)
    return np.ascontiguousarray(words.transpose(0, 2, 4, 3, 1, 5)).reshape(128, n // 2)
