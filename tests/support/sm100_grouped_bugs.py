"""The planted bugs: each an edit of the real grouped Blackwell kernel, and what must be found when it runs.

A bug counts as found on a seed by a report of one of its `kinds`; one of arithmetic alone (`kinds` empty) by a wrong or
missing value in the output, or one outside the groups.
"""

# ruff: noqa: E501  (a bug is a line)

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
from padless.kernels.sm100_grouped.host import fit
from support import planted_bugs
from support.emulator_variants import Variant
from support.sm100_grouped import Case, make_case, run

C = Sm100GroupedConfig
MAIN, STORAGE = "sm100_grouped/sm100_grouped_gemm.cu", "sm100_grouped/storage.cuh"
LOAD = "sm100_grouped/load.cuh"
GATHER, STORE = "sm100_grouped/scale_gather.cuh", "sm100_grouped/store.cuh"
ONE = C(num_stages=2)
PAIR = C(cta_group=2, mma_n=256, num_stages=2)
WIDE = C(mma_n=256, num_stages=2)
FEW = C(tokens_on_n=True, mma_n=64, num_stages=2)
SHORT = C(cta_group=2, tokens_on_n=True, mma_n=256, num_stages=2)  # of 256 tokens, or 64, 128, 192
SHARED = C(cta_group=2, mma_n=256, multicast=2, num_stages=2)  # two pairs, 512 columns


@dataclass(frozen=True)
class Bug(planted_bugs.Bug):
    config: Sm100GroupedConfig = ONE
    fmt: str = "MXFP8"
    sizes: tuple[int, ...] = (20, 0, 130)
    n: int = 136
    k: int = 416
    layouts: tuple[str, str] = ("blocked", "blocked")


WAIT_EMPTY = "mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);"
WAIT_EMPTY_GATHER = "if (part == 0) mbarrier_wait(shared_address(&shared.empty[stage]), empty_phase);"
WAIT_DONE = "mbarrier_wait(shared_address(&shared.done[accumulator.stage]), accumulator.phase);"
WAIT_DRAINED = "mbarrier_wait(shared_address(&shared.drained[drained]), drained_phase ^ 1);"
COMMIT_EMPTY = "commit_stage(shared_address(&shared.empty[stage]));"
COMMIT_DONE = "commit_tile(shared_address(&shared.done[accumulator.stage]));"
COMMIT_STAGE = "tcgen05_commit_multicast<CTA_GROUP>(barrier, (1 << CLUSTER) - 1);"
COMMIT_TILE = "tcgen05_commit_multicast<CTA_GROUP>(barrier, 3 << even_rank());"
LAST_CLUSTER_SYNC = "barrier_cluster_arrive();\n        barrier_cluster_wait();"

