// What the roles of sm90_fp8_grouped_gemm.cu share: the constants that follow from its config, shared memory, the problem.
#pragma once

// The host defines, from GemmConfig: BLOCK_M, BLOCK_N, NUM_STAGES (0 = as many as fit), CLUSTER_N, RASTER_M,
// MAX_GROUPS, SCALE_WINDOW_K_BLOCKS, STORE_IS_POOL, SCALES_ARE_K_MAJOR, OUT_TYPE.
constexpr bool SCALES_K_MAJOR = SCALES_ARE_K_MAJOR;

constexpr int BLOCK_K = 128;  // bytes, elements, and the length of a scale block
constexpr int WGMMA_M = 64, WGMMA_K = 32;
constexpr int NUM_MMA_WARPGROUPS = BLOCK_M == 64 ? 1 : 2;
constexpr int WAVES = BLOCK_M / WGMMA_M / NUM_MMA_WARPGROUPS;  // of 64 rows that a consumer warpgroup holds
constexpr int NUM_THREADS = 128 * (1 + NUM_MMA_WARPGROUPS);
constexpr int CONSUMER_REGISTERS = NUM_MMA_WARPGROUPS == 1 ? 248 : 232;
constexpr int PRODUCER_REGISTERS = 40;

constexpr int OUT_BYTES = OUT_TYPE == OUT_F32 ? 4 : 2;
constexpr int SLAB_COLUMNS = 128 / OUT_BYTES;
constexpr int SLAB_BYTES = WGMMA_M * 128;
// A tile may start in the second half of a 128-column scale block unless its width is a multiple of 128.
constexpr bool CAN_START_ODD = BLOCK_N % 128 != 0;
constexpr int NUM_SFB = GATE_AND_UP_APART ? 2
                        : CAN_START_ODD   ? (BLOCK_N + 64 + 127) / 128
                                          : BLOCK_N / 128;  // scale blocks a tile can touch
static_assert(BLOCK_M == 64 || BLOCK_M == 128 || BLOCK_M == 256, "one or two warpgroups of one or two waves");
static_assert(BLOCK_N % 64 == 0, "scales are selected by 64 columns");

// Rows come in m64s, 64 rows each: m64 u belongs to warpgroup u % NUM_MMA_WARPGROUPS as its wave u / NUM_MMA_WARPGROUPS. A
// tile with fewer rows than BLOCK_M has fewer m64s, and no other m64 is loaded or multiplied. Where columns are quantised
// two m64s of a warpgroup are neighbours instead (first_m64 of device/sm90/quant_storage.cuh).
__device__ __forceinline__ int m64s_of(int rows) {
    return (rows + WGMMA_M - 1) / WGMMA_M;
}

// MN-major scales travel with the stage: the tile's rows and up to 3 before them, since a copy must start at a multiple
// of 4. A box has at most 256 elements and lands on a 128-byte boundary: 256 rows take three copies, end to end.
// Row-major scales travel once per tile, as the contiguous window of all K blocks of the tile's rows, in copies of 256
// floats that start at a multiple of 4.
constexpr int SFA_COPY_FLOATS = BLOCK_M == 256 ? 96 : BLOCK_M + 4;
constexpr int SFA_STAGE_FLOATS = SCALES_K_MAJOR ? 0 : BLOCK_M == 256 ? 3 * 96 : (BLOCK_M + 4 + 31) / 32 * 32;
constexpr int WINDOW_COPY_FLOATS = 256;
constexpr int WINDOW_FLOATS = SCALES_K_MAJOR
                                  ? (BLOCK_M * SCALE_WINDOW_K_BLOCKS + 3 + WINDOW_COPY_FLOATS - 1) /
                                        WINDOW_COPY_FLOATS * WINDOW_COPY_FLOATS
                                  : 0;

constexpr int M64_BYTES = WGMMA_M * BLOCK_K;
constexpr int A_BYTES = BLOCK_M * BLOCK_K;
constexpr int B_BYTES = BLOCK_N * BLOCK_K;

