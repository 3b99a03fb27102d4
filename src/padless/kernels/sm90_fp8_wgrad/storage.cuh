// What the roles of sm90_fp8_wgrad.cu share: the constants that follow from its config, shared memory, the problem.
#pragma once

// The host defines, from WgradConfig: BLOCK_M, NUM_STAGES (0 = as many as fit), CLUSTER_N, RASTER_M, MAX_GROUPS, REDUCED_PIECES,
// X_SCALES_ARE_BLOCKS (1d2d; else 1d1d), OUT_TYPE (OUT_BF16 or OUT_F32), ACCUMULATE (adds to what is there).
constexpr int BLOCK_T = 128;  // tokens of a stage, bytes of an operand's row, tokens that share a scale
constexpr int BLOCK_N = 128;  // columns of a tile: all have one scale in 1d2d
constexpr int WGMMA_M = 64, WGMMA_K = 32;
constexpr int NUM_MMA_WARPGROUPS = 2;
constexpr int WAVES = BLOCK_M / WGMMA_M / NUM_MMA_WARPGROUPS;  // of 64 rows that a consumer warpgroup holds
constexpr int WAVE_ROWS = NUM_MMA_WARPGROUPS * WGMMA_M;        // from one of them to the next
constexpr int NUM_CONSUMER_WARPS = NUM_MMA_WARPGROUPS * 4;
constexpr int NUM_THREADS = 128 * (1 + NUM_MMA_WARPGROUPS);
constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;
constexpr int NUM_TILE_READERS =
    NUM_CONSUMER_WARPS + 1 + NUM_MMA_WARPGROUPS;  // with the producer and the store warps
static_assert(BLOCK_M == 128 || BLOCK_M == 256, "two warpgroups of one or two waves");

constexpr int A_BYTES = BLOCK_M * BLOCK_T;
constexpr int B_BYTES = BLOCK_N * BLOCK_T;

constexpr int SFB_FLOATS = X_SCALES_ARE_BLOCKS ? 1 : BLOCK_N;  // X's scales of a stage
constexpr int SFB_STAGE_FLOATS = (SFB_FLOATS + 31) / 32 * 32;  // TMA writes to multiples of 128 bytes

constexpr int OUT_BYTES = OUT_TYPE == OUT_F32 ? 4 : 2;
constexpr int SLAB_COLUMNS = 128 / OUT_BYTES;
constexpr int SLAB_BYTES = WGMMA_M * 128;
// A warpgroup stages its tile piece by piece, in two buffers in turn: waves (64 rows), or halves of their columns, where two
// buffers of 64 rows would take a stage of the ring. In device/sm90/piece_store.cuh a wave is a part.
constexpr int PIECES_PER_WAVE = OUT_TYPE == OUT_BF16 && WAVES == 2 ? 1 : 2;
constexpr int NUM_PIECES = WAVES * PIECES_PER_WAVE;
constexpr int PIECE_COLUMNS = BLOCK_N / PIECES_PER_WAVE;
constexpr int PIECE_SLABS = PIECE_COLUMNS / SLAB_COLUMNS;
constexpr int NUM_D = 2;
constexpr bool D_EVICTS_FIRST = CLUSTER_N > 1 && !ACCUMULATE;
constexpr bool FETCHES_LATE_PIECES = CLUSTER_N == 1 || !X_SCALES_ARE_BLOCKS;  // measured
static_assert(NUM_PIECES % NUM_D == 0, "a piece has the same buffer in every tile");

template <int STAGES>
struct alignas(1024) SharedStorageOf {
    uint8_t a[STAGES][A_BYTES];
    uint8_t b[STAGES][B_BYTES];
    uint8_t d[NUM_MMA_WARPGROUPS][NUM_D][PIECE_SLABS * SLAB_BYTES];
    alignas(128) float sfa[STAGES][BLOCK_M];
    alignas(128) float sfb[STAGES][SFB_STAGE_FLOATS];
    uint64_t full[STAGES], empty[STAGES];
    uint64_t d_loaded[NUM_MMA_WARPGROUPS][NUM_D];  // where ACCUMULATE
    uint64_t next_tile_wanted;
    TileQueueStorage queue;
    SortedGroups<MAX_GROUPS> groups;
};

constexpr int STAGES = NUM_STAGES == 0 ? stages_that_fit<SharedStorageOf, 12>() : NUM_STAGES;
using SharedStorage = SharedStorageOf<STAGES>;
static_assert(sizeof(SharedStorage::d) >= 4 * MAX_GROUPS, "the groups are sorted there");
#include "device/read_back.cuh"
// How many multiply-adds of the promotion in a row read their common scale once (operand_reuse.py).
extern "C" __device__ const int padless_reuse_run = WAVES == 2 ? 12 : 4;

using Order = LongestFirst<BLOCK_M, BLOCK_N * CLUSTER_N, RASTER_M, MAX_GROUPS>;
using Reader = TileReader<CLUSTER_N>;

// A transposed operand: where every group begins in it.
struct Columns {
    const int* starts;  // [num_groups] first token of a group, a multiple of 32
    int tokens;         // columns in all
};

struct Problem {
    Columns a, b;
    const int* block_starts;  // [num_groups] first row of a group in the scales
    const float* sfb;         // (scale_rows, ceil(n_columns / 128)), where X's scales are blocks
    int n_rows, n_columns, num_groups, scale_rows;
};

// The CTAs of a cluster stand side by side along the columns and share the rows of A.
__device__ __forceinline__ int cta_column(const Tile& tile) {
    return CLUSTER_N == 1 ? tile.column : tile.column + static_cast<int>(cluster_cta_rank()) * BLOCK_N;
}

// Where in the result a warpgroup's piece of a tile begins (device/sm90/piece_store.cuh).
__device__ __forceinline__ int piece_row(const Tile& tile, int warpgroup, int piece) {
    return tile.row + piece / PIECES_PER_WAVE * WAVE_ROWS + warpgroup * WGMMA_M;
}
__device__ __forceinline__ int piece_column(const Tile& tile, int piece) {
    return cta_column(tile) + piece % PIECES_PER_WAVE * PIECE_COLUMNS;
}

// Blocks of 128 tokens, the last one begun.
__device__ __forceinline__ int token_blocks(int tokens) {
    return (tokens + BLOCK_T - 1) / BLOCK_T;
}
