// What the roles of sm90_fp4_dgrad.cu share: the constants that follow from its config, shared memory, the problem.
#pragma once

// The host defines, from Fp4DgradConfig: BLOCK_M (rows of dY), NUM_STAGES (0 = as many as fit), RASTER_M, MAX_GROUPS, FORMAT,
// SCALES_ARE_BLOCKED.
constexpr int BLOCK_COLUMNS = 256;  // columns of D
constexpr int BLOCK_N = 64;         // of the sums, to a stage: 128 bytes of a row of dY
constexpr int WGMMA_M = 64;
constexpr int NUM_MMA_WARPGROUPS = 2;
constexpr int NUM_CONSUMER_WARPS = NUM_MMA_WARPGROUPS * 4;
constexpr int WARPGROUP_COLUMNS = BLOCK_COLUMNS / NUM_MMA_WARPGROUPS;
constexpr int M64S = WARPGROUP_COLUMNS / WGMMA_M;
constexpr int NUM_THREADS = 128 * (NUM_MMA_WARPGROUPS + 1);
constexpr int CONSUMER_REGISTERS = 224, PRODUCER_REGISTERS = 56;
// A scale warp has a round of each stage; the producer reads tiles too.
constexpr int NUM_SCALE_WARPS = 2;
constexpr int NUM_TILE_READERS = NUM_CONSUMER_WARPS + 1 + NUM_SCALE_WARPS;
static_assert(BLOCK_M == 32 || BLOCK_M == 64 || BLOCK_M == 128, "rows");
static_assert(is_fp4(FORMAT), "two codes a byte");
static_assert(M64S == 2, "the four codes of a lane in an ldmatrix are its rows of two m64s");

constexpr int SCALE_BLOCK = FORMAT == FORMAT_NVFP4 ? 16 : 32;  // columns that share a scale
constexpr int SCALE_COLUMNS = BLOCK_COLUMNS / SCALE_BLOCK;     // of a tile

// Rows of dY in one copy. A tile of no more rows than that takes one, and products of half the size.
constexpr int BOX_ROWS = BLOCK_M < 64 ? BLOCK_M : 64;
constexpr int BOX_BYTES = BOX_ROWS * 128;
constexpr int ROWS_BYTES = BLOCK_M * 128;
constexpr int CODE_BYTES = BLOCK_N * BLOCK_COLUMNS / 2;

// Scales come row-major as 16 bytes a row, the least that a copy can have, or as whole 32x4x4 tiles, of 128 rows.
constexpr int TILE_COLUMNS = 4, TILE_BYTES = 512;
constexpr int SCALE_ROW_BYTES = 16;
constexpr int SCALE_BYTES =
    SCALES_ARE_BLOCKED ? SCALE_COLUMNS / TILE_COLUMNS * TILE_BYTES : BLOCK_N * SCALE_ROW_BYTES;

// The factors of a block of columns: a word for each pair of neighbours along N, those that a lane needs for 32 of N together.
// The padding spreads the blocks over the banks.
constexpr int FACTOR_WORDS = BLOCK_N / 2 + 4;
constexpr int ROUND_N = 32;
constexpr int ROUNDS = BLOCK_N / ROUND_N;
static_assert(ROUNDS == NUM_SCALE_WARPS, "a warp for each");
constexpr bool MAY_BE_LARGE = FORMAT == FORMAT_MXFP4;  // scales that take two factors

// A slab is 64 columns of D, 128 bytes, of BLOCK_M rows.
constexpr int SLAB_COLUMNS = 64;
constexpr int NUM_SLABS = WARPGROUP_COLUMNS / SLAB_COLUMNS;
constexpr int SLAB_BYTES = BLOCK_M * 128;

template <int STAGES>
struct alignas(1024) SharedStorageOf {
    uint8_t rows[STAGES][ROWS_BYTES];
    uint8_t codes[STAGES][CODE_BYTES];
    uint8_t d[NUM_MMA_WARPGROUPS][NUM_SLABS * SLAB_BYTES];
    alignas(128) uint8_t scales[STAGES][SCALE_BYTES];
    alignas(16) uint32_t factors[STAGES][SCALE_COLUMNS][FACTOR_WORDS];
    alignas(16) uint32_t second_factors[MAY_BE_LARGE ? STAGES : 1][SCALE_COLUMNS][FACTOR_WORDS];
    uint32_t is_large[STAGES][ROUNDS];  // whether second factors count
    uint64_t full[STAGES], empty[STAGES];
    uint64_t has_factors[STAGES];
    TileQueueStorage queue;
    GroupTableStorage<MAX_GROUPS> groups;
};

constexpr int STAGES = NUM_STAGES == 0 ? stages_that_fit<SharedStorageOf, 8>() : NUM_STAGES;
using SharedStorage = SharedStorageOf<STAGES>;
#include "device/read_back.cuh"

using Order = TileOrder<BLOCK_M, BLOCK_COLUMNS, RASTER_M>;
using Reader = TileReader<1>;

struct Problem {
    const float* global_scales;
    int global_stride;  // 0: one for all groups, 1: one a group
    int n, k;

    __device__ __forceinline__ int n_stages() const { return (n + BLOCK_N - 1) / BLOCK_N; }
};

// Where a stage's scale of the first row of a round lies; in both layouts a row's is 16 bytes behind the row's before. column: of
// the tile, and row-major of the 16 that are copied together, of which a tile of MXFP4 needs the first or the last 8.
__device__ __forceinline__ uint32_t first_scale(const SharedStorage& shared, int stage, int step, int round,
                                                int column) {
    static_assert(ROUND_N == 32 && BLOCK_N == 64, "a round has the 32 rows of a tile's four columns of 32");
    const uint32_t scales = shared_address(shared.scales[stage]);
    if constexpr (!SCALES_ARE_BLOCKED) return scales + round * (ROUND_N * SCALE_ROW_BYTES) + column;
    return scales + column / TILE_COLUMNS * TILE_BYTES + (step % 2 * 2 + round) * TILE_COLUMNS +
           column % TILE_COLUMNS;
}
