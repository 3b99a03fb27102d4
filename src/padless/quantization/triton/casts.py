"""Device functions shared by the Triton quantizers: bit patterns, and float32 to the small formats.

Every cast exists twice. HARDWARE_CAST uses the conversion instructions of compute capability 8.9 and later,
which round to nearest even and saturate. Without it the same rounding is done in integers: for older GPUs,
and for Triton's interpreter, whose float8 conversion does not round to nearest even.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

INF_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)


def _e2m1_asm() -> str:
    """PTX that packs four low ($1..$4) and four high ($5..$8) halved float32 into $0; see halves_to_e2m1."""
    # Horner's rule from the last nibble: high 3, low 3, high 2, ..., low 0.
    operands = [f"${1 + i + 4 * half}" for i in (3, 2, 1, 0) for half in (1, 0)]
    lines = [".reg .f32 h, u, t;", ".reg .b32 c, y, codes, signs;", "mov.b32 codes, 0;", "mov.b32 signs, 0;"]
    for operand in operands:
        lines += [
            f"abs.f32 h, {operand};",
            "add.rn.sat.f32 u, h, 0f00000000;",
            "fma.rn.f32 t, u, 0f40800000, 0f4B000000;",  # 4 u + 2^23
            "add.rn.sat.f32 u, h, 0fBF800000;",  # - 1
            "fma.rn.f32 t, u, 0f40000000, t;",  # 2 u + t
            "add.rn.sat.f32 u, h, 0fC0000000;",  # - 2
            "add.rn.f32 t, u, t;",
            "mov.b32 c, t;",
            "mad.lo.u32 codes, codes, 16, c;",
            f"mov.b32 y, {operand};",
            "shf.l.wrap.b32 signs, y, signs, 4;",  # the sign and three bits to be masked out
        ]
    lines += ["sub.u32 codes, codes, 0xFB000000;", "lop3.b32 $0, codes, signs, 0x88888888, 0xF8;"]
    return "{" + "\n".join(lines) + "}"


_E2M1_ASM = tl.constexpr(_e2m1_asm())


def _e2m1_words_asm() -> str:
    """PTX that multiplies the bf16 pairs $1..$4 by the pairs $5..$8 and packs their codes into $0."""
    # bf16 pairs are no immediate operands.
    numbers = {"zero": 0, "minus_zero": 0x8000, "minus_half": 0xBF00, "one": 0x3F80, "two": 0x4000, "six": 0x40C0,
               "minus_2": 0xC000, "minus_4": 0xC080, "magic": 0x4300}  # fmt: skip
    lines = [f".reg .b32 y, a, r, q, t, c<4>, {', '.join(numbers)};"]
    lines += [f"mov.b32 {name}, {bits * 0x10001:#010x};" for name, bits in numbers.items()]
    for i in range(4):
        lines += [
            f"fma.rn.bf16x2 y, ${1 + i}, ${5 + i}, minus_zero;",  # + -0, which keeps the zeros' signs
            "and.b32 a, y, 0x7FFF7FFF;",
            "max.bf16x2 a, a, zero;",  # NaN to 0
            "min.bf16x2 a, a, six;",
            "min.bf16x2 t, a, two;",
            "fma.rn.bf16x2 t, t, two, magic;",  # 2 t + 128
            "fma.rn.relu.bf16x2 r, a, one, minus_2;",
            "fma.rn.relu.bf16x2 q, a, one, minus_4;",
            "fma.rn.bf16x2 r, q, minus_half, r;",
            "fma.rn.bf16x2 t, r, one, t;",
            "shr.u32 y, y, 12;",
            f"lop3.b32 c{i}, y, t, 0x00080008, 0xE4;",  # the sign from y, the rest from t
        ]
    lines += [
        "prmt.b32 c0, c0, c1, 0x6420;",
        "prmt.b32 c2, c2, c3, 0x6420;",
        "shr.u32 c1, c0, 4;",
        "or.b32 c0, c0, c1;",
        "shr.u32 c3, c2, 4;",
        "or.b32 c2, c2, c3;",
        "prmt.b32 $0, c0, c2, 0x6420;",
    ]
    return "{" + "\n".join(lines) + "}"


_E2M1_WORDS_ASM = tl.constexpr(_e2m1_words_asm())


def _e2m1_scaled_words_asm(dtype: str) -> str:
    """PTX for scaled_words_to_e2m1: pairs $1..$4 of "bf16" or "fp16" times 8 * $5..$8, sign masks $9..$12, into $0."""
    lines = [".reg .f32 x<8>, v, a, b, c;", ".reg .b16 l, h;", ".reg .b32 t, u, n<8>, p<4>;"]
    for i in range(4):
        if dtype == "bf16":
            lines += [f"shl.b32 t, ${1 + i}, 16;", f"mov.b32 x{2 * i}, t;"]
            lines += [f"and.b32 t, ${1 + i}, 0xFFFF0000;", f"mov.b32 x{2 * i + 1}, t;"]
        else:
            lines += [f"mov.b32 {{l, h}}, ${1 + i};", f"cvt.f32.f16 x{2 * i}, l;", f"cvt.f32.f16 x{2 * i + 1}, h;"]
    for i in range(8):
        lines += [
            f"abs.f32 v, x{i};",
            f"mul.rn.sat.f32 v, v, ${5 + i // 2};",
            "fma.rn.f32 a, v, 0f41800000, 0f4B000000;",  # 2 y + 2^23
            "fma.rn.f32 b, v, 0f41000000, 0f4B000002;",  # y + 2 + 2^23
            "fma.rn.f32 c, v, 0f40199999, 0f4B000005;",  # 0.3 y + 5 + 2^23
            "mov.b32 t, a;",
            "mov.b32 u, b;",
            "min.s32 t, t, u;",
            "mov.b32 u, c;",
            f"min.s32 n{i}, t, u;",
        ]
    # A byte each, and above it what the next three cut off.
    lines += [f"mad.lo.u32 n{i}, n{i + 1}, 16, n{i};" for i in (0, 2, 4, 6)]
    lines += ["prmt.b32 n0, n0, n2, 0x0040;", "prmt.b32 n4, n4, n6, 0x0040;", "prmt.b32 n0, n0, n4, 0x5410;"]
    lines += [
        "prmt.b32 p0, $1, $2, 0x7531;",
        "prmt.b32 p1, $3, $4, 0x7531;",
        "prmt.b32 p2, p0, p1, 0x6420;",  # the bytes with the signs of the low halves
        "prmt.b32 p3, p0, p1, 0x7531;",
        "shr.u32 p2, p2, 4;",
        "lop3.b32 p2, p3, p2, 0x80808080, 0xE4;",
        "prmt.b32 p0, $9, $10, 0x0040;",
        "prmt.b32 p1, $11, $12, 0x0040;",
        "prmt.b32 p0, p0, p1, 0x5410;",
        "lop3.b32 $0, n0, p2, p0, 0xF8;",
    ]
    return "{" + "\n".join(lines) + "}"


_E2M1_SCALED_BF16_ASM = tl.constexpr(_e2m1_scaled_words_asm("bf16"))
_E2M1_SCALED_FP16_ASM = tl.constexpr(_e2m1_scaled_words_asm("fp16"))

# What the assembler makes of rcp.rn.f32 for such numbers, without the branch it takes for every number to see whether
# it is one: the numbers of a thread would wait for each other.
_USUAL_RECIPROCAL_ASM = tl.constexpr(
    "{.reg .f32 r, e;\n"
    "rcp.approx.ftz.f32 r, $1;\n"
    "neg.f32 e, $1;\n"
    "fma.rn.f32 e, e, r, 0f3F800000;\n"
    "fma.rn.f32 $0, r, e, r;}"
)

# One value at a time into a whole register. ptxas 12.8 miscompiles the code of Triton's own cast where the two bytes
# of `cvt.e4m3x2` are taken apart and packed with each other again, as scales are: it merges that into the
# conversion, which then reads a register that was never written.
_TO_E4M3_SCALE_ASM = tl.constexpr(
    "{.reg .f32 zero; .reg .b16 h; mov.f32 zero, 0f00000000; "
    "cvt.rn.satfinite.e4m3x2.f32 h, zero, $1; cvt.u32.u16 $0, h;}"
)

_E4M3_TO_FLOAT32_ASM = tl.constexpr(
    "{.reg .b16 h, zero; .reg .b32 halves; cvt.u16.u32 h, $1; cvt.rn.f16x2.e4m3x2 halves, h; "
    "mov.b32 {h, zero}, halves; cvt.f32.f16 $0, h;}"
)


@lru_cache(maxsize=64)
def casts_in_hardware(device: torch.device) -> bool:
    """Whether the device converts float32 to e4m3 and e5m2 in one instruction."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def tile_rows(rows: int, dtype: torch.dtype) -> int:
    """Rows of a tile of 128 columns: 64, or 32 of float32, so that four warps have 16 KiB in flight; fewer
    for few.
    """
    full = 32 if dtype == torch.float32 else 64
    return full if rows > 16 else 16 if rows > 4 else 4


