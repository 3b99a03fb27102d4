// What the roles of sm90_fp8_swapped_grouped_gemm.cu share: constants, shared memory, the problem.
#pragma once

// The host defines, from Sm90Fp8SwappedConfig: BLOCK_M (most tokens of a tile), NUM_STAGES (0 = as many as fit), NUM_D,
// RASTER_M, STEP_M, MAX_GROUPS, OUT_TYPE.
constexpr int BLOCK_N = 256;  // weights, which are rows of the products
constexpr int BLOCK_K = 128;  // bytes, elements, and the length of a scale block
constexpr int WGMMA_M = 64, WGMMA_K = 32;
constexpr int NUM_MMA_WARPGROUPS = 2;
constexpr int WAVES = 2;  // m64s of weights that a consumer warpgroup holds
constexpr int TILE_M64S = NUM_MMA_WARPGROUPS * WAVES;
constexpr int NUM_CONSUMER_WARPS = NUM_MMA_WARPGROUPS * 4;
constexpr int NUM_THREADS = 128 * (1 + NUM_MMA_WARPGROUPS);
constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;
// Of a consumer, beside sums and scales: where all scales of a K block are kept, and where some are.
constexpr int OTHER_REGISTERS = 24, OTHER_REGISTERS_OF_SOME = 18;
static_assert(BLOCK_M % STEP_M == 0 && STEP_M % 8 == 0 && BLOCK_M <= 152, "tokens of a tile");
static_assert(OUT_TYPE == OUT_BF16 || OUT_TYPE == OUT_F16, "values of two bytes, transposed by stmatrix");

constexpr int M64_BYTES = WGMMA_M * BLOCK_K;
constexpr int WEIGHT_BYTES = BLOCK_N * BLOCK_K, TOKEN_BYTES = BLOCK_M * BLOCK_K;
constexpr int SFA_COPY_FLOATS = BLOCK_M + 4;  // a copy starts at a multiple of 4 rows
constexpr int SFA_STAGE_FLOATS = (SFA_COPY_FLOATS + 31) / 32 * 32;
constexpr int SCALE_FLOATS = (BLOCK_M + 15) / 16 * 16;
constexpr int SCALE_BLOCKS = BLOCK_N / 128;  // of 128 weights, whose scales a tile needs
constexpr int SLAB_BYTES = BLOCK_M * 128;    // 64 weights of every token
constexpr int NUM_TILE_READERS = NUM_CONSUMER_WARPS + 2;

// An m64 of the tile's weights: wave `w` of a warpgroup. Which columns of D those are, and which scale block is theirs.
__device__ __forceinline__ constexpr int m64_of(int warpgroup, int w) {
    return warpgroup * WAVES + w;
}
__device__ __forceinline__ constexpr int scale_block_of(int warpgroup, int /*w*/) {
    return warpgroup;
}

template <int STAGES>
struct alignas(1024) SharedStorageOf {
    uint8_t weights[STAGES][WEIGHT_BYTES];
    uint8_t tokens[STAGES][TOKEN_BYTES];
    uint8_t d[NUM_MMA_WARPGROUPS][NUM_D][SLAB_BYTES];
    alignas(128) float sfa[STAGES][SFA_STAGE_FLOATS];
    alignas(128) float scales[STAGES][SCALE_BLOCKS][SCALE_FLOATS];
    uint64_t full[STAGES], scaled[STAGES], empty[STAGES];
    TileQueueStorage queue;
    GroupTableStorage<MAX_GROUPS> groups;
};

constexpr int STAGES = NUM_STAGES == 0 ? stages_that_fit<SharedStorageOf, 8>() : NUM_STAGES;
using SharedStorage = SharedStorageOf<STAGES>;
#include "device/read_back.cuh"

using Order = EvenTileOrder<BLOCK_M, BLOCK_N, RASTER_M>;
using Reader = TileReader<1>;

struct Problem {
    const float* sfb;
    int m, n, k, num_groups;

    __device__ __forceinline__ int k_blocks() const { return (k + BLOCK_K - 1) / BLOCK_K; }
    __device__ __forceinline__ int sfb_rows() const { return (n + 127) / 128; }
    // M64s of a tile that have weights.
    __device__ __forceinline__ int m64s(const Tile& tile) const {
        const int m64s = (n - tile.column + WGMMA_M - 1) / WGMMA_M;
        return m64s < TILE_M64S ? m64s : TILE_M64S;
    }
};

// Tokens that are loaded and multiplied for a tile.
__device__ __forceinline__ int columns_of(const Tile& tile) {
    return (tile.rows + STEP_M - 1) / STEP_M * STEP_M;
}
