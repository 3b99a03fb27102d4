"""The planted bugs of the weight-gradient kernel: each an edit of its source, and what must be found when it runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from padless.kernels.sm90_fp8_wgrad.config import WgradConfig
from support import planted_bugs

FOLDER = "sm90_fp8_wgrad/"
MAIN, STORAGE, LOAD, MULTIPLY = (
    FOLDER + name for name in ("sm90_fp8_wgrad.cu", "storage.cuh", "load.cuh", "multiply.cuh")
)
STORE, SCHEDULE = "device/sm90/piece_store.cuh", "device/longest_first.cuh"
TILES, QUEUE = "device/gradient_tiles.cuh", "device/tile_queue.cuh"
RANK = "device/sorted_groups.cuh"
STORED = WgradConfig(block_m=128, num_stages=2, out_dtype=torch.float32)
TWO_WAVES = WgradConfig(block_m=256, num_stages=2, out_dtype=torch.float32)
TWO_BUFFERS = WgradConfig(block_m=256, num_stages=2)
CLUSTERED = WgradConfig(block_m=128, num_stages=2, cluster_n=2, out_dtype=torch.float32)
REDUCED = WgradConfig(
    block_m=256, num_stages=2, cluster_n=2, out_dtype=torch.float32, accumulate=True, reduced_pieces=2
)
COLUMN_SCALES = WgradConfig(block_m=128, num_stages=2, mode="1d1d", out_dtype=torch.float32)


@dataclass(frozen=True)
class Bug(planted_bugs.Bug):
    """poisoned: NaN in codes of nobody."""

    config: WgradConfig = STORED
    poisoned: bool = False


WAIT_EMPTY = "mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);"
WAIT_LOADED = "mbarrier_wait(d_loaded(shared, warpgroup, piece), (piece / NUM_D + parity) % 2);"
CLUSTER_SYNC = "barrier_cluster_arrive();\n        barrier_cluster_wait();"
WAIT_FULL = "mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);"

BUGS: tuple[Bug, ...] = (
    # ---- what is multiplied
    Bug("no K step left out of the last block", "",
        (MULTIPLY, "const int last_steps = (tokens - (blocks - 1) * BLOCK_T + WGMMA_K - 1) / WGMMA_K;",
        "const int last_steps = 4;"), quick=True, poisoned=True),
    Bug("a K step too many left out", "", (MULTIPLY, "(blocks - 1) * BLOCK_T + WGMMA_K - 1) / WGMMA_K;",
        "(blocks - 1) * BLOCK_T + WGMMA_K - 2) / WGMMA_K;")),
    Bug("a group of one block takes all its K steps", "",
        (MULTIPLY, "blocks == 1 ? last_steps : BLOCK_T / WGMMA_K", "BLOCK_T / WGMMA_K"), poisoned=True),
    Bug("scale rows counted from padded starts", "", (LOAD, "const int block_start = problem.block_starts[tile.group];",
        "const int block_start = a_start / BLOCK_T;"), quick=True),
    Bug("scales of X of the block before", "",
        (LOAD, "column, block_start + block);", "column, block_start + block - 1);")),
    Bug("tokens of X taken where dY has them", "", (LOAD, "b_start + t, column", "a_start + t, column")),
    Bug("first block added to the last tile", "", (MULTIPLY, "FIRST ? 0.0f : d[i]", "d[i]")),
    Bug("column scales of the wrong columns", "",
        (MULTIPLY, "ld_shared_v2_f32(sfb + i * 32", "ld_shared_v2_f32(sfb + (i ^ 1) * 32"), COLUMN_SCALES),
    Bug("the lower rows take the upper rows' scale", "", (MULTIPLY, "scale[i / 2 % 2]", "scale[0]")),
    # ---- what is stored
    Bug("first microbatch accumulates", "", (STORE, "if (piece < NUM_LOADED)", "if (true)"), quick=True),
    Bug("a later microbatch stores", "", (STORE, "if (piece < NUM_LOADED)", "if (false)"), onto=True),
    # -0 and NaN do not survive it
    Bug("empty groups get zeros added", "",
        (MAIN, "n_rows, n_columns, ACCUMULATE};", "n_rows, n_columns, false};"), onto=True),
    Bug("empty groups not stored", "", (MAIN, "n_rows, n_columns, ACCUMULATE};", "n_rows, n_columns, true};")),
    Bug("registers that hold no tile are stored", "",
        (STORE, "if (lane == 0 && tile.rows > 0)", "if (lane == 0)"), onto=True),
    Bug("the last tile is not staged", "deadlock exit",
        (MAIN, "#pragma unroll\n    for (int w = 0; w < WAVES; ++w) stage(w);\n}", "}")),
    Bug("a band of the tile order too low", "",
        (SCHEDULE, "(band * RASTER_M + in_band % height)", "(band * RASTER_M + in_band % RASTER_M)")),
    # ---- waits, arrivals and fences
    Bug("full barrier not waited for", "race", (MULTIPLY, WAIT_FULL, ""), quick=True),
    Bug("empty barrier not waited for", "race mbarrier", (LOAD, WAIT_EMPTY, "")),
    Bug("products not waited for", "register-in-flight", (MULTIPLY, "wgmma_wait_group<0>();", "")),
    Bug("no wgmma.fence", "missing-wgmma-fence", (MULTIPLY, "wgmma_fence();\n    const auto", "const auto")),
    Bug("no proxy fence before the store", "missing-proxy-fence",
        (STORE, "fence_proxy_async_shared();", ""), quick=True),
    # the proxy fence behind the table of groups would do as well
    Bug("no fence after mbarrier init", "mbarrier mbarrier-init",
        (MAIN, "fence_mbarrier_init();", "", MAIN, "fence_proxy_async_shared();  // what is added to", "//")),
    Bug("stage never released", "deadlock", (MULTIPLY, "if (arrives) mbarrier_arrive(empty);", "")),
    Bug("stage released before X's scales of its columns are read", "race",
        (MULTIPLY, "promote<FIRST>(d[w], p, scale, sfb, arrives);",
        "if (w == WAVES - 1) release_stage(shared, stage, lane, arrives);"
        " promote<FIRST>(d[w], p, scale, sfb, arrives); continue;"), COLUMN_SCALES),
    Bug("scale of X not waited for", "race mbarrier uninitialised-shared",
        (LOAD, "X_SCALES_ARE_BLOCKS ? 2 : 1;", "1;", LOAD, "cp_async_mbarrier_arrive_noinc(full);", "")),
    Bug("scale of X never arrives", "deadlock", (LOAD, "cp_async_mbarrier_arrive_noinc(full);", "")),
    Bug("expect_tx forgets the scales", "race mbarrier deadlock", (LOAD, "+ BLOCK_M * 4 +", "+")),
    Bug("staged before the last store has read", "race",
        (STORE, "if (lane == 0) cp_async_bulk_wait_group_read_all();", "")),
    Bug("one store too few waited for", "race",
        (STORE, "cp_async_bulk_wait_group_read_all", "cp_async_bulk_wait_group_read<1>"), TWO_BUFFERS),
    Bug("one store of half a wave too few waited for", "race",
        (STORE, "cp_async_bulk_wait_group_read_all", "cp_async_bulk_wait_group_read<1>"), TWO_WAVES),
    Bug("both buffers share a barrier", "barrier race deadlock",
        (STORE, "return 1 + warpgroup * NUM_D + piece % NUM_D;", "return 1 + warpgroup * NUM_D;"), seeds=8),
    Bug("the first piece's buffer is never said to be free", "deadlock", (STORE, "hand_out(tile, 0);", "")),
    Bug("old values not waited for", "race", (STORE, WAIT_LOADED, ";"), onto=True),
    Bug("old values not waited for in two waves", "race", (STORE, WAIT_LOADED, ";"), TWO_WAVES, onto=True),
    Bug("a tile's parity that stays", "race deadlock mbarrier", (STORE, "parity ^= 1;", "parity ^= 0;"), onto=True),
    Bug("old values fetched over what is being stored", "race",
        (STORE, "if (lane == 0) cp_async_bulk_wait_group_read_all();", ""), TWO_WAVES, onto=True),
    Bug("old values of another piece", "", (STORE, "piece_column(tile, piece) + s * SLAB_COLUMNS, row",
        "piece_column(tile, 0) + s * SLAB_COLUMNS, row"), onto=True),
    Bug("too few bytes of old values expected", "race mbarrier deadlock",
        (STORE, "mbarrier_arrive_expect_tx(loaded, PIECE_SLABS *", "mbarrier_arrive_expect_tx(loaded,"), onto=True),
    Bug("a piece of the copy engine's is stored", "",
        (STORE, "piece >= NUM_LOADED", "piece > NUM_LOADED"), REDUCED, onto=True),
    Bug("a piece added twice", "", (STORE, "piece >= NUM_LOADED", "piece >= NUM_LOADED - 1"), REDUCED, onto=True),
    Bug("an empty buffer is never handed out", "deadlock",
        (STORE, "mbarrier_arrive(d_loaded(shared, warpgroup, piece));", ";"), REDUCED, onto=True),
    Bug("old values not waited for beside the copy engine's", "race", (STORE, WAIT_LOADED, ";"), REDUCED, onto=True),
    # ---- clusters
    Bug("no cluster barrier after the set-up", "mbarrier", (MAIN, CLUSTER_SYNC, ""), CLUSTERED),
    Bug("no cluster barrier before the end", "exit", (MAIN, CLUSTER_SYNC, ""), CLUSTERED, nth=1),
    Bug("rows of A for its own CTA alone", "deadlock",
        (LOAD, "(1 << CLUSTER_N) - 1", "1 << cluster_cta_rank()"), CLUSTERED),
    Bug("both CTAs bring the same rows of A", "",
        (LOAD, "const int first = static_cast<int>(cluster_cta_rank()) * ROWS;", "const int first = 0;"), CLUSTERED,
        quick=True),
    Bug("both CTAs ask for the next tile", "mbarrier", (LOAD, "cluster_cta_rank() == 0;", "true;"), CLUSTERED),
    Bug("both CTAs take the first one's columns", "",
        (STORAGE, "tile.column + static_cast<int>(cluster_cta_rank()) * BLOCK_N;", "tile.column;"), CLUSTERED),
    Bug("a stage released to its own CTA alone", "deadlock",
        (MULTIPLY, "if (arrives) mbarrier_arrive_cluster(empty, lane);",
        "if (lane == cluster_cta_rank()) mbarrier_arrive_cluster(empty, lane);"), CLUSTERED),
    Bug("empty barrier counts one CTA of the cluster", "race mbarrier",
        (MAIN, "CLUSTER_N * NUM_CONSUMER_WARPS", "NUM_CONSUMER_WARPS"), CLUSTERED, seeds=8),
    Bug("half a wave staged where the other half is", "", (STORAGE, "piece % PIECES_PER_WAVE * PIECE_COLUMNS", "0")),
    Bug("store does not wait for what is staged", "race deadlock barrier",
        (STORE, "bar_sync(d_full(warpgroup, piece), STORE_THREADS);", "")),
    Bug("consumer does not wait for free memory", "race deadlock barrier",
        (STORE, "bar_sync(d_free(warpgroup, piece), STORE_THREADS);", ";")),
    Bug("both warpgroups share their barriers", "barrier race deadlock",
        (STORE, "return 1 + warpgroup * NUM_D + piece % NUM_D;", "return 1 + piece % NUM_D;"), seeds=8),
    Bug("store not committed", "race exit", (STORE, "cp_async_bulk_commit_group();", "")),
    Bug("CTA ends before its stores have read", "exit",
        (STORE, "if (lane == 0) cp_async_bulk_wait_group_read_all();", ""), nth=1),
    Bug("empty groups ask for no next tile", "deadlock",
        (LOAD, "if (blocks == 0 && draws) mbarrier_arrive(shared_address(&shared.next_tile_wanted));", "")),
    Bug("global memory read before the kernels ahead have ended", "grid-dependency",
        (MAIN, "griddepcontrol_wait();", "")),
    Bug("consumers keep their slot of the queue", "deadlock", (TILES, "if (lane == 0) reader.release();", "")),
    Bug("consumers pass over tiles", "deadlock mbarrier race",
        (MULTIPLY, "if (wave == WAVES - 1) next();", "if (wave == WAVES - 1) next(), next();")),
    # and once more when it is: a tile that there is not may have rows without end
    Bug("a consumer reads the queue before it is filled", "race", (QUEUE, "wait(); tile = queue.tiles[pipeline.stage];",
        "(void)*static_cast<volatile int*>(&queue.tiles[pipeline.stage].rows);"
        " wait(); tile = queue.tiles[pipeline.stage];")),
    Bug("store warp keeps its slot of the queue", "deadlock",
        (STORE, "if (next.rows > 0 && lane == 0) reader.release();", "")),
    Bug("queue does not wait for the store warps", "race mbarrier",
        (STORAGE, "NUM_CONSUMER_WARPS + 1 + NUM_MMA_WARPGROUPS;", "NUM_CONSUMER_WARPS + 1;"), seeds=8),
    Bug("the groups' order read before it is written", "race uninitialised-shared",
        (RANK, "gather<NUM_THREADS>(rows_together, num_groups, any & TALL);\n        __syncthreads();",
        "gather<NUM_THREADS>(rows_together, num_groups, any & TALL);")),
    Bug("scale rows past the end", "out-of-bounds", (LOAD, "problem.sfb + static_cast<long long>(scale_row)",
        "problem.sfb + static_cast<long long>(scale_row + problem.scale_rows)")),
    Bug("consumers ask for 8 registers too many", "deadlock",
        (STORAGE, "CONSUMER_REGISTERS = 232", "CONSUMER_REGISTERS = 240")),
)  # fmt: skip
