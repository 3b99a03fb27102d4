"""Planted bugs of Hopper's bf16 kernel: each an edit of its source, and what must be found when it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from padless.emulator.fake_driver import EmulatedDriver
from padless.formats import BlockScaledTensor
from padless.kernels.sm90_bf16 import host as sm90_bf16
from padless.kernels.sm90_bf16.config import Sm90Bf16Config
from padless.kernels.sm90_bf16.host import KERNEL
from padless.kernels.table import BF16
from padless.layouts import to_blocked
from support import planted_bugs
from support.sm90_bf16_cases import Problem, error_bound, exact_result, random_problem

DEQUANTIZE = "sm90_bf16/dequantize.cuh"
STORE = "device/sm90/transposed_store.cuh"
LOAD = "sm90_bf16/load.cuh"
TOKENS = "sm90_bf16/tokens.cuh"
WEIGHTS = "sm90_bf16/weights.cuh"
MULTIPLY = "sm90_bf16/multiply.cuh"
REPACKED, REPACKED_PAIR = "sm90_bf16/repacked.cuh", (BF16, "MXFP4_REPACKED")


@dataclass(frozen=True)
class Bug(planted_bugs.Bug):
    pair: tuple[str, str] = ("NVFP4", "NVFP4")
    blocked: bool = False  # with NaN where no scale is
    block_m: int = 8  # 128: of tiles with many tokens, and with few


FREE_TOKENS = "arrive_warp<TOKEN_ARRIVALS>(shared.tokens_empty[used], lane);"  # in the loop, and at its end

BUGS: tuple[Bug, ...] = (
    # ---- the beginning
    Bug("global memory is read though the kernels ahead may still be writing it", "grid-dependency",
        ("device/queue_start_ahead.cuh", "if (!is_ready) griddepcontrol_wait(); if (lane", "if (lane"), quick=True),
    # ---- hand-over of the tokens
    Bug("no proxy fence after the tokens are written", "missing-proxy-fence",
        (TOKENS, "fence_proxy_async_shared();  // the tensor core", "// the tensor core"), quick=True),
    Bug("the converters do not wait until the tokens are done with", "race mbarrier",
        (TOKENS, "mbarrier_wait(shared_address(&shared.tokens_empty[to]), ring.phase ^ 1);", ""), nth=1),
    Bug("the consumers do not wait for the tokens", "race uninitialised-shared",
        (MULTIPLY, "mbarrier_wait(shared_address(&shared.tokens_full[from]), ring.phase);", ""), quick=True),
    Bug("a converter warp arrives before all of its lanes have written", "race missing-proxy-fence",
        (TOKENS, "arrive_warp<TOKEN_ARRIVALS>(shared.tokens_full[to], lane);",
        "if (lane == 0 || TOKEN_ARRIVALS == 32) mbarrier_arrive(shared_address(&shared.tokens_full[to]));")),
    Bug("tokens of the last stage never given back", "deadlock", (MULTIPLY, FREE_TOKENS, ";"), nth=1),
    # ---- the ring of codes
    Bug("stages are refilled without the converters' consent", "race mbarrier",
        (KERNEL, "mbarrier_init(shared_address(&shared.empty[s]), NUM_TILE_READERS - 1);",
        "mbarrier_init(shared_address(&shared.empty[s]), NUM_CONSUMER_WARPS);")),
    Bug("codes given back before they are read", "race", (MULTIPLY, "} else if (next_octet == LAST_PART) {",
        "} else if (next_octet == LAST_PART) { arrive_warp(shared.empty[stage], lane);", MULTIPLY,
        "if (round * ROUND_OCTETS == LAST_PART) arrive_warp(shared.empty[stage], lane);", "")),
    Bug("codes given back behind their loads, before a product has needed them", "unread-load",
        (MULTIPLY, "section.load_codes(weights, stage, STAGE_BLOCKS - 1, LAST_PART % 4 / OCTETS);",
        "section.load_codes(weights, stage, STAGE_BLOCKS - 1, LAST_PART % 4 / OCTETS);"
        " arrive_warp(shared.empty[stage], lane);", MULTIPLY, "section.make_fragments(fragments[0], 0);",
        "if (LAST_PART == 0 && !ends) arrive_warp(shared.empty[pipeline.stage], lane);"
        " section.make_fragments(fragments[0], 0);", MULTIPLY,
        "ends = BEGINS_IN_F16 && wants_bf16(shared, pipeline.stage, lane); } }",
        "ends = BEGINS_IN_F16 && wants_bf16(shared, pipeline.stage, lane);"
        " if (LAST_PART == 0 && !ends) arrive_warp(shared.empty[pipeline.stage], lane); } }", MULTIPLY,
        "if (round * ROUND_OCTETS == LAST_PART) arrive_warp(shared.empty[stage], lane);", ""), quick=True),
    Bug("the next K block's barrier not waited for", "race uninitialised-shared",
        (MULTIPLY, "await_weights(shared, pipeline);", ""), nth=1),
    # ---- the checkers' word on a stage's scales
    Bug("consumers do not wait for what the checkers say", "race uninitialised-shared",
        (MULTIPLY, "BEGINS_IN_F16 ? &shared.checked[pipeline.stage] : &shared.full[pipeline.stage]",
        "&shared.full[pipeline.stage]"), pair=("MXFP4", "MXFP4"), quick=True),
    Bug("a checker keeps the stages that it has looked at", "deadlock",
        (TOKENS, "arrive_warp(shared.empty[pipeline.stage], lane);\n            pipeline", "pipeline"),
        pair=("MXFP4", "MXFP4"), quick=True),
    Bug("a checker does not wait for what it looks at", "race uninitialised-shared",
        (TOKENS, "mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);", ""), pair=("MXFP4", "MXFP4")),
    Bug("the converters do not wait for the checkers' word", "race uninitialised-shared", (TOKENS,
        "mbarrier_wait(shared_address(&shared.checked[stage]), pipeline.phase);", ""), pair=("MXFP4", "MXFP4")),
    # ---- products and the store
    Bug("no wgmma.fence", "missing-wgmma-fence", (MULTIPLY, "wgmma_fence();", "")),
    Bug("no proxy fence before the store", "missing-proxy-fence",
        (STORE, "fence_proxy_async_shared();\n    bar_sync", "bar_sync")),
    Bug("the store is clipped at the tile and not at the group", "",
        (STORE, "tile.row + tile.rows);", "tile.row + BLOCK_M);")),
    # ---- tiles of 128 tokens with at most 64
    Bug("a tile of few tokens waits for the bytes of one of many", "deadlock",
        (LOAD, "boxes_of(tile) * STAGE_BYTES_OF_BOX", "2 * STAGE_BYTES_OF_BOX"), pair=(BF16, "MXFP4"), block_m=128,
        quick=True),
    Bug("the second 64 tokens are copied to the first's place", "",
        (LOAD, "shared.a[stage][j]) + first * 128;", "shared.a[stage][j]);"), pair=(BF16, "MXFP4"), block_m=128),
    Bug("65 tokens are multiplied as if they were few", "", (KERNEL, "tile.rows <= BOX_ROWS)",
        "tile.rows <= BOX_ROWS + 1)"), pair=(BF16, "NVFP4"), block_m=128, quick=True),
    Bug("65 tokens are converted as if they were few", "uninitialised-shared",
        (TOKENS, "rows > BOX_ROWS); };", "rows > BOX_ROWS + 1); };"), pair=(BF16, "MXFP4"), block_m=128),
    # ---- values
    Bug("two words of the tokens change places", "", (TOKENS, "swizzle_128b(in_eight, octet % 2 * 4 + w)",
        "swizzle_128b(in_eight, octet % 2 * 4 + (w ^ 1))"), quick=True),
    Bug("nibble 0 is taken from the wrong place", "",
        (DEQUANTIZE, "to[0] = lop3_select(w << 6,", "to[0] = lop3_select(w << 2,"), pair=(BF16, "MXFP4")),
    Bug("MXFP4's second factor forgotten", "",
        (WEIGHTS, "if (MAY_BE_LARGE && second)", "if (false)"), pair=(BF16, "MXFP4")),
    Bug("scales past the end of K count", "",
        (WEIGHTS, "bytes[u][h] &= mask;", "bytes[u][h] &= 0x7F7F;"), blocked=True, quick=True),
    Bug("which scales count in a stage's second K block is taken from its first", "",
        (WEIGHTS, "counting >> (16 * block);", "counting;"), blocked=True),
    Bug("the scales of a stage's first K block for both", "", (WEIGHTS, "+ block * scales_of_128(B_FORMAT);", ";")),
    Bug("the scale of the first K block for all of them", "",
        (TOKENS, "scale = ahead;", ""), pair=("FP8_BLOCK", "MXFP4")),
    Bug("the weights' scale of the first 128 of K for all of it", "",
        (MULTIPLY, "weight_scales += problem.scales_k_stride;", ""), pair=(BF16, "FP8_BLOCK")),
    Bug("the weights' scale of the next 128 of K", "", (MULTIPLY, "const float of_weights = weight_scale;",
        "const float of_weights = __ldg(weight_scales + (ks + 1 < k_stages));"), pair=(BF16, "FP8_BLOCK"), quick=True),
    Bug("the weights' scale of the next 128 rows", "", (WEIGHTS, "(tile.column + first_row) / 128, blocks",
        "(tile.column + first_row) / 128 + 1, blocks"), pair=(BF16, "FP8_BLOCK")),
    Bug("the weights' scales of the first group for all of them", "",
        (WEIGHTS, "static_cast<long long>(tile.group) * blocks", "0LL"), pair=(BF16, "FP8_BLOCK")),
    Bug("bytes of the weights' codes two by two from their halves", "",
        (DEQUANTIZE, "from[i / 2] >> (16 * (i % 2))", "from[i % 2] >> (16 * (i / 2))"), pair=(BF16, "FP8_BLOCK")),
    Bug("the global scale of the first group for all of them", "",
        (KERNEL, "problem.global_b + group * problem.global_b_stride", "problem.global_b")),
    # ---- repacked weights
    Bug("words rotated by a bit less", "",
        (DEQUANTIZE, "funnelshift_l(w, w, 12)", "funnelshift_l(w, w, 11)"), pair=REPACKED_PAIR),
    Bug("no mantissas of the first codes", "", (DEQUANTIZE, "| (w >> 8 & FIRST_MANTISSAS)", ""), pair=REPACKED_PAIR),
    Bug("a tile's rows not turned over", "", (REPACKED, "row ^ (quad / 2 * 3)", "row"), pair=REPACKED_PAIR, quick=True),
    Bug("the first tile for all quads", "", (WEIGHTS, "quad / 2 * TILE_CODE_BYTES", "0"), pair=REPACKED_PAIR),
    Bug("tiles of the first rows", "", (LOAD, "row / TILE_CODE_ROWS, tile.group", "0, tile.group"), pair=REPACKED_PAIR),
    Bug("tiles of the first group", "",
        (LOAD, "row / TILE_CODE_ROWS, tile.group", "row / TILE_CODE_ROWS, 0"), pair=REPACKED_PAIR),
)  # fmt: skip


def problem_of(bug: Bug) -> Problem:
    """More K blocks than the rings have stages; a tail of K; two blocks of rows, where weights have such."""
    n = 200 if bug.pair[1] == "FP8_BLOCK" else 72
    sizes, k = ((65, 3), 416) if bug.block_m == 128 else ((5, 9), 672 if bug.blocked else 800)
    if bug.pair == REPACKED_PAIR:
        n = 144
    problem = random_problem(bug.pair, sizes, n, k, spare_rows=4)
    if not bug.blocked:
        return problem
    b = problem.b
    rows, columns = b.scale.shape[-2:]
    whole = torch.full((len(b.data), 128, -(-columns // 4) * 4), 0x7F, dtype=torch.uint8)
    whole[:, :rows, :columns] = b.scale.view(torch.uint8)
    blocked = torch.stack([to_blocked(matrix) for matrix in whole]).view(b.scale.dtype)
    return replace(problem, b=BlockScaledTensor(b.data, blocked, b.format, b.global_scale, "blocked"))


def run(bug: Bug, driver: EmulatedDriver, config: Sm90Bf16Config, seed: int) -> tuple[bool, list[str]]:
    """(right, kinds of reports): right if every value is within the bound and no row outside the groups was touched."""
    problem = problem_of(bug)
    out = torch.full((problem.a.shape[0], problem.b.shape[1]), float("nan"))
    with driver.configured(seed=seed, raise_on_reports=False, num_sms=1):
        sm90_bf16.prepare(driver, problem.a, problem.b, problem.offs, out, config).launch(0)
    assert driver.last_result is not None
    valid = problem.valid_rows
    close = (out[:valid].double() - exact_result(problem)).abs() <= error_bound(problem, out.dtype)
    right = bool(close.all()) and bool(out[valid:].isnan().all())
    return right, [report.kind for report in driver.last_result.reports]


def config_of(bug: Bug) -> Sm90Bf16Config:
    return Sm90Bf16Config(*bug.pair, block_m=bug.block_m, num_stages=2, blocked=bug.blocked, out_dtype=torch.float32)
