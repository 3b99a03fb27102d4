"""SwiGLU's backward and the quantization of all that it makes on a GPU: 6 I bytes read, 5 I written a row.

A CUDA kernel takes the usual operands on Hopper (`padless.kernels.sm90_swiglu_backward`), the Triton kernels here
others. The same arithmetic as `padless.quantization.swiglu_rules`, bit for bit, and FP8_BLOCK's codes and scales of
its results. A program takes a tile of 128 tokens of one group x 128 columns of dH, and with them 256 columns of Z:
where gate and up are concatenated, a block of each; where they are interleaved by 32, two blocks in a row.
`group_tiles` runs before, and a small kernel adds up dprob behind.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from padless.formats import ceil_div
from padless.kernels.sm90_swiglu_backward import host
from padless.layouts import empty_mn_major
from padless.quantization.triton import casts, tiles
from padless.quantization.triton import group_tiles as groups
from padless.quantization.triton import swiglu_arithmetic as arithmetic
from padless.quantization.triton.launches import launch
from padless.quantization.triton.rows_columns import empty_columns, with_padding
from padless.runtime.driver import Driver, stream_of

# One program on a multiprocessor of Hopper: 256 threads with all their registers are 18% faster than 512 with half of
# them (measured, tools/tune_columns.py).
NUM_WARPS, MAX_REGISTERS = 8, 255

_INTERLEAVE = tl.constexpr(32)
_ROWS_AT_ONCE = 256


def swiglu_backward(
    dh: torch.Tensor,
    z: torch.Tensor,
    offs: torch.Tensor,
    prob: torch.Tensor | None,
    gate_up: str,
    hidden_block: tuple[int, int],
    alignment: int,
    driver: Driver | None = None,
) -> tuple[torch.Tensor, ...]:
    """(row codes, row scale, dZ column codes, scale, H column codes, scale, starts, block_starts, dprob) of checked
    arguments.

    driver: of a Hopper GPU that may run the CUDA kernel, or None. Without prob dprob has no elements.
    """
    dh, z = (t if t.stride(-1) == 1 else t.contiguous() for t in (dh, z))
    num_rows, hidden = dh.shape
    num_groups = offs.shape[0]
    row_codes = torch.empty((num_rows, 2 * hidden), dtype=torch.uint8, device=z.device)
    row_scale = empty_mn_major(num_rows, ceil_div(2 * hidden, 128), z.device)
    of_dz = empty_columns(num_rows, num_groups, 2 * hidden, (1, 128), alignment, z.device)
    of_hidden = empty_columns(num_rows, num_groups, hidden, hidden_block, alignment, z.device)
    blocks = ceil_div(hidden, 128)
    sums = torch.empty((blocks, num_rows if prob is not None else 0), dtype=torch.float32, device=z.device)
    out = host.Outputs(row_codes, with_padding(row_scale), *of_dz, *of_hidden, sums if prob is not None else None)
    prob = None if prob is None else prob.contiguous()
    square, interleaved = hidden_block[0] == 128, gate_up == "interleaved"
    if driver is not None and host.fits(dh, z, offs):
        of = groups.token_groups(offs, num_rows, alignment)
        starts, block_starts = of.starts, of.block_starts
        host.prepare(driver, dh, z, prob, of, out, interleaved, square).launch(stream_of(z))
    else:
        found = groups.group_tiles(offs, num_rows, alignment)
        starts, block_starts = found.starts, found.block_starts
        _launch(dh, z, prob, found, out, interleaved, square)
    dprob = torch.empty(sums.shape[1], dtype=torch.float32, device=z.device)
    if dprob.numel() > 0:
        launch(_sum_blocks, ceil_div(num_rows, _ROWS_AT_ONCE))(
            sums, dprob, num_rows, blocks, BLOCK_M=_ROWS_AT_ONCE, num_warps=4
        )
    return (row_codes, row_scale, *of_dz, *of_hidden, starts, block_starts, dprob)


def _launch(
    dh: torch.Tensor,
    z: torch.Tensor,
    prob: torch.Tensor | None,
    found: groups.GroupTiles,
    out: host.Outputs,
    interleaved: bool,
    square: bool,
) -> None:
    """The Triton kernel for any operands."""
    num_rows, hidden = dh.shape
    # Where blocks of 128 columns lie across the border of gate and up, a program takes one of them.
    straddling = not interleaved and hidden % 128 != 0
    kernel = _straddling_blocks if straddling else _pairs_of_blocks
    layout = {"INTERLEAVED": interleaved, "WHOLE": hidden % 128 == 0}
    if straddling:
        layout = {"ALIGNED": hidden % 16 == 0}
    launch(kernel, found.num_tiles * ceil_div(2 * hidden if straddling else hidden, 128))(
        dh,
        z,
        prob,
        found.table,
        out.row_codes,
        out.row_scale,
        out.dz_codes.view(torch.int32),
        out.dz_scale,
        out.hidden_codes.view(torch.int32),
        out.hidden_scale,
        out.sums,
        num_rows,
        hidden,
        dh.stride(0),
        z.stride(0),
        out.row_scale.stride(1),
        out.dz_codes.shape[1] // 32,
        out.dz_scale.shape[0],
        found.num_tiles,
        **layout,
        SQUARE=square,
        HARDWARE_CAST=casts.casts_in_hardware(z.device),
        num_warps=NUM_WARPS,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=False,
    )


_OF_M = ["M", "row_scale_ld", "column_units", "num_scale_rows", "num_tiles"]


# What M decides is not compiled in: a new number of rows must not mean a new kernel.
@triton.jit(do_not_specialize=_OF_M)
def _pairs_of_blocks(
    dh_ptr,  # (M, I) bf16, fp16 or fp32, strides (dh_stride, 1)
    z_ptr,  # (M, 2 I) bf16, fp16 or fp32, strides (z_stride, 1)
    prob_ptr,  # (M,) float32, or None
    table_ptr,  # (5, num_tiles) int32, group_tiles
    row_codes_ptr,  # (M, 2 I) uint8, contiguous
    row_scale_ptr,  # (M, ceil(2 I / 128)) float32, strides (1, row_scale_ld)
    dz_codes_ptr,  # (2 I, T' / 4) int32: four codes each
    dz_scale_ptr,  # (S, 2 I) float32, contiguous
    hidden_codes_ptr,  # (I, T' / 4) int32
    hidden_scale_ptr,  # (S, I) float32, or SQUARE (S, ceil(I / 128)), contiguous
    sums_ptr,  # (ceil(I / 128), M) float32, contiguous: dprob's blocks; or None
    M,
    I,  # noqa: E741
    dh_stride,
    z_stride,
    row_scale_ld,
    column_units,  # T' / 32
    num_scale_rows,  # S
    num_tiles,
    INTERLEAVED: tl.constexpr,
    WHOLE: tl.constexpr,  # I is a multiple of 128; it is where not INTERLEAVED
    SQUARE: tl.constexpr,  # scales of H's columns are of 128 features
    HARDWARE_CAST: tl.constexpr,
):
    """All for 128 columns of dH."""
    num_blocks = tl.cdiv(I, tiles.TILE)
    pid = tl.program_id(0)
    block = pid % num_blocks  # neighbours in time are neighbours in memory
    tile = pid // num_blocks
    first_row, rows, tokens, first_unit, units = tiles.place(table_ptr, tile, num_tiles)
    if (rows == 0) & (units == 0) & (tile >= num_scale_rows):
        return

    row = first_row + 4 * tl.arange(0, tiles.QUADS)
    rows_end = first_row + rows
    column = block * tiles.TILE + tl.arange(0, tiles.TILE)
    if INTERLEAVED:  # gate's columns of Z, their end, and how far up's are from them
        of_gate = column // _INTERLEAVE * (2 * _INTERLEAVE) + column % _INTERLEAVE
        end = 2 * I
        to_up = _INTERLEAVE
    else:
        of_gate = column
        end = I
        to_up = I
    gate = _bounded(tiles.load(z_ptr, row, rows_end, of_gate, end, z_stride))
    up = tiles.load(z_ptr + to_up, row, rows_end, of_gate, end, z_stride)
    dh = tiles.load(dh_ptr, row, rows_end, column, I, dh_stride)
    s = _sigmoids(gate, HARDWARE_CAST)
    hidden = _products(_products(gate, s), up)
    if prob_ptr is not None:
        prob = _load_prob(prob_ptr, row, rows_end)
        _store_sums(_products(hidden, dh), sums_ptr + block.to(tl.int64) * M, row, rows_end, tokens)
        if WHOLE:
            hidden = _products(hidden, prob)
            dh = _products(dh, prob)
        else:  # 0 times a prob that is not finite is not 0
            hidden = _chosen(column < I, _products(hidden, prob))
            dh = _chosen(column < I, _products(dh, prob))
    _store_hidden(
        hidden, tile, tokens, first_unit, units, column, I, hidden_codes_ptr, column_units, hidden_scale_ptr, I, block,
        num_scale_rows, SQUARE, HARDWARE_CAST,
    )  # fmt: skip
    d_up = _products(dh, _products(gate, s))
    d_gate = _products(_products(dh, up), _slopes(gate, s, HARDWARE_CAST))

    if INTERLEAVED:
        first_scale = row_scale_ptr + (2 * block).to(tl.int64) * row_scale_ld
        has_second = (2 * block + 1) * tiles.TILE < 2 * I
        second_scale = first_scale + has_second.to(tl.int64) * row_scale_ld
        _store_interleaved_rows(
            d_gate, d_up, row, rows_end, of_gate, end, row_codes_ptr, first_scale, second_scale, has_second,
            HARDWARE_CAST,
        )  # fmt: skip
    else:
        first_scale = row_scale_ptr + block.to(tl.int64) * row_scale_ld
        second_scale = first_scale + num_blocks.to(tl.int64) * row_scale_ld
        tiles.store_rows(d_gate, row, rows_end, column, I, row_codes_ptr, 2 * I, first_scale, HARDWARE_CAST)
        tiles.store_rows(d_up, row, rows_end, column, I, row_codes_ptr + I, 2 * I, second_scale, HARDWARE_CAST)
    tiles.store_padding(first_scale, M, row_scale_ld, tile == 0)
    tiles.store_padding(second_scale, M, row_scale_ld, tile == 0)
    tiles.store_columns(
        d_gate, tile, tokens, first_unit, units, of_gate, end, dz_codes_ptr, column_units, dz_scale_ptr, 2 * I,
        num_scale_rows, HARDWARE_CAST,
    )  # fmt: skip
    up_codes_ptr = dz_codes_ptr + (column_units * 8).to(tl.int64) * to_up
    tiles.store_columns(
        d_up, tile, tokens, first_unit, units, of_gate, end, up_codes_ptr, column_units, dz_scale_ptr + to_up, 2 * I,
        num_scale_rows, HARDWARE_CAST,
    )  # fmt: skip


@triton.jit(do_not_specialize=_OF_M)
def _straddling_blocks(
    dh_ptr,  # as in _pairs_of_blocks
    z_ptr,
    prob_ptr,
    table_ptr,
    row_codes_ptr,
    row_scale_ptr,
    dz_codes_ptr,
    dz_scale_ptr,
    hidden_codes_ptr,
    hidden_scale_ptr,
    sums_ptr,
    M,
    I,  # noqa: E741
    dh_stride,
    z_stride,
    row_scale_ld,
    column_units,
    num_scale_rows,
    num_tiles,
    ALIGNED: tl.constexpr,  # I is a multiple of 16
    SQUARE: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
):
    """All for 128 columns of dZ, gate before up, one of whose blocks has both. Values are read for each of them."""
    num_blocks = tl.cdiv(2 * I, tiles.TILE)
    pid = tl.program_id(0)
    block = pid % num_blocks
    tile = pid // num_blocks
    first_row, rows, tokens, first_unit, units = tiles.place(table_ptr, tile, num_tiles)
    if (rows == 0) & (units == 0) & (tile >= num_scale_rows):
        return

    row = first_row + 4 * tl.arange(0, tiles.QUADS)
    rows_end = first_row + rows
    column = block * tiles.TILE + tl.arange(0, tiles.TILE)
    is_gate = column < I
    of_gate = tl.where(is_gate, column, column - I)  # from I on, and of no value, where column is from 2 I on
    if ALIGNED:  # which no analysis sees behind the choice
        of_gate = tl.max_contiguous(tl.multiple_of(of_gate, 16), 16)
    gate = _bounded(tiles.load(z_ptr, row, rows_end, of_gate, I, z_stride))
    up = tiles.load(z_ptr + I, row, rows_end, of_gate, I, z_stride)
    dh = tiles.load(dh_ptr, row, rows_end, of_gate, I, dh_stride)
    s = _sigmoids(gate, HARDWARE_CAST)
    has_hidden = block * tiles.TILE < I
    hidden = _chosen(is_gate, _products(_products(gate, s), up))
    if prob_ptr is not None:
        prob = _load_prob(prob_ptr, row, rows_end)
        if has_hidden:
            _store_sums(
                _chosen(is_gate, _products(hidden, dh)), sums_ptr + block.to(tl.int64) * M, row, rows_end, tokens
            )
        hidden = _chosen(is_gate, _products(hidden, prob))
        dh = _chosen(column < 2 * I, _products(dh, prob))
    if has_hidden:
        _store_hidden(
            hidden, tile, tokens, first_unit, units, column, I, hidden_codes_ptr, column_units, hidden_scale_ptr, I,
            block, num_scale_rows, SQUARE, HARDWARE_CAST,
        )  # fmt: skip
    d_up = _products(dh, _products(gate, s))
    d_gate = _products(_products(dh, up), _slopes(gate, s, HARDWARE_CAST))
    dz = _either(is_gate, d_gate, d_up)
    scale = row_scale_ptr + block.to(tl.int64) * row_scale_ld
    tiles.store_rows(dz, row, rows_end, column, 2 * I, row_codes_ptr, 2 * I, scale, HARDWARE_CAST)
    tiles.store_padding(scale, M, row_scale_ld, tile == 0)
    tiles.store_columns(
        dz, tile, tokens, first_unit, units, column, 2 * I, dz_codes_ptr, column_units, dz_scale_ptr, 2 * I,
        num_scale_rows, HARDWARE_CAST,
    )  # fmt: skip


# --- tiles, quarter by quarter ---------------------------------------------------------------------------


@triton.jit
def _products(x, y):
    return x[0] * y[0], x[1] * y[1], x[2] * y[2], x[3] * y[3]


@triton.jit
def _either(condition, x, y):
    c = condition[None, :]
    return tl.where(c, x[0], y[0]), tl.where(c, x[1], y[1]), tl.where(c, x[2], y[2]), tl.where(c, x[3], y[3])


@triton.jit
def _chosen(condition, x):
    """x in the columns of the condition, 0 in the others, whatever x is there."""
    c = condition[None, :]
    return tl.where(c, x[0], 0.0), tl.where(c, x[1], 0.0), tl.where(c, x[2], 0.0), tl.where(c, x[3], 0.0)


@triton.jit
def _bounded(gate):
    return (
        arithmetic.bounded(gate[0]),
        arithmetic.bounded(gate[1]),
        arithmetic.bounded(gate[2]),
        arithmetic.bounded(gate[3]),
    )


@triton.jit
def _sigmoids(gate, HARDWARE: tl.constexpr):
    return (
        arithmetic.sigmoid(gate[0], HARDWARE),
        arithmetic.sigmoid(gate[1], HARDWARE),
        arithmetic.sigmoid(gate[2], HARDWARE),
        arithmetic.sigmoid(gate[3], HARDWARE),
    )


@triton.jit
def _slopes(gate, s, HARDWARE: tl.constexpr):
    return (
        arithmetic.slope(s[0], gate[0] * s[0], HARDWARE),
        arithmetic.slope(s[1], gate[1] * s[1], HARDWARE),
        arithmetic.slope(s[2], gate[2] * s[2], HARDWARE),
        arithmetic.slope(s[3], gate[3] * s[3], HARDWARE),
    )


@triton.jit
def _load_prob(prob_ptr, row, rows_end):
    """A tile of one column: prob of the rows."""
    return (
        tl.load(prob_ptr + row, mask=row < rows_end, other=0.0)[:, None],
        tl.load(prob_ptr + row + 1, mask=row + 1 < rows_end, other=0.0)[:, None],
        tl.load(prob_ptr + row + 2, mask=row + 2 < rows_end, other=0.0)[:, None],
        tl.load(prob_ptr + row + 3, mask=row + 3 < rows_end, other=0.0)[:, None],
    )


@triton.jit
def _store_sums(x, sums_ptr, row, rows_end, tokens):
    """The sum of each row; 0 for rows past the last group, which no output depends on."""
    tiles.store_of_rows(
        tl.where(tokens > 0, arithmetic.pairwise_sum(x[0]), 0.0),
        tl.where(tokens > 0, arithmetic.pairwise_sum(x[1]), 0.0),
        tl.where(tokens > 0, arithmetic.pairwise_sum(x[2]), 0.0),
        tl.where(tokens > 0, arithmetic.pairwise_sum(x[3]), 0.0),
        row,
        rows_end,
        sums_ptr,
    )


@triton.jit
def _store_hidden(
    x, tile, tokens, first_unit, units, column, num_columns, codes_ptr, column_units, scale_ptr, scale_stride, block,
    num_scale_rows, SQUARE: tl.constexpr, HARDWARE_CAST: tl.constexpr,
):  # fmt: skip
    if SQUARE:
        tiles.store_square_columns(
            x, tile, tokens, first_unit, units, column, num_columns, codes_ptr, column_units, scale_ptr + block,
            tl.cdiv(num_columns, tiles.TILE), num_scale_rows, HARDWARE_CAST,
        )  # fmt: skip
    else:
        tiles.store_columns(
            x, tile, tokens, first_unit, units, column, num_columns, codes_ptr, column_units, scale_ptr, scale_stride,
            num_scale_rows, HARDWARE_CAST,
        )  # fmt: skip


@triton.jit
def _store_interleaved_rows(
    gate, up, row, rows_end, of_gate, end, codes_ptr, first_scale, second_scale, has_second,
    HARDWARE_CAST: tl.constexpr,
):  # fmt: skip
    """Codes of gate and up of two blocks in a row: the first has the first 64 columns of both, the second the others."""
    in_first = (tl.arange(0, tiles.TILE) < tiles.TILE // 2)[None, :]
    for j in tl.static_range(4):
        bits = tl.maximum(casts.magnitude_bits(gate[j]), casts.magnitude_bits(up[j]))
        scale, inverse = tiles.scale_of(tl.max(tl.where(in_first, bits, 0), axis=1), HARDWARE_CAST)
        tl.store(first_scale + row + j, scale, mask=row + j < rows_end)
        scale, other = tiles.scale_of(tl.max(tl.where(in_first, 0, bits), axis=1), HARDWARE_CAST)
        tl.store(second_scale + row + j, scale, mask=(row + j < rows_end) & has_second)
        of = tl.where(in_first, inverse[:, None], other[:, None])
        tiles.store_codes(gate, of, j, row, rows_end, of_gate, end, codes_ptr, end, HARDWARE_CAST)
        tiles.store_codes(up, of, j, row, rows_end, of_gate, end, codes_ptr + _INTERLEAVE, end, HARDWARE_CAST)


@triton.jit(do_not_specialize=["M"])
def _sum_blocks(
    sums_ptr,  # (num_blocks, M) float32, contiguous
    out_ptr,  # (M,) float32
    M,
    num_blocks,
    BLOCK_M: tl.constexpr,
):
    """Sums over the blocks, one after the other."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    total = tl.zeros((BLOCK_M,), tl.float32)
    block = tl.program_id(0) * 0
    while block < num_blocks:  # range does not take num_blocks in the interpreter of Triton 3.6
        total += tl.load(sums_ptr + block.to(tl.int64) * M + row, mask=row < M, other=0.0)
        block += 1
    nan = tl.full((BLOCK_M,), casts.NAN_BITS, tl.int32).to(tl.float32, bitcast=True)
    tl.store(out_ptr + row, tl.where(total == total, total, nan), mask=row < M)
