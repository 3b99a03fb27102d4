// What the roles of sm90_mxfp8_grouped_gemm.cu share: the constants that follow from its config, shared memory, the problem.
#pragma once

// The host defines, from Sm90Mxfp8Config: BLOCK_M, BLOCK_N, NUM_STAGES (0 = as many as fit), RASTER_M, MAX_GROUPS,
// A_E5M2, B_E5M2, OUT_TYPE.
constexpr int BLOCK_K = 128;  // bytes and elements: STEPS blocks of 32
constexpr int WGMMA_M = 64;
constexpr int HALF_N = BLOCK_N / 2;  // products are begun and promoted in halves
constexpr int NUM_MMA_WARPGROUPS = BLOCK_M / WGMMA_M;
constexpr int NUM_CONSUMER_WARPS = NUM_MMA_WARPGROUPS * 4;
constexpr int NUM_SCALE_WARPS = 2;
constexpr int NUM_THREADS = 128 * (1 + NUM_MMA_WARPGROUPS);
constexpr int CONSUMER_REGISTERS = NUM_MMA_WARPGROUPS == 1 ? 248 : 232;
constexpr int PRODUCER_REGISTERS = 40;
static_assert(BLOCK_M == 64 || BLOCK_M == 128, "one or two warpgroups");
static_assert(BLOCK_N == 64 || BLOCK_N == 128, "a thread holds 3 / 2 BLOCK_N sums and scales");

constexpr int OUT_BYTES = OUT_TYPE == OUT_F32 ? 4 : 2;
constexpr int SLAB_COLUMNS = 128 / OUT_BYTES;
constexpr int SLAB_BYTES = WGMMA_M * 128;

// Rows come in m64s, 64 rows each, one to a consumer warpgroup.
__device__ __forceinline__ int m64s_of(int rows) {
    return (rows + WGMMA_M - 1) / WGMMA_M;
}

constexpr int M64_BYTES = WGMMA_M * BLOCK_K;
constexpr int A_BYTES = BLOCK_M * BLOCK_K;
constexpr int B_BYTES = BLOCK_N * BLOCK_K;
constexpr int V_BYTES = BLOCK_N / 8 * V_BRICKS;

#if EPILOGUE_IS_QUANT
constexpr int WAVES = 1;  // of 64 rows that a consumer warpgroup holds
constexpr int CLUSTER_N = 1;
#include "device/sm90/quant_storage.cuh"
constexpr int M64_D_BYTES = QUANT_M64_BYTES;
#else
constexpr int NUM_SLABS = BLOCK_N / SLAB_COLUMNS;
constexpr int M64_D_BYTES = NUM_SLABS * SLAB_BYTES;
#endif

template <int STAGES>
struct alignas(1024) SharedStorageOf {
    uint8_t a[STAGES][A_BYTES];
    uint8_t b[STAGES][B_BYTES];
    uint8_t d[NUM_MMA_WARPGROUPS][M64_D_BYTES];
    alignas(128) uint8_t v[STAGES][V_BYTES];        // scales of B, as an operand
    alignas(128) uint32_t sfa[STAGES][BLOCK_M][2];  // scales of A: bf16, STEPS to a row
    uint64_t full[STAGES], empty[STAGES];
    TileQueueStorage queue;
    GroupTableStorage<MAX_GROUPS> groups;
#if EPILOGUE_IS_QUANT
    QuantStorage quant;
#endif
};

constexpr int STAGES = NUM_STAGES == 0 ? stages_that_fit<SharedStorageOf, 12>() : NUM_STAGES;
using SharedStorage = SharedStorageOf<STAGES>;
#include "device/read_back.cuh"

using Order = TileOrder<BLOCK_M, BLOCK_N, RASTER_M>;
using Reader = TileReader<1>;

struct Problem {
    ScaleSource sfa, sfb;
    int m, n, k, num_groups;

    __device__ __forceinline__ int k_blocks() const { return (k + BLOCK_K - 1) / BLOCK_K; }
};

// Where the columns of a tile are interleaved (device/sm90/wgmma_fragment.cuh), B comes in copies of two of every four rows; of gate and
// of up, if they are apart.
constexpr int B_COPIES = GATE_AND_UP_APART ? 4 : 2;

// The row of the group's weights from which copy `copy` of the tile at `column` takes its fours.
__device__ __forceinline__ int first_weight_row(const Problem& problem, int column, int copy) {
    return GATE_AND_UP_APART ? (column + copy / 2 * problem.n) / 2 : column;
}

// The row of the group's weights that row `row` of the tile's part of B is.
__device__ __forceinline__ int interleaved_weight_row(const Problem& problem, int column, int row) {
    constexpr int COPY_ROWS = BLOCK_N / B_COPIES;
    const int copy = row / COPY_ROWS, in_copy = row % COPY_ROWS;
    return first_weight_row(problem, column, copy) + in_copy / 2 * 4 + copy % 2 * 2 + in_copy % 2;
}
