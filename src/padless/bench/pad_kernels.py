# mypy: disable-error-code="no-untyped-def"
"""The Triton kernels behind `padless.bench.pad`.

Every program finds its group from the offsets itself (a cumulative sum over at most a few hundred groups that
stay in L2), so there is nothing to prepare on the host or in another launch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _find_group(offs_ptr, num_groups, row, BLOCK_GROUPS: tl.constexpr, MULTIPLE: tl.constexpr):
    """Group of padded row `row` (num_groups or more past the end), its start before and after padding, its size."""
    g = tl.arange(0, BLOCK_GROUPS)
    exists = g < num_groups
    ends = tl.load(offs_ptr + g, mask=exists, other=0)
    starts = tl.load(offs_ptr + g - 1, mask=exists & (g > 0), other=0)
    sizes = tl.where(exists, tl.maximum(ends - starts, 0), 0)
    padded_sizes = (sizes + (MULTIPLE - 1)) // MULTIPLE * MULTIPLE
    padded_ends = tl.cumsum(padded_sizes, 0)
    # Empty groups in front of the row count too: their padded end is at or before it.
    group = tl.sum((padded_ends <= row).to(tl.int32), 0)
    here = g == group
    start = tl.sum(tl.where(here, starts, 0), 0)
    padded_start = tl.sum(tl.where(here, padded_ends - padded_sizes, 0), 0)
    size = tl.sum(tl.where(here, sizes, 0), 0)
    return group, start, padded_start, size, padded_ends


@triton.jit
def pad_kernel(
    data_ptr,  # (M, WORDS)
    padded_data_ptr,  # (rows, WORDS)
    scale_ptr,  # (M, SCALE_COLUMNS), row-major or MN-major with leading dimension scale_ld
    padded_scale_ptr,  # (rows, SCALE_COLUMNS), the same layout
    offs_ptr,  # (num_groups,) int32 cumulative ends
    padded_offs_ptr,  # (num_groups,) int32
    group_index_ptr,  # (rows,) int32
    num_groups,
    rows,
    scale_ld,
    padded_scale_ld,
    scale_programs,
    WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    MULTIPLE: tl.constexpr,
    ROW_MAJOR: tl.constexpr,
):
    """Programs below scale_programs move the scales (and index) of MULTIPLE padded rows, the others a tile of codes."""
    pid = tl.program_id(0)
    if pid < scale_programs:
        first = pid * MULTIPLE
        group, start, padded_start, size, padded_ends = _find_group(offs_ptr, num_groups, first, BLOCK_GROUPS, MULTIPLE)
        if pid == 0:
            g = tl.arange(0, BLOCK_GROUPS)
            tl.store(padded_offs_ptr + g, tl.minimum(padded_ends, rows), mask=g < num_groups)
        r = first + tl.arange(0, MULTIPLE)
        in_group = r - padded_start
        valid = (group < num_groups) & (in_group < size)
        tl.store(group_index_ptr + r, tl.where(valid, group, -1))
        if group < num_groups:
            source_row = (start + in_group).to(tl.int64)
            for column in range(0, SCALE_COLUMNS, BLOCK_COLUMNS):
                c = column + tl.arange(0, BLOCK_COLUMNS)
                exists = (c < SCALE_COLUMNS)[None, :]
                if ROW_MAJOR:
                    source = source_row[:, None] * scale_ld + c[None, :]
                    target = r.to(tl.int64)[:, None] * padded_scale_ld + c[None, :]
                else:
                    source = source_row[:, None] + c.to(tl.int64)[None, :] * scale_ld
                    target = r[:, None] + c.to(tl.int64)[None, :] * padded_scale_ld
                scale = tl.load(scale_ptr + source, mask=valid[:, None] & exists, other=0.0)
                tl.store(padded_scale_ptr + target, scale, mask=exists)
    else:
        tile = pid - scale_programs
        WIDTH: tl.constexpr = (WORDS + BLOCK_WORDS - 1) // BLOCK_WORDS
        first = (tile // WIDTH) * BLOCK_ROWS
        group, start, padded_start, size, _ = _find_group(offs_ptr, num_groups, first, BLOCK_GROUPS, MULTIPLE)
        if group < num_groups:
            r = first + tl.arange(0, BLOCK_ROWS)
            in_group = r - padded_start
            w = (tile % WIDTH) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
            exists = (w < WORDS)[None, :]
            source = (start + in_group).to(tl.int64)[:, None] * WORDS + w[None, :]
            target = r.to(tl.int64)[:, None] * WORDS + w[None, :]
            words = tl.load(data_ptr + source, mask=(in_group < size)[:, None] & exists, other=0)
            tl.store(padded_data_ptr + target, words, mask=exists)


@triton.jit
def unpad_kernel(
    padded_ptr,  # (rows, WORDS)
    out_ptr,  # (out_rows, WORDS)
    offs_ptr,  # (num_groups,) int32 cumulative ends before padding
    num_groups,
    rows,
    out_rows,
    WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    MULTIPLE: tl.constexpr,
):
    """Each program moves the valid rows of a tile of the padded matrix to where they were before padding."""
    tile = tl.program_id(0)
    WIDTH: tl.constexpr = (WORDS + BLOCK_WORDS - 1) // BLOCK_WORDS
    first = (tile // WIDTH) * BLOCK_ROWS
    group, start, padded_start, size, _ = _find_group(offs_ptr, num_groups, first, BLOCK_GROUPS, MULTIPLE)
    if group < num_groups:
        r = first + tl.arange(0, BLOCK_ROWS)
        in_group = r - padded_start
        out_row = start + in_group
        w = (tile % WIDTH) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
        valid = ((in_group < size) & (out_row < out_rows) & (r < rows))[:, None] & (w < WORDS)[None, :]
        words = tl.load(padded_ptr + r.to(tl.int64)[:, None] * WORDS + w[None, :], mask=valid, other=0)
        tl.store(out_ptr + out_row.to(tl.int64)[:, None] * WORDS + w[None, :], words, mask=valid)
