"""Quantising calls of the Blackwell kernel, every output and layout among them, and bugs to plant into it."""

# ruff: noqa: E501  (a bug is a line)

from __future__ import annotations

import torch

from padless.epilogue import Epilogue
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledFormat
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
from support.quant_cases import ALL

C = Sm100GroupedConfig
ONE, WIDE = C(), C(mma_n=256)
PAIR = C(cta_group=2, mma_n=256)
NARROW_PAIR = C(cta_group=2)
TWO_PAIRS = C(cta_group=2, mma_n=256, multicast=2)
INTERLEAVED = {"activation": "swiglu", "gate_up": "interleaved", "d_dtype": torch.float32}
CONCATENATED = {"activation": "swiglu", "gate_up": "concatenated", "d_dtype": torch.float32}
TILED = ("blocked_groups", "blocked")


def epilogue(
    row: BlockScaledFormat | None = None, column: BlockScaledFormat | None = None, rule: str = "rceil", **options: object
) -> Epilogue:  # fmt: skip
    rule = "te" if row == NVFP4 else "" if FP8_BLOCK in (row, column) else rule if row or column else ""
    return Epilogue(row_format=row, column_format=column, scale_rule=rule, **options)


def blocked(row: str, column: str = "plain") -> dict[str, str]:
    return {"row_layout": row, "column_layout": column}


