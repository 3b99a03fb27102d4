"""Device functions on tiles of 128 rows x 128 columns, whose codes are also stored column by column.

A tile is a tuple of four quarters of (32, 128): quarter j has rows 4 q + j, q = 0 .. 31. The codes of four rows that
follow each other in memory once transposed are then in one thread, which packs them into a word: what goes through
shared memory to be transposed are words of 32 bits, a quarter of the accesses that bytes would need, and rows of the
transposed tile are whole lines of 128 bytes.

`row` is everywhere the (32,) rows of quarter 0, and `rows_end` the first that is not the tile's; `column` the (128,)
columns, of which those from `num_columns` on do not exist.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from padless.quantization.triton import casts
from padless.quantization.triton.fp8_block import _AMAX_FLOOR_BITS, _fp8_block_scale

QUADS = tl.constexpr(32)
TILE = tl.constexpr(128)

_E4M3_WORD_ASM = tl.constexpr(
    "{.reg .b16 low, high;\n"
    "cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;\n"
    "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;\n"
    "mov.b32 $0, {low, high};}"
)

# $0 is the function unit's approximation of 1 / $2, and $1 one step of Newton's from it: the rounded reciprocal for
# numbers from 2^-126 to below 2^126.
_RECIPROCALS_ASM = tl.constexpr(
    "{.reg .f32 e;\n"
    "rcp.approx.ftz.f32 $0, $2;\n"
    "neg.f32 e, $2;\n"
    "fma.rn.f32 e, e, $0, 0f3F800000;\n"
    "fma.rn.f32 $1, $0, e, $0;}"
)


def _unpack_asm(word: str, low: str, high: str, dtype: str) -> str:
    """PTX: float32 low and high of the two "bf16" or "fp16" values in a word."""
    if dtype == "bf16":
        return f"shl.b32 t, {word}, 16; mov.b32 {low}, t; and.b32 t, {word}, 0xFFFF0000; mov.b32 {high}, t;\n"
    return f"mov.b32 {{p, q}}, {word}; cvt.f32.f16 {low}, p; cvt.f32.f16 {high}, q;\n"


def _pair_asm(dtype: str) -> str:
    """PTX: $0, 16 bits, the e4m3 codes of the two values in $1 times $2."""
    return (
        "{.reg .b32 t; .reg .b16 p, q; .reg .f32 a, b;\n"
        + _unpack_asm("$1", "a", "b", dtype)
        + "mul.rn.f32 a, a, $2; mul.rn.f32 b, b, $2;\ncvt.rn.satfinite.e4m3x2.f32 $0, b, a;}"
    )


def _quads_asm(dtype: str) -> str:
    """PTX: $0 and $1, the e4m3 codes of the low and of the high values in $2 .. $5 times $6 and $7."""
    lines = "{.reg .b32 t; .reg .b16 p, q; .reg .f32 a<4>, b<4>;\n"
    for i in range(4):
        lines += _unpack_asm(f"${2 + i}", f"a{i}", f"b{i}", dtype)
        lines += f"mul.rn.f32 a{i}, a{i}, $6; mul.rn.f32 b{i}, b{i}, $7;\n"
    for out, x in (("$0", "a"), ("$1", "b")):
        lines += f"cvt.rn.satfinite.e4m3x2.f32 p, {x}1, {x}0;\ncvt.rn.satfinite.e4m3x2.f32 q, {x}3, {x}2;\n"
        lines += f"mov.b32 {out}, {{p, q}};\n"
    return lines + "}"


_PAIR_BF16_ASM, _PAIR_FP16_ASM = tl.constexpr(_pair_asm("bf16")), tl.constexpr(_pair_asm("fp16"))
_QUADS_BF16_ASM, _QUADS_FP16_ASM = tl.constexpr(_quads_asm("bf16")), tl.constexpr(_quads_asm("fp16"))

PAIRS = tl.constexpr(64)


def word_type(x: torch.Tensor) -> str:
    """ "bf16" or "fp16" where pairs of neighbours in the rows of x can be read as aligned words, else ""."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(x.dtype, "")
    aligned = x.data_ptr() % 4 == 0 and all(s % 2 == 0 for s in (x.shape[-1], *x.stride()[:-1]))
    return name if aligned and casts.casts_in_hardware(x.device) else ""


