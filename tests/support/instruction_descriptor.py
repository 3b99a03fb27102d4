"""Instruction descriptors of tcgen05.mma by their fields, as the tables of the PTX ISA have them."""

from __future__ import annotations

_CODES = {
    "f16": {"f16": 0, "bf16": 1}, "tf32": {"tf32": 2}, "i8": {"u8": 0, "s8": 1},
    "mxf4": {"e2m1": 1}, "mxf4nvf4": {"e2m1": 1},
}  # fmt: skip
_NARROW = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}


def build(
    kind: str,
    m: int,
    n: int,
    a_type: str,
    b_type: str,
    d_type: str = "f32",
    *,
    negate_a: bool = False,
    b_major: str = "k",
    scale_format: str = "ue8m0",
    sfa_id: int = 0,
    sfb_id: int = 0,
) -> int:
    """The bits of a descriptor: the inverse of the emulator's ``decode``."""
    codes = _CODES.get(kind, _NARROW)
    bits = codes[a_type] << 7 | codes[b_type] << 10 | negate_a << 13 | n >> 3 << 17 | (b_major == "mn") << 16
    if not kind.startswith("mx"):
        return bits | {"f16": 0, "f32": 1, "s32": 2}[d_type] << 4 | m >> 4 << 24
    return bits | (scale_format == "ue8m0") << 23 | m >> 7 << 27 | sfa_id << 29 | sfb_id << 4
