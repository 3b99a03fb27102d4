"""The planted bugs of the Blackwell kernels: each an edit of a kernel's source, and what must be found when it runs.

A bug is found on a seed if one of its `kinds` is reported; these name the fault itself, rather than a consequence. With
no `kinds` it is one of arithmetic alone, which the output has to show.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from padless.kernels.sm100_dense.config import Sm100DenseConfig
from padless.kernels.sm100_dense.host import KERNEL as DENSE
from support.emulator_variants import Edit

TCGEN05 = "device/ptx/tcgen05.cuh"
EPILOGUE = "sm100_dense/store.cuh"
DESCRIPTORS = "device/sm100/descriptors.cuh"


@dataclass(frozen=True)
class Bug:
    """One fault of `kernel`, compiled for `config`, and the problem that shows it. `nth`: which occurrence is edited."""

    name: str
    kinds: tuple[str, ...]
    edits: tuple[Edit, ...]
    config: Any
    kernel: str = DENSE
    problem: tuple[Any, ...] = (140, 520, 288)
    seeds: int = 4  # within which it must be found
    nth: int = 0


# --- the dense MXFP8 kernel --------------------------------------------------------------------------------

PAIR = Sm100DenseConfig(out_dtype=torch.float32)
STAGED = dataclasses.replace(PAIR, store="staged")
ONE = dataclasses.replace(PAIR, cta_group=1, block_n=128)

WAIT_EMPTY = "mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);"
WAIT_FULL = "mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);"
WAIT_FREE = "mbarrier_wait(shared_address(&shared.free[turn % FREE_BARRIERS]), (turn / FREE_BARRIERS & 1) ^ 1);"
WAIT_SUMS = "mbarrier_wait(shared_address(&shared.accumulator_full[accumulator]), turn >> 1 & 1);"
FENCE_AFTER = "tcgen05_fence_after_thread_sync();"
RELEASE = "if (i == LAST_NEEDED_CHUNK) release_columns(shared.free[turn % FREE_BARRIERS], lane);"
CLUSTER_SYNC = "barrier_cluster_arrive(); barrier_cluster_wait();"
COMMIT_BOTH = "tcgen05_commit_multicast<2>(shared_address(&barrier), 0b11);"


def dense(
    name: str, kinds: tuple[str, ...], *edits: tuple[str, str], config: Sm100DenseConfig = PAIR, **rest: Any
) -> Bug:
    """A bug in the kernel's own file."""
    return Bug(name, kinds, tuple((DENSE, old, new) for old, new in edits), config, **rest)