@triton.jit
def place(table_ptr, tile, num_tiles):
    """(first row, rows, tokens, first column / 32, columns / 32) of a tile in the table of `group_tiles`."""
    return (
        tl.load(table_ptr + tile),
        tl.load(table_ptr + num_tiles + tile),
        tl.load(table_ptr + 2 * num_tiles + tile),
        tl.load(table_ptr + 3 * num_tiles + tile),
        tl.load(table_ptr + 4 * num_tiles + tile),
    )


@triton.jit
def load(ptr, row, rows_end, column, num_columns, stride):
    """float32 values of a tile, 0 where there are none."""
    return (
        _load_quarter(ptr, row, rows_end, column, num_columns, stride),
        _load_quarter(ptr, row + 1, rows_end, column, num_columns, stride),
        _load_quarter(ptr, row + 2, rows_end, column, num_columns, stride),
        _load_quarter(ptr, row + 3, rows_end, column, num_columns, stride),
    )


@triton.jit
def _load_quarter(ptr, row, rows_end, column, num_columns, stride):
    mask = (row[:, None] < rows_end) & (column[None, :] < num_columns)
    x = tl.load(ptr + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0)
    return casts.to_float32(x)


@triton.jit
def columns_amax(x):
    """(128,) bits of the largest magnitude in every column of a tile."""
    low, high = _larger_magnitude(x[0], x[1]), _larger_magnitude(x[2], x[3])
    return tl.max(casts.magnitude_bits(_larger_magnitude(low, high)), axis=0)


