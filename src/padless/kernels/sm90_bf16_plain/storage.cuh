// What the roles of sm90_bf16_plain_grouped_gemm.cu share: the constants that follow from its config, shared memory, the problem.
#pragma once

// The host defines, from Bf16PlainConfig: BLOCK_N, NUM_STAGES (0 = as many as fit), PIECE_SLABS,
// RASTER_M, MAX_GROUPS, B_IS_N_MAJOR, OUT_TYPE.
constexpr int BLOCK_M = 128;
constexpr int BLOCK_K = 64;  // 128 bytes
constexpr int WGMMA_M = 64, WGMMA_K = 16;
constexpr int STEPS = BLOCK_K / WGMMA_K;
constexpr int NUM_MMA_WARPGROUPS = BLOCK_M / WGMMA_M;
constexpr int NUM_CONSUMER_WARPS = NUM_MMA_WARPGROUPS * 4;
constexpr int NUM_THREADS = 128 * (1 + NUM_MMA_WARPGROUPS);
constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;
constexpr int NUM_TILE_READERS =
    NUM_CONSUMER_WARPS + 1 + NUM_MMA_WARPGROUPS;  // with the producer and the store warps

// A lies in shared memory row after row, 64 of K (128 bytes) of each. So does B, or K after K, 64 rows (128 bytes) of each to a
// chunk, where N is contiguous.
constexpr bool A_IS_MN_MAJOR = false, B_IS_MN_MAJOR = B_IS_N_MAJOR;
constexpr int CHUNK_ROWS = 64, CHUNK_BYTES = BLOCK_K * 128;
constexpr int M64_BYTES = WGMMA_M * 128;
constexpr int A_BYTES = BLOCK_M * 128, B_BYTES = BLOCK_N * 128;
constexpr int A_WARPGROUP_BYTES = M64_BYTES;

constexpr int OUT_BYTES = OUT_TYPE == OUT_F32 ? 4 : 2;
constexpr int SLAB_COLUMNS = 128 / OUT_BYTES;
constexpr int SLAB_BYTES = WGMMA_M * 128;
// A warpgroup's tile is one part in device/sm90/piece_store.cuh.
constexpr int PIECE_COLUMNS = PIECE_SLABS * SLAB_COLUMNS;
constexpr int NUM_PIECES = BLOCK_N / PIECE_COLUMNS;
constexpr int NUM_D = 2;
constexpr bool ACCUMULATE = false;
constexpr int REDUCED_PIECES = 0;
constexpr bool FETCHES_LATE_PIECES = false;
static_assert(NUM_PIECES % NUM_D == 0, "a piece has the same buffer in every tile");

template <int STAGES>
struct alignas(1024) SharedStorageOf {
    uint8_t a[STAGES][A_BYTES];
    uint8_t b[STAGES][B_BYTES];
    uint8_t d[NUM_MMA_WARPGROUPS][NUM_D][PIECE_SLABS * SLAB_BYTES];
    uint64_t full[STAGES], empty[STAGES];
    uint64_t next_tile_wanted;
    TileQueueStorage queue;
    SortedGroups<MAX_GROUPS> groups;
};

constexpr int STAGES = NUM_STAGES == 0 ? stages_that_fit<SharedStorageOf, 12>() : NUM_STAGES;
using SharedStorage = SharedStorageOf<STAGES>;
static_assert(sizeof(SharedStorage::d) >= 4 * MAX_GROUPS, "the groups are sorted there");
#include "device/read_back.cuh"

using Order = RankedRows<BLOCK_M, BLOCK_N, RASTER_M, MAX_GROUPS>;
using Reader = TileReader<1>;

struct Problem {
    int n, k;

    __device__ __forceinline__ int k_blocks() const { return (k + BLOCK_K - 1) / BLOCK_K; }
    // Products of 16 of K in the last of them.
    __device__ __forceinline__ int last_steps() const {
        return (k - (k_blocks() - 1) * BLOCK_K + WGMMA_K - 1) / WGMMA_K;
    }
};

// For device/sm90/piece_store.cuh. Rows of D past the tile's, which are another group's, are dropped by the ragged map.
__device__ __forceinline__ int piece_row(const Tile& tile, int warpgroup, int /*piece*/) {
    return tile.row + warpgroup * WGMMA_M;
}
__device__ __forceinline__ int piece_column(const Tile& tile, int piece) {
    return tile.column + piece * PIECE_COLUMNS;
}
__device__ __forceinline__ bool is_in_result(const Problem& problem, const Tile& tile, int row, int column) {
    return row < tile.row + tile.rows && column < problem.n;
}
__device__ __forceinline__ void write_slab(const Problem& /*problem*/, const TensorMap& map_d, uint32_t slab,
                                           const Tile& tile, int row, int column) {
    store_slab_ragged(map_d, slab, column, row, tile.row + tile.rows);
}