DENSE_BUGS: tuple[Bug, ...] = (
    # ---- commits
    dense("commit to the even CTA alone", ("deadlock",), (COMMIT_BOTH, COMMIT_BOTH.replace("0b11", "0b01"))),
    dense("commit to the odd CTA alone", ("deadlock",), (COMMIT_BOTH, COMMIT_BOTH.replace("0b11", "0b10"))),
    dense("stage never given back", ("deadlock",), ("commit(shared.empty[stage]);", "")),
    dense(
        "stage given back before its products",
        ("race",),
        ("commit(shared.empty[stage]);", ""),
        (WAIT_FULL, WAIT_FULL + " commit(shared.empty[stage]);"),
        problem=(140, 264, 800),
    ),
    dense("sums never announced", ("deadlock",), ("commit(shared.accumulator_full[accumulator]);", "")),
    dense(
        "sums announced before the last stage",
        ("race", "uninitialised-tensor-memory"),
        ("commit(shared.accumulator_full[accumulator]);", ""),
        (
            "commit(shared.empty[stage]);",
            "if (kb == k_blocks - 2) commit(shared.accumulator_full[accumulator]); commit(shared.empty[stage]);",
        ),
    ),
    dense(
        "sums announced by a thread that issued nothing",
        ("tensor-memory",),
        ("commit(shared.accumulator_full[accumulator]);", ""),
        (
            "if (cta_rank == 0 && elect_one()) issue_mma(shared, problem, tmem);",
            "if (cta_rank == 0) { if (elect_one()) issue_mma(shared, problem, tmem); else if (lane == 9)"
            " commit(shared.accumulator_full[0]); }",
        ),
        problem=(140, 136, 64),
    ),
    # ---- tcgen05 fences and waits
    dense(
        "no fence after the waits of the products",
        ("missing-tcgen05-fence",),
        (WAIT_FREE + " " + FENCE_AFTER, WAIT_FREE),
        (WAIT_FULL + " " + FENCE_AFTER, WAIT_FULL),
    ),
    dense("no fence after the wait for sums", ("missing-tcgen05-fence",), (WAIT_SUMS + " " + FENCE_AFTER, WAIT_SUMS)),
    dense(
        "no fence before columns are given back",
        ("missing-tcgen05-fence",),
        ("tcgen05_fence_before_thread_sync(); __syncwarp(); if (lane != 0) return;", "__syncwarp(); if (lane) return;"),
    ),
    dense("loads of sums not waited for", ("register-in-flight",), ("tcgen05_wait_ld();", "")),
    dense(
        "columns given back before they are read",
        ("race",),
        (RELEASE, ""),
        ("uint32_t sums[CHUNK_COLUMNS];", "uint32_t sums[CHUNK_COLUMNS]; " + RELEASE),
    ),
    # ---- the overlap
    dense("columns not waited for", ("race",), (WAIT_FREE, "")),
    dense("common columns given back after another chunk", ("race",), ("i == 0 ? CHUNKS - 1 : i - 1;", "i;")),
    dense("columns never given back", ("deadlock",), (RELEASE, "")),
    dense(
        "columns given back for every chunk", ("race", "mbarrier"), ("if (i == LAST_NEEDED_CHUNK) release", "release")
    ),
    dense(
        "one barrier's parity for two accumulators",
        ("deadlock", "race"),
        ("constexpr int FREE_BARRIERS = OVERLAP == 0 ? 2 : 1;", "constexpr int FREE_BARRIERS = 2;"),
    ),
    dense(
        "accumulators overlap by more than is waited for",
        ("race",),
        ("constexpr int ACCUMULATOR_1 = BLOCK_N - OVERLAP;", "constexpr int ACCUMULATOR_1 = BLOCK_N - OVERLAP - 32;"),
    ),
    dense(
        "scales inside the second accumulator",
        (),
        ("constexpr int SFA_COLUMN = ACCUMULATOR_1 + BLOCK_N;", "constexpr int SFA_COLUMN = BLOCK_N;"),
        problem=(140, 520, 64),
    ),
    dense(
        "parity of the free columns flipped",
        ("deadlock", "race"),
        ("(turn / FREE_BARRIERS & 1) ^ 1);", "turn / FREE_BARRIERS & 1);"),
    ),
    dense(
        "arrivals of one CTA awaited",
        ("race", "mbarrier"),
        ("FREE_ARRIVALS = CTA_GROUP * STORE_WARPS;", "FREE_ARRIVALS = STORE_WARPS;"),
    ),
    dense(
        "columns given back to the own CTA",
        ("deadlock",),
        (
            "mbarrier_arrive_cluster(shared_address(&barrier), 0);",
            "mbarrier_arrive_cluster(shared_address(&barrier), cluster_cta_rank());",
        ),
    ),
    # ---- loads
    dense("stage not waited for by the loads", ("race",), (WAIT_EMPTY, ""), problem=(140, 264, 800)),
    dense("stage not waited for by the products", ("race",), (WAIT_FULL, "")),
    dense("too few bytes expected", ("race", "mbarrier"), ("own_full, CTA_GROUP * (slabs", "own_full, 1 * (slabs")),
    dense("too many bytes expected", ("deadlock",), ("+ SFA_BYTES + SFB_BYTES));", "+ SFA_BYTES + 2 * SFB_BYTES));")),
    dense(
        "expected by both CTAs, each its own",
        ("deadlock", "mbarrier", "race"),
        ("if (cta_rank == 0)  // for both CTAs", ""),
    ),
    dense(
        "loads signal their own CTA",
        ("deadlock",),
        ("const uint32_t full = pair_even_address(own_full);", "const uint32_t full = own_full;"),
    ),
    dense(
        "scales of B to one CTA",
        ("deadlock",),
        ("full, 0, atom, tile.column / 128 + j, 0b11);", "full, 0, atom, tile.column / 128 + j, 1 << cta_rank);"),
    ),
    dense("both CTAs load the same half of B", (), ("tile.column + cta_rank * B_ROWS;", "tile.column;")),
    dense(
        "end without waiting for the last commits",
        ("exit", "race"),
        (
            "for (int i = 0; i < STAGES; ++i) { mbarrier_wait(shared_address(&shared.empty[pipeline.stage])",
            "for (int i = 0; i < 0; ++i) { mbarrier_wait(shared_address(&shared.empty[pipeline.stage])",
        ),
        (CLUSTER_SYNC, ""),
        (CLUSTER_SYNC, ""),
    ),
    # ---- scales
    dense("SF id off by one", (), ("SHAPE | scale_ids(j)", "SHAPE | scale_ids((j + 1) % 4)")),
    dense("one SF id for all", (), ("SHAPE | scale_ids(j)", "SHAPE | scale_ids(0)")),
    Bug(
        "SF ids of A and B exchanged with a shift",
        (),
        ((DESCRIPTORS, "id << 29 | id << 4", "id << 29 | (id ^ 1) << 4"),),
        PAIR,
    ),
    dense(
        "scales of A and B exchanged",
        (),
        ("SHAPE | scale_ids(j), sfa_at, sfb_at", "SHAPE | scale_ids(j), sfb_at, sfa_at"),
    ),
    dense(
        "rows of atoms of B exchanged",
        (),
        ("sfb + (j * SLABS + s) * (SCALE_ATOM_BYTES / 16)", "sfb + (s * SLABS + j) * (SCALE_ATOM_BYTES / 16)"),
    ),
    dense(
        "scales of the second slab over the first's",
        (),
        ("tmem + SFA_COLUMN + s * SCALE_ATOM_COLUMNS;", "tmem + SFA_COLUMN;"),
        ("SHAPE | scale_ids(j), sfa_at", "SHAPE | scale_ids(j), sfa_at + s * SCALE_ATOM_COLUMNS"),
    ),
    dense(
        "scales not copied",
        ("uninitialised-tensor-memory",),
        (
            "for (int j = 0; j < SFB_ATOMS; ++j) tcgen05_cp_32x128b_warpx4",
            "for (int j = 1; j < SFB_ATOMS; ++j) tcgen05_cp_32x128b_warpx4",
        ),
    ),
    dense("steps past K", (), ("if (s * (SLAB_K / MMA_K) + j >= steps) break;", "")),
    # ---- products
    dense("first product adds", ("uninitialised-tensor-memory",), ("kb != 0 || s != 0 || j != 0);", "true);")),
    dense("every stage starts anew", (), ("kb != 0 || s != 0 || j != 0);", "s != 0 || j != 0);")),
    dense(
        "same K step twice",
        (),
        ("(a + (s * A_SLAB_BYTES + j * MMA_K) / 16)", "(a + (s * A_SLAB_BYTES + j / 2 * 2 * MMA_K) / 16)"),
    ),
    Bug(
        "descriptor of the older encoding",
        ("descriptor",),
        ((DESCRIPTORS, "(uint64_t(2) << 61) | (uint64_t(1) << 46)", "(uint64_t(1) << 62)"),),
        PAIR,
    ),
    Bug(
        "wrong row pitch of an operand",
        (),
        ((DESCRIPTORS, "uint64_t(1024 >> 4) << 32", "uint64_t(512 >> 4) << 32"),),
        PAIR,
    ),
    dense(
        "scales not told to be UE8M0", ("descriptor",), ("SHAPE | scale_ids(j)", "(SHAPE ^ 1u << 23) | scale_ids(j)")
    ),
    # ---- tensor memory
    dense("never freed", ("tensor-memory",), ("tcgen05_dealloc<CTA_GROUP, TMEM_COLUMNS>(tmem);", "")),
    dense(
        "freed in part",
        ("tensor-memory",),
        ("tcgen05_dealloc<CTA_GROUP, TMEM_COLUMNS>", "tcgen05_dealloc<CTA_GROUP, 256>"),
    ),
    dense(
        "too few columns",
        ("tensor-memory",),
        ("constexpr int TMEM_COLUMNS = 512;", "constexpr int TMEM_COLUMNS = 256;"),
        ("static_assert(USED_COLUMNS <= TMEM_COLUMNS", "static_assert(USED_COLUMNS <= 512"),
        ("SFB_COLUMNS <= TMEM_COLUMNS ? 0", "SFB_COLUMNS <= 512 ? 0"),
    ),
    dense(
        "lanes of another warp", ("tensor-memory",), ("tmem + (warp * 32 << 16);", "tmem + ((warp ^ 1) * 32 << 16);")
    ),
    # ---- start and end
    dense("no fence after mbarrier init", ("mbarrier",), ("fence_mbarrier_init();", "")),
    dense("pair not in step at the start", ("mbarrier", "race"), (CLUSTER_SYNC, "")),
    dense("pair not in step at the end", ("exit", "race"), (CLUSTER_SYNC, ""), nth=1),
    # ---- the staged store
    Bug(
        "no proxy fence before the store",
        ("missing-proxy-fence",),
        ((EPILOGUE, "fence_proxy_async_shared();", ""),),
        STAGED,
    ),
    Bug(
        "buffer written while it is stored",
        ("race",),
        ((EPILOGUE, "if (lane == 0) cp_async_bulk_wait_group_read<STORE_BUFFERS - 1>();", ""),),
        STAGED,
    ),
    Bug("buffers mixed up", ("race",), ((EPILOGUE, "staging + (turn & 1) *", "staging + (turn & 0) *"),), STAGED),
    Bug("swizzle left out", (), ((EPILOGUE, "at ^ (at >> 7 & (BYTES / 16 - 1)) << 4", "at"),), STAGED),
    dense(
        "CTA ends before its stores have read",
        ("exit",),
        ("if (STORE_BYTES != 0 && lane == 0) cp_async_bulk_wait_group_read_all();", ""),
        config=STAGED,
    ),
    # ---- the direct store
    Bug("row past the end stored", ("out-of-bounds",), ((EPILOGUE, "if (row >= rows) return;", ""),), PAIR),
    Bug(
        "columns past the end stored",
        ("out-of-bounds",),
        ((EPILOGUE, "if (j >= left) break;", ""),),
        PAIR,
        problem=(140, 269, 64),
    ),
    Bug(
        "wide store off its alignment",
        ("misaligned",),
        ((EPILOGUE, "d_is_aligned && left >= PIECE", "left >= PIECE"),),
        PAIR,
        problem=(140, 269, 64),
    ),
    # ---- one CTA
    dense("one CTA: sums not waited for", ("uninitialised-tensor-memory", "race"), (WAIT_SUMS, ""), config=ONE),
    dense("one CTA: columns not waited for", ("race",), (WAIT_FREE, ""), config=ONE),
    dense(
        "one CTA: columns given back after the first chunk",
        ("race",),
        ("OVERLAP == 0 ? CHUNKS - 1 : 0;", "0;"),
        config=ONE,
    ),
    dense(
        "one CTA: stage not waited for by the loads", ("race",), (WAIT_EMPTY, ""), config=ONE, problem=(140, 264, 800)
    ),
)
