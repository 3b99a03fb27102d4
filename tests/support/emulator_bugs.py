"""The planted bugs: each an edit of the real Hopper kernel's source, and what must be found when it runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from support import planted_bugs

MAIN = "sm90_fp8/sm90_fp8_grouped_gemm.cu"
STORAGE = "sm90_fp8/storage.cuh"
LOAD = "sm90_fp8/load.cuh"
MULTIPLY = "sm90_fp8/multiply.cuh"
STORE = "sm90_fp8/store.cuh"
EPILOGUE = "device/sm90/output.cuh"
MEMORY = "device/ptx/memory.cuh"
MBARRIER = "device/ptx/mbarrier.cuh"
QUEUE = "device/tile_queue.cuh"
BASE = Sm90Fp8Config(block_m=128, block_n=128, num_stages=3)
CONSUMERS_STORE = dataclasses.replace(BASE, block_n=192)
CLUSTER = dataclasses.replace(BASE, cluster_n=2)
ROW_MAJOR = dataclasses.replace(BASE, scales="k", scale_window_k_blocks=8)
FLOAT_OUT = dataclasses.replace(BASE, out_dtype=torch.float32)


@dataclass(frozen=True)
class Bug(planted_bugs.Bug):
    config: Sm90Fp8Config = BASE
    sizes: tuple[int, ...] = (70, 0, 129, 3)
    n: int = 256
    k: int = 640
    workers: int = 1  # CTAs, or clusters of them


WAIT_EMPTY = "mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);"
WAIT_FULL = "mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);"
TWO_M64S = dataclasses.replace(BASE, block_m=256)
RELEASE = "if (w == NUM_WAVES - 1) release_stage(shared, stage, lane);"
CLUSTER_SYNC = "barrier_cluster_arrive();\n        barrier_cluster_wait();"

BUGS: tuple[Bug, ...] = (
    # ---- fences
    Bug("no proxy fence before the store", "missing-proxy-fence", (STORE, "fence_proxy_async_shared();", "")),
    Bug("no fence after mbarrier init", "mbarrier mbarrier-init", (MAIN, "fence_mbarrier_init();", "")),
    Bug("no wgmma.fence", "missing-wgmma-fence", (MULTIPLY, "wgmma_fence();", "")),
    Bug("proxy fence after the barrier, by the issuer only after its stores", "missing-proxy-fence",
        (STORE, "fence_proxy_async_shared();", "", STORE, "cp_async_bulk_commit_group();",
        "fence_proxy_async_shared(); cp_async_bulk_commit_group();")),
    # ---- waits
    Bug("products not waited for", "register-in-flight", (MULTIPLY, "wgmma_wait_group<0>();", "")),
    Bug("one product group too few waited for", "register-in-flight",
        (MULTIPLY, "wgmma_wait_group<0>", "wgmma_wait_group<1>")),
    Bug("products not committed", "register-in-flight deadlock", (MULTIPLY, "wgmma_commit_group();", "")),
    Bug("full barrier not waited for", "race", (MULTIPLY, WAIT_FULL, "")),
    Bug("full barrier waited for in a tile's first K block alone", "race",
        (MULTIPLY, WAIT_FULL, "if (kb == 0) " + WAIT_FULL)),
    Bug("full barrier not waited for in a short tile", "race",
        (MULTIPLY, WAIT_FULL, "if (!IS_SHORT) " + WAIT_FULL), config=TWO_M64S, sizes=(300, 3)),
    Bug("full barrier not waited for by a warpgroup of two m64s", "race",
        (MULTIPLY, WAIT_FULL, ""), config=TWO_M64S, sizes=(300, 3)),
    Bug("parity flipped for a warpgroup of two m64s", "race deadlock", (MULTIPLY, WAIT_FULL,
        WAIT_FULL.replace("pipeline.phase)", "pipeline.phase ^ 1)")), config=TWO_M64S, sizes=(300, 3)),
    Bug("empty barrier not waited for", "race mbarrier", (LOAD, WAIT_EMPTY, "")),
    Bug("store's shared memory reused before a store warp's copies have read it", "race",
        (STORE, "            cp_async_bulk_wait_group_read_all();\n        }\n", "        }\n")),
    Bug("store's shared memory reused before a consumer's copies have read it", "race",
        (STORE, "if (issuer) cp_async_bulk_wait_group_read_all();", ""), CONSUMERS_STORE),
    Bug("CTA ends before its stores have read", "exit",
        (MAIN, "if (CONSUMERS_STORE && warp == 0 && lane == 0) cp_async_bulk_wait_group_all();", ""), CONSUMERS_STORE),
    Bug("store not committed", "race exit", (STORE, "    cp_async_bulk_commit_group();\n", "")),
    Bug("rows that no copy brings left as they were", "uninitialised-shared",
        (MAIN, "clear_missing_rows<STAGES, BLOCK_M, NUM_CONSUMER_WARPS * 32>(shared.a[0], problem.row_box(), m);", ""),
        sizes=(7, 0, 20, 3)),
    Bug("cleared rows not handed to the tensor core", "missing-proxy-fence", ("device/sm90/row_box.cuh",
        "    fence_proxy_async_shared();  // the tensor core reads them\n", ""), sizes=(7, 0, 20, 3)),
    Bug("rows loaded while they are still cleared", "race missing-proxy-fence",
        (MAIN, "warp == LOAD_WARP && !problem.boxes_vary()", "warp == LOAD_WARP"), sizes=(40, 0, 30, 3)),
    Bug("more bytes expected than the box of few rows has", "deadlock",
        (LOAD, "boxes * problem.row_box() * BLOCK_K + B_BYTES", "m64s * M64_BYTES + B_BYTES"), sizes=(7, 0, 20, 3)),
    # ---- phases and stages
    Bug("producer's parity flipped", "deadlock race mbarrier", (LOAD, "pipeline.phase ^ 1", "pipeline.phase")),
    Bug("consumer's parity flipped", "race deadlock",
        (MULTIPLY, WAIT_FULL, WAIT_FULL.replace("pipeline.phase)", "pipeline.phase ^ 1)"))),
    Bug("phase never toggles", "deadlock race mbarrier", ("device/pipeline.cuh", "phase ^= 1;", "")),
    Bug("consumer waits on the stage before", "race deadlock",
        (MULTIPLY, WAIT_FULL, WAIT_FULL.replace("[stage]", "[(stage + STAGES - 1) % STAGES]"))),
    Bug("ring one stage longer than the memory", "race mbarrier deadlock out-of-bounds",
        ("device/pipeline.cuh", "if (++stage == STAGES)", "if (++stage == STAGES + 1)")),
    # ---- arrivals and counts
    Bug("stage never released", "deadlock", (MULTIPLY, RELEASE, "")),
    Bug("scales multiplied where the compiler likes, behind the release of their stage", "unread-load",
        (MULTIPLY, "pin_register(scale[r][c]);", ""), CONSUMERS_STORE),
    Bug("stage released twice", "mbarrier race", (MULTIPLY, RELEASE, RELEASE + RELEASE)),
    Bug("stage released before the products are done", "race",
        (MULTIPLY, RELEASE, "", MULTIPLY, "wgmma_wait_group<0>();", RELEASE + "\n            wgmma_wait_group<0>();")),
    Bug("every lane releases", "mbarrier",
        (MULTIPLY, "if (lane == 0) mbarrier_arrive(empty);", "mbarrier_arrive(empty);")),
    Bug("empty barrier expects one arrival too many", "deadlock",
        (MAIN, "CLUSTER_N * NUM_CONSUMER_WARPS);", "CLUSTER_N * NUM_CONSUMER_WARPS + 1);")),
    Bug("empty barrier expects one arrival too few", "race mbarrier",
        (MAIN, "CLUSTER_N * NUM_CONSUMER_WARPS);", "CLUSTER_N * NUM_CONSUMER_WARPS - 1);")),
    Bug("full barrier expects two arrivals", "deadlock", (MAIN, "mbarrier_init(shared_address(&shared.full[s]), 1)",
        "mbarrier_init(shared_address(&shared.full[s]), 2)")),
    Bug("expect_tx 16 bytes too many", "deadlock", (LOAD, "(full, loads.bytes);", "(full, loads.bytes + 16);")),
    Bug("expect_tx 16 bytes too few", "race mbarrier deadlock",
        (LOAD, "(full, loads.bytes);", "(full, loads.bytes - 16);")),
    Bug("expect_tx forgets the scales", "race mbarrier deadlock", (LOAD, " + sfa_copies * SFA_COPY_FLOATS * 4;", ";")),
    Bug("barrier initialised twice", "mbarrier mbarrier-init",
        (MAIN, "fence_mbarrier_init();", "mbarrier_init(shared_address(&shared.full[0]), 1); fence_mbarrier_init();")),
    Bug("barriers not initialised", "mbarrier", (MAIN, "mbarrier_init(shared_address(&shared.window_full), 1);", "",
        MAIN, "mbarrier_init(shared_address(&shared.full[s]), 1);", "")),
    # ---- CTA barriers and lanes
    # of at most 32 groups
    Bug("no __syncthreads after the set-up", "mbarrier race", (MAIN, "bar_sync(START_BARRIER, NUM_THREADS);", ";")),
    Bug("store warp does not wait for what is staged", "race",
        (STORE, "bar_sync(d_full(warpgroup), STORE_THREADS);\n        if (lane == 0) {", "if (lane == 0) {")),
    Bug("no barrier between staging and a consumer's store", "race",
        (STORE, "bar_sync(d_full(warpgroup), STORE_THREADS);\n    else", ";\n    else"), CONSUMERS_STORE),
    Bug("staged before the last store has read", "race",
        (STORE, "    bar_sync(d_free(warpgroup), STORE_THREADS);\n", "")),
    Bug("no barrier between the last store's wait and staging", "race",
        (STORE, "    bar_sync(d_free(warpgroup), STORE_THREADS);\n", ""), CONSUMERS_STORE),
    Bug("store warp says nothing of free memory", "deadlock",
        (STORE, "bar_arrive(d_free(warpgroup), STORE_THREADS);", "")),
    Bug("store barrier counts one warp too many", "barrier deadlock",
        (STORE, "128 + (CONSUMERS_STORE ? 0 : 32)", "160 + (CONSUMERS_STORE ? 0 : 32)")),
    Bug("store warp meets a warpgroup that skips the tile", "deadlock race",
        (STORE, "if (warpgroup * WGMMA_M >= tile.rows) continue;", "")),
    Bug("store warp keeps its slot of the queue", "deadlock", (STORE, "if (lane == 0) reader.release();", "")),
    Bug("queue does not wait for the store warps", "race mbarrier",
        (MAIN, "CLUSTER_N * NUM_TILE_READERS);", "CLUSTER_N * (NUM_CONSUMER_WARPS + 1));"), n=1024, k=128, seeds=8),
    Bug("all lanes of the producer warp load", "mbarrier race",
        (MAIN, "if (elect_one()) {\n                if (SCALES_K_MAJOR", "{\n                if (SCALES_K_MAJOR")),
    Bug("both warpgroups share one store barrier", "barrier race deadlock",
        (STORE, "return 1 + warpgroup;", "return 1;"), seeds=8),
    # ---- resources and addresses
    Bug("registers beyond the SM", "deadlock registers",
        (STORAGE, "NUM_MMA_WARPGROUPS == 1 ? 248 : 232", "NUM_MMA_WARPGROUPS == 1 ? 248 : 256")),
    # 66560 registers where the CTA has 64512
    Bug("consumers ask for 8 registers more than the producer leaves them", "deadlock",
        (STORAGE, "NUM_MMA_WARPGROUPS == 1 ? 248 : 232", "NUM_MMA_WARPGROUPS == 1 ? 248 : 240")),
    Bug("the producer keeps 8 registers too many", "deadlock",
        (STORAGE, "PRODUCER_REGISTERS = 40", "PRODUCER_REGISTERS = 48")),
    Bug("scales read past their end", "out-of-bounds",
        (MULTIPLY, "kb < k_blocks ? __ldg(rows[j] + kb) : 0.0f", "__ldg(rows[j] + kb)")),
    Bug("scale copy starts off a 16-byte boundary", "tma",
        (LOAD, "(tile.row & ~3) + i * SFA", "tile.row + 1 + i * SFA")),
    Bug("rows of the next group overwritten", "",
        (STORE, "const int rows = left < WGMMA_M ? left : WGMMA_M;", "const int rows = WGMMA_M;")),
    # ---- wrong values only
    Bug("swizzle bit wrong in the epilogue", "",
        (EPILOGUE, "const uint32_t chunk = i % 8 + lane / 16;", "const uint32_t chunk = (i % 8 + lane / 16) ^ 1;")),
    Bug("K step of a descriptor wrong", "", (MULTIPLY, "k_major_128b_descriptor(b + k / 16), k != 0)",
        "k_major_128b_descriptor(b + (k & 64) / 16), k != 0)")),
    Bug("accumulators not cleared", "uninitialised-register",
        (MULTIPLY, "k_major_128b_descriptor(b + k / 16), k != 0)", "k_major_128b_descriptor(b + k / 16), 1)")),
    Bug("weight scale of the wrong K block", "", (MULTIPLY, "kb & 31)", "(kb + 1) & 31)")),
)  # fmt: skip
