"""wgmma.mma_async: a warpgroup's D (64 x n) = A (64 x k) * B (k x n) [+ D], D in registers, B in shared memory.

Of the sparse form A lies there as 64 x k / 2 elements, in the same fragments and layouts (`sparsity`).

Fragments of a warp, here and in mma.sync, for its thread t: A register i holds bytes 4 (t % 4) + 16 (i // 2) .. +3 of
row t // 4 + 8 (i % 2); a 32-bit D register i holds row t // 4 + 8 ((i % 4) // 2), column 8 (i // 4) + 2 (t % 4) + i % 2;
a float16 D register i holds two columns, 8 (i // 2) + 2 (t % 4) in the low half, of row t // 4 + 8 (i % 2). Each warp of
a warpgroup has the next 16 rows (PTX ISA, "Register fragments and shared memory matrix layouts" of wgmma).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from padless.emulator.units import arithmetic, number_formats, sparsity
from padless.emulator.units.matrix_descriptor import SharedMatrix, decode_wgmma
from padless.emulator.units.number_formats import CODES, Array

ELEMENT_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
TYPES = (*ELEMENT_BYTES, "f32", "s32")
M = 64


def check_types(d_type: str, a_type: str, b_type: str) -> None:
    """ValueError for a product that neither wgmma nor mma.sync has."""
    for name, value in (("a_type", a_type), ("b_type", b_type)):
        if value not in ELEMENT_BYTES:
            raise ValueError(f"{name}: {value!r} is not one of {', '.join(ELEMENT_BYTES)}")
    if ELEMENT_BYTES[a_type] != ELEMENT_BYTES[b_type]:
        raise ValueError(f"a_type, b_type: {a_type} and {b_type} differ in width")
    integers = [t in ("s8", "u8", "s32") for t in (d_type, a_type, b_type)]
    if d_type not in ("f32", "f16", "s32") or any(integers) != all(integers):
        raise ValueError(f"d_type: {d_type!r} of {a_type} times {b_type} does not exist")


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
        selector: sp-sel of the sparse form, whose K is twice as long and whose A has half of it; None: dense.
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
    selector: int | None = None

    def __post_init__(self) -> None:
        check_types(self.d_type, self.a_type, self.b_type)
        if self.n % 8 or not 8 <= self.n <= 256:
            raise ValueError(f"n: {self.n} is not a multiple of 8 in 8..256")
        if self.selector is not None:
            sparsity.check_selector(self.selector, ELEMENT_BYTES[self.a_type])

    @property
    def stored_k(self) -> int:
        """Elements of a row of A as it lies in registers or shared memory."""
        return 32 // ELEMENT_BYTES[self.a_type]

    @property
    def k(self) -> int:
        return self.stored_k if self.selector is None else 2 * self.stored_k

    def _shared(self) -> dict[str, SharedMatrix]:
        """The operands that lie in shared memory."""
        places = {
            "a": (self.a_descriptor, M, self.stored_k, self.a_major),
            "b": (self.b_descriptor, self.n, self.k, self.b_major),
        }
        return {
            name: SharedMatrix(decode_wgmma(bits), rows, k, ELEMENT_BYTES[self.a_type], major)
            for name, (bits, rows, k, major) in places.items()
            if bits is not None
        }

    def problems(self) -> tuple[str, ...]:
        """Broken rules of the descriptors and operand layouts, one sentence each."""
        found: list[str] = []
        for name, operand in self._shared().items():
            found += [f"{name.upper()} {p}" for p in operand.problems()]
            if operand.major == "mn" and operand.element_bytes != 2:
                found.append(f"{name.upper()} is MN-major; only 16-bit operands may be")
        return tuple(found)

    def shared_ranges(self) -> dict[str, list[tuple[int, int]]]:
        """Merged [first, end) byte ranges of shared memory read for "a" (empty from registers) and "b"."""
        return {"a": []} | {name: operand.ranges() for name, operand in self._shared().items()}

    def execute(
        self,
        shared: Array,
        d: Array,
        a_registers: Array | None = None,
        mode: str = "truncate",
        chunks: Array | None = None,
    ) -> Array:
        """Multiply.

        Args:
            shared: uint8 (bytes,) of the CTA.
            d: (128, n / 2) of 32-bit elements, or (128, n / 4) for d_type f16: the accumulator registers by thread.
            a_registers: (128, 4) 32-bit, where A comes from registers.
            mode: of arithmetic.dot_product_add.
            chunks: (64, chunks of K), the metadata of the sparse form as of sparsity.unpack.

        Returns:
            The new registers, with the shape and dtype of ``d``.
        """
        if (a_registers is None) != (self.a_descriptor is not None):
            raise ValueError("a_registers: needed exactly if there is no descriptor of A")
        if (chunks is None) != (self.selector is None):
            raise ValueError("chunks: needed exactly by the sparse form")
        codes = {name: operand.gather(shared) for name, operand in self._shared().items()}
        if a_registers is not None:
            codes["a"] = unpack_a(a_registers).view(CODES[ELEMENT_BYTES[self.a_type]])
        c = unpack_d(np.ascontiguousarray(d).view(np.uint32), self.d_type) if self.scale_d else None
        types = self.d_type, self.a_type, self.b_type
        rule = arithmetic.HOPPER_FP8 if ELEMENT_BYTES[self.a_type] == 1 else arithmetic.WIDE
        options: dict[str, Any] = {
            "mode": mode, "negate": (self.negate_a, self.negate_b), "saturate": self.saturate,
        }  # fmt: skip
        if chunks is None:
            result = arithmetic.multiply(codes["a"], codes["b"], c, types, rule, **options)
        else:
            where = sparsity.positions(chunks, ELEMENT_BYTES[self.a_type])
            result = sparsity.multiply(codes["a"], codes["b"], c, where, types, rule, **options)
        return pack_d(result, self.d_type).view(d.dtype)


def unpack_a(registers: Array) -> Array:
    """A fragments of w warps, (32 w, r) 32-bit registers by thread, to bytes (16 w, 8 r)."""
    warps, count = len(registers) // 32, registers.shape[1]
    octets = np.ascontiguousarray(registers).view(np.uint8)
    octets = octets.reshape(warps, 8, 4, count // 2, 2, 4)  # w, t/4, t%4, i/2, i%2, byte
    return np.ascontiguousarray(octets.transpose(0, 4, 1, 3, 2, 5)).reshape(16 * warps, 8 * count)


def unpack_d(bits: Array, d_type: str) -> Array:
    """D registers of w warps as uint32 by thread to a matrix (16 w, n): float32, or int32 for s32."""
    warps = len(bits) // 32
    words = bits.view(np.uint16) if d_type == "f16" else bits
    # w, t/4, t%4, i/4, (i%4)/2, i%2; of float16 ones the last two are i%2 and the half
    words = words.reshape(warps, 8, 4, words.shape[1] // 4, 2, 2).transpose(0, 4, 1, 3, 2, 5)
    matrix = np.ascontiguousarray(words).reshape(16 * warps, -1)
    if d_type == "f16":
        return number_formats.decode(matrix, "f16").astype(np.float32)
    return matrix.view(np.int32 if d_type == "s32" else np.float32)


def pack_d(matrix: Array, d_type: str) -> Array:
    """A matrix (16 w, n) to D registers: uint32 (32 w, n / 2), or (32 w, n / 4) for f16."""
    rows, n = matrix.shape
    words = number_formats.encode(matrix, "f16") if d_type == "f16" else np.ascontiguousarray(matrix).view(np.uint32)
    words = words.reshape(rows // 16, 2, 8, n // 8, 4, 2).transpose(0, 2, 4, 3, 1, 5)
    return np.ascontiguousarray(words).reshape(2 * rows, n // 2).view(np.uint32)
