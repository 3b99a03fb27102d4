"""The planted bugs of the kernel of gradients through FP4 weights: edits of its source, and what must be found."""

from __future__ import annotations

from padless.kernels.sm90_fp4_dgrad.config import Fp4DgradConfig
from support.planted_bugs import Bug

FOLDER = "sm90_fp4_dgrad/"
MAIN, STORAGE, LOAD, MULTIPLY = (FOLDER + n for n in ("sm90_fp4_dgrad.cu", "storage.cuh", "load.cuh", "multiply.cuh"))
DEQUANTIZE, LDMATRIX = "sm90_bf16/dequantize.cuh", "device/ptx/ldmatrix.cuh"
NVFP4 = Fp4DgradConfig("NVFP4", num_stages=2, blocked=True)
MXFP4 = Fp4DgradConfig("MXFP4", num_stages=2, blocked=True)

WAIT_EMPTY = "mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);"
AWAITS_SCALES = "mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);"
AWAITS_FACTORS = "mbarrier_wait(shared_address(&shared.has_factors[pipeline.stage]), pipeline.phase);"
STAGED = """    fence_proxy_async_shared();
    bar_sync(1 + warpgroup, 128);"""
GIVEN_BACK = """wgmma_wait_group<1>();  // the last round's fragments have been read
            if (round == 0 && step != 0) release_stage(shared, before);"""

BUGS: tuple[Bug, ...] = (
    # --- which code, which scale
    Bug("nibbles of a word swapped", "",
        (MULTIPLY, "= mul_bf16x2(values[i]", "= mul_bf16x2(values[i ^ 1]"), quick=True),
    Bug("codes not transposed", "", (LDMATRIX, "x4.trans.", "x4.")),
    Bug("scale of the neighbouring block of 16", "",
        (MULTIPLY, "lane / 4 * 4 / SCALE_BLOCK", "(1 - lane / 4 * 4 / SCALE_BLOCK)"), quick=True),
    Bug("scale of the neighbouring block of 32", "",
        (LOAD, "first_column + column) +", "first_column + (column ^ 1)) +"), MXFP4),
    Bug("scales of two rows swapped", "", (LOAD, "(low | high << 8)", "(high | low << 8)")),
    Bug("scales of two rows swapped", "", (LOAD, "mxfp4_factor(high), 0x5410", "mxfp4_factor(high), 0x1054"), MXFP4),
    Bug("factors of the first 32 rows for all", "", (MULTIPLY, "+ round * (ROUND_N / 2 * 4);", ";")),
    Bug("factors in the order of the rows", "", (LOAD, "pair % 4 * 4 + pair / 4;", "pair;")),
    Bug("scales of the first group", "", (LOAD, "tile.group * row_tiles", "0")),
    Bug("scales of the first tile's columns", "", (LOAD, "column_tiles + column / TILE_COLUMNS", "column_tiles")),
    Bug("scales of the first half of a tile", "", (STORAGE, "(step % 2 * 2 + round)", "round")),
    Bug("scales of the first 128 rows", "", (LOAD, "row_tiles + step * BLOCK_N / 128", "row_tiles")),
    Bug("second factors left out", "", (MULTIPLY, "if (MAY_BE_LARGE && has_second)", "if (false)"), MXFP4, quick=True),
    Bug("no stage has second factors", "", (LOAD, "__any_sync(0xffffffff, mxfp4_is_large(any))", "false"), MXFP4),
    Bug("sign bits of scales count", "", (LOAD, "& 0x7F7F", "")),
    Bug("global scale of the first group", "", (MAIN, "tile.group * problem.global_stride", "0")),
    Bug("values stay 2^-8 too small", "", (MAIN, "static_cast<float>(1 << NVFP4_SHIFT)", "1.0f")),
    Bug("scales of rows that do not exist count", "", (LOAD, "if (rows_left < BLOCK_N)", "if (false)")),
    # --- which tile
    Bug("codes of the tile before", "", (LOAD, "tile.column / 2, step", "tile.column / 4, step"), quick=True),
    Bug("codes of the first group", "",
        (LOAD, "tile.column / 2, step * BLOCK_N, tile.group);", "tile.column / 2, step * BLOCK_N, 0);")),
    Bug("the last step of N left out", "", (STORAGE, "(n + BLOCK_N - 1) / BLOCK_N", "n / BLOCK_N")),
    Bug("the second box holds the first one's rows", "", (LOAD, "tile.row + box * BOX_ROWS", "tile.row")),
    Bug("a box too few", "", (LOAD, "(tile.rows + BOX_ROWS - 1) / BOX_ROWS", "tile.rows / BOX_ROWS")),
    Bug("half the products for a whole tile", "", (MAIN, "|| tile.rows <= BOX_ROWS", "|| tile.rows <= BLOCK_M")),
    Bug("first products added to the last tile", "", (MULTIPLY, "step != 0 || round != 0 || i != 0);", "true);")),
    Bug("both warpgroups multiply the same columns", "", (MULTIPLY, "warpgroup * 4 + warp;", "warp;")),
    Bug("rows of the next group are stored", "",
        (MULTIPLY, "tile.row + row, tile.row + tile.rows);", "tile.row + row, tile.row + BLOCK_M);"), quick=True),
    Bug("rows past the first box are not stored", "", (MULTIPLY, "row < tile.rows; row += BOX_ROWS", "row < 1; ++row")),
    Bug("two columns of a lane swapped", "", (MULTIPLY, "cvt_bf16x2(d[0][4 * i + j], d[0][4 * i + 2 + j])",
        "cvt_bf16x2(d[0][4 * i + 2 + j], d[0][4 * i + j])")),
    # --- the order of things
    Bug("the copies do not wait for an empty stage", "race mbarrier", (LOAD, WAIT_EMPTY, "")),
    Bug("factors are made before the scales have come", "race uninitialised-shared", (LOAD, AWAITS_SCALES, "")),
    Bug("stage not waited for", "race uninitialised-shared", (MULTIPLY, AWAITS_FACTORS, ""), quick=True),
    Bug("a stage given back before its products", "race",
        (MULTIPLY, GIVEN_BACK, "if (round == 0 && step != 0) release_stage(shared, before); wgmma_wait_group<1>();")),
    Bug("products not waited for", "register-in-flight", (MULTIPLY, "wgmma_wait_group<0>();", "")),
    Bug("fragments made while they are read", "register-in-flight", (MULTIPLY, "wgmma_wait_group<1>();", "")),
    Bug("no proxy fence before the store", "missing-proxy-fence",
        (MULTIPLY, STAGED, STAGED.split("\n")[1]), quick=True),
    Bug("no barrier before the store", "race missing-proxy-fence uninitialised-shared",
        (MULTIPLY, STAGED, STAGED.split("\n")[0])),
    Bug("the last store is not waited for", "race", (MULTIPLY, "if (issuer) cp_async_bulk_wait_group_read_all();", "")),
    Bug("a skipped tile keeps its stages", "deadlock", (MULTIPLY, "release_stage(shared, pipeline.stage);", "")),
    Bug("a skipped tile is released before it has come", "race mbarrier",
        (MULTIPLY, f"{AWAITS_FACTORS}\n        release_stage", "release_stage")),
    Bug("both scale warps write the same round", "", (MAIN, "role - 2, lane", "0, lane")),
    Bug("scale warps keep the tile", "deadlock", (LOAD, "if (lane == 0) reader.release();", "")),
)  # fmt: skip
