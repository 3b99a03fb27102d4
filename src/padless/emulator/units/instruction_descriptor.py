"""The 32-bit instruction descriptor of tcgen05.mma: element types, transposes, shape and scale-factor ids.

Three layouts (PTX ISA, "Instruction descriptor"):

    f16, tf32, f8f6f4, i8    2 sparse  3 saturate  4-5 D  7-9 A  10-12 B  13/14 negate  15/16 transpose
                             17-22 N / 8  24-28 M / 16  30-31 .ws shift
    mxf8f6f4                 2 sparse  4-5 SFB id  7-9 A  10-12 B  13/14 negate  15/16 transpose  17-22 N / 8
                             23 scale format  27-28 M / 128  29-30 SFA id
    mxf4, mxf4nvf4           2 sparse  4-5 SFB id  7-9 A  10-11 B  13/14 negate  17-22 N / 8  23 scale format
                             27-28 M / 128  29-30 SFA id  31 K = 96
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

KINDS = ("f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4", "mxf4nvf4")
BLOCK_SCALED = ("mxf8f6f4", "mxf4", "mxf4nvf4")
_EIGHT_SIX_FOUR = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_TYPES = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "i8": {0: "u8", 1: "s8"},
    "f8f6f4": _EIGHT_SIX_FOUR,
    "mxf8f6f4": _EIGHT_SIX_FOUR,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
_D_TYPES = {0: "f16", 1: "f32", 2: "s32"}
# Bits with a meaning, per layout.
_PLAIN_BITS = 0b1101_1111_0111_1111_1111_1111_1011_1111
_MX8_BITS = 0b0111_1000_1111_1111_1111_1111_1011_0100
_MX4_BITS = 0b1111_1000_1111_1110_0110_1111_1011_0100


@dataclass(frozen=True)
class InstructionDescriptor:
    """A decoded descriptor.

    Attributes:
        kind: of the instruction.  m, n: of the whole operation (both CTAs).  k: elements per instruction.
        a_type, b_type: number formats; "?" for a code that means nothing.  d_type: f32, f16 or s32.
        a_major, b_major: "k" or "mn".
        sfa_id, sfb_id: the byte of a scale word that this instruction starts at.
        scale_format: "ue8m0", "ue4m3", or "" for kinds without scales.
        faults: what the bits alone get wrong.
        meaningless: those that leave no operation to perform, or none that is modelled.
    """

    bits: int
    kind: str
    m: int
    n: int
    k: int
    a_type: str
    b_type: str
    d_type: str
    negate_a: bool = False
    negate_b: bool = False
    a_major: str = "k"
    b_major: str = "k"
    saturate: bool = False
    sfa_id: int = 0
    sfb_id: int = 0
    scale_format: str = ""
    faults: tuple[str, ...] = ()
    meaningless: tuple[str, ...] = ()

    def problems(self, cta_group: int, block: int = 0, a_in_tmem: bool = False) -> tuple[str, ...]:
        """Broken rules of reserved bits, shape and ids, one sentence each; ``meaningless`` comes on top.

        Args:
            cta_group: 1 or 2.
            block: elements per scale, 16 or 32; 0 for kinds without scales.
            a_in_tmem: whether A comes from tensor memory.
        """
        found = list(self.faults)
        scaled = self.kind in BLOCK_SCALED
        sizes = {(1, False): (64, 128), (1, True): (128,), (2, False): (128, 256), (2, True): (128, 256)}
        allowed = sizes[cta_group, scaled]
        step = 8 * cta_group
        if a_in_tmem and self.m != 64:
            step = 16 * cta_group
        if self.kind == "i8" and self.n != 8:
            step = 16 * cta_group
        if self.b_major == "mn" and self.a_type in ("e4m3", "e5m2", "u8", "s8"):
            step = max(step, 16 * cta_group)
        if self.m not in allowed:
            found.append(
                f"M = {self.m}; {self.kind} with cta_group::{cta_group} takes {' or '.join(map(str, allowed))}"
            )
        if self.n % step or not 8 * cta_group <= self.n <= 256:
            found.append(f"N = {self.n} is not a multiple of {step} in {8 * cta_group}..256")
        if self.kind in ("mxf4", "mxf4nvf4"):
            per = 64 // block if block else 0
            ids = {2: (0, 2), 4: (0,)}.get(per, ())
            if self.kind == "mxf4" and (block != 32 or self.scale_format != "ue8m0"):
                found.append(f"mxf4 takes ue8m0 scales of 32 elements, not {self.scale_format} of {block}")
            if self.kind == "mxf4nvf4" and block == 32 and self.scale_format != "ue8m0":
                found.append("mxf4nvf4 with blocks of 32 takes ue8m0 scales")
            own = (("SFA", self.sfa_id), ("SFB", self.sfb_id))
            found += [f"{name} id {i}; blocks of {block} allow {ids}" for name, i in own if i not in ids]
        elif scaled and block != 32:
            found.append(f"mxf8f6f4 has one scale per 32 elements, not {block}")
        return tuple(f"instruction descriptor {self.bits:#010x}: {p}" for p in found)


@lru_cache(maxsize=4096)
def decode(bits: int, kind: str) -> InstructionDescriptor:
    """Decode for ``kind``. Example: 0x10B00000, mxf8f6f4: e4m3 x e4m3, M 256, N 192. ValueError: unknown kind."""
    if kind not in KINDS:
        raise ValueError(f"kind: {kind!r} is not one of {', '.join(KINDS)}")
    four = kind in ("mxf4", "mxf4nvf4")
    scaled = kind in BLOCK_SCALED
    mask = _MX4_BITS if four else _MX8_BITS if scaled else _PLAIN_BITS
    faults: list[str] = []
    meaningless: list[str] = []
    if bits & ~mask:
        faults.append(f"reserved bits {bits & ~mask:#x} are set")
    if bits >> 2 & 1:
        meaningless.append("the sparse bit is set; sparsity is not modelled")
    types = _TYPES[kind]
    codes = bits >> 7 & 7, bits >> 10 & (3 if four else 7)
    for name, code in zip("AB", codes, strict=True):
        if code not in types:
            meaningless.append(f"{name} format {code} is none of {types}")
    a_type, b_type = (types.get(code, "?") for code in codes)
    d_type = "f32"
    if not scaled:
        d_type = _D_TYPES.get(bits >> 4 & 3, "?")
        fits = {"i8": ("s32",), "tf32": ("f32",)}.get(kind, ("f16", "f32"))
        if d_type not in fits or (d_type == "f16" and "bf16" in (a_type, b_type)):
            meaningless.append(f"D format {bits >> 4 & 3} does not go with {kind} of {a_type}")
        if bits >> 30:
            meaningless.append(".ws shift is not modelled")
        if bits & 3:
            faults.append("a sparsity selector is set on a dense instruction")
        if bits >> 3 & 1 and kind != "i8":
            faults.append("saturate is for i8 only")
    if four and bits >> 31:
        meaningless.append("K = 96 exists on sm_103a only")
    if kind == "mxf8f6f4" and not bits >> 23 & 1:
        faults.append("scale format 0; mxf8f6f4 takes 1 (ue8m0)")
    return InstructionDescriptor(
        bits, kind,
        m=(bits >> 27 & 3) * 128 if scaled else (bits >> 24 & 31) * 16,
        n=(bits >> 17 & 63) * 8,
        k={"f16": 16, "tf32": 8, "mxf4": 64, "mxf4nvf4": 64}.get(kind, 32),
        a_type=a_type, b_type=b_type, d_type=d_type,
        negate_a=bool(bits >> 13 & 1), negate_b=bool(bits >> 14 & 1),
        a_major="mn" if bits >> 15 & 1 and not four else "k",
        b_major="mn" if bits >> 16 & 1 and not four else "k",
        saturate=bool(bits >> 3 & 1) and not scaled,
        sfa_id=bits >> 29 & 3 if scaled else 0,
        sfb_id=bits >> 4 & 3 if scaled else 0,
        scale_format=("ue8m0" if bits >> 23 & 1 or kind == "mxf8f6f4" else "ue4m3") if scaled else "",
        faults=tuple(faults), meaningless=tuple(meaningless),
    )  # fmt: skip
