// What a quantising epilogue of a BLOCK_M x BLOCK_N tile is compiled for, and the shared memory it works in.
#pragma once

constexpr int OUT_COLUMNS = GLU == GLU_NONE ? BLOCK_N : BLOCK_N / 2;  // of the output, that a tile makes

using RowFormat = FormatOf<ROW_QUANT, MX_RULE>::Type;
using ColumnFormat = FormatOf<COLUMN_QUANT, MX_RULE>::Type;

// Columns of a tile that share a row scale, and how many such blocks it has. A block wider than the tile is shared by
// the two CTAs of a cluster.
constexpr int ROW_BLOCK = RowFormat::BLOCK < OUT_COLUMNS ? RowFormat::BLOCK : OUT_COLUMNS;
constexpr int ROW_BLOCKS = OUT_COLUMNS / ROW_BLOCK;
constexpr bool SWAPS_ROW_AMAX = ROW_QUANT != QUANT_NONE && RowFormat::BLOCK > OUT_COLUMNS;
static_assert(!SWAPS_ROW_AMAX || (CLUSTER_N == 2 && RowFormat::BLOCK == 2 * OUT_COLUMNS),
              "a row's block of scales lies in two CTAs: they must be a cluster");
static_assert(BLOCK_N == 128, "a tile is as wide as the widest block");

// Where columns are quantised and a warpgroup has two m64s, these are neighbours: a run of 128 rows that share their
// columns' scales then lies in one warpgroup, and the two need not wait for each other. A tile of no more m64s than
// warpgroups gives each one, and only there does a run of 128 rows lie in both.
constexpr bool M64S_ARE_NEIGHBOURS = COLUMN_QUANT != QUANT_NONE && WAVES == 2;
constexpr int M64_STEP = M64S_ARE_NEIGHBOURS ? 1 : NUM_MMA_WARPGROUPS;  // from a warpgroup's m64 to its next
__device__ __forceinline__ int first_m64(int warpgroup, int rows) {
    return M64S_ARE_NEIGHBOURS && m64s_of(rows) > NUM_MMA_WARPGROUPS ? warpgroup * WAVES : warpgroup;
}

// Runs of rows that share column scales. RUNS: of a warpgroup; M64S_OF_RUN: how many of its m64s are in one;
// MAXIMA_OF_RUN: how many of its warps have rows in one, each of which leaves the maxima of these.
constexpr bool RUNS_EXCEED_M64S = COLUMN_QUANT != QUANT_NONE && ColumnFormat::BLOCK > WGMMA_M;
constexpr int M64S_OF_RUN = RUNS_EXCEED_M64S ? WAVES : 1;
constexpr int MAXIMA_OF_RUN = RUNS_EXCEED_M64S ? 4 : ColumnFormat::BLOCK / 16;
constexpr int RUNS =
    COLUMN_QUANT == QUANT_NONE || RUNS_EXCEED_M64S ? 1 : WAVES * WGMMA_M / ColumnFormat::BLOCK;
static_assert(COLUMN_QUANT == QUANT_NONE || ColumnFormat::BLOCK <= BLOCK_M, "a run of rows lies in one tile");
static_assert(COLUMN_QUANT == QUANT_NONE || ColumnFormat::CODE_BITS == 8, "columns are quantised to FP8");

// Staged outputs of 64 rows, one after the other; each starts on a multiple of 1024.
constexpr int PLAIN_BYTES = HAS_PLAIN ? 64 * OUT_COLUMNS * (OUT_TYPE == OUT_F32 ? 4 : 2) : 0;
constexpr int ROW_CODE_BYTES = ROW_QUANT == QUANT_NONE ? 0 : 64 * OUT_COLUMNS * RowFormat::CODE_BITS / 8;
constexpr int COLUMN_CODE_BYTES = COLUMN_QUANT == QUANT_NONE ? 0 : 64 * OUT_COLUMNS;
constexpr int STAGED_BYTES = PLAIN_BYTES + ROW_CODE_BYTES + COLUMN_CODE_BYTES;
constexpr int QUANT_M64_BYTES = STAGED_BYTES == 0 ? 1024 : STAGED_BYTES;  // amax alone needs none

// Where a warpgroup may have two m64s and a run is no shorter, lanes leave their column maxima as they are, in the slabs of
// the column codes, which are not written until the maxima have been read: no shuffles, and the loads that reduce them lie
// behind the barrier, where rows give the warp something else to do. An m64's slab has room for those of two warps.
constexpr bool LANES_LEAVE_MAXIMA = RUNS_EXCEED_M64S && WAVES == 2;
constexpr int WARP_MAXIMA_BYTES = 8 * OUT_COLUMNS * 4;  // a row of floats for each quad
static_assert(2 * WARP_MAXIMA_BYTES <= COLUMN_CODE_BYTES || !LANES_LEAVE_MAXIMA,
              "a slab has 64 codes to a column");

constexpr int KEPT_MAXIMA = COLUMN_QUANT == QUANT_NONE || LANES_LEAVE_MAXIMA ? 1 : RUNS * MAXIMA_OF_RUN;

// Of one warpgroup. Where a run lies in both, the first writes the second's multipliers; nobody else writes another's.
struct ColumnStorage {
    alignas(16) float amax[KEPT_MAXIMA][OUT_COLUMNS];
    alignas(16) float multiplier[RUNS][OUT_COLUMNS];
};

struct QuantStorage {
    ColumnStorage columns[COLUMN_QUANT == QUANT_NONE ? 1 : NUM_MMA_WARPGROUPS];
    alignas(8) float peer_amax[2][NUM_CONSUMER_WARPS][SWAPS_ROW_AMAX ? 16 * WAVES : 1];
    uint64_t peer_full[2][NUM_CONSUMER_WARPS][WAVES];
    uint32_t swaps[NUM_CONSUMER_WARPS];  // that each warp has made
    int group_tiles[HAS_GROUP_TILES ? MAX_GROUPS
                                    : 1];  // first 128-row tile of each group, every group starting on one

    // One thread, before anybody else touches it.
    __device__ __forceinline__ void init() {
        for (int warp = 0; warp < NUM_CONSUMER_WARPS; ++warp) {
            swaps[warp] = 0;
            for (int buffer = 0; buffer < 2; ++buffer)
                for (int w = 0; w < WAVES; ++w)
                    mbarrier_init(shared_address(&peer_full[buffer][warp][w]), 2);  // either warp
        }
    }

    __device__ __forceinline__ Placement placement(const int* group_ends, int group) const {
        const int start = group == 0 ? 0 : group_ends[group - 1];
        return Placement{group, start, group_ends[group] - start, HAS_GROUP_TILES ? group_tiles[group] : 0};
    }
};
