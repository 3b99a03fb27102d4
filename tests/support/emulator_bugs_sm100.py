"""The planted bugs of the Blackwell kernels: each an edit of a kernel's source, and what must be found when it runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from padless.kernels.sm100_dense.config import Sm100DenseConfig
from padless.kernels.sm100_dense.host import KERNEL as DENSE
from support import planted_bugs

EPILOGUE = "sm100_dense/store.cuh"
DESCRIPTORS = "device/sm100/descriptors.cuh"


@dataclass(frozen=True)
class Bug(planted_bugs.Bug):
    """problem: M, N and K, which show it."""

    problem: tuple[Any, ...] = (140, 520, 288)
    workers: int = 1  # CTAs or pairs


# --- the dense MXFP8 kernel --------------------------------------------------------------------------------

PAIR = Sm100DenseConfig(out_dtype=torch.float32)
STAGED = dataclasses.replace(PAIR, store="staged")
ONE = dataclasses.replace(PAIR, cta_group=1, block_n=128)

# Two workers and three tiles, of which the last is cut: each worker's second.
CUT: dict[str, Any] = {"config": dataclasses.replace(PAIR, cta_group=1), "problem": (70, 700, 160), "workers": 2}

WAIT_EMPTY = "mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);"
WAIT_FULL = "mbarrier_wait(shared_address(&shared.full[stage]), here.phase);"
WAIT_FREE = "mbarrier_wait(shared_address(&shared.free[accumulator]), (turn >> 1 & 1) ^ 1);"
WAIT_COMMON = "mbarrier_wait(shared_address(&shared.common_free), (turn & 1) ^ 1);"
WAIT_SUMS = "mbarrier_wait(shared_address(&shared.accumulator_full[accumulator][half]), turn >> 1 & 1);"
COMMIT_STAGE = "if (i == halves - 1) commit(shared.empty[stage]);"
COMMIT_SUMS = "if (is_last && s == stages - 1) commit(shared.accumulator_full[accumulator][half]);"
FENCE_AFTER = "tcgen05_fence_after_thread_sync();"
RELEASE = "if (OVERLAP > 0 && i == 0) release_columns(shared.common_free, lane);"
RELEASE_ALL = "if (i == CHUNKS - 1) release_columns(shared.free[accumulator], lane);"
SCALES = "sfa + slab * SCALE_ATOM_COLUMNS, sfb + slab * SCALE_ATOM_COLUMNS"
CLUSTER_SYNC = "barrier_cluster_arrive(); barrier_cluster_wait();"
COMMIT_BOTH = "tcgen05_commit_multicast<2>(shared_address(&barrier), 0b11);"


def dense(name: str, reports: str, *texts: str, config: Sm100DenseConfig = PAIR, **rest: Any) -> Bug:
    """A bug in the kernel's own file. texts: a text and what takes its place, and so on."""
    edits = zip(texts[::2], texts[1::2], strict=True)
    return Bug(name, reports, tuple(text for edit in edits for text in (DENSE, *edit)), config, **rest)


