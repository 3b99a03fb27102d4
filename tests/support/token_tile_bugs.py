"""The planted bugs of the kernels on tiles of 128 tokens: each an edit of their source that a run must find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support import planted_bugs

TILES = "device/token_tiles.cuh"
COLUMNS_MAIN = "sm90_rows_columns/sm90_rows_columns.cu"
COLUMNS_STORAGE = "sm90_rows_columns/storage.cuh"
SWIGLU = "sm90_swiglu_backward/"
MAIN = "sm90_swiglu_backward.cu"
SWIGLU_MAIN = SWIGLU + MAIN


@dataclass(frozen=True)
class Bug(planted_bugs.Bug):
    """kernel: the file that is compiled. many_groups: more of them than a warp scans at once. band, gathers: of the
    kernel's configuration."""

    kernel: str = COLUMNS_MAIN
    many_groups: bool = False
    band: int = 1
    gathers: bool = False


def _columns(name: str, old: str, new: str, file: str = COLUMNS_MAIN, **rest: Any) -> Bug:
    return Bug(name, "", (file, old, new), **rest)


def _swiglu(name: str, file: str, old: str, new: str) -> Bug:
    return Bug(name, "", (SWIGLU + file, old, new), kernel=SWIGLU_MAIN)


BUGS = (
    # ---- order
    _columns("copies not waited for", "cp_async_wait<0>();", ""),
    _columns("copies not seen by other lanes", "cp_async_wait<0>(); __syncwarp();", "cp_async_wait<0>();"),
    _columns("copies over rows that are being read", "words[row][1]); __syncwarp();", "words[row][1]);"),
    _columns("no barrier before the scales", "__syncthreads(); if (warp ==", "if (warp =="),
    _columns("no barrier before the codes", "__syncthreads(); next_source =", "next_source ="),
    _columns("no barrier before the last lines", "__syncthreads(); if (number > 0)", "if (number > 0)"),
    _columns("last lines forgotten", "__syncthreads(); if (number > 0)", "if (number > 1000)"),
    _columns("lines of another item", "shared.schedule.items[(number + 3) % 4]", "shared.schedule.items[number % 4]"),
    # ---- groups
    _columns("slack of groups left out", "+ groups.alignment - 1)", ")", TILES),
    _columns("ends not ascending", "end = end > row ? end : row;", "", TILES, many_groups=True),
    _columns("only the first 32 groups", "row = __shfl_sync(0xffffffff, end, 31);", "", TILES, many_groups=True),
    _columns("starts not written", "groups.starts[group] =", "const int unused =", TILES),
    _columns("a band as wide as the others", "left < BAND ? left : BAND", "BAND", TILES, band=4),
    _columns("a group behind kept for the next band", "if (tile < first_tile[of]) of = 0;", "", TILES),
    _columns("rows past the last group in columns", "is_group ? item.rows : 0", "item.rows", TILES),
    # ---- chosen rows
    _columns("rows of the item before", "= source_of(number + 2);", "= source_of(number + 1);", gathers=True),
    _columns("one row for two lanes", "source, 2 * step + lane / 16);", "source, 2 * step);", gathers=True),
    _columns("rows in order", "? problem.tokens[item.first_row + row]", "? item.first_row + row", gathers=True),
    _columns("rows behind a group copied", "row < item.rows ? problem.", "row < TILE ? problem.", gathers=True),
    _columns("features that are not there copied", "column < problem.features ? problem.num_source_rows : 0",
        "problem.num_source_rows", gathers=True),
    # ---- values
    _columns("codes behind a group kept", "low & mask.low", "low"),
    _columns("NaN dropped", "max.NaN.xorsign", "max.xorsign", COLUMNS_STORAGE),
    _columns("odd chunks from even slots", "slot_of(2 * chunk + 1, of_lane)", "slot_of(2 * chunk, of_lane)", TILES),
    _columns("padding of scales not zeroed", "row_scale_ld + row] = 0.0f;", "row_scale_ld + row] = 1.0f;"),
    _columns("scales of no tokens", "tokens > 0 ? scale : 0.0f", "scale"),
    # ---- SwiGLU
    _swiglu("a pair waited for too late", MAIN, "cp_async_wait<ROWS / 2 - 1>();", "cp_async_wait<ROWS / 2>();"),
    _swiglu("prob of the next item", "rows.cuh", "shared.probs[number % 2][row]", "shared.probs[0][row]"),
    _swiglu("prob not copied with the rows", MAIN, "copy_probs(shared, problem, next, number + 1, warp, lane);", ""),
    _swiglu("up's rows by gate's scale", "rows.cuh", "16 + 2 * row);", "2 * row);"),
    _swiglu("dprob added in another order", MAIN, "total, 8));", "total, 16));"),
    _swiglu("dprob of rows past the last group", MAIN, "item.tokens > 0 ? total : 0.0f", "total"),
    _swiglu("gates without a bound", "arithmetic.cuh", "max_nan(gate, -87.25f)", "gate"),
    _swiglu("a slope rounded once less", "arithmetic.cuh", "__fmaf_rn(silu, __fadd_rn(1.0f, -s), s)",
        "__fmaf_rn(-silu, s, __fadd_rn(silu, s))"),
    _swiglu("up's columns from gate's codes", "columns.cuh", "lines.store(output, step, target);",
        "lines.store(0, step, target);"),
)  # fmt: skip
