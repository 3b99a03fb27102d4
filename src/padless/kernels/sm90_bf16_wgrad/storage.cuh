// What the roles of sm90_bf16_wgrad.cu share: the constants that follow from its config, shared memory, the problem.
#pragma once

// The host defines, from Bf16WgradConfig: BLOCK_N, BLOCK_T, NUM_STAGES (0 = as many as fit), PIECE_SLABS, RASTER_M, MAX_GROUPS,
// OUT_TYPE (OUT_BF16 or OUT_F32), ACCUMULATE (adds to what is there).
constexpr int BLOCK_M = 128;
constexpr int WGMMA_M = 64, WGMMA_K = 16;
constexpr int STEPS = BLOCK_T / WGMMA_K;
constexpr int NUM_MMA_WARPGROUPS = BLOCK_M / WGMMA_M;
constexpr int NUM_CONSUMER_WARPS = NUM_MMA_WARPGROUPS * 4;
constexpr int NUM_THREADS = 128 * (1 + NUM_MMA_WARPGROUPS);
constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;
constexpr int NUM_TILE_READERS =
    NUM_CONSUMER_WARPS + 1 + NUM_MMA_WARPGROUPS;  // with the producer and the store warps

// Both operands lie in shared memory as in global memory: tokens one after the other, 64 features (128 bytes) of each to a chunk.
constexpr bool A_IS_MN_MAJOR = true, B_IS_MN_MAJOR = true;
constexpr int CHUNK_FEATURES = 64, CHUNK_BYTES = BLOCK_T * 128;
constexpr int A_CHUNKS = BLOCK_M / CHUNK_FEATURES, B_CHUNKS = BLOCK_N / CHUNK_FEATURES;
constexpr int A_BYTES = A_CHUNKS * CHUNK_BYTES, B_BYTES = B_CHUNKS * CHUNK_BYTES;
constexpr int A_WARPGROUP_BYTES = WGMMA_M / CHUNK_FEATURES * CHUNK_BYTES;

constexpr int OUT_BYTES = OUT_TYPE == OUT_F32 ? 4 : 2;
constexpr int SLAB_COLUMNS = 128 / OUT_BYTES;
constexpr int SLAB_BYTES = WGMMA_M * 128;
// A warpgroup's tile is one part in device/sm90/piece_store.cuh.
constexpr int PIECE_COLUMNS = PIECE_SLABS * SLAB_COLUMNS;
constexpr int NUM_PIECES = BLOCK_N / PIECE_COLUMNS;
constexpr int NUM_D = 2;
constexpr int REDUCED_PIECES = 0;
constexpr bool D_EVICTS_FIRST = false, FETCHES_LATE_PIECES = true;
static_assert(NUM_PIECES % NUM_D == 0, "a piece has the same buffer in every tile");

template <int STAGES>
struct alignas(1024) SharedStorageOf {
    uint8_t a[STAGES][A_BYTES];
    uint8_t b[STAGES][B_BYTES];
    uint8_t d[NUM_MMA_WARPGROUPS][NUM_D][PIECE_SLABS * SLAB_BYTES];
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

using Order = LongestFirst<BLOCK_M, BLOCK_N, RASTER_M, MAX_GROUPS>;
using Reader = TileReader<1>;

struct Problem {
    int n_rows, n_columns, num_groups;
};

// Where in the result a warpgroup's piece of a tile begins (device/sm90/piece_store.cuh).
__device__ __forceinline__ int piece_row(const Tile& tile, int warpgroup, int /*piece*/) {
    return tile.row + warpgroup * WGMMA_M;
}
__device__ __forceinline__ int piece_column(const Tile& tile, int piece) {
    return tile.column + piece * PIECE_COLUMNS;
}

// Stages of BLOCK_T tokens, the last one begun.
__device__ __forceinline__ int token_blocks(int tokens) {
    return (tokens + BLOCK_T - 1) / BLOCK_T;
}

// Products of 16 tokens in the last of them.
__device__ __forceinline__ int last_block_steps(int tokens, int blocks) {
    return (tokens - (blocks - 1) * BLOCK_T + WGMMA_K - 1) / WGMMA_K;
}
