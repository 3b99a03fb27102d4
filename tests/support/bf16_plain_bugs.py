"""The planted bugs of the plain bf16 kernel: each an edit of its source, and what must be found when it runs."""

from __future__ import annotations

import torch

from padless.kernels.sm90_bf16_plain.config import Bf16PlainConfig
from support.planted_bugs import Bug

FOLDER = "sm90_bf16_plain/"
MAIN, STORAGE, LOAD = (FOLDER + name for name in ("sm90_bf16_plain_grouped_gemm.cu", "storage.cuh", "load.cuh"))
MULTIPLY, STORE = "device/sm90/bf16_multiply.cuh", "device/sm90/piece_store.cuh"
ORDER = "device/ranked_rows.cuh"
STORED = Bf16PlainConfig(block_n=128, num_stages=2, out_dtype=torch.float32)
N_MAJOR = Bf16PlainConfig(block_n=128, num_stages=2, n_major=True, out_dtype=torch.float32)


WAIT_EMPTY = "mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);"
WAIT_FULL = "mbarrier_wait(shared_address(&shared.full[pipeline.stage]), pipeline.phase);"

BUGS: tuple[Bug, ...] = (
    Bug("rows of the next group are stored", "",
        (STORAGE, "store_slab_ragged(map_d, slab, column, row, tile.row + tile.rows);",
        "store_slab_ragged(map_d, slab, column, row, row + WGMMA_M);"), quick=True),
    Bug("a K step too many left out", "",
        (STORAGE, "(k_blocks() - 1) * BLOCK_K + WGMMA_K - 1) / WGMMA_K", "(k_blocks() - 1) * BLOCK_K) / WGMMA_K")),
    Bug("weights of the first group for all", "", (LOAD, "k, tile.column, tile.group);", "k, tile.column, 0);")),
    Bug("a chunk of weights loaded where the first is", "",
        (LOAD, "destination + i * CHUNK_BYTES, full", "destination, full"), N_MAJOR),
    Bug("weights read as if K were contiguous", "",
        (STORAGE, "B_IS_MN_MAJOR = B_IS_N_MAJOR", "B_IS_MN_MAJOR = false"), N_MAJOR, quick=True),
    Bug("both warpgroups multiply the same rows", "", (MULTIPLY, "warpgroup * A_WARPGROUP_BYTES", "0")),
    Bug("first products added to the last tile", "", (MULTIPLY, "step != 0 || accumulate);", "true);")),
    Bug("tiles counted from groups of one tile", "",
        (ORDER, "const int m_tiles = (rows + BLOCK_M - 1) / BLOCK_M;", "const int m_tiles = rows > 0;")),
    Bug("a group's tiles begin where it ends", "",
        (ORDER, "in_group, group, end - rows, end", "in_group, group, end, end")),
    Bug("full barrier not waited for", "race", (MULTIPLY, WAIT_FULL, ""), quick=True),
    Bug("empty barrier not waited for", "race mbarrier", (LOAD, WAIT_EMPTY, "")),
    Bug("products not waited for", "register-in-flight", (MULTIPLY, "wgmma_wait_group<0>();", "")),
    Bug("no proxy fence before the store", "missing-proxy-fence", (STORE, "fence_proxy_async_shared();", "")),
    Bug("the m64 that is not loaded is waited for", "race mbarrier deadlock",
        (LOAD, "m64s * M64_BYTES + B_BYTES", "2 * M64_BYTES + B_BYTES")),
    Bug("a skipped tile keeps its stages", "deadlock race mbarrier",
        (MAIN, "release_stage(shared, pipeline.stage, lane);", "")),
    Bug("a skipped tile is released before it has come", "race mbarrier deadlock", (MAIN, WAIT_FULL, ""), seeds=8),
    Bug("a skipped tile is not staged", "deadlock exit barrier",
        (MAIN, "next();\n        }", "next();\n            continue;\n        }")),
    Bug("global memory read before the kernels ahead have ended", "grid-dependency",
        (MAIN, "griddepcontrol_wait();", "")),
    Bug("no fence after mbarrier init", "mbarrier mbarrier-init", (MAIN, "fence_mbarrier_init();", "")),
)  # fmt: skip