ROWS = epilogue(MXFP8)
BOTH = epilogue(MXFP8, MXFP8)
# name: format of the operands, N, epilogue, tile, layouts of the operands' scales
CASES: dict[str, tuple[str | tuple[str, str], int, Epilogue, Sm100GroupedConfig | None, tuple[str, str]]] = {
    "rows": ("MXFP8", 144, ROWS, ONE, ("blocked", "blocked")),
    "FP8_BLOCK operands": ("FP8_BLOCK", 160, epilogue(FP8_BLOCK, FP8_BLOCK, **ALL), None, ("blocked", "plain")),
    "FP8_BLOCK operands, halves": (
        "FP8_BLOCK", 320, epilogue(FP8_BLOCK, **blocked("plain_mn"), **CONCATENATED), PAIR, ("blocked", "plain"),
    ),
    "FP8_BLOCK operands, interleaved": (
        "FP8_BLOCK", 320, epilogue(FP8_BLOCK, **INTERLEAVED), WIDE, ("plain", "plain"),
    ),
    "MXFP4 weights, halves": (
        ("MXFP8", "MXFP4"), 320, epilogue(MXFP8, **blocked("blocked"), **CONCATENATED), PAIR, ("plain", "blocked"),
    ),
    "MXFP4 weights, one CTA": (
        ("MXFP8", "MXFP4"), 320, epilogue(MXFP8, MXFP8, **CONCATENATED), WIDE, ("blocked", "blocked"),
    ),
    "everything": (
        "MXFP8", 160, epilogue(MXFP8, MXFP8, d_dtype=torch.bfloat16, **ALL), PAIR, ("blocked", "blocked"),
    ),
    "floor, 32x4x4 tiles": (
        "MXFP8", 160, epilogue(MXFP8, MXFP8, "floor", **blocked("blocked", "blocked")), ONE, TILED,
    ),
    "cudnn, tiles of their own": (
        "MXFP8", 304,
        epilogue(
            MXFP8, MXFP8, "cudnn", bias_rule="gated_bias", **blocked("blocked_groups", "blocked_groups"), **ALL
        ),
        PAIR, ("plain", "blocked"),
    ),
    "e5m2 documented": (
        "NVFP4", 160, epilogue(MXFP8_E5M2, MXFP8_E5M2, "cudnn_documented"), None, ("blocked", "blocked"),
    ),
    "columns alone": ("MXFP8", 272, epilogue(None, MXFP8, "cudnn", alpha=True), WIDE, ("blocked", "blocked")),
    "nvfp4": ("NVFP4", 288, epilogue(NVFP4, **blocked("blocked"), **ALL), PAIR, ("blocked", "blocked")),
    "nvfp4, narrow pair": (
        "NVFP4", 160, epilogue(NVFP4, d_dtype=torch.float16), NARROW_PAIR, ("blocked", "blocked"),
    ),
    "mxfp4": ("MXFP4", 160, epilogue(MXFP4, None, "cudnn", **blocked("blocked_groups")), ONE, TILED),
    "amax alone": ("MXFP8", 168, epilogue(amax=True, alpha=True), None, ("blocked", "blocked")),
    "float32 alone": (
        "NVFP4", 136, epilogue(d_dtype=torch.float32, alpha=True, bias=True, prob=True), WIDE, ("blocked", "blocked"),
    ),
    "prob with no bias to gate": (
        "MXFP8", 144, epilogue(MXFP8, bias_rule="gated_bias", prob=True), ONE, ("blocked", "blocked"),
    ),
    "interleaved, everything": (
        "MXFP8", 192, epilogue(MXFP8, MXFP8, **blocked("blocked"), **INTERLEAVED, **ALL), PAIR, ("blocked", "blocked"),
    ),
    "interleaved, nvfp4, 64 columns": (
        "NVFP4", 192, epilogue(NVFP4, **blocked("blocked"), **INTERLEAVED), ONE, ("blocked", "blocked"),
    ),
    "concatenated, nvfp4": (
        "NVFP4", 320, epilogue(NVFP4, **blocked("blocked"), **CONCATENATED, **ALL), PAIR, ("blocked", "blocked"),
    ),
    "concatenated, one CTA, copied scales": (
        "MXFP8", 512, epilogue(MXFP8, MXFP8, **blocked("blocked_groups", "blocked"), **CONCATENATED, **ALL), WIDE, TILED,
    ),
    "concatenated, pair, copied scales": ("NVFP4", 512, epilogue(NVFP4, **CONCATENATED), PAIR, TILED),
    "concatenated, a tail and plain scales": (
        "MXFP8", 352, epilogue(MXFP8, amax=True, **CONCATENATED), WIDE, ("plain", "plain"),
    ),
    "FP8_BLOCK rows": ("MXFP8", 144, epilogue(FP8_BLOCK, **blocked("plain_mn")), ONE, ("blocked", "blocked")),
    "FP8_BLOCK everything": (
        "MXFP8", 400, epilogue(FP8_BLOCK, FP8_BLOCK, d_dtype=torch.bfloat16, **ALL), PAIR, ("blocked", "blocked"),
    ),
    "FP8_BLOCK columns alone": ("NVFP4", 272, epilogue(None, FP8_BLOCK, alpha=True), WIDE, ("plain", "blocked")),
    "FP8_BLOCK interleaved, everything": (
        "NVFP4", 320, epilogue(FP8_BLOCK, FP8_BLOCK, **blocked("plain_mn"), **INTERLEAVED, **ALL), PAIR,
        ("blocked", "blocked"),
    ),
    "FP8_BLOCK concatenated": (
        "MXFP8", 288, epilogue(FP8_BLOCK, FP8_BLOCK, amax=True, **CONCATENATED), None, TILED,
    ),
    "two pairs, everything": (
        "NVFP4", 576, epilogue(MXFP8, MXFP8, **blocked("blocked_groups", "blocked"), **ALL), TWO_PAIRS,
        ("blocked", "blocked"),
    ),
    "two pairs, concatenated": (
        "MXFP8", 832, epilogue(NVFP4, **blocked("blocked"), **CONCATENATED, **ALL), TWO_PAIRS, TILED,
    ),
}  # fmt: skip


# ---- planted bugs

