"""The planted bugs of the MXFP8 weight-gradient kernel: each an edit of its source, and what must be found."""

from __future__ import annotations

import torch

from padless.kernels.sm100_mxfp8_wgrad.config import Mxfp8WgradConfig
from support.planted_bugs import Bug

FOLDER = "sm100_mxfp8_wgrad/"
MAIN, STORAGE = FOLDER + "sm100_mxfp8_wgrad.cu", FOLDER + "storage.cuh"
GRADIENT = "device/sm100/gradient.cuh"
WAIT_EMPTY = "mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);"
PAIR = Mxfp8WgradConfig(num_stages=2, out_dtype=torch.float32, cta_group=2)
COMMIT = "tcgen05_commit_multicast<CTA_GROUP>(barrier, 3);"
COMMIT_TILE = "if (tile.tokens > 0) commit(shared_address(&shared.done));"
CLUSTER_SYNC = "barrier_cluster_arrive(); barrier_cluster_wait();"
SCALES_ARRIVE = "mbarrier_arrive_release_cluster(full, 0);"
SCALES_WAIT = (
    "mbarrier_wait(shared_address(&shared.empty[pipeline.stage]), pipeline.phase ^ 1);\n        st_shared_v4_b32"
)


BUGS: tuple[Bug, ...] = (
    # ---- what is multiplied
    Bug("the next group's tokens are multiplied", "",
        (STORAGE, "if (end - token >= BLOCK_T)", "if (true)"), quick=True),
    Bug("the ragged map ends a token late", "", (STORAGE, "RAGGED_B - (end - token);", "RAGGED_B - (end - token) - 1;",
        STORAGE, "cut, end, RAGGED_B", "cut, end + 1, RAGGED_B")),
    Bug("a K step too few", "",
        (STORAGE, "(tokens - block * BLOCK_T + MMA_T - 1) / MMA_T", "(tokens - block * BLOCK_T + MMA_T - 2) / MMA_T")),
    Bug("A is read K-major", "", (STORAGE, "A_IS_MN_MAJOR = 1u << 15", "A_IS_MN_MAJOR = 0"), quick=True),
    Bug("B is read K-major", "", (STORAGE, "B_IS_MN_MAJOR = 1u << 16", "B_IS_MN_MAJOR = 0")),
    Bug("steps of 16 tokens", "", (STORAGE, "STEP_BYTES = MMA_T * PART", "STEP_BYTES = MMA_T / 2 * PART")),
    Bug("the scales of the first step for all", "", (MAIN, "SHAPE | scale_ids(step)", "SHAPE | scale_ids(0)")),
    Bug("scales counted from the tokens of all groups before", "",
        (STORAGE, "first_scales = before * STEPS", "first_scales = start / MMA_T"), quick=True),
    Bug("scales of A for B", "", (MAIN, "shared.sfb[part], sfb,", "shared.sfb[part], sfa,")),
    Bug("scales of the block before", "", (MAIN, "feature + lane, block + 1, exist", "feature + lane, block, exist")),
    Bug("the first 32 features' scales for all", "", (MAIN, "feature + 32 * j", "feature")),
    Bug("the last step's scales for all", "",
        (MAIN, "number = block * STEPS + step < exist", "number = block * STEPS + step < 1")),
    Bug("features 32 apart in the wrong order", "",
        (MAIN, "words[0], words[1], words[2], words[3]", "words[1], words[0], words[2], words[3]")),
    Bug("first products added to what was there", "uninitialised-tensor-memory",
        (MAIN, "block != 0 || step != 0", "true")),
    Bug("every stage begins anew", "", (MAIN, "block != 0 || step != 0", "step != 0")),
    # ---- what is stored
    Bug("columns of another tile", "", (STORAGE, "in_group % across * TILE", "0 * TILE")),
    Bug("first microbatch accumulating", "", (GRADIENT, "if constexpr (ACCUMULATE)", "if constexpr (true)")),
    Bug("a later microbatch stores", "", (GRADIENT, "if constexpr (ACCUMULATE)", "if constexpr (false)"), onto=True),
    Bug("empty groups get zeros added", "", (MAIN, "} else if (ACCUMULATE) {", "} else if (false) {"), onto=True),
    Bug("empty groups are not stored", "", (MAIN, "} else if (ACCUMULATE) {", "} else if (true) {")),
    Bug("rows of the next group are stored", "", (GRADIENT, "if (row >= d.n_rows) return;", "")),
    # ---- waits, arrivals and fences
    Bug("full barrier not waited for", "race", (MAIN, "mbarrier_wait(full, pipeline.phase);", ";"), quick=True),
    Bug("empty barrier not waited for", "race mbarrier", (MAIN, WAIT_EMPTY, "")),
    Bug("scales written before they were read", "race mbarrier", (MAIN, SCALES_WAIT, "st_shared_v4_b32")),
    Bug("no proxy fence behind the scales", "missing-proxy-fence",
        (MAIN, "fence_proxy_async_shared();", ""), quick=True),
    Bug("scales arrive before all lanes have stored", "race missing-proxy-fence",
        (MAIN, "__syncwarp(); if (lane == 0) {", "if (lane == 0) {")),
    Bug("stage never released", "deadlock", (MAIN, "commit(shared_address(&shared.empty[stage]));", "")),
    Bug("store does not wait", "race tensor-memory uninitialised-tensor-memory",
        (MAIN, "mbarrier_wait(shared_address(&shared.done), 0);", "")),
    Bug("loads from tensor memory not waited for", "register-in-flight", (MAIN, "tcgen05_wait_ld();", "")),
    Bug("no fence after mbarrier init", "mbarrier mbarrier-init", (MAIN, "fence_mbarrier_init();", "")),
    Bug("expect_tx forgets B", "race mbarrier deadlock",
        (MAIN, "full, CTA_GROUP * 2 * OPERAND_BYTES", "full, OPERAND_BYTES")),
    Bug("tensor memory is not freed", "tensor-memory", (MAIN, "tcgen05_dealloc<CTA_GROUP, TMEM_COLUMNS>(tmem);", "")),
    # ---- the pair: what is multiplied and stored
    Bug("odd CTA loads the even one's rows of A", "",
        (MAIN, "tile.row + pair_rank() * PART, token", "tile.row, token"), PAIR),
    Bug("odd CTA loads the even one's columns of B", "",
        (MAIN, "tile.column + pair_rank() * PART, token", "tile.column, token"), PAIR),
    Bug("scales of the other half's rows", "",
        (MAIN, "n_rows, tile.row + pair_rank() * PART", "n_rows, tile.row + (1 - pair_rank()) * PART"), PAIR),
    Bug("scales of the even CTA's rows for both", "",
        (MAIN, "n_rows, tile.row + pair_rank() * PART", "n_rows, tile.row"), PAIR),
    Bug("scales of its own columns alone", "",
        (MAIN, "tile.column + part * PART, tile, lane", "tile.column + pair_rank() * PART, tile, lane"), PAIR),
    Bug("both halves' scales of the columns exchanged", "",
        (MAIN, "shared.sfb[part], sfb,", "shared.sfb[1 - part], sfb,"), PAIR),
    Bug("one atom of scales of B copied", "uninitialised-tensor-memory",
        (MAIN, "part < CTA_GROUP; ++part) tcgen05_cp", "part < 1; ++part) tcgen05_cp"), PAIR),
    Bug("odd CTA stores the even one's rows", "",
        (MAIN, "row = tile.row + pair_rank() * PART", "row = tile.row"), PAIR),
    Bug("a tile to a CTA", "", (MAIN, "tile_of(blockIdx.x / CTA_GROUP", "tile_of(blockIdx.x"), PAIR),
    Bug("half of the columns stored", "", (MAIN, "column < TILE; column += 32", "column < PART; column += 32"), PAIR),
    # ---- the pair: waits, arrivals and its end
    Bug("commits to the even CTA alone", "deadlock", (MAIN, COMMIT, COMMIT.replace("3", "1")), PAIR),
    Bug("commits to the odd CTA alone", "deadlock", (MAIN, COMMIT, COMMIT.replace("3", "2")), PAIR),
    Bug("tile committed to the even CTA alone", "deadlock", (MAIN, COMMIT_TILE,
        "if (tile.tokens > 0) tcgen05_commit_multicast<2>(shared_address(&shared.done), 1);"), PAIR),
    Bug("full barrier of the other phase", "race mbarrier deadlock", (MAIN,
        "mbarrier_wait_cluster(full, pipeline.phase);", "mbarrier_wait_cluster(full, pipeline.phase ^ 1);"), PAIR),
    Bug("odd CTA's scales acquired at CTA scope", "race missing-proxy-fence",
        (MAIN, "mbarrier_wait_cluster(full, pipeline.phase);", "mbarrier_wait(full, pipeline.phase);"), PAIR),
    Bug("odd CTA's scales released at CTA scope", "race missing-proxy-fence",
        (MAIN, SCALES_ARRIVE, "mbarrier_arrive_cluster(full, 0);"), PAIR),
    Bug("odd CTA's scales arrive at the odd CTA", "deadlock", (MAIN, SCALES_ARRIVE, "mbarrier_arrive(full);"), PAIR),
    Bug("odd CTA's scales not counted", "race mbarrier",
        (STORAGE, "1 + CTA_GROUP * (1 + CTA_GROUP)", "1 + (1 + CTA_GROUP)"), PAIR, quick=True),
    Bug("copies of the odd CTA signal the odd CTA", "deadlock mbarrier race",
        (MAIN, "full = pair_even_address(full);", ";"), PAIR),
    Bug("bytes of one CTA expected", "race mbarrier deadlock",
        (MAIN, "full, CTA_GROUP * 2 * OPERAND_BYTES", "full, 2 * OPERAND_BYTES"), PAIR),
    Bug("odd CTA multiplies", "deadlock", (MAIN, "if (pair_rank() == 0 && elect_one()) issue_mma",
        "if (pair_rank() == 1 && elect_one()) issue_mma"), PAIR),
    Bug("CTAs of a pair begin before both have barriers", "mbarrier mbarrier-init", (MAIN, CLUSTER_SYNC, ""), PAIR),
    Bug("last commits not waited for", "exit", (MAIN, "CTA_GROUP == 2 && s < STAGES", "false"), PAIR),
    Bug("tensor memory is freed by one CTA", "tensor-memory",
        (MAIN, "if (warp == MMA_WARP) { tcgen05_fence_after_thread_sync(); tcgen05_dealloc",
        "if (warp == MMA_WARP && pair_rank() == 0) { tcgen05_fence_after_thread_sync(); tcgen05_dealloc"), PAIR),
    Bug("tensor memory is allocated by one CTA", "deadlock", (MAIN, "if (warp == MMA_WARP) { tcgen05_alloc",
        "if (warp == MMA_WARP && pair_rank() == 0) { tcgen05_alloc"), PAIR),
    Bug("too few columns of tensor memory", "tensor-memory", (STORAGE, "TMEM_COLUMNS = 256 * CTA_GROUP",
        "TMEM_COLUMNS = 256", STORAGE, "static_assert(SFB_COLUMN", "static_assert(0 * SFB_COLUMN"), PAIR),
)  # fmt: skip