BUGS: tuple[Bug, ...] = (
    # ---- commits
    Bug("stage given back to the even CTA alone", "deadlock", (MAIN, COMMIT_STAGE, COMMIT_STAGE.replace("(1 << CLUSTER) - 1", "1")), PAIR, quick=True),
    Bug("stage given back to the odd CTA alone", "deadlock", (MAIN, COMMIT_STAGE, COMMIT_STAGE.replace("(1 << CLUSTER) - 1", "2")), PAIR),
    Bug("tile committed to the even CTA alone", "deadlock", (MAIN, COMMIT_TILE, COMMIT_TILE.replace("3", "1")), PAIR),
    Bug("tile committed to the odd CTA alone", "deadlock", (MAIN, COMMIT_TILE, COMMIT_TILE.replace("3", "2")), PAIR),
    Bug("stage never given back", "deadlock", (MAIN, COMMIT_EMPTY, "")),
    Bug("tile never committed", "deadlock", (MAIN, COMMIT_DONE, "")),
    Bug(
        "tile committed before its last block",
        "race mbarrier",
        (MAIN, COMMIT_DONE, "", MAIN, COMMIT_EMPTY, "if (kb == k_blocks - 2) " + COMMIT_DONE + COMMIT_EMPTY),
    ),
    # ---- fences
    Bug("no tcgen05 fence after done", "missing-tcgen05-fence", (MAIN, WAIT_DONE + " tcgen05_fence_after_thread_sync();", WAIT_DONE), quick=True),
    Bug("no tcgen05 fence before drained", "missing-tcgen05-fence", (MAIN, "tcgen05_fence_before_thread_sync(); __syncwarp();", "__syncwarp();")),
    Bug("no proxy fence after gathering", "missing-proxy-fence", (LOAD, "fence_proxy_async_shared();", ""), quick=True),
    Bug("no fence after mbarrier init", "mbarrier mbarrier-init", (MAIN, "fence_mbarrier_init();", ""), nth=1),
    Bug("offs read before the kernels ahead have ended", "grid-dependency", (MAIN, "griddepcontrol_wait();", ""), quick=True),
    Bug("loads of sums not waited for", "register-in-flight", (MAIN, "tcgen05_wait_ld();", ""), quick=True),
    # ---- waits
    Bug("producer does not wait for the stage", "race mbarrier", (LOAD, WAIT_EMPTY, "")),
    Bug("gathering warps do not wait for the stage", "race mbarrier", (LOAD, WAIT_EMPTY_GATHER, "")),
    Bug("products do not wait for the stage", "race", (MAIN, "mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);", "")),
    Bug("stores do not wait for the products", "race uninitialised-tensor-memory", (MAIN, WAIT_DONE, "")),
    Bug("products do not wait for the stores", "race mbarrier", (MAIN, WAIT_DRAINED, ";"), sizes=(20, 0, 130, 9, 5, 7)),
    # ---- the accumulators' shared columns
    Bug("shared columns given back before they are read", "race", (MAIN, "i == CHUNKS_BEFORE_DRAINED - 1", "i == CHUNKS_BEFORE_DRAINED - 2"), WIDE, "NVFP4", quick=True),
    Bug("shared columns of the first accumulator read last", "race", (MAIN, "NUM_CHUNKS - 1 - i : i", "i : i"), WIDE, "NVFP4", n=256),
    Bug("second accumulator a column too low", "race", (STORAGE, "UNIT_N : MMA_N - SHARED_COLUMNS", "UNIT_N : MMA_N - SHARED_COLUMNS - 1"), WIDE, "NVFP4"),
    Bug("scales over the accumulator", "", (STORAGE, "ACCUMULATORS * UNIT_N : 2 * MMA_N - SHARED_COLUMNS", "ACCUMULATORS * UNIT_N : 2 * MMA_N - SHARED_COLUMNS - 4"), WIDE, "NVFP4", n=256),
    # ---- counts
    Bug("bytes of one CTA expected", "mbarrier race deadlock", (LOAD, "CTA_GROUP * bytes", "bytes"), PAIR),
    Bug("gathering warps do not arrive", "deadlock", (LOAD, "mbarrier_arrive(full);", ";")),
    Bug("gathering warps of the odd CTA not counted", "mbarrier race", (STORAGE, "? CTA_GROUP : 0)", "? 1 : 0)"), PAIR),
    Bug("stores of the odd CTA not counted", "mbarrier race", (STORAGE, "DRAINED_ARRIVALS = CTA_GROUP *", "DRAINED_ARRIVALS ="), PAIR, sizes=(20, 0, 130, 9, 5, 7)),
    Bug("a reader of the queue too few", "mbarrier race", (STORAGE, "+ 2 + NUM_GATHER_WARPS) + MULTICAST;", "+ 2 + NUM_GATHER_WARPS);"), sizes=(20, 0, 130, 9, 5, 7)),
    Bug("copies of the odd CTA signal the odd CTA", "deadlock mbarrier race", (LOAD, "full = pair_even_address(full);", ";"), PAIR, quick=True),
    # ---- two pairs that share the tokens
    Bug("tokens multicast to the even CTAs by both", "mbarrier race deadlock", (LOAD, "SAME_PART << pair_rank();", "SAME_PART;"), SHARED, n=392, quick=True),
    Bug("tokens multicast inside the pair", "mbarrier race deadlock", (LOAD, "SAME_PART << pair_rank();", "3 << even_rank();"), SHARED, n=392),
    Bug("a share of the tokens for its own pair alone", "deadlock", (LOAD, "SAME_PART << pair_rank();", "1 << cluster_rank();"), SHARED, n=392),
    Bug("products of the other pair not waited for", "mbarrier race", (STORAGE, "EMPTY_ARRIVALS = MULTICAST;", "EMPTY_ARRIVALS = 1;"), SHARED, n=392, quick=True),
    Bug("stage given back to the own pair alone", "deadlock", (MAIN, COMMIT_STAGE, COMMIT_STAGE.replace("(1 << CLUSTER) - 1", "3 << even_rank()")), SHARED, n=392),
    Bug("tile committed to the first pair", "mbarrier race deadlock", (MAIN, COMMIT_TILE, COMMIT_TILE.replace("3 << even_rank()", "3")), SHARED, n=392),
    Bug("both pairs load the same share", "mbarrier race", (LOAD, "worker_rank() * SHARE;", "0;"), SHARED, n=392),
    Bug("second share from the rows of the first", "", (LOAD, "row + share + piece", "row + piece"), SHARED, n=392, quick=True),
    Bug("both pairs make the same columns", "", (MAIN, "tile.column += worker_rank() * TILE_N;\n        return found;\n    }\n    __device__ __forceinline__ bool next(Tile& tile, int lane)", "return found;\n    }\n    __device__ __forceinline__ bool next(Tile& tile, int lane)"), SHARED, n=392),
    Bug("scales of the tokens loaded by both pairs", "mbarrier race deadlock", (LOAD, "(SHARES == 1 || worker_rank() == 0)", "true"), SHARED, n=392, layouts=("blocked_groups", "blocked")),
    Bug("scales of the tokens loaded by nobody", "deadlock", (LOAD, "(SHARES == 1 || worker_rank() == 0)", "SHARES == 1"), SHARED, n=392, layouts=("blocked_groups", "blocked")),
    Bug("gathering warps arrive at the first pair", "mbarrier race deadlock", (LOAD, "mbarrier_arrive_release_cluster(full, even_rank());", "mbarrier_arrive_release_cluster(full, 0);"), SHARED, n=392),
    Bug("sums given back to the first pair", "mbarrier race deadlock", (MAIN, "mbarrier_arrive_release_cluster(drained, even_rank());", "mbarrier_arrive_release_cluster(drained, 0);"), SHARED, n=392, sizes=(20, 0, 130, 9, 5, 7)),
    Bug("readers in the other pair not counted", "mbarrier race", (STORAGE, "CLUSTER * (NUM_STORE_WARPS * PROMOTERS + 2 + NUM_GATHER_WARPS) + MULTICAST", "CTA_GROUP * (NUM_STORE_WARPS * PROMOTERS + 2 + NUM_GATHER_WARPS) + 1"), SHARED, n=392, sizes=(20, 0, 130, 9, 5, 7)),
    Bug("clusters do not wait for each other at the end", "exit race mbarrier", (MAIN, LAST_CLUSTER_SYNC, ""), SHARED, n=392, nth=1),
    # ---- tiles of few tokens, and the first tile
    Bug("bytes of a whole tile expected", "deadlock mbarrier", (LOAD, "SHORT ? own_rows * BLOCK_K + (LOADS_SCALES ? atoms * LEFT_SCALE_BYTES : 0) : BYTES", "BYTES"), SHORT, "NVFP4", quick=True),
    Bug("odd CTA's tokens begin behind those of a whole tile", "", (LOAD, "APART ? to_up : own_rows);", "APART ? to_up : ROWS);"), SHORT),
    Bug("boxes of tokens in one place", "race mbarrier", (LOAD, "data + box * BOX * BLOCK_K, full", "data, full"), SHORT),
    Bug("every box has the first one's tokens", "", (LOAD, "row + box * BOX, group", "row, group"), SHORT),
    Bug("a short tile multiplied by whole products", "", (MAIN, "product_shape(columns);", "product_shape(MMA_N);"), SHORT, quick=True),
    Bug("scales of the last 128 tokens not copied", "", (MAIN, "if (part * 128 >= columns) break;", "if (part > 0 && part * 128 + 128 >= columns) break;"), SHORT, "NVFP4"),
    Bug("scales of 128 tokens loaded twice", "", (LOAD, "scale_tile + atom,", "scale_tile,"), SHORT, "NVFP4", k=448, layouts=("blocked_groups", "blocked")),
    Bug("first tile queued twice", "deadlock mbarrier race", (MAIN, "nullptr, has_small_table);", "nullptr, false);")),
    Bug("first tile of the odd CTA another worker's", "", (MAIN, "const int worker = blockIdx.x / CLUSTER,", "const int worker = blockIdx.x,"), PAIR),
    # ---- leaving
    Bug("CTAs of a pair do not wait for each other at the end", "exit race", (MAIN, LAST_CLUSTER_SYNC, ""), PAIR, nth=1),
    Bug("tensor memory not freed", "tensor-memory", (MAIN, "if (warp == MULTIPLY_WARP) tcgen05_dealloc", "if (problem.counter < -1) tcgen05_dealloc")),
    Bug("tensor memory freed too early", "race tensor-memory", (MAIN, "    __syncwarp();\n\n    tcgen05_fence_before_thread_sync();\n    __syncthreads();", "    __syncwarp();")),
    # ---- values
    Bug("scale id off by one", "", (MAIN, "shape | scale_ids(step)", "shape | scale_ids((step + 1) % 4)"), quick=True),
    Bug("scales of the step before", "", (MAIN, "sfa + step * LEFT_ATOM", "sfa + (step ^ 1) * LEFT_ATOM"), fmt="NVFP4"),
    Bug("second 128 columns take the scales of the first", "", (MAIN, "part * LEFT_SCALE_BYTES + atom * 512) / 16", "atom * 512) / 16"), WIDE),
    Bug("window of scales not shifted", "", (GATHER, "const int skip = first >> 5 & 3;", "const int skip = 0;"), quick=True),
    Bug("window of scales from one tile", "", (GATHER, "tile < last_tile && skip != 0 ? tile + 1 : tile;", "tile;")),
    Bug("groups' own tiles not counted", "", (GATHER, "(before + tiles - own) * 128 - start", "before * 128 - start"), layouts=("blocked_groups", "blocked")),
    Bug("padding of scales not cleared", "", (GATHER, "left >= 4 ? word :", "left >= -8 ? word :"), FEW, "NVFP4", k=352),
    Bug("odd CTA takes the even one's rows", "", (LOAD, "+ pair_rank() * (BY_UNITS ? ROWS / PIECES : APART ? to_up : own_rows);", ";"), PAIR),
    Bug("odd CTA takes the even one's scales", "", (LOAD, "int row = IS_LEFT ? pair_rank() * LANE_ROWS : 0;", "int row = 0;"), PAIR),
    Bug("first products added to what was there", "uninitialised-tensor-memory", (MAIN, "kb + step > 0", "true")),
    Bug("K ends a step early", "", (MAIN, "(bytes_left + MMA_K - 1) / MMA_K", "bytes_left / MMA_K - 1")),
    Bug("rows past the group stored", "out-of-bounds", (MAIN, "const int lane_limit = TOKENS_ON_N ? columns_left : tile.rows;", "const int lane_limit = 128;"), sizes=(20, 0, 9), quick=True),
    Bug("tokens past the group stored", "", (MAIN, "const int column_limit = TOKENS_ON_N ? tile.rows : columns_left;", "const int column_limit = columns_left;"), FEW),
    Bug("factor forgotten", "", (STORE, "__uint_as_float(r[i]) * factor", "__uint_as_float(r[i])"), fmt="NVFP4"),
)  # fmt: skip