constexpr int NUM_CONSUMER_WARPS = NUM_MMA_WARPGROUPS * 4;
// Where consumers do not store themselves, a warp for each of their warpgroups does, beside the producer. With 192 columns
// that does not pay (measured).
constexpr bool CONSUMERS_STORE = EPILOGUE_IS_QUANT || BLOCK_N == 192;
constexpr int NUM_STORE_WARPS = CONSUMERS_STORE ? 0 : NUM_MMA_WARPGROUPS;
constexpr int NUM_TILE_READERS = NUM_CONSUMER_WARPS + 1 + NUM_STORE_WARPS;  // of a CTA
#if EPILOGUE_IS_QUANT
#include "device/sm90/quant_storage.cuh"
constexpr int M64_D_BYTES = QUANT_M64_BYTES;
#else
constexpr int M64_STEP = NUM_MMA_WARPGROUPS;  // from a warpgroup's m64 to its next
__device__ __forceinline__ int first_m64(int warpgroup, int) {
    return warpgroup;
}
constexpr int NUM_SLABS = BLOCK_N / SLAB_COLUMNS;
constexpr int M64_D_BYTES = NUM_SLABS * SLAB_BYTES;
#endif

template <int STAGES>
struct alignas(1024) SharedStorageOf {
    uint8_t a[STAGES][A_BYTES];
    uint8_t b[STAGES][B_BYTES];
    uint8_t d[BLOCK_M / WGMMA_M][M64_D_BYTES];
    alignas(128) float sfa[STAGES][SFA_STAGE_FLOATS == 0 ? 32 : SFA_STAGE_FLOATS];
    alignas(128) float sfa_window[WINDOW_FLOATS == 0 ? 32 : WINDOW_FLOATS];
    uint64_t full[STAGES], empty[STAGES];
    uint64_t window_full, window_empty;
    TileQueueStorage queue;
    GroupTableStorage<MAX_GROUPS> groups;
#if EPILOGUE_IS_QUANT
    QuantStorage quant;
#endif
    uint64_t next_tile_wanted;  // see K_BLOCKS_AHEAD
};

constexpr int STAGES = NUM_STAGES == 0 ? stages_that_fit<SharedStorageOf, 12>() : NUM_STAGES;
using SharedStorage = SharedStorageOf<STAGES>;
#include "device/read_back.cuh"
// How many multiply-adds of the promotion in a row read their common scale once (operand_reuse.py): as measured.
extern "C" __device__ const int padless_reuse_run = WAVES == 2 ? 12 : 4;

// Tiles of the last round are cut in two (device/scheduler.cuh) where a half, one m64 of each warpgroup, costs about half a tile.
// No scale of a column covers rows of both halves.
constexpr bool HALF_TILES = WAVES == 2;
using Order = TileOrder<BLOCK_M, BLOCK_N * CLUSTER_N, RASTER_M, HALF_TILES>;
// Tiles that take long are taken late: when the producer begins with the last K_BLOCKS_AHEAD K blocks of the tile before. In a
// half these take 6 us, of which an atomic and a message to the other CTA need less than half.
constexpr bool TAKES_LATE = HALF_TILES || BLOCK_N == 192;
constexpr int K_BLOCKS_AHEAD = 16;
using Reader = TileReader<CLUSTER_N>;

struct Problem {
    const float* sfb;
    int m, n, k, num_groups;
#if LOW_RANK_STEPS > 0
    const TensorMap *map_t, *map_factor;
    float scaling;
#endif

    __device__ __forceinline__ int k_blocks() const { return (k + BLOCK_K - 1) / BLOCK_K; }
    __device__ __forceinline__ int sfb_rows() const { return (n + 127) / 128; }
    // Whoever loads windows of row-major scales has no registers left to count boxes.
    __device__ __forceinline__ int row_box() const {
        return SCALES_K_MAJOR ? ::row_box(m) : ::row_box(m, num_groups);
    }
    // Whether one m64 may take more than one box. Further boxes bring rows that clear_missing_rows clears, and have to wait
    // for it.
    __device__ __forceinline__ bool boxes_vary() const { return row_box() < 64 && row_box() < m; }
};

// First column of this CTA's part of the tile.
__device__ __forceinline__ int cta_column(const Tile& tile) {
    return CLUSTER_N == 1 ? tile.column : tile.column + static_cast<int>(cluster_cta_rank()) * BLOCK_N;
}