BUGS: tuple[Bug, ...] = (
    # ---- commits
    dense("commit to the even CTA alone", "deadlock", COMMIT_BOTH, COMMIT_BOTH.replace("0b11", "0b01")),
    dense("commit to the odd CTA alone", "deadlock", COMMIT_BOTH, COMMIT_BOTH.replace("0b11", "0b10")),
    dense("stage never given back", "deadlock", COMMIT_STAGE, ""),
    dense("stage given back before its products", "race", COMMIT_STAGE, "", WAIT_FULL,
        WAIT_FULL + " commit(shared.empty[stage]);", problem=(140, 264, 800)),
    dense("sums never announced", "deadlock", COMMIT_SUMS, ""),
    dense("sums announced before the last round", "race uninitialised-tensor-memory", COMMIT_SUMS,
        COMMIT_SUMS.replace("is_last", "!is_last")),
    dense("sums of both halves announced with the first", "race uninitialised-tensor-memory", COMMIT_SUMS, "",
        COMMIT_STAGE, COMMIT_STAGE + " if (is_last && s == stages - 1 && i == 0) for (int h = 0; h < 2; ++h)"
        " commit(shared.accumulator_full[accumulator][h]);"),
    dense("sums announced by a thread that issued nothing", "tensor-memory", COMMIT_SUMS, "",
        "if (cta_rank == 0 && elect_one()) issue_mma(shared, problem, tmem);",
        "if (cta_rank == 0) { if (elect_one()) issue_mma(shared, problem, tmem); else if (lane == 9)"
        " commit(shared.accumulator_full[0][0]); }", problem=(140, 136, 64)),
    # ---- tcgen05 fences and waits
    dense("no fence after the waits of the products", "missing-tcgen05-fence", WAIT_FREE + " " + FENCE_AFTER, WAIT_FREE,
        WAIT_COMMON + " " + FENCE_AFTER, WAIT_COMMON, WAIT_FULL + " " + FENCE_AFTER, WAIT_FULL),
    dense("no fence after the wait for sums", "missing-tcgen05-fence", WAIT_SUMS + " " + FENCE_AFTER, WAIT_SUMS),
    dense("no fence before columns are given back", "missing-tcgen05-fence",
        "tcgen05_fence_before_thread_sync(); __syncwarp(); if (lane != 0) return;", "__syncwarp(); if (lane) return;"),
    dense("loads of sums not waited for", "register-in-flight", "tcgen05_wait_ld();", ""),
    dense("columns given back before they are read", "race", RELEASE, "", "uint32_t sums[CHUNK_COLUMNS];",
        "uint32_t sums[CHUNK_COLUMNS]; " + RELEASE),
    # ---- the overlap
    dense("columns not waited for", "race", WAIT_FREE, ""),
    dense("common columns not waited for", "race", WAIT_COMMON, ""),
    dense("common columns multiplied first", "race", "(i == 1) != (is_last && first > 0)", "i == 0"),
    dense("common columns given back after another chunk", "race", "accumulator == 1 ? i : CHUNKS - 1 - i;",
        "true ? i : 0;"),
    dense("common columns never given back", "deadlock", RELEASE, ""),
    dense("columns never given back", "deadlock", RELEASE_ALL, ""),
    dense("columns given back for every chunk", "race mbarrier", "if (OVERLAP > 0 && i == 0) release", "release"),
    dense("one barrier for two accumulators", "deadlock race", WAIT_FREE, WAIT_FREE.replace("[accumulator]", "[0]"),
        RELEASE_ALL, RELEASE_ALL.replace("[accumulator]", "[0]")),
    dense("accumulators overlap by more than is waited for", "race", "constexpr int ACCUMULATOR_1 = BLOCK_N - OVERLAP;",
        "constexpr int ACCUMULATOR_1 = BLOCK_N - OVERLAP - 32;"),
    dense("scales inside the second accumulator", "", "constexpr int SFA_COLUMN = ACCUMULATOR_1 + BLOCK_N;",
        "constexpr int SFA_COLUMN = BLOCK_N;", problem=(140, 520, 64)),
    dense("parity of the free columns flipped", "deadlock race", WAIT_FREE,
        WAIT_FREE.replace("(turn >> 1 & 1) ^ 1", "turn >> 1 & 1")),
    dense("arrivals of one CTA awaited", "race mbarrier", "FREE_ARRIVALS = CTA_GROUP * STORE_WARPS;",
        "FREE_ARRIVALS = STORE_WARPS;"),
    dense("columns given back to the own CTA", "deadlock", "mbarrier_arrive_cluster(shared_address(&barrier), 0);",
        "mbarrier_arrive_cluster(shared_address(&barrier), cluster_cta_rank());"),
    # ---- loads
    dense("stage not waited for by the loads", "race", WAIT_EMPTY, "", problem=(140, 264, 800)),
    dense("stage not waited for by the products", "race", WAIT_FULL, ""),
    dense("too few bytes expected", "race mbarrier", "own_full, CTA_GROUP * (slabs", "own_full, 1 * (slabs"),
    dense("too many bytes expected", "deadlock", "tile.halves * SFB_BYTES));", "2 * SFB_BYTES + 512));"),
    dense("expected by both CTAs, each its own", "deadlock mbarrier race", "if (cta_rank == 0)  // for both CTAs", ""),
    dense("loads signal their own CTA", "deadlock", "const uint32_t full = pair_even_address(own_full);",
        "const uint32_t full = own_full;"),
    dense("scales of B to one CTA", "deadlock", "tile.column / HALF_N + h, 0b11);",
        "tile.column / HALF_N + h, 1 << cta_rank);"),
    dense("both CTAs load the same half of B", "", "tile.column + cta_rank * B_ROWS;", "tile.column;"),
    dense("end without waiting for the last commits", "exit race",
        "for (int i = 0; i < STAGES; ++i) { mbarrier_wait(shared_address(&shared.empty[pipeline.stage])",
        "for (int i = 0; i < 0; ++i) { mbarrier_wait(shared_address(&shared.empty[pipeline.stage])", CLUSTER_SYNC, "",
        CLUSTER_SYNC, ""),
    # ---- scales
    dense("SF id off by one", "", "SHAPE | scale_ids(step)", "SHAPE | scale_ids((step + 1) % 4)"),
    dense("one SF id for all", "", "SHAPE | scale_ids(step)", "SHAPE | scale_ids(0)"),
    Bug("SF ids of A and B exchanged with a shift", "",
        (DESCRIPTORS, "id << 29 | id << 4", "id << 29 | (id ^ 1) << 4"), PAIR),
    dense("scales of A and B exchanged", "", SCALES,
        "sfb + slab * SCALE_ATOM_COLUMNS, sfa + slab * SCALE_ATOM_COLUMNS"),
    dense("rows of atoms of B exchanged", "", "sfb + (h * SLABS + s) * (SCALE_ATOM_BYTES / 16)",
        "sfb + ((1 - h) * SLABS + s) * (SCALE_ATOM_BYTES / 16)"),
    dense("scales of the second stage over the first's", "", "tmem + SFA_COLUMN + s * SCALE_COLUMNS;",
        "tmem + SFA_COLUMN;"),
    dense("scales not copied", "uninitialised-tensor-memory",
        "for (int h = 0; h < HALVES; ++h) { if (h >= halves) break; tcgen05_cp",
        "for (int h = 1; h < HALVES; ++h) { if (h >= halves) break; tcgen05_cp"),
    dense("steps past K", "", "if (i >= steps) break;", ""),
    # ---- products
    dense("first product adds", "uninitialised-tensor-memory", "accumulate || i != 0);", "true);"),
    dense("every stage starts anew", "", "accumulate || i != 0);", "i != 0);"),
    dense("same K step twice", "", "(a + (slab * A_SLAB_BYTES + step * MMA_K) / 16)",
        "(a + (slab * A_SLAB_BYTES + step / 2 * 2 * MMA_K) / 16)"),
    Bug("descriptor of the older encoding", "descriptor",
        (DESCRIPTORS, "(uint64_t(2) << 61) | (uint64_t(1) << 46)", "(uint64_t(1) << 62)"), PAIR),
    Bug("wrong row pitch of an operand", "",
        (DESCRIPTORS, "uint64_t(1024 >> 4) << 32", "uint64_t(512 >> 4) << 32"), PAIR),
    dense("scales not told to be UE8M0", "descriptor", "SHAPE | scale_ids(step)",
        "(SHAPE ^ 1u << 23) | scale_ids(step)"),
    # ---- tensor memory
    dense("never freed", "tensor-memory", "tcgen05_dealloc<CTA_GROUP, TMEM_COLUMNS>(tmem);", ""),
    dense("freed in part", "tensor-memory", "tcgen05_dealloc<CTA_GROUP, TMEM_COLUMNS>",
        "tcgen05_dealloc<CTA_GROUP, 256>"),
    dense("too few columns", "tensor-memory", "constexpr int TMEM_COLUMNS = 512;", "constexpr int TMEM_COLUMNS = 256;",
        "static_assert(USED_COLUMNS <= TMEM_COLUMNS", "static_assert(USED_COLUMNS <= 512",
        "SFB_COLUMNS <= TMEM_COLUMNS ? 0", "SFB_COLUMNS <= 512 ? 0"),
    dense("lanes of another warp", "tensor-memory", "tmem + (warp * 32 << 16);", "tmem + ((warp ^ 1) * 32 << 16);"),
    # ---- start and end
    dense("no fence after mbarrier init", "mbarrier mbarrier-init", "fence_mbarrier_init();", ""),
    dense("pair not in step at the start", "mbarrier race", CLUSTER_SYNC, ""),
    dense("pair not in step at the end", "exit race", CLUSTER_SYNC, "", nth=1),
    # ---- the staged store
    Bug("no proxy fence before the store", "missing-proxy-fence",
        (EPILOGUE, "fence_proxy_async_shared();", ""), STAGED),
    Bug("buffer written while it is stored", "race",
        (EPILOGUE, "if (lane == 0) cp_async_bulk_wait_group_read<STORE_BUFFERS - 1>();", ""), STAGED),
    Bug("buffers mixed up", "race", (EPILOGUE, "staging + (turn & 1) *", "staging + (turn & 0) *"), STAGED),
    Bug("swizzle left out", "", (EPILOGUE, "at ^ (at >> 7 & (BYTES / 16 - 1)) << 4", "at"), STAGED),
    dense("CTA ends before its stores have read", "exit",
        "if (STORE_BYTES != 0 && lane == 0) cp_async_bulk_wait_group_read_all();", "", config=STAGED),
    # ---- the direct store
    Bug("row past the end stored", "out-of-bounds", (EPILOGUE, "if (row >= rows) return;", ""), PAIR),
    Bug("columns past the end stored", "out-of-bounds",
        (EPILOGUE, "if (j >= left) break;", ""), PAIR, problem=(140, 269, 64)),
    Bug("wide store off its alignment", "misaligned",
        (EPILOGUE, "d_is_aligned && left >= PIECE", "left >= PIECE"), PAIR, problem=(140, 269, 64)),
    # ---- tiles of the last round, cut
    dense("cut tile from the other half's operands", "", "= halves == 1 ? 0 : half;", "= half;", **CUT),
    dense("cut tile stored as if it were whole", "", "is_whole ? chunk : chunk % CHUNKS_A_HALF", "chunk", **CUT),
    Bug("second half of a cut tile left out", "",
        ("sm100_dense/tile_list.cuh", "total = cuts ? tiles + left : tiles;", "total = tiles;"), **CUT),
    dense("bytes of a whole tile expected for a cut one", "deadlock", "slabs * (A_SLAB_BYTES + tile.halves *",
        "slabs * (A_SLAB_BYTES + 2 *", **CUT),
    # ---- one CTA
    dense("one CTA: sums not waited for", "uninitialised-tensor-memory race", WAIT_SUMS, "", config=ONE),
    dense("one CTA: columns not waited for", "race", WAIT_FREE, "", config=ONE),
    dense("one CTA: columns given back after the first chunk", "race", RELEASE_ALL,
        RELEASE_ALL.replace("CHUNKS - 1", "0"), config=ONE),
    dense("one CTA: stage not waited for by the loads", "race", WAIT_EMPTY, "", config=ONE, problem=(140, 264, 800)),
)  # fmt: skip