@triton.jit
def _larger_magnitude(a, b):
    """The larger of |a| and |b|, NaN if one of them is: one instruction."""
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of(amax_bits, HARDWARE_CAST: tl.constexpr):
    """(scale, 1 / scale) of FP8_BLOCK blocks from the bits of their amax, without the branches of a general division.

    The quotient is the product with the rounded 1 / 448 and what that left over, which is correctly rounded for all
    float32 from 1e-4 on; so is the reciprocal of numbers in the range of scales.
    """
    if not HARDWARE_CAST:
        return _fp8_block_scale(amax_bits)
    x = tl.maximum(amax_bits, _AMAX_FLOOR_BITS).to(tl.float32, bitcast=True)
    part = tl.full(x.shape, 1.0 / 448.0, tl.float32)
    quotient = x * part
    left = tl.fma(quotient, tl.full(x.shape, -448.0, tl.float32), x)
    is_number = amax_bits < casts.INF_BITS
    scale = tl.where(is_number, tl.fma(left, part, quotient), x)
    rough, inverse = tl.inline_asm_elementwise(
        _RECIPROCALS_ASM, "=&f,=&f,f", [scale], (tl.float32, tl.float32), is_pure=True, pack=1
    )
    inverse = tl.where(is_number, inverse, rough)  # 0 of Inf, NaN of NaN
    one_nan = tl.full(x.shape, casts.NAN_BITS, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(amax_bits > casts.INF_BITS, one_nan, scale), inverse


@triton.jit
def code_words(x, inverse, HARDWARE_CAST: tl.constexpr):
    """(32, 128) int32 with the e4m3 codes of x * inverse, four rows each, the first in the lowest byte."""
    y0, y1, y2, y3 = x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse
    if HARDWARE_CAST:
        return tl.inline_asm_elementwise(_E4M3_WORD_ASM, "=r,f,f,f,f", [y0, y1, y2, y3], tl.int32, is_pure=True, pack=1)
    low = casts.to_e4m3(y0, False).to(tl.int32) | (casts.to_e4m3(y1, False).to(tl.int32) << 8)
    high = casts.to_e4m3(y2, False).to(tl.int32) | (casts.to_e4m3(y3, False).to(tl.int32) << 8)
    return low | (high << 16)


@triton.jit
def kept_bytes(count):
    """(32,) int32 masks of the words of a tile: the bytes of its first `count` rows."""
    left = tl.minimum(tl.maximum(count - 4 * tl.arange(0, QUADS), 0), 4)
    return tl.where(left == 4, -1, (1 << (8 * (left & 3))) - 1)


@triton.jit
def store_transposed(words, ptr, column, num_columns, stride, first_word, num_words):
    """Stores a tile's words, transposed, to rows `column` of words that are `stride` apart, from first_word on.

    ptr: int32. num_words: of the 32 that are stored, at most all.
    """
    quad = tl.arange(0, QUADS)
    target = ptr + column.to(tl.int64)[:, None] * stride + first_word + quad[None, :]
    mask = (column[:, None] < num_columns) & (quad[None, :] < num_words)
    tl.store(target, tl.trans(words), mask=mask)


@triton.jit
def store_codes(
    x, inverse, j: tl.constexpr, row, rows_end, column, num_columns, ptr, stride, HARDWARE_CAST: tl.constexpr
):
    """Stores e4m3(x * inverse) of quarter j of a tile as rows."""
    at = row + j
    y = x[j] * inverse
    if HARDWARE_CAST:
        # Four neighbours in a register. Of the halves that Triton's own conversion leaves LLVM builds vectors with bytes
        # that are not set yet, and ptxas 12.8 has taken all of one for not set where the columns after the first were
        # known to be zero.
        codes = tl.inline_asm_elementwise(_E4M3_WORD_ASM, "=r,f,f,f,f", [y], tl.uint8, is_pure=True, pack=4)
    else:
        codes = casts.to_e4m3(y, False)
    mask = (at[:, None] < rows_end) & (column[None, :] < num_columns)
    tl.store(ptr + at.to(tl.int64)[:, None] * stride + column[None, :], codes, mask=mask)


@triton.jit
def store_rows(x, row, rows_end, column, num_columns, ptr, stride, scale_ptr, HARDWARE_CAST: tl.constexpr):
    """Codes of a tile with a scale for each row; scale_ptr: of row 0 and these columns, rows adjacent."""
    scale0 = _store_row(x, 0, row, rows_end, column, num_columns, ptr, stride, HARDWARE_CAST)
    scale1 = _store_row(x, 1, row, rows_end, column, num_columns, ptr, stride, HARDWARE_CAST)
    scale2 = _store_row(x, 2, row, rows_end, column, num_columns, ptr, stride, HARDWARE_CAST)
    scale3 = _store_row(x, 3, row, rows_end, column, num_columns, ptr, stride, HARDWARE_CAST)
    store_of_rows(scale0, scale1, scale2, scale3, row, rows_end, scale_ptr)


@triton.jit
def _store_row(x, j: tl.constexpr, row, rows_end, column, num_columns, ptr, stride, HARDWARE_CAST: tl.constexpr):
    scale, inverse = scale_of(tl.max(casts.magnitude_bits(x[j]), axis=1), HARDWARE_CAST)
    store_codes(x, inverse[:, None], j, row, rows_end, column, num_columns, ptr, stride, HARDWARE_CAST)
    return scale


@triton.jit
def store_padding(scale_ptr, M, scale_ld, is_first):
    """Zeroes the padding of a column of MN-major scales, in one program of all."""
    padding = M + tl.arange(0, 4)
    tl.store(scale_ptr + padding, 0.0, mask=(padding < scale_ld) & is_first)


@triton.jit
def store_columns(
    x, tile, tokens, first_unit, units, column, num_columns, codes_ptr, column_units, scale_ptr, scale_stride,
    num_scale_rows, HARDWARE_CAST: tl.constexpr,
):  # fmt: skip
    """Transposed codes of a tile with a scale for each column; where it has no tokens both are 0.

    tokens .. units: of `place`. codes_ptr: of column 0, rows of column_units * 8 words. scale_ptr: of column 0, rows
    that are scale_stride apart.
    """
    scale, inverse = scale_of(columns_amax(x), HARDWARE_CAST)
    at = scale_ptr + tile.to(tl.int64) * scale_stride + column
    tl.store(at, tl.where(tokens > 0, scale, 0.0), mask=(column < num_columns) & (tile < num_scale_rows))
    words = code_words(x, inverse[None, :], HARDWARE_CAST) & kept_bytes(tokens)[:, None]
    store_transposed(words, codes_ptr, column, num_columns, column_units * 8, first_unit * 8, units * 8)


@triton.jit
def store_square_columns(
    x, tile, tokens, first_unit, units, column, num_columns, codes_ptr, column_units, scale_ptr, scale_stride,
    num_scale_rows, HARDWARE_CAST: tl.constexpr,
):  # fmt: skip
    """The same with one scale for the tile; scale_ptr: of this block of columns."""
    scale, inverse = scale_of(tl.max(columns_amax(x), axis=0), HARDWARE_CAST)
    at = scale_ptr + tile.to(tl.int64) * scale_stride
    tl.store(at, tl.where(tokens > 0, scale, 0.0), mask=tile < num_scale_rows)
    words = code_words(x, inverse, HARDWARE_CAST) & kept_bytes(tokens)[:, None]
    store_transposed(words, codes_ptr, column, num_columns, column_units * 8, first_unit * 8, units * 8)


# --- tiles of 16-bit values, two columns to a word ---------------------------------------------------------
#
# Quarters of (32, 64) int32 as they were loaded: half the registers of float32, and magnitudes are compared two at
# once. A value is converted where it is multiplied. pair: the (64,) pairs of columns.


@triton.jit
def load_words(ptr, row, rows_end, pair, num_pairs, stride):
    """The words of a tile, 0 where there are none; stride in words."""
    return (
        _load_words(ptr, row, rows_end, pair, num_pairs, stride),
        _load_words(ptr, row + 1, rows_end, pair, num_pairs, stride),
        _load_words(ptr, row + 2, rows_end, pair, num_pairs, stride),
        _load_words(ptr, row + 3, rows_end, pair, num_pairs, stride),
    )


@triton.jit
def _load_words(ptr, row, rows_end, pair, num_pairs, stride):
    mask = (row[:, None] < rows_end) & (pair[None, :] < num_pairs)
    return tl.load(ptr + row.to(tl.int64)[:, None] * stride + pair[None, :], mask=mask, other=0)


@triton.jit
def _larger_of_words(a, b, DTYPE: tl.constexpr):
    if DTYPE == "bf16":
        return casts.larger_bf16_magnitudes(a, b)
    return casts.larger_fp16_magnitudes(a, b)


@triton.jit
def _reduce_words(words, AXIS: tl.constexpr, DTYPE: tl.constexpr):
    """float32 bits of the largest magnitudes along an axis, of the low values and of the high ones."""
    if DTYPE == "bf16":
        largest = tl.reduce(words, AXIS, casts.larger_bf16_magnitudes)
    else:
        largest = tl.reduce(words, AXIS, casts.larger_fp16_magnitudes)
    low, high = casts.unpack_words(largest & 0x7FFF7FFF, DTYPE)
    return low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)


