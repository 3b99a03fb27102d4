"""MXFP8, MXFP4 and NVFP4 quantizers as Triton kernels: blocks of 32 or 16 along K inside one row.

The same arithmetic as `padless.quantization.rules.mx` and `.nvfp4`, bit for bit. One kernel for all of them: a tile of
rows x BLOCK_K values is read once, each block's scale is found and its codes (two a byte for FP4) and scale are
written, the scale to where its layout wants it. Weights are the rows of all groups under each other.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from padless import layouts
from padless.formats import (
    MXFP4,
    MXFP8,
    MXFP8_E5M2,
    NVFP4,
    TILE_COLUMNS,
    TILE_ROWS,
    BlockScaledFormat,
    blocked_size,
    ceil_div,
    round_up,
)
from padless.quantization import rules as quantize_rules
from padless.quantization.triton import casts
from padless.quantization.triton.launches import launch

WORD_INPUTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# Those of 448, 57344 and 6, the largest codes of the MX formats, in float32.
MAX_MANTISSAS = {MXFP8: 0x600000, MXFP8_E5M2: 0x600000, MXFP4: 0x400000}
# A scale is 0 or from 2^-9 to 448, so where NVFP4's second factor is from 2^-114 to 2^114, scale * second and its
# reciprocal are from 2^-123 to 2^123. What needs care beyond is left out there.
_USUAL_RANGE = tl.constexpr(114 << 23)
_ONE_BITS = tl.constexpr(0x3F800000)
_TINY = tl.constexpr(2.0**-100)  # values whose eighth is not exact are nothing times a multiplier below this
ELEMENTS = {MXFP8: "e4m3", MXFP8_E5M2: "e5m2", MXFP4: "e2m1", NVFP4: "e2m1"}


class Tile(NamedTuple):
    """The part that one program quantizes: rows x columns of values; its warps and registers a thread."""

    rows: int
    columns: int
    num_warps: int
    max_registers: int | None = None


# The tile of many rows of 16-bit values, for (codes a byte, whether scales are plain). Measured on an H200: with plain
# scales 32 x 256 is 1 to 3% faster than 64 x 128, and NVFP4 1% more in 64 registers than in 72.
TILES = {
    (1, True): Tile(32, 256, 4),
    (1, False): Tile(64, 128, 4),
    (2, True): Tile(32, 256, 4, 64),
    (2, False): Tile(64, 128, 4),
}


def choose_tile(rows: int, K: int, dtype: torch.dtype, format: BlockScaledFormat, scale_layout: str) -> Tile:
    """The tile for (rows, K) of a dtype: fewer rows of float32, so that as many bytes are in flight, and for few."""
    tile = TILES[format.codes_per_byte, scale_layout == "plain"]
    if dtype != torch.float32 and rows > 16 and tile.columns <= K:
        return tile
    block_m = casts.tile_rows(rows, dtype)
    return Tile(block_m, 128, 4 if block_m >= 32 else 1)


def row_blocks(
    x: torch.Tensor,
    format: BlockScaledFormat,
    scale_rule: str,
    scale_layout: str,
    offs: torch.Tensor | None,
    factors: torch.Tensor | None,
    source: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(data, scale) of checked arguments; factors: NVFP4's `quantize_rules.nvfp4_factors`, (2,) or (groups,
    2); source: rows of a 2-D x to quantize, (R,), None for all of them in order.
    """
    K = x.shape[-1]
    flat = as_rows(x)
    rows = flat.shape[0] if source is None else source.shape[0]
    leading = tuple(x.shape[:-1]) if source is None else (rows,)
    rows_per_group = x.shape[-2] if x.dim() == 3 else max(rows, 1)
    columns = ceil_div(K, format.block_k)
    data = torch.empty((*leading, K // format.codes_per_byte), dtype=torch.uint8, device=x.device)
    scale, scale_row = _empty_scale(leading, x.device, columns, scale_layout, offs)
    group = None
    if factors is not None and factors.numel() > 2 and x.dim() == 2:
        assert offs is not None
        group = layouts.group_of_rows(offs, rows).clamp(max=len(offs) - 1)
    scale_rows = round_up(rows_per_group, TILE_ROWS)
    if scale_layout == "blocked_groups":
        scale_rows = scale.numel() // blocked_size(1, columns) * TILE_ROWS
    if data.numel() > 0:
        tile = choose_tile(rows, K, x.dtype, format, scale_layout)
        programs = ceil_div(K, tile.columns) * ceil_div(rows, tile.rows)
        # Loaded as words of two, 16-bit values come 16 to a thread, a whole block of NVFP4; loaded one by one
        # they come 8 to a thread, and two threads work out every scale.
        by_words = format.codes_per_byte == 2 and is_word_aligned(flat)
        words = WORD_INPUTS.get(x.dtype, "none") if by_words else "none"
        values = flat if words == "none" else flat.view(torch.int32)
        pointers = (values, data, scale, factors, group, scale_row)
        sizes = (rows, K, values.stride(0), columns, rows_per_group, scale_rows)
        launch(_row_blocks, programs)(
            *pointers,
            *sizes,
            source,
            flat.shape[0],
            ELEMENT=ELEMENTS[format],
            BLOCK=format.block_k,
            WORDS=words,
            RULE=scale_rule,
            EMAX=quantize_rules.ELEMENT_EMAX.get(format, 0),
            MAX_MANTISSA=MAX_MANTISSAS.get(format, 0),
            FACTORS=_factors_by(factors, group),
            SCALE_LAYOUT=scale_layout,
            HARDWARE_CAST=casts.casts_in_hardware(x.device),
            BLOCK_M=tile.rows,
            BLOCK_K=tile.columns,
            num_warps=tile.num_warps,
            maxnreg=tile.max_registers,
        )
    return data.view(format.data_dtype), scale.view(format.scale_dtype)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x as (rows, K) with adjacent columns, copied only where it must be."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _factors_by(factors: torch.Tensor | None, group: torch.Tensor | None) -> str:
    """The way the kernel finds a row's factors."""
    if group is not None:
        return "row"
    return "group" if factors is not None and factors.numel() > 2 else "one"


def is_word_aligned(x: torch.Tensor) -> bool:
    """Whether every row of x starts on a 4-byte boundary."""
    return x.stride(0) % 2 == 0 and x.storage_offset() % 2 == 0 and x.data_ptr() % 4 == 0


def _empty_scale(
    leading: tuple[int, ...], device: torch.device, columns: int, scale_layout: str, offs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale bytes to be filled, zero where the layout pads; for grouped tiles also every row's tile row."""
    if scale_layout == "plain":
        return torch.empty((*leading, columns), dtype=torch.uint8, device=device), None
    if scale_layout == "blocked":
        shape = (*leading[:-1], blocked_size(leading[-1], columns))
        # Whole tiles have no padding: all is written by the kernel.
        whole = leading[-1] % TILE_ROWS == 0 and columns % TILE_COLUMNS == 0
        return (torch.empty if whole else torch.zeros)(shape, dtype=torch.uint8, device=device), None
    assert offs is not None
    size = blocked_size(layouts.blocked_groups_rows(leading[0], offs.shape[0]), columns)
    return torch.zeros(size, dtype=torch.uint8, device=device), layouts.padded_rows(offs, leading[0])


# What M decides is not compiled in: a new number of rows must not mean a new kernel.
@triton.jit(do_not_specialize=["rows", "rows_per_group", "scale_rows_per_group", "x_rows"])
def _row_blocks(
    x_ptr,  # (x_rows, K) bf16, fp16 or fp32, strides (x_stride, 1)
    codes_ptr,  # (rows, K) uint8, or (rows, K / 2) with two codes a byte, contiguous
    scale_ptr,  # uint8, in SCALE_LAYOUT
    factors_ptr,  # NVFP4: (groups, 2) float32
    group_ptr,  # FACTORS "row": (rows,) int64
    scale_row_ptr,  # SCALE_LAYOUT "blocked_groups": (rows,) int64
    rows,
    K,
    x_stride,
    scale_columns,  # ceil(K / BLOCK)
    rows_per_group,  # N of weights
    scale_rows_per_group,  # rows of tiles: of a group, or with "blocked_groups" of all
    rows_ptr,  # (rows,) int32 or int64: rows of x; None where rows is x_rows
    x_rows,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,  # "bf16", "fp16": x_ptr is two values in an int32, x_stride counts those; or "none"
    RULE: tl.constexpr,
    EMAX: tl.constexpr,
    MAX_MANTISSA: tl.constexpr,  # of the largest code, as float32 has it
    FACTORS: tl.constexpr,
    SCALE_LAYOUT: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    num_chunks = tl.cdiv(K, BLOCK_K)
    pid = tl.program_id(0)
    chunk = pid % num_chunks  # neighbours in time are neighbours in memory
    row = (pid // num_chunks) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (row[:, None] < rows) & (column[None, :] < K)
    row64 = row.to(tl.int64)
    source = casts.source_rows(rows_ptr, row64, rows, x_rows)
    BLOCKS: tl.constexpr = BLOCK_K // BLOCK
    HALF: tl.constexpr = BLOCK_K // 2
    BY_PAIRS: tl.constexpr = HARDWARE_CAST and WORDS != "none"  # two 16-bit values together

    if ELEMENT == "e2m1":
        pair = chunk * HALF + tl.arange(0, HALF)
        pairs_inside = (row[:, None] < rows) & (pair[None, :] < K // 2)
        if WORDS == "none":
            x = tl.load(x_ptr + source[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
            low, high = tl.split(tl.reshape(casts.to_float32(x), (BLOCK_M, HALF, 2)))
        else:
            words = tl.load(x_ptr + source[:, None] * x_stride + pair[None, :], mask=pairs_inside, other=0)
            if not BY_PAIRS:
                low, high = casts.unpack_words(words, WORDS)
        if BY_PAIRS:
            amax_bits = casts.amax_bits_of_words(tl.reshape(words, (BLOCK_M, BLOCKS, BLOCK // 2)), WORDS)
        else:
            bits = tl.maximum(casts.magnitude_bits(low), casts.magnitude_bits(high))
            amax_bits = tl.max(tl.reshape(bits, (BLOCK_M, BLOCKS, BLOCK // 2)), axis=2)
    else:
        x = tl.load(x_ptr + source[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
        x = tl.reshape(casts.to_float32(x), (BLOCK_M, BLOCKS, BLOCK))
        amax_bits = tl.max(casts.magnitude_bits(x), axis=2)

    if RULE == "te" or RULE == "torchao":
        if FACTORS == "one":
            only = tl.load(factors_ptr + 1)
            unusual = _far_from_one(only)
            first = tl.load(factors_ptr) + tl.zeros((BLOCK_M, 1), tl.float32)
            second = only + tl.zeros((BLOCK_M, 1), tl.float32)
        else:
            if FACTORS == "row":
                group = tl.load(group_ptr + row64, mask=row < rows, other=0)
            else:
                group = (row // rows_per_group).to(tl.int64)
            first = tl.load(factors_ptr + group * 2, mask=row < rows, other=1.0)[:, None]
            second = tl.load(factors_ptr + group * 2 + 1, mask=row < rows, other=1.0)[:, None]
            unusual = tl.max(_far_from_one(second).to(tl.int32)) > 0
        scale, multiplier = _nvfp4_scale(amax_bits, first, second, unusual, RULE, HARDWARE_CAST)
    else:
        scale, multiplier = mx_scale(amax_bits, RULE, EMAX, MAX_MANTISSA)

    if ELEMENT == "e2m1":
        if BY_PAIRS and WORDS == "bf16" and (RULE == "floor" or RULE == "rceil"):
            codes = casts.words_to_e2m1(words, _for_pairs(multiplier, BLOCK_M, BLOCKS, BLOCK))
        elif BY_PAIRS:
            eighth = multiplier * 0.125
            if WORDS == "bf16":  # noqa: SIM102 (one is known to the compiler, the other to the GPU)
                # An eighth below 2^-126 is not exact. It takes values of 2^125 and more to make them.
                if unusual:
                    tiny = multiplier < _TINY
                    eighth = tl.where(tiny, multiplier, eighth)
                    eighth_words = casts.eighth_of_bf16_words(words)
                    words = tl.where(_for_pairs(tiny, BLOCK_M, BLOCKS, BLOCK), eighth_words, words)
            sign_mask = tl.where(amax_bits >= casts.INF_BITS, 0, -0x77777778)  # a NaN has code 0
            codes = casts.scaled_words_to_e2m1(
                words, _for_pairs(eighth, BLOCK_M, BLOCKS, BLOCK), _for_pairs(sign_mask, BLOCK_M, BLOCKS, BLOCK), WORDS
            )
        else:
            # A product with half of the multiplier is half of the other, or both are too small to count.
            half = _for_pairs(multiplier, BLOCK_M, BLOCKS, BLOCK) * 0.5
            codes = casts.halves_to_e2m1(low * half, high * half, HARDWARE_CAST)
        tl.store(codes_ptr + row64[:, None] * (K // 2) + pair[None, :], codes, mask=pairs_inside)
    else:
        y = tl.reshape(x * multiplier[:, :, None], (BLOCK_M, BLOCK_K))
        if ELEMENT == "e4m3":
            codes = casts.to_e4m3(y, HARDWARE_CAST)
        else:
            codes = casts.to_e5m2(y, HARDWARE_CAST)
        tl.store(codes_ptr + row64[:, None] * K + column[None, :], codes, mask=inside)

    scale_column = chunk * BLOCKS + tl.arange(0, BLOCKS)
    if SCALE_LAYOUT == "plain":
        offset = row64[:, None] * scale_columns + scale_column[None, :]
    else:
        if SCALE_LAYOUT == "blocked":
            group_start = (row // rows_per_group).to(tl.int64) * scale_rows_per_group
            tile_row = group_start + row % rows_per_group
        else:
            tile_row = tl.load(scale_row_ptr + row64, mask=row < rows, other=0)
        tile = (tile_row // 128)[:, None] * tl.cdiv(scale_columns, 4) + (scale_column // 4)[None, :]
        in_tile = (tile_row % 32 * 16 + tile_row % 128 // 32 * 4)[:, None] + (scale_column % 4)[None, :]
        offset = tile * 512 + in_tile
    scale_inside = (row[:, None] < rows) & (scale_column[None, :] < scale_columns)
    if SCALE_LAYOUT == "blocked_groups":
        scale_inside = scale_inside & (tile_row[:, None] < scale_rows_per_group)  # else in no group
    tl.store(scale_ptr + offset, scale, mask=scale_inside)


@triton.jit
def _for_pairs(of_blocks, BLOCK_M: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """(BLOCK_M, BLOCKS), one for each block, as one for each two values, (BLOCK_M, BLOCKS * BLOCK / 2)."""
    repeated = tl.broadcast_to(of_blocks[:, :, None], (BLOCK_M, BLOCKS, BLOCK // 2))
    return tl.reshape(repeated, (BLOCK_M, BLOCKS * BLOCK // 2))


@triton.jit
def _far_from_one(x):
    """Whether x is outside of 2^-114 to 2^114."""
    return tl.abs(x.to(tl.int32, bitcast=True) - _ONE_BITS) > _USUAL_RANGE


@triton.jit
def mx_scale(amax_bits, RULE: tl.constexpr, EMAX: tl.constexpr, MAX_MANTISSA: tl.constexpr):
    """(E8M0 byte, 2^(127 - byte)) of blocks from the bits of their amax.

    "rceil" divides nothing: amax / largest is above a power of two exactly where amax is above largest times it,
    that is where its mantissa is above the largest code's, and float32's rounding of the quotient to nearest moves
    none across one. But one: subnormal quotients are further apart, and the amax next to largest * 2^-127 comes down
    to 2^-127 itself.
    """
    if RULE == "floor":
        byte = tl.maximum((amax_bits >> 23) - EMAX, 0)
    else:
        byte = tl.maximum(((amax_bits + (0x7FFFFF - MAX_MANTISSA)) >> 23) - EMAX, 0)
        byte = tl.where(amax_bits == (EMAX << 23) + MAX_MANTISSA + 1, 0, byte)
    byte = tl.where(amax_bits >= casts.INF_BITS, 0xFF, byte)
    multiplier = tl.where(byte == 0xFF, casts.NAN_BITS, (0xFE - byte) << 23)
    return byte.to(tl.uint8), multiplier.to(tl.float32, bitcast=True)


@triton.jit
def _nvfp4_scale(amax_bits, first, second, unusual, RULE: tl.constexpr, HARDWARE_CAST: tl.constexpr):
    """(e4m3 byte, multiplier) of blocks; first, second: `quantize_rules.nvfp4_factors` of each row; unusual:
    whether any second is `_far_from_one`.
    """
    broken = amax_bits >= casts.INF_BITS
    amax = tl.where(broken, 0, amax_bits).to(tl.float32, bitcast=True)
    first = tl.broadcast_to(first, amax.shape)
    second = tl.broadcast_to(second, amax.shape)
    if RULE == "te":
        byte = casts.to_e4m3_scale(tl.minimum(amax * first, casts.FLOAT32_MAX), HARDWARE_CAST)
        decoded = casts.e4m3_to_float32(byte, HARDWARE_CAST) * second
        if HARDWARE_CAST:
            # The multiplier of a scale of 0 is the largest float32 in the end: a minimum ignores NaN.
            multiplier = casts.usual_reciprocal(decoded)
            if unusual:
                multiplier = casts.reciprocal(decoded, HARDWARE_CAST)
        else:
            multiplier = casts.reciprocal(decoded, HARDWARE_CAST)
    else:
        wanted = tl.math.div_rn(casts.divided_by(amax, 6.0), first)
        byte = casts.to_e4m3_scale(tl.minimum(tl.maximum(wanted, 0.015625), 448.0), HARDWARE_CAST)
        multiplier = tl.math.div_rn(second, casts.e4m3_to_float32(byte, HARDWARE_CAST))
    multiplier = tl.minimum(multiplier, casts.FLOAT32_MAX)
    nan = tl.full(amax_bits.shape, casts.NAN_BITS, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(broken, 0x7F, byte).to(tl.uint8), tl.where(broken, nan, multiplier)
