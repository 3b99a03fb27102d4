"""Tensor maps without a driver: an encoder that refuses what the driver refuses, and the decoder of its 128 bytes.

Real tensor maps are opaque; this encoding is private. All of it sits in the first 64 bytes, since kernels
that rewrite maps on the device copy only those:

    bytes  0-3   "PTM1"            bytes 32-51  strides / 16, five bytes each, of dimensions 1 to 4
    bytes  4-11  address           bytes 52-56  box - 1
    bytes 12-31  dims mod 2^32     bytes 57-58  element strides - 1, three bits each
    bytes 59-61  a bit field: data type 0-3, rank - 1 4-6, swizzle 7-9, fill 12, L2 13-14,
                 dimension i is 2^32 in bit 15 + i

Limits: CUDA driver API, cuTensorMapEncodeTiled; replacement codes: PTX ISA, "tensormap.replace".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as _replace
from functools import lru_cache
from typing import Any

MAGIC = b"PTM1"
BYTES = 128
# CUtensorMapDataType -> (element name, bits in global memory)
DATA_TYPES = (
    ("u8", 8), ("u16", 16), ("u32", 32), ("s32", 32), ("u64", 64), ("s64", 64), ("f16", 16), ("f32", 32),
    ("f64", 64), ("bf16", 16), ("f32", 32), ("tf32", 32), ("tf32", 32), ("b4x16", 4), ("b4x16_p64", 4), ("b6x16_p32", 6),
)  # fmt: skip
_PTX_ELEMENTS = (0, 1, 2, 3, 4, 5, 6, 7, 10, 8, 9, 11, 12, 13, 14, 15)  # tensormap.replace .elemtype -> driver enum
SWIZZLES = ("none", "32B", "64B", "128B", "128B_32B")
_SPAN = (0, 32, 64, 128, 128)
_FLOATS = ("f16", "f32", "f64", "bf16", "tf32")


@dataclass(frozen=True)
class TensorMap:
    """A decoded map; tuples are innermost dimension first and have ``rank`` entries (strides one less).

    Attributes:
        address: bytes.  dims: elements.  strides: bytes, of dimensions 1 and up.  box: elements of one copy.
        element: u8 u16 u32 s32 u64 s64 f16 f32 f64 bf16 tf32 b4x16 b4x16_p64 b6x16_p32.
        element_bits: in global memory; a b4x16_p64 element takes 8 bits of shared memory, on average.
        swizzle: name of units.swizzle.
        nan_fill: out-of-bounds elements read as NaN instead of 0.
    """

    data_type: int
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle_code: int = 0
    l2_promotion: int = 0
    nan_fill: bool = False

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def element(self) -> str:
        return DATA_TYPES[self.data_type][0]

    @property
    def element_bits(self) -> int:
        return DATA_TYPES[self.data_type][1]

    @property
    def shared_bits(self) -> int:
        """Bits of shared memory per element, padding included."""
        return 8 if self.element in ("b4x16_p64", "b6x16_p32") else self.element_bits

    @property
    def swizzle(self) -> str:
        return SWIZZLES[self.swizzle_code]


@lru_cache(maxsize=4096)
def problems(m: TensorMap) -> tuple[str, ...]:
    """What the driver would refuse, each as "argument: what it is; what is allowed"."""
    padded = m.element in ("b4x16_p64", "b6x16_p32")
    unit = 32 if padded else 16
    inner = m.box[0] * m.shared_bits / 8
    span = _SPAN[m.swizzle_code]
    rules = [
        (0 <= m.address < 1 << 64, f"address: {m.address:#x} is not a 64-bit address"),
        (m.address % unit == 0, f"address: {m.address:#x} is not a multiple of {unit} bytes"),
        *((1 <= x <= 1 << 32, f"dims[{i}]: {x} is outside 1..2^32") for i, x in enumerate(m.dims)),
        *((x % unit == 0, f"strides[{i}]: {x} bytes is not a multiple of {unit}") for i, x in enumerate(m.strides)),
        *((0 <= x < 1 << 40, f"strides[{i}]: {x} bytes is outside 0..2^40-1") for i, x in enumerate(m.strides)),
        *((1 <= x <= 256, f"box[{i}]: {x} is outside 1..256") for i, x in enumerate(m.box)),
        *((1 <= x <= 8, f"element_strides[{i}]: {x} is outside 1..8") for i, x in enumerate(m.element_strides)),
        (inner % 16 == 0, f"box[0]: {m.box[0]} elements are {inner:g} bytes, not a multiple of 16"),
        (not span or inner <= span, f"box[0]: {inner:g} bytes are more than the {span} of swizzle {m.swizzle}"),
        (
            m.element != "b4x16" or m.dims[0] % 2 == 0,
            f"dims[0]: {m.dims[0]} four-bit elements, an even number is needed",
        ),
        (not padded or m.dims[0] % 128 == 0, f"dims[0]: {m.dims[0]} is not a multiple of 128, which {m.element} needs"),
        (not padded or m.box[0] == 128, f"box[0]: {m.box[0]}; {m.element} needs 128"),
        (not padded or m.swizzle_code in (0, 3, 4), f"swizzle: {m.swizzle}; {m.element} takes none or 128B"),
        (not m.nan_fill or m.element in _FLOATS, f"oob_fill: NaN fill needs a floating-point type, got {m.element}"),
    ]
    return tuple(text for good, text in rules if not good)


def encode_tiled(
    data_type: int,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int] | None = None,
    *,
    interleave: int = 0,
    swizzle: int = 0,
    l2_promotion: int = 0,
    oob_fill: int = 0,
    object_address: int = 0,
) -> bytes:
    """cuTensorMapEncodeTiled: innermost dimension first, strides in bytes and one fewer than dims.

    Args:
        data_type, interleave, swizzle, l2_promotion, oob_fill: the driver's enumerations as integers.
        object_address: where the caller will put the 128 bytes.

    Raises:
        ValueError: for what the driver answers with CUDA_ERROR_INVALID_VALUE, and for interleaved layouts and
            swizzles 5 and 6, which are not modelled.
    """
    rank = len(dims)
    if object_address % 64:
        raise ValueError(f"object_address: {object_address:#x} is not a multiple of 64")
    if not 1 <= rank <= 5:
        raise ValueError(f"rank: {rank} is outside 1..5")
    if not 0 <= data_type < len(DATA_TYPES):
        raise ValueError(f"data_type: {data_type} is outside 0..{len(DATA_TYPES) - 1}")
    steps = tuple(element_strides) if element_strides is not None else (1,) * rank
    for name, value, length in (("strides", strides, rank - 1), ("box", box, rank), ("element_strides", steps, rank)):
        if len(value) != length:
            raise ValueError(f"{name}: {len(value)} entries for rank {rank}; {length} are needed")
    for name, code, count in (
        ("interleave", interleave, 3), ("swizzle", swizzle, 7), ("l2_promotion", l2_promotion, 4),
        ("oob_fill", oob_fill, 2),
    ):  # fmt: skip
        if not 0 <= code < count:
            raise ValueError(f"{name}: {code} is outside 0..{count - 1}")
    if interleave or swizzle >= len(SWIZZLES):
        raise ValueError(f"interleave {interleave}, swizzle {swizzle}: the emulator does not model this layout")
    shape = tuple(dims), tuple(strides), tuple(box), steps
    m = TensorMap(data_type, address, *shape, swizzle, l2_promotion, bool(oob_fill))
    wrong = problems(m)
    if wrong:
        raise ValueError("; ".join(wrong))
    return pack(m)


def pack(m: TensorMap) -> bytes:
    """The 128 bytes of a map, legal or not."""
    pad = 5 - m.rank
    dims = m.dims + (1,) * pad
    fields = m.data_type | (m.rank - 1) << 4 | m.swizzle_code << 7 | m.nan_fill << 12
    fields |= m.l2_promotion << 13
    steps = 0
    for i, dim in enumerate(dims):
        fields |= (dim >> 32) << (15 + i)
    for i, step in enumerate(m.element_strides):
        steps |= (step - 1) << (3 * i)
    raw = MAGIC + struct.pack("<Q5I", m.address, *(d & 0xFFFFFFFF for d in dims))
    raw += b"".join((s >> 4).to_bytes(5, "little") for s in m.strides + (0,) * pad)
    raw += bytes(b - 1 for b in m.box + (1,) * pad) + steps.to_bytes(2, "little") + fields.to_bytes(3, "little")
    return raw.ljust(BYTES, b"\0")


def decode(raw: bytes) -> TensorMap:
    """The map in at least 64 bytes. Raises ValueError for bytes that this encoder did not write."""
    raw = bytes(raw)
    if len(raw) < 64 or raw[:4] != MAGIC:
        begin = f"{len(raw)} bytes that begin with {raw[:4]!r}"
        raise ValueError(f"raw: {begin} are no tensor map of the emulator's encoder")
    address, *dims = struct.unpack_from("<Q5I", raw, 4)
    fields = int.from_bytes(raw[59:62], "little")
    steps = int.from_bytes(raw[57:59], "little")
    rank = (fields >> 4 & 7) + 1
    return TensorMap(
        fields & 15,
        address,
        tuple(d | (fields >> (15 + i) & 1) << 32 for i, d in enumerate(dims))[:rank],
        tuple(int.from_bytes(raw[32 + 5 * i : 37 + 5 * i], "little") << 4 for i in range(rank - 1)),
        tuple(b + 1 for b in raw[52 : 52 + rank]),
        tuple((steps >> 3 * i & 7) + 1 for i in range(rank)),
        fields >> 7 & 7,
        fields >> 13 & 3,
        bool(fields >> 12 & 1),
    )


def replace(raw: bytes, field: str, value: int, ordinal: int = 0) -> bytes:
    """tensormap.replace.tile.<field>: one field of a map, with the instruction's codes. Returns 128 bytes.

    ``rank`` takes rank - 1; ``global_stride`` ordinal i is the stride of dimension i + 1 in bytes. Dimensions beyond
    the map's rank may be written, and change nothing. A map may pass through states that no copy could use;
    ``problems`` says so when it is used. Raises ValueError for values that do not fit the field and for layouts that
    are not modelled.
    """
    return pack(changed(decode(raw), field, value, ordinal))[:64] + bytes(raw)[64:BYTES].ljust(64, b"\0")


def changed(m: TensorMap, field: str, value: int, ordinal: int) -> TensorMap:
    """The map after `replace`. Raises ValueError as that does."""
    if field in _VECTORS:
        attribute, (low, high) = _VECTORS[field]
        old = getattr(m, attribute)
        if not 0 <= ordinal < 4 + (field != "global_stride"):
            raise ValueError(f"ordinal: {ordinal} for {field}")
        if not low <= value <= high:
            raise ValueError(f"{field}: {value} is outside {low}..{high}")
        if field == "global_stride" and value % 16:
            raise ValueError(f"global_stride: {value} bytes is not a multiple of 16")
        if ordinal >= len(old):  # a dimension that a map of this rank does not have
            return m
        new: dict[str, Any] = {attribute: (*old[:ordinal], value, *old[ordinal + 1 :])}
        return _replace(m, **new)
    if field == "global_address":
        return _replace(m, address=value & (1 << 64) - 1)
    if field == "rank":
        return _with_rank(m, value + 1)
    if field == "elemtype" and 0 <= value < len(_PTX_ELEMENTS):
        return _replace(m, data_type=_PTX_ELEMENTS[value])
    if field == "swizzle_mode" and 0 <= value <= 3:
        return _replace(m, swizzle_code=value)
    if field == "swizzle_atomicity" and (value == 0 or (value == 1 and m.swizzle_code in (3, 4))):
        return _replace(m, swizzle_code=4 if value else min(m.swizzle_code, 3))
    if field == "fill_mode" and value in (0, 1):
        return _replace(m, nan_fill=bool(value))
    if field != "interleave_layout" or value:
        raise ValueError(f"{field}: {value} is not a value the emulator models")
    return m


_VECTORS = {
    "global_dim": ("dims", (0, (1 << 32) - 1)),
    "global_stride": ("strides", (0, (1 << 40) - 1)),
    "box_dim": ("box", (1, 256)),
    "element_stride": ("element_strides", (1, 8)),
}


def _with_rank(m: TensorMap, rank: int) -> TensorMap:
    if not 1 <= rank <= 5:
        raise ValueError(f"rank: {rank - 1} is outside 0..4")
    ones = (1,) * rank
    dims, box, steps = ((x + ones)[:rank] for x in (m.dims, m.box, m.element_strides))
    return _replace(m, dims=dims, box=box, element_strides=steps, strides=(m.strides + (0,) * rank)[: rank - 1])
