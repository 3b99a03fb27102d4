// What the roles of sm90_fp8_few_grouped_gemm.cu share: the constants that follow from its config, shared memory, the problem.
#pragma once

// The host defines, from Sm90Fp8Config: BLOCK_M (rows of A and D, "tokens"), BLOCK_N (weight rows), NUM_STAGES (0 = as many as
// fit), RASTER_M, MAX_GROUPS, OUT_TYPE.
constexpr int BLOCK_K = 128;  // bytes, elements, and the length of a scale block
constexpr int WGMMA_M = 64, WGMMA_K = 32;
constexpr int NUM_MMA_WARPGROUPS = 2;
constexpr int M64S_OF_WARPGROUP = BLOCK_N / WGMMA_M / NUM_MMA_WARPGROUPS;
constexpr int NUM_CONSUMER_WARPS = NUM_MMA_WARPGROUPS * 4;
constexpr int NUM_THREADS = 128 * (NUM_MMA_WARPGROUPS + 1);
constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;
constexpr int NUM_TILE_READERS = NUM_CONSUMER_WARPS + 1;
static_assert(BLOCK_M == 8 || BLOCK_M == 16 || BLOCK_M == 32 || BLOCK_M == 64, "tokens");
static_assert(BLOCK_N == 128 || BLOCK_N == 256, "weight rows");

#if EPILOGUE_IS_QUANT
#include "device/ptx/conversion.cuh"
#include "device/activation.cuh"
#include "device/quant_rules.cuh"
#include "device/quant_outputs.cuh"
#include "device/sm90/transposed_quant.cuh"
#else
constexpr bool GATE_AND_UP_APART = false;
constexpr int OUT_BYTES = OUT_TYPE == OUT_F32 ? 4 : 2;
constexpr int SLAB_COLUMNS = 128 / OUT_BYTES;
constexpr int NUM_SLABS = WGMMA_M / SLAB_COLUMNS;
constexpr int SLAB_BYTES = BLOCK_M * 128;
#endif

constexpr int A_BYTES = BLOCK_M * BLOCK_K;
constexpr int B_BYTES = BLOCK_N * BLOCK_K;
// The tile's rows and up to 3 before them, since a copy must start at a multiple of 4.
constexpr int SFA_COPY_FLOATS = BLOCK_M + 4;
constexpr int SFA_STAGE_FLOATS = (SFA_COPY_FLOATS + 31) / 32 * 32;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES + SFA_COPY_FLOATS * 4;

template <int STAGES>
struct alignas(1024) SharedStorageOf {
    uint8_t b[STAGES][B_BYTES];
    uint8_t a[STAGES][A_BYTES];
#if EPILOGUE_IS_QUANT
    alignas(1024) uint8_t d[NUM_TEAMS][PIECE_BYTES];
#else
    uint8_t d[NUM_MMA_WARPGROUPS][NUM_SLABS * SLAB_BYTES];
#endif
    alignas(128) float sfa[STAGES][SFA_STAGE_FLOATS];
    uint64_t full[STAGES], empty[STAGES];
    TileQueueStorage queue;
    GroupTableStorage<MAX_GROUPS> groups;
#if EPILOGUE_IS_QUANT
    int group_tiles[HAS_GROUP_TILES ? MAX_GROUPS : 1];  // first 128-row tile of each group
#endif
};

constexpr int STAGES = NUM_STAGES == 0 ? stages_that_fit<SharedStorageOf, 12>() : NUM_STAGES;
using SharedStorage = SharedStorageOf<STAGES>;
#include "device/read_back.cuh"

using Order = TileOrder<BLOCK_M, BLOCK_N, RASTER_M>;
using Reader = TileReader<1>;

struct Problem {
    const float* sfb;
    int m, n, k, num_groups;

    __device__ __forceinline__ int k_blocks() const { return (k + BLOCK_K - 1) / BLOCK_K; }
};

// With gate and up apart, the weights of a tile come in runs of 32 rows, of gate and of up in turn: the row of the group's
// weights that run `run` of the tile at `column` starts at.
__device__ __forceinline__ int run_of_weights(const Problem& problem, int column, int run) {
    return column / 2 + run / 2 * 32 + run % 2 * (problem.n / 2);
}
