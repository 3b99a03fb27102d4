"""tcgen05.mma: D (tensor memory) = A * B [+ D], with or without block scales, by one CTA or a pair.

Where row m and column n of D are, for an address (lane 0 or 16, column d) (PTX ISA, "Data path layout organization"):

    M = 64            lane m % 16 + 32 (m // 16) (+ 16), column d + n
    M = 128           lane m, column d + n
    M = 128, a pair   CTA m // 64; n < N / 2: lane m % 64, column d + n; else lane 64 + m % 64, column d + n - N / 2
    M = 256, a pair   CTA m // 128; lane m % 128, column d + n

In a pair each CTA holds its own rows of A, half of the rows of B (N / 2) and its own scales of A, and all scales of B.
Scale factors of operand row r lie in lane r % 32, in four copies 32 lanes apart, column r // 32 of the given one, byte
id + j of the word ("Scale factor layout in Tensor Memory").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from padless.emulator.units import arithmetic, instruction_descriptor, number_formats
from padless.emulator.units.instruction_descriptor import BLOCK_SCALED, InstructionDescriptor
from padless.emulator.units.matrix_descriptor import SharedMatrix, decode_tcgen05
from padless.emulator.units.number_formats import CODES, Array, nibbles, six_bits
from padless.emulator.units.tensor_memory import Rectangle, rectangle_problems, split_address

_BYTES = {"f16": 2, "bf16": 2, "tf32": 4}  # of an element in memory; 1 for the others, packed or padded


@dataclass(frozen=True)
class Mma:
    """One tcgen05.mma with its run-time operands.

    Attributes:
        kind: f16, tf32, f8f6f4, i8, mxf8f6f4, mxf4, mxf4nvf4.  cta_group: 1 or 2.
        idesc: instruction descriptor.  d: tensor-memory address.
        b_descriptor: of B in shared memory.
        a_descriptor: of A in shared memory, or None with ``a_tmem``, the address of A in tensor memory.
        enable_d: whether D is added to.
        sfa, sfb: tensor-memory addresses of the scales; None for kinds without.
        block: elements per scale: 32 or 16 (.block32, .block16); 0 for kinds without.
        disable_lanes: 4 or 8 words of 32 lanes, a set bit keeps the lane of D unwritten.
        scale_d: D enters as D * 2^-scale_d (kinds f16 and tf32).
    """

    kind: str
    cta_group: int
    idesc: int
    d: int
    b_descriptor: int
    a_descriptor: int | None = None
    a_tmem: int | None = None
    enable_d: bool = True
    sfa: int | None = None
    sfb: int | None = None
    block: int = 0
    disable_lanes: tuple[int, ...] = ()
    scale_d: int = 0

    def __post_init__(self) -> None:
        if self.cta_group not in (1, 2):
            raise ValueError(f"cta_group: {self.cta_group} is neither 1 nor 2")
        if (self.a_descriptor is None) == (self.a_tmem is None):
            raise ValueError("a_descriptor, a_tmem: exactly one of them says where A is")
        scaled = self.kind in BLOCK_SCALED
        if scaled != (self.sfa is not None) or scaled != (self.sfb is not None) or scaled != (self.block in (16, 32)):
            raise ValueError(f"sfa, sfb, block: kind {self.kind} {'needs all' if scaled else 'takes none'} of them")
        if self.disable_lanes and len(self.disable_lanes) != 4 * self.cta_group:
            raise ValueError(f"disable_lanes: {len(self.disable_lanes)} words, {4 * self.cta_group} are needed")

    @property
    def fields(self) -> InstructionDescriptor:
        return instruction_descriptor.decode(self.idesc, self.kind)

    @property
    def _rows(self) -> int:
        """Rows of A, and of D, in one CTA."""
        return self.fields.m // self.cta_group

    @property
    def _split(self) -> bool:
        """Whether the columns of D are folded: M = 128 by a pair."""
        return self.cta_group == 2 and self.fields.m == 128

    def problems(self) -> tuple[str, ...]:
        """Broken rules of both kinds of descriptor, shape, types and addresses, one sentence each."""
        f = self.fields
        found = [*f.problems(self.cta_group, self.block, self.a_tmem is not None), *self.unsupported()]
        for name, operand in reversed(self._shared().items()):
            found += [f"{name.upper()} {p}" for p in operand.problems()]
            if operand.descriptor.swizzle == "128B_32B" and self.kind != "tf32":
                found.append(f"{name.upper()}: the 128B swizzle with 32-byte atoms is for tf32 only")
        lane, _ = split_address(self.d)
        if lane not in ((0, 16) if f.m == 64 else (0,)):
            found.append(f"D begins at lane {lane}, which M = {f.m} does not allow")
        if self.scale_d and self.kind not in ("f16", "tf32"):
            found.append(f"scale-input-d does not exist for {self.kind}")
        if self.disable_lanes and self.kind in BLOCK_SCALED:
            found.append("disable-output-lane does not exist for block-scaled kinds")
        for name, regions in {**self.tmem_reads(), "D": self.tmem_writes()}.items():
            found += rectangle_problems(name, regions)
        return tuple(found)

    def unsupported(self) -> tuple[str, ...]:
        """What the emulator does not model, or cannot give a meaning: ``execute`` raises these."""
        f = self.fields
        found = [f"instruction descriptor {self.idesc:#010x}: {p}" for p in f.meaningless]
        narrow = ("e2m1", "e2m3", "e3m2")
        for name, kind, major in (("A", f.a_type, f.a_major), ("B", f.b_type, f.b_major)):
            if major == "mn" and kind in narrow:
                found.append(f"{name}: MN-major {kind} is not modelled")
        if self.a_tmem is not None and self._split:
            found.append("A in tensor memory is modelled for one CTA, and for M = 256 by a pair")
        return tuple(found)

    # ---- what is touched
    def shared_ranges(self) -> dict[str, list[tuple[int, int]]]:
        """Merged [first, end) byte ranges read in each CTA's shared memory, of "a" and "b"."""
        return {"a": []} | {name: operand.ranges() for name, operand in self._shared().items()}

    def _shared(self) -> dict[str, SharedMatrix]:
        """The operands that lie in shared memory, as one CTA has them."""
        f = self.fields
        places = {
            "a": (self.a_descriptor, self._rows, f.a_type, f.a_major),
            "b": (self.b_descriptor, f.n // self.cta_group, f.b_type, f.b_major),
        }
        return {
            name: SharedMatrix(decode_tcgen05(bits), rows, 32 // _BYTES.get(kind, 1), _BYTES.get(kind, 1), major)
            for name, (bits, rows, kind, major) in places.items()
            if bits is not None
        }

    def tmem_reads(self) -> dict[str, list[Rectangle]]:
        """Rectangles read in each CTA's tensor memory, of "a", "d", "sfa" and "sfb", where they are read."""
        out: dict[str, list[Rectangle]] = {}
        if self.enable_d:
            out["d"] = self.tmem_writes()
        if self.a_tmem is not None:
            lane, column = split_address(self.a_tmem)
            if self._rows == 64:
                out["a"] = [(32 * q + lane, 32 * q + lane + 16, column, column + 8) for q in range(4)]
            else:
                out["a"] = [(0, self._rows, column, column + 8)]
        f = self.fields
        if self.sfa is not None and self.sfb is not None:
            for name, address, rows in (("sfa", self.sfa, self._rows), ("sfb", self.sfb, f.n // (1 + self._split))):
                column = address & 0x1FF
                out[name] = [(0, 128, column, column + -(-rows // 32))]
        return out

    def tmem_writes(self) -> list[Rectangle]:
        """Rectangles of D in each CTA's tensor memory."""
        lane, column = split_address(self.d)
        f = self.fields
        if f.m == 64 and self.cta_group == 1:
            return [(32 * q + lane, 32 * q + lane + 16, column, column + f.n) for q in range(4)]
        return [(0, 128, column, column + f.n // (1 + self._split))]

    # ---- the operation
    def execute(self, shared: Sequence[Array], tmem: Sequence[Array], mode: str = "truncate") -> tuple[str, ...]:
        """Multiply; D is written in place.

        Args:
            shared, tmem: of the CTA, or of the even and the odd CTA of the pair: uint8 (bytes,), uint32 (128, 512).
            mode: of arithmetic.dot_product_add.

        Returns:
            Reports: scale factors whose four copies differ.

        Raises:
            ValueError: for what ``unsupported`` names, and operands past the end of shared memory.
        """
        f = self.fields
        if self.unsupported():
            raise ValueError("; ".join(self.unsupported()))
        operands = self._shared()
        b = np.concatenate([self._shared_codes(s, operands["b"], f.b_type) for s in shared])
        reports: list[str] = []
        for cta in range(self.cta_group):
            if "a" in operands:
                a = self._shared_codes(shared[cta], operands["a"], f.a_type)
            else:
                a = self._tmem_codes(tmem[cta])
            where = self._d_words()
            words = tmem[cta][where]
            c = self._accumulator(words) if self.enable_d else None
            if self.kind in BLOCK_SCALED:
                result = self._scaled_product(a, b, c, tmem[cta], cta, mode, reports)
            else:
                types, signs = (f.d_type, f.a_type, f.b_type), (f.negate_a, f.negate_b)
                rule = arithmetic.WIDE
                result = arithmetic.multiply(a, b, c, types, rule, mode=mode, negate=signs, saturate=f.saturate)
            new = self._d_bits(result)
            if self.disable_lanes:
                masks = np.array(self.disable_lanes[4 * cta : 4 * cta + 4], np.uint64)
                keep = (masks[where[0] // 32] >> (where[0] % 32).astype(np.uint64)) & np.uint64(1)
                new = np.where(keep == 1, words, new)
            tmem[cta][where] = new
        return tuple(reports)

    def _scaled_product(
        self, a: Array, b: Array, c: Array | None, tmem: Array, cta: int, mode: str, reports: list[str]
    ) -> Array:
        f = self.fields
        x, y = arithmetic.decode_operand(a, f.a_type), arithmetic.decode_operand(b, f.b_type)
        x, y = x.negated() if f.negate_a else x, y.negated() if f.negate_b else y
        sfa, sfb = self._scales(tmem, cta, reports)
        if self.kind == "mxf8f6f4":
            return arithmetic.dot_product_add(x.scaled(sfa), y.scaled(sfb), c, arithmetic.WIDE, mode=mode)
        repeat = self.block // 16
        return arithmetic.dot_product_add(
            x, y, c, arithmetic.FP4_BLOCK, mode=mode, scale_format=f.scale_format,
            scale_a=np.repeat(sfa, repeat, axis=1), scale_b=np.repeat(sfb, repeat, axis=1),
        )  # fmt: skip

    def _shared_codes(self, shared: Array, operand: SharedMatrix, kind: str) -> Array:
        codes, rows = operand.gather(shared), operand.rows
        if self.kind in ("mxf4", "mxf4nvf4"):
            return nibbles(codes)
        if kind == "e2m1":
            # 16 elements are 8 bytes and 8 bytes of padding
            return nibbles(codes.reshape(rows, 2, 16)[:, :, :8].reshape(rows, 16))
        if kind in ("e2m3", "e3m2"):
            return six_bits(codes.reshape(rows, 2, 16)[:, :, :12].reshape(rows, 24))
        return codes

    def _tmem_codes(self, tmem: Array) -> Array:
        assert self.a_tmem is not None
        lane, column = split_address(self.a_tmem)
        row = np.arange(self._rows)
        lanes = row % 16 + 32 * (row // 16) + lane if self._rows == 64 else row  # as those of D
        octets = np.ascontiguousarray(tmem[lanes, column : column + 8]).view(np.uint8)
        if self.kind in ("mxf4", "mxf4nvf4"):
            return nibbles(octets)
        if self.fields.a_type == "e2m1":
            return octets >> 2 & 15
        if self.fields.a_type in ("e2m3", "e3m2"):
            return octets >> 1 & 63
        return octets.view(CODES[_BYTES.get(self.fields.a_type, 1)])

    def _d_words(self) -> tuple[Array, Array]:
        """(lanes, columns) of the (rows, N) words of D in one CTA."""
        f = self.fields
        lane, column = split_address(self.d)
        m, n = np.arange(self._rows)[:, None], np.arange(f.n)[None, :]
        if self._split:
            return m + 64 * (n // (f.n // 2)), column + n % (f.n // 2) + 0 * m
        if f.m == 64:
            return m % 16 + 32 * (m // 16) + lane + 0 * n, column + n + 0 * m
        return m + 0 * n, column + n + 0 * m

    def _accumulator(self, words: Array) -> Array:
        kind = self.fields.d_type
        if kind == "s32":
            return words.view(np.int32)
        if kind == "f16":
            c = number_formats.decode(words & np.uint32(0xFFFF), "f16").astype(np.float32)
        else:
            c = words.view(np.float32)
        return np.ldexp(c, -self.scale_d).astype(np.float32) if self.scale_d else c

    def _d_bits(self, result: Array) -> Array:
        if self.fields.d_type == "f16":
            return number_formats.encode(result, "f16").astype(np.uint32)
        return np.ascontiguousarray(result).view(np.uint32)

    def _scales(self, tmem: Array, cta: int, reports: list[str]) -> tuple[Array, Array]:
        f = self.fields
        per = 1 if self.kind == "mxf8f6f4" else 64 // self.block
        out = []
        for name, address, rows, first in (("SFA", self.sfa, self._rows, f.sfa_id), ("SFB", self.sfb, f.n, f.sfb_id)):
            assert address is not None
            column = address & 0x1FF
            row = np.arange(rows)
            folded = self._split and name == "SFB"
            inside = row % (rows // 2) if folded else row
            quarter = 2 * (row // (rows // 2)) if folded else 0 * row
            lanes, columns = inside % 32 + 32 * quarter, column + inside // 32
            words = tmem[lanes, columns]
            for copy in (1,) if folded else (1, 2, 3):
                other = tmem[lanes + 32 * copy, columns]
                # Only the bytes this instruction uses have to agree.
                mask = np.uint32(((1 << 8 * per) - 1) << 8 * first & 0xFFFFFFFF)
                differs = np.flatnonzero((words ^ other) & mask)
                if len(differs):
                    r = int(differs[0])
                    reports.append(
                        f"{name} of row {r}: lane {lanes[r]} has {words[r]:#010x}, its copy in lane "
                        f"{lanes[r] + 32 * copy} {other[r]:#010x} (CTA {cta} of the group, column {columns[r]})"
                    )
                    break
            octets = np.ascontiguousarray(words).view(np.uint8).reshape(rows, 4)
            out.append(octets[:, first : first + per])
        return out[0], out[1]
