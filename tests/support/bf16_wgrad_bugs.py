"""The planted bugs of the bf16 weight-gradient kernel: each an edit of its source, and what must be found."""

from __future__ import annotations

import torch

from padless.kernels.sm90_bf16_wgrad.config import Bf16WgradConfig
from support.planted_bugs import Bug

FOLDER = "sm90_bf16_wgrad/"
MAIN, STORAGE, LOAD = (FOLDER + name for name in ("sm90_bf16_wgrad.cu", "storage.cuh", "load.cuh"))
MULTIPLY, STORE = "device/sm90/bf16_multiply.cuh", "device/sm90/piece_store.cuh"
TILES, DESCRIPTORS = "device/gradient_tiles.cuh", "device/sm90/descriptors.cuh"
STORED = Bf16WgradConfig(block_n=128, block_t=64, num_stages=2, out_dtype=torch.float32)


WAIT_EMPTY = "mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);"
WAIT_FULL = "mbarrier_wait(shared_address(&shared.full[pipeline.stage]), pipeline.phase);"

BUGS: tuple[Bug, ...] = (
    # ---- what is multiplied
    Bug("rows of the next group are multiplied", "", (LOAD, "if (end - token >= BLOCK_T)", "if (true)"), quick=True),
    Bug("the ragged map ends where the block begins", "",
        (LOAD, "RAGGED_B - (end - token), end, RAGGED_B", "RAGGED_B, token, RAGGED_B")),
    Bug("the ragged map ends a row late", "", (LOAD, "RAGGED_B - (end - token), end, RAGGED_B",
        "RAGGED_B - (end - token) - 1, end + 1, RAGGED_B"), quick=True),
    Bug("a group begins a row late", "",
        (LOAD, "end - tokens + block * BLOCK_T;", "end - tokens + 1 + block * BLOCK_T;")),
    Bug("a K step too many left out", "", (STORAGE, "(blocks - 1) * BLOCK_T + WGMMA_K - 1) / WGMMA_K",
        "(blocks - 1) * BLOCK_T + WGMMA_K - 2) / WGMMA_K")),
    Bug("the last stage is not in what is stored", "",
        (MULTIPLY, "multiply_stage<false>(d, a, b, last_steps, blocks != 1);", "")),
    Bug("first products added to the last tile", "", (MULTIPLY, "step != 0 || accumulate);", "true);")),
    Bug("leading offset of a chunk too small", "",
        (DESCRIPTORS, "uint64_t(CHUNK_BYTES >> 4) << 16", "uint64_t(CHUNK_BYTES >> 5) << 16")),
    Bug("eight tokens to a step", "",
        (MULTIPLY, "B_STEP = (B_IS_MN_MAJOR ? 16 * 128 : 32)", "B_STEP = (B_IS_MN_MAJOR ? 8 * 128 : 32)")),
    Bug("both warpgroups multiply the same rows", "", (MULTIPLY, "warpgroup * A_WARPGROUP_BYTES", "0")),
    Bug("columns of X loaded where the first chunk is", "",
        (LOAD, "destination + i * CHUNK_BYTES, full, feature", "destination, full, feature")),
    # ---- tiles, and what is stored
    Bug("tile numbers counted from tiles twice as wide", "",
        (STORAGE, "LongestFirst<BLOCK_M, BLOCK_N,", "LongestFirst<BLOCK_M, 2 * BLOCK_N,"), quick=True),
    Bug("consumers take another group's tokens", "",
        (TILES, "tokens = shared.groups.rows(tile.group);", "tokens = shared.groups.rows(tile.group - 1);")),
    Bug("first microbatch accumulates", "", (STORE, "if (piece < NUM_LOADED)", "if (true)")),
    Bug("a later microbatch stores", "", (STORE, "if (piece < NUM_LOADED)", "if (false)"), onto=True),
    # -0 and NaN do not survive it
    Bug("empty groups get zeros added", "",
        (MAIN, "n_rows, n_columns, ACCUMULATE};", "n_rows, n_columns, false};"), onto=True),
    Bug("empty groups not stored", "", (MAIN, "n_rows, n_columns, ACCUMULATE};", "n_rows, n_columns, true};")),
    Bug("empty groups store the last tile", "", (MAIN, "for (int i = 0; i < BLOCK_N / 2; ++i) d[i] = 0.0f;", ";")),
    Bug("registers that hold no tile are stored", "",
        (STORE, "if (lane == 0 && tile.rows > 0)", "if (lane == 0)"), onto=True),
    Bug("the second warpgroup stores over the first one's rows", "",
        (STORAGE, "tile.row + warpgroup * WGMMA_M", "tile.row")),
    Bug("pieces stored over the first one", "", (STORAGE, "tile.column + piece * PIECE_COLUMNS", "tile.column")),
    # ---- waits, arrivals and fences
    Bug("full barrier not waited for", "race", (MULTIPLY, WAIT_FULL, ""), quick=True),
    Bug("full barrier waited for in the other phase", "race deadlock",
        (MULTIPLY, WAIT_FULL, WAIT_FULL.replace("phase)", "phase ^ 1)"))),
    Bug("empty barrier not waited for", "race mbarrier", (LOAD, WAIT_EMPTY, "")),
    Bug("products not waited for", "register-in-flight", (MULTIPLY, "wgmma_wait_group<0>();", "")),
    Bug("stage released while it is multiplied", "race",
        (MULTIPLY, "wgmma_wait_group<1>();", "release_stage(shared, pipeline.stage, lane); continue;"), seeds=8),
    Bug("no wgmma.fence", "missing-wgmma-fence", (MULTIPLY, "wgmma_fence();\n#pragma unroll", "#pragma unroll")),
    Bug("no proxy fence before the store", "missing-proxy-fence",
        (STORE, "fence_proxy_async_shared();", ""), quick=True),
    # the proxy fence behind the table of groups would do as well
    Bug("no fence after mbarrier init", "mbarrier mbarrier-init",
        (MAIN, "fence_mbarrier_init();", "", MAIN, "fence_proxy_async_shared();  // what is added to", "//")),
    Bug("stage never released", "deadlock",
        (MULTIPLY, "if (lane == 0) mbarrier_arrive(shared_address(&shared.empty[stage]));", "")),
    Bug("expect_tx forgets A", "race mbarrier deadlock",
        (LOAD, "STAGE_BYTES = A_BYTES + B_BYTES", "STAGE_BYTES = B_BYTES")),
    Bug("staged before the last store has read", "race",
        (STORE, "if (lane == 0) cp_async_bulk_wait_group_read_all();", "")),
    Bug("store does not wait for what is staged", "race deadlock barrier",
        (STORE, "bar_sync(d_full(warpgroup, piece), STORE_THREADS);", "")),
    Bug("consumer does not wait for free memory", "race deadlock barrier",
        (STORE, "bar_sync(d_free(warpgroup, piece), STORE_THREADS);", ";")),
    Bug("store not committed", "race exit", (STORE, "cp_async_bulk_commit_group();", "")),
    Bug("the last tile is not staged", "deadlock exit",
        (MAIN, "stage_part<NUM_PIECES>(d, shared, warpgroup, 0, parity);  // no tile, which is not stored", "")),
    Bug("empty groups ask for no next tile", "deadlock",
        (LOAD, "if (blocks == 0) mbarrier_arrive(shared_address(&shared.next_tile_wanted));", "")),
    Bug("global memory read before the kernels ahead have ended", "grid-dependency",
        (MAIN, "griddepcontrol_wait();", "")),
    Bug("consumers keep their slot of the queue", "deadlock", (TILES, "if (lane == 0) reader.release();", "")),
    Bug("consumers ask for 8 registers too many", "deadlock",
        (STORAGE, "CONSUMER_REGISTERS = 232", "CONSUMER_REGISTERS = 240")),
)  # fmt: skip