@triton.jit
def source_rows(rows_ptr, row, rows, x_rows):
    """The rows of x that rows `row` (int64) of the result are: themselves, or by rows_ptr, inside of x in any case."""
    if rows_ptr is None:
        source = row
    else:
        source = tl.load(rows_ptr + row, mask=row < rows, other=0).to(tl.int64)
        source = tl.minimum(tl.maximum(source, 0), x_rows - 1)
    return source


@triton.jit
def to_float32(x):
    """x as float32, exactly. bf16 goes by its bits: the interpreter's conversion is wrong for subnormals."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def unpack_words(words, DTYPE: tl.constexpr):
    """(low, high) float32 of two "bf16" or "fp16" values in each int32, the first in the low half."""
    if DTYPE == "bf16":
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    low = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def magnitude_bits(x):
    """Bit pattern of |x|, float32: as int32 these order as the magnitudes do, and every NaN is above Inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def quotient(numerator: tl.constexpr, denominator):
    """numerator / denominator, correctly rounded (Triton's `/` on float32 is not)."""
    return tl.math.div_rn(tl.full(denominator.shape, numerator, tl.float32), denominator)


@triton.jit
def reciprocal(x, IN_PTX: tl.constexpr):
    """1 / x, correctly rounded: as quotient(1.0, x), in half its instructions. IN_PTX: compute capability 2.0 and on."""
    if IN_PTX:
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return quotient(1.0, x)


