"""Tensor maps in NVIDIA's own packing, decoded to the emulator's fields, and changed one field after the other.

Programs of CuTe DSL pack their maps in host code instead of calling the driver. The packing is read in the host code
that nvidia-cutlass-dsl 4.8.1 generates; 64-bit words, of dimensions innermost first:

    0      address
    1      bits 0-3 two; 4-6 rank - 1; 7-10 element type; 13-14 swizzle; 16 TF32; 17-18 L2 promotion;
           21 the array has 2^17 bytes or more; 32-63 low half of stride 1 / 16
    2, 3   low halves of strides 2 and 3, of 4, / 16; bits 36-39 of strides 1 to 4 in bits 32-47 of word 3
    4, 5   dims - 1 of dimensions 0 to 3, 32 bits each
    6      bits 0-31 dim - 1 of dimension 4; 56-63 box - 1 of dimension 0
    7      box - 1 of dimensions 1 to 4, eight bits each

Other bits of these words are zero in those programs; what they mean is not known here, and a map that has one is
refused, and so is a change that would need one. The last 64 bytes are never written.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from padless.emulator.units import tensor_map
from padless.emulator.units.tensor_map import TensorMap

# u8, u16, u64, f16, f32, bf16, packed e2m1 and TF32 (f32 with bit 16): the packing's number to the driver's.
_ELEMENTS = {0: 0, 1: 1, 4: 4, 6: 6, 7: 7, 10: 9, 11: 13, 7 | 1 << 4: 11}
_KNOWN = (
    (1 << 57) - 16,
    0xFFFFFFFF_0027_67FF,
    (1 << 64) - 1,
    0x0000FFFF_FFFFFFFF,
    (1 << 64) - 1,
    (1 << 64) - 1,
    0xFF000000_FFFFFFFF,
    0xFFFFFFFF,
)
# (word, lowest bit, bits) of a field, low part first; `ordinal` is the dimension's, of a stride its number less one
_PLACES = {
    ("global_address", 0): ((0, 0, 64),),
    ("rank", 0): ((1, 4, 3),),
    ("elemtype", 0): ((1, 7, 4), (1, 16, 1)),
    ("swizzle_mode", 0): ((1, 13, 2),),
    ("l2_promotion", 0): ((1, 17, 2),),
    **{("global_dim", i): ((4 + i // 2, 32 * (i % 2), 32),) for i in range(5)},
    **{("box_dim", i): ((7, 8 * i - 8, 8) if i else (6, 56, 8),) for i in range(5)},
    **{("global_stride", i): (((i + 1) // 2 + 1, 32 * ((i + 1) % 2), 32), (3, 32 + 4 * i, 4)) for i in range(4)},
}


def _read(words: Sequence[int], field: str, ordinal: int = 0) -> int:
    value = at = 0
    for word, low, bits in _PLACES[field, ordinal]:
        value |= (words[word] >> low & (1 << bits) - 1) << at
        at += bits
    return value


def decode(raw: bytes) -> TensorMap:
    """The fields of a map of 64 bytes and more, in this packing or the emulator's own. Raises ValueError for others."""
    if len(raw) < 64 or raw[:4] == tensor_map.MAGIC:
        return tensor_map.decode(raw)
    words = struct.unpack_from("<8Q", raw)
    unknown = [i for i, (word, known) in enumerate(zip(words, _KNOWN, strict=True)) if word & ~known]
    if unknown or words[1] & 15 != 2:
        word = unknown[0] if unknown else 1
        raise ValueError(f"raw: word {word} is {words[word]:#x}, with bits that are not known of NVIDIA's packing")
    rank, number = _read(words, "rank") + 1, _read(words, "elemtype")
    element = _ELEMENTS.get(number)
    if rank > 5 or element is None:
        known = f"known are ranks 1 to 5 and types {', '.join(map(str, _ELEMENTS))}"
        raise ValueError(f"raw: rank {rank} and element type {number}; {known}")
    dims, box = ([_read(words, field, i) + 1 for i in range(rank)] for field in ("global_dim", "box_dim"))
    strides = [_read(words, "global_stride", i) << 4 for i in range(rank - 1)]
    return TensorMap(
        element, words[0], tuple(dims), tuple(strides), tuple(box), (1,) * rank, _read(words, "swizzle_mode"),
        _read(words, "l2_promotion"),
    )  # fmt: skip


def replace(raw: bytes, field: str, value: int, ordinal: int = 0) -> bytes:
    """`tensor_map.replace` of a map in this packing or the emulator's own: only the bits of the field change.

    Raises ValueError as that does, and for a value that this packing is not known to have bits for.
    """
    raw = bytes(raw)
    before = decode(raw)
    if raw[:4] == tensor_map.MAGIC:
        return tensor_map.replace(raw, field, value, ordinal)
    after = tensor_map.changed(before, field, value, ordinal)
    numbers = {driver: packed for packed, driver in _ELEMENTS.items()}
    stored: int | None = value
    if field == "elemtype":
        stored = numbers.get(after.data_type)
    elif field in ("global_dim", "box_dim"):
        stored = value - 1
    elif field == "global_stride":
        stored = value >> 4
    elif (field, ordinal) not in _PLACES and after != before:
        stored = None
    if stored is None:
        raise ValueError(f"{field}: {value} has no known place in NVIDIA's packing")
    words = list(struct.unpack_from("<8Q", raw))
    for word, low, bits in _PLACES.get((field, ordinal), ()):
        words[word] = words[word] & ~((1 << bits) - 1 << low) | (stored & (1 << bits) - 1) << low
        stored >>= bits
    return struct.pack("<8Q", *words) + raw[64:]