@triton.jit
def words_columns_amax(x, DTYPE: tl.constexpr):
    """Bits of the largest magnitude in every column: (64,) of the low ones and (64,) of the high ones."""
    low, high = _larger_of_words(x[0], x[1], DTYPE), _larger_of_words(x[2], x[3], DTYPE)
    return _reduce_words(_larger_of_words(low, high, DTYPE), 0, DTYPE)


@triton.jit
def code_words_of_words(x, low, high, DTYPE: tl.constexpr):
    """(32, 128) as `code_words`: of the low values times `low` and of the high ones times `high`."""
    if DTYPE == "bf16":
        even, odd = tl.inline_asm_elementwise(
            _QUADS_BF16_ASM, "=&r,=&r,r,r,r,r,f,f", [x[0], x[1], x[2], x[3], low, high], (tl.int32, tl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        even, odd = tl.inline_asm_elementwise(
            _QUADS_FP16_ASM, "=&r,=&r,r,r,r,r,f,f", [x[0], x[1], x[2], x[3], low, high], (tl.int32, tl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
    return tl.reshape(tl.join(even, odd), (QUADS, TILE))


@triton.jit
def store_codes_of_words(x, inverse, j: tl.constexpr, row, rows_end, pair, num_pairs, ptr, DTYPE: tl.constexpr):
    """Stores the codes of quarter j of a tile as rows of num_pairs pairs; ptr: int16."""
    at = row + j
    if DTYPE == "bf16":
        codes = tl.inline_asm_elementwise(_PAIR_BF16_ASM, "=h,r,f", [x[j], inverse], tl.int16, is_pure=True, pack=1)
    else:
        codes = tl.inline_asm_elementwise(_PAIR_FP16_ASM, "=h,r,f", [x[j], inverse], tl.int16, is_pure=True, pack=1)
    mask = (at[:, None] < rows_end) & (pair[None, :] < num_pairs)
    tl.store(ptr + at.to(tl.int64)[:, None] * num_pairs + pair[None, :], codes, mask=mask)


@triton.jit
def store_rows_of_words(x, row, rows_end, pair, num_pairs, ptr, scale_ptr, DTYPE: tl.constexpr):
    """As `store_rows`."""
    scale0 = _store_row_of_words(x, 0, row, rows_end, pair, num_pairs, ptr, DTYPE)
    scale1 = _store_row_of_words(x, 1, row, rows_end, pair, num_pairs, ptr, DTYPE)
    scale2 = _store_row_of_words(x, 2, row, rows_end, pair, num_pairs, ptr, DTYPE)
    scale3 = _store_row_of_words(x, 3, row, rows_end, pair, num_pairs, ptr, DTYPE)
    store_of_rows(scale0, scale1, scale2, scale3, row, rows_end, scale_ptr)


@triton.jit
def _store_row_of_words(x, j: tl.constexpr, row, rows_end, pair, num_pairs, ptr, DTYPE: tl.constexpr):
    low, high = _reduce_words(x[j], 1, DTYPE)
    scale, inverse = scale_of(tl.maximum(low, high), True)
    store_codes_of_words(x, inverse[:, None], j, row, rows_end, pair, num_pairs, ptr, DTYPE)
    return scale


@triton.jit
def store_of_rows(x0, x1, x2, x3, row, rows_end, ptr):
    """One store of a number for each row of the quarters: each quarter's would go through shared memory by itself."""
    x = tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (TILE,))
    at = tl.reshape(row[:, None] + tl.arange(0, 4)[None, :], (TILE,))
    tl.store(ptr + at, x, mask=at < rows_end)


@triton.jit
def store_columns_of_words(
    x, tile, tokens, first_unit, units, column, num_columns, codes_ptr, column_units, scale_ptr, scale_stride,
    num_scale_rows, DTYPE: tl.constexpr,
):  # fmt: skip
    """As `store_columns`."""
    low, high = words_columns_amax(x, DTYPE)
    low_scale, low_inverse = scale_of(low, True)
    high_scale, high_inverse = scale_of(high, True)
    at = scale_ptr + tile.to(tl.int64) * scale_stride + column
    scale = tl.reshape(tl.join(low_scale, high_scale), (TILE,))
    tl.store(at, tl.where(tokens > 0, scale, 0.0), mask=(column < num_columns) & (tile < num_scale_rows))
    words = code_words_of_words(x, low_inverse[None, :], high_inverse[None, :], DTYPE)
    words = words & kept_bytes(tokens)[:, None]
    store_transposed(words, codes_ptr, column, num_columns, column_units * 8, first_unit * 8, units * 8)


@triton.jit
def store_square_columns_of_words(
    x, tile, tokens, first_unit, units, column, num_columns, codes_ptr, column_units, scale_ptr, scale_stride,
    num_scale_rows, DTYPE: tl.constexpr,
):  # fmt: skip
    """As `store_square_columns`."""
    low, high = words_columns_amax(x, DTYPE)
    scale, inverse = scale_of(tl.max(tl.maximum(low, high), axis=0), True)
    at = scale_ptr + tile.to(tl.int64) * scale_stride
    tl.store(at, tl.where(tokens > 0, scale, 0.0), mask=tile < num_scale_rows)
    words = code_words_of_words(x, inverse, inverse, DTYPE) & kept_bytes(tokens)[:, None]
    store_transposed(words, codes_ptr, column, num_columns, column_units * 8, first_unit * 8, units * 8)