@lru_cache(maxsize=4)
def cached_case(fmt: str, sizes: tuple[int, ...], n: int, k: int, layouts: tuple[str, str]) -> Case:
    factors = (torch.tensor([1.5]), None) if fmt == "NVFP4" else (None, None)
    return make_case(fmt, sizes, n, k, exact=True, layouts=layouts, global_scales=factors)


def detect(bug: Bug) -> tuple[int | None, list[str]]:
    """(number of seeds needed, kinds reported until then); None if it was not found."""
    case = cached_case(bug.fmt, bug.sizes, bug.n, bug.k, bug.layouts)
    config = fit(bug.config, case.a, case.b, torch.empty(case.exact.shape))
    driver = Variant("sm_100a", MAIN, bug.edits, config, bug.nth)
    kinds: list[str] = []
    for seed in range(bug.seeds):
        result = run(
            case, bug.config, seed=seed, num_sms=bug.config.cluster, arithmetic="fast", driver=driver, guard=False
        )
        kinds += [r.kind for r in result.result.reports]
        expected = case.exact.float() * (1.5 if bug.fmt == "NVFP4" else 1)
        wrong = not torch.equal(result.out, expected) or not result.intact
        if bug.kinds & set(kinds) or (not bug.kinds and wrong):
            return seed + 1, kinds
    return None, kinds