LOAD, STORAGE = "sm100_grouped/load.cuh", "sm100_grouped/storage.cuh"
VALUES, STORE, WIDE_STORE = (
    "sm100_grouped/quant_values.cuh",
    "sm100_grouped/quant_store.cuh",
    "sm100_grouped/quant_wide.cuh",
)
# What is wrong: file, text, what takes its place, and the case that has to show it.
BUGS = {
    "rows of the next group in the maxima": (VALUES, "if (MASKS_ROWS && !has_row)", "if (false)", "columns alone"),
    "columns past the last in the maxima": (VALUES, "if (column + CHUNK > n_out)", "if (false)", "rows"),
    "multipliers read before they are there": (STORE, "    __syncwarp();\n    float multiplier[CHUNK];", "    float multiplier[CHUNK];", "columns alone"),
    "columns exchanged with the wrong lane": (VALUES, "given, half)", "given, half ^ 1)", "columns alone"),
    "the other half of the columns kept": (VALUES, "upper ? m[i + half] : m[i];", "upper ? m[i] : m[i + half];", "columns alone"),
    "sums given back too early": (VALUES, "last_read && i == OUT_CHUNKS_BEFORE_DRAINED - 1", "last_read && i == 0", "nvfp4"),
    "loads of sums not waited for": (VALUES, "    tcgen05_wait_ld();\n", "", "rows"),
    "no tcgen05 fence after done": (
        "sm100_grouped/sm100_grouped_gemm.cu", "accumulator.phase);\n    tcgen05_fence_after_thread_sync();\n", "accumulator.phase);\n", "rows",
    ),
    "up from the neighbouring columns": (VALUES, "chunk + OUT_CHUNKS :", "chunk + OUT_CHUNKS - 1 :", "concatenated, a tail and plain scales"),
    "up's scales where gate's are": (LOAD, "scale_tile + piece * (to_up / 128)", "scale_tile", "concatenated, one CTA, copied scales"),
    "up's rows where gate's are": (LOAD, "row + share + piece * to_next", "row + share", "concatenated, one CTA, copied scales"),
    "up's gathered scales 128 rows on": (LOAD, "!IS_A && GATE_AND_UP_APART ? operands.n / 2 : 128", "128", "concatenated, a tail and plain scales"),
    "alpha and bias rounded one by one": (
        "device/quant_outputs.cuh", "__fmaf_rn(sum, alpha, addend)", "__fadd_rn(__fmul_rn(sum, alpha), addend)", "float32 alone",
    ),
    "scales of the word before kept": (STORE, "                word = 0;\n", "", "nvfp4"),
    "a group's tile counted from its row": (STORE, "(shared.scale_shifts[group] + start) / 128", "start / 128", "cudnn, tiles of their own"),
    "nobody counts the groups' tiles": (STORAGE, "GROUPS_ON_TILES || EPILOGUE_IS_QUANT", "GROUPS_ON_TILES", "everything"),
    "a whole chunk of codes at the last columns": (STORE, "limit >= CHUNK && reinterpret", "reinterpret", "rows"),
    "amax of a warp without rows": (STORE, "lane == 0 && t.rows > 0", "lane == 0 && t.rows <= 0", "amax alone"),
    # Blocks of 128
    "sums given back at the first reading": (WIDE_STORE, "take_chunk(v, shared, problem, t, i, exists, is_known)", "take_chunk(v, shared, problem, t, i, exists, !is_known)", "FP8_BLOCK everything"),
    "warps do not wait for the others' maxima": (WIDE_STORE, "if constexpr (COLUMN_QUANT != QUANT_NONE) bar_sync(1, 32 * NUM_STORE_WARPS);", "", "FP8_BLOCK columns alone"),
    "one buffer for the maxima": (WIDE_STORE, "shared.column_maxima[turn & 1]", "shared.column_maxima[0]", "FP8_BLOCK everything"),
    "maxima of three warps": (WIDE_STORE, "w < NUM_STORE_WARPS; ++w", "w < NUM_STORE_WARPS - 1; ++w", "FP8_BLOCK columns alone"),
    "scale of a row from its last chunk": (WIDE_STORE, "amax = max_nan_abs(amax, of_chunk[0]);", "amax = of_chunk[0];", "FP8_BLOCK rows"),
    "columns' scales stored by the last warp": (WIDE_STORE, "warp == 0 && column", "warp == 3 && column", "FP8_BLOCK everything"),
    "blocks of a row counted from the tile": (WIDE_STORE, "(t.out_column + t.chunk(first) * CHUNK) / WIDE", "t.chunk(first) * CHUNK / WIDE", "FP8_BLOCK everything"),
    # Two pairs
    "bias of the first pair's columns": (STORE, "GLU == GLU_NONE ? tile.column : tile.column / 2,", "(GLU == GLU_NONE ? tile.column : tile.column / 2) - worker_rank() * OUT_COLUMNS,", "two pairs, everything"),
}  # fmt: skip