@triton.jit
def usual_reciprocal(x):
    """1 / x, correctly rounded, for x from 2^-126 to below 2^126; NaN for 0."""
    return tl.inline_asm_elementwise(_USUAL_RECIPROCAL_ASM, "=&f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def divided_by(numerator, denominator: tl.constexpr):
    """numerator / denominator, correctly rounded."""
    return tl.math.div_rn(numerator, tl.full(numerator.shape, denominator, tl.float32))


@triton.jit
def _fp8_codes(y, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, ANCHOR: tl.constexpr):
    """float32 to FP8 codes (uint8) by integer arithmetic: nearest even, magnitudes up to LARGEST, NaN to 0x7F."""
    CUT: tl.constexpr = 23 - MANTISSA
    FIRST_NORMAL: tl.constexpr = (127 - BIAS + 1) << 23  # 2^(1 - BIAS)
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal: keep MANTISSA bits (add half of the last, less one where it is even, and cut), rebase the exponent.
    rounded = (magnitude + ((1 << (CUT - 1)) - 1) + ((magnitude >> CUT) & 1)) >> CUT
    normal = rounded - ((127 - BIAS) << MANTISSA)
    # Below: adding ANCHOR, whose last bit is worth as much as a code's, leaves the code in the low bits.
    shifted = magnitude.to(tl.float32, bitcast=True) + ANCHOR
    subnormal = shifted.to(tl.int32, bitcast=True) & ((2 << MANTISSA) - 1)
    code = tl.where(magnitude < FIRST_NORMAL, subnormal, tl.minimum(normal, LARGEST)) | ((bits >> 24) & 0x80)
    return tl.where(magnitude > INF_BITS, 0x7F, code).to(tl.uint8)


@triton.jit
def to_e4m3(y, HARDWARE_CAST: tl.constexpr):
    """float32 to e4m3 codes (uint8): nearest even, magnitudes above 448 to 448, NaN to 0x7F."""
    if HARDWARE_CAST:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return _fp8_codes(y, 3, 7, 0x7E, 16384.0)


@triton.jit
def to_e4m3_scale(y, HARDWARE_CAST: tl.constexpr):
    """float32 to e4m3 codes as `to_e4m3`, but in int32, for scales."""
    if HARDWARE_CAST:
        return tl.inline_asm_elementwise(_TO_E4M3_SCALE_ASM, "=r,f", [y], tl.int32, is_pure=True, pack=1)
    return to_e4m3(y, HARDWARE_CAST).to(tl.int32)


@triton.jit
def to_e5m2(y, HARDWARE_CAST: tl.constexpr):
    """float32 to e5m2 codes (uint8): nearest even, magnitudes above 57344 to 57344, NaN to 0x7F."""
    if HARDWARE_CAST:
        return y.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return _fp8_codes(y, 2, 15, 0x7B, 128.0)


@triton.jit
def e4m3_to_float32(code, HARDWARE_CAST: tl.constexpr):
    """float32 value of non-negative finite e4m3 codes (int32)."""
    if HARDWARE_CAST:
        return tl.inline_asm_elementwise(_E4M3_TO_FLOAT32_ASM, "=f,r", [code], tl.float32, is_pure=True, pack=1)
    normal = ((code + ((127 - 7) << 3)) << 20).to(tl.float32, bitcast=True)
    subnormal = code.to(tl.float32) * 0.001953125  # 2^-9
    return tl.where(code < 8, subnormal, normal)


@triton.jit
def halves_to_e2m1(low, high, HARDWARE_CAST: tl.constexpr):
    """Bytes of the e2m1 codes of 2 low and 2 high, `low`'s in bits 3:0: nearest even, above 5 to 6, NaN to 0.

    There is no conversion instruction before Blackwell, so this one is counted in cycles: with h = |y| / 2, which is
    given, the code is 4 sat(h) + 2 sat(h - 1) + sat(h - 2), each term rounded to an integer where it is added, sat
    clamping to [0, 1] (and NaN to 0). That is six operations on the multiply-add pipe, which is otherwise
    idle here. Rounding to even codes is right because a term only counts once those before it are full, at 4
    and at 6. The sums start from 2^23, so their last bits are the code, and eight of them are put together by
    integer multiply-adds; the eight 0x4B000000 that come along add up to 0xFB000000.
    """
    if HARDWARE_CAST:
        return tl.inline_asm_elementwise(
            asm=_E2M1_ASM, constraints="=r,f,f,f,f,f,f,f,f", args=[low, high], dtype=tl.uint8, is_pure=True, pack=4
        )
    return _e2m1_code(low * 2.0) | (_e2m1_code(high * 2.0) << 4)


@triton.jit
def words_to_e2m1(words, multiplier):
    """Bytes of the e2m1 codes of two bf16 in each int32 times a power of two; rounding as in halves_to_e2m1.

    multiplier: float32, of the words' shape. The products are exact in bf16, or too small to count, so all is done
    for two values together: with y = min(|product|, 6) the code is 2 min(y, 2) rounded to an integer, plus
    relu(y - 2) - relu(y - 4) / 2 (all exact) where it is added. The sums start from 128, whose bf16 steps are 1.
    """
    half = (multiplier.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    return tl.inline_asm_elementwise(
        asm=_E2M1_WORDS_ASM,
        constraints="=r,r,r,r,r,r,r,r,r",
        args=[words, half | (half << 16)],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def scaled_words_to_e2m1(words, eighth, sign_mask, DTYPE: tl.constexpr):
    """Bytes of the e2m1 codes of two "bf16" or "fp16" in each int32 times 8 * eighth; rounding as in halves_to_e2m1.

    eighth: float32, an exact eighth of the multiplier; sign_mask: int32, 0x88888888, or 0 for codes without signs. Both
    of the words' shape.

    Counted in cycles too. With v = |x| * eighth clamped to [0, 1] (and NaN to 0) and y = 8 v, the code is the least
    of 2 y, y + 2 and 0.3 y + 5, each rounded to an integer as it is added to 2^23: up to 2, up to 4 and from there on
    the first, the second and the third is least. The third only says whether y is above 5, which is why its factor
    is the float32 below 0.3, and no clamp is needed at 7. Five operations, four of them on the multiply-add pipe. The
    signs come from the words, eight together.
    """
    if DTYPE == "bf16":
        return tl.inline_asm_elementwise(
            asm=_E2M1_SCALED_BF16_ASM,
            constraints="=r,r,r,r,r,f,f,f,f,r,r,r,r",
            args=[words, eighth, sign_mask],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return tl.inline_asm_elementwise(
        asm=_E2M1_SCALED_FP16_ASM,
        constraints="=r,r,r,r,r,f,f,f,f,r,r,r,r",
        args=[words, eighth, sign_mask],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def eighth_of_bf16_words(words):
    """Both bf16 in each int32, divided by 8."""
    return tl.inline_asm_elementwise(
        "{.reg .b32 f; mov.b32 f, 0x3E003E00; mul.rn.bf16x2 $0, $1, f;}",
        "=r,r",
        [words],
        tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def larger_bf16_magnitudes(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def larger_fp16_magnitudes(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def amax_bits_of_words(words, DTYPE: tl.constexpr):
    """float32 bits of the largest magnitude along the last of three axes, two "bf16" or "fp16" values to an int32.

    NaN if there is one. Two magnitudes are compared together, with some sign that is dropped in the end: compute
    capability 8.6.
    """
    if DTYPE == "bf16":
        pair = tl.reduce(words, 2, larger_bf16_magnitudes)
    else:
        pair = tl.reduce(words, 2, larger_fp16_magnitudes)
    low, high = unpack_words(pair & 0x7FFF7FFF, DTYPE)
    return tl.maximum(low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True))


@triton.jit
def _e2m1_code(y):
    """e2m1 codes 0..15 (uint8), in integers."""
    bits = y.to(tl.int32, bitcast=True)
    v = tl.minimum(tl.abs(y), 6.0)
    # p, the power of two at or below v (at least 1), times 2^22 has p / 2 as its last bit: the step of e2m1
    # there.
    power = tl.maximum(v.to(tl.int32, bitcast=True) & INF_BITS, 0x3F800000).to(tl.float32, bitcast=True)
    rounded = (v + power * 4194304.0) - power * 4194304.0
    # From 1: one mantissa bit below the exponent, rebased. Below: halves.
    normal = (rounded.to(tl.int32, bitcast=True) >> 22) - ((127 - 1) << 1)
    halves = (rounded * 2.0).to(tl.int32)
    code = tl.where(rounded < 1.0, halves, normal) | ((bits >> 28) & 0x8)
    return tl.where((bits & 0x7FFFFFFF) > INF_BITS, 0, code).to(tl.uint8)
