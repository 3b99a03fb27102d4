"""Tensor maps in NVIDIA's own packing, decoded to the emulator's fields.

Programs of CuTe DSL pack their maps in host code instead of calling the driver. The packing is read in the host code
that nvidia-cutlass-dsl 4.8.1 generates; 64-bit words, of dimensions innermost first:

    0      address
    1      bits 0-3 two; 4-6 rank - 1; 7-10 element type; 13-14 swizzle; 17-18 L2 promotion;
           21 the array has 2^17 bytes or more; 32-63 low half of stride 1 / 16
    2, 3   low halves of strides 2 and 3, of 4, / 16; bits 36-39 of strides 1 to 4 in bits 32-47 of word 3
    4, 5   dims - 1 of dimensions 0 to 3, 32 bits each
    6      bits 0-31 dim - 1 of dimension 4; 56-63 box - 1 of dimension 0
    7      box - 1 of dimensions 1 to 4, eight bits each

Other bits of these words are zero in those programs; what they mean is not known here, and a map that has one is
refused. The last 64 bytes are never written.
"""

from __future__ import annotations

import struct

from padless.emulator.units import tensor_map
from padless.emulator.units.tensor_map import BYTES, TensorMap

# u8, u16, u64, f16, f32, bf16 and packed e2m1: the packing's number to the driver's.
_ELEMENTS = {0: 0, 1: 1, 4: 4, 6: 6, 7: 7, 10: 9, 11: 13}
_KNOWN = (
    (1 << 57) - 16,
    0xFFFFFFFF_0026_67FF,
    (1 << 64) - 1,
    0x0000FFFF_FFFFFFFF,
    (1 << 64) - 1,
    (1 << 64) - 1,
    0xFF000000_FFFFFFFF,
    0xFFFFFFFF,
)


def decode(raw: bytes) -> TensorMap:
    """The fields of a map of 128 bytes. Raises ValueError for bytes that are not in this packing."""
    if len(raw) != BYTES:
        raise ValueError(f"raw: {len(raw)} bytes; a tensor map has {BYTES}")
    words = struct.unpack_from("<8Q", raw)
    unknown = [i for i, (word, known) in enumerate(zip(words, _KNOWN, strict=True)) if word & ~known]
    if unknown or words[1] & 15 != 2:
        word = unknown[0] if unknown else 1
        raise ValueError(f"raw: word {word} is {words[word]:#x}, with bits that are not known of NVIDIA's packing")
    fields = words[1]
    rank = (fields >> 4 & 7) + 1
    low = (words[1] >> 32, words[2] & 0xFFFFFFFF, words[2] >> 32, words[3] & 0xFFFFFFFF)
    strides = tuple((low[i] << 4) | (words[3] >> (32 + 4 * i) & 15) << 36 for i in range(4))
    dims = tuple((words[4 + i // 2] >> (32 * (i % 2)) & 0xFFFFFFFF) + 1 for i in range(5))
    box = (words[6] >> 56, *words[7].to_bytes(8, "little")[:4])
    element = _ELEMENTS.get(fields >> 7 & 15)
    if rank > 5 or element is None:
        known = f"known are ranks 1 to 5 and types {', '.join(map(str, _ELEMENTS))}"
        raise ValueError(f"raw: rank {rank} and element type {fields >> 7 & 15}; {known}")
    return TensorMap(
        element, words[0], dims[:rank], strides[: rank - 1], tuple(b + 1 for b in box[:rank]),
        (1,) * rank, fields >> 13 & 3, fields >> 17 & 3,
    )  # fmt: skip


def translate(raw: bytes) -> bytes:
    """A map in NVIDIA's packing as the emulator's own 128 bytes. Raises ValueError for what the driver would refuse."""
    m = decode(raw)
    return tensor_map.encode_tiled(
        m.data_type, m.address, m.dims, m.strides, m.box, swizzle=m.swizzle_code, l2_promotion=m.l2_promotion
    )
