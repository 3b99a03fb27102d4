// The sizes of the grouped Blackwell kernel: tiles, stages, and what lies where in shared and tensor memory.
#pragma once

// The host defines, from Sm100GroupedConfig: CTA_GROUP, MULTICAST, TOKENS_ON_N, MMA_N, NUM_STAGES (0 = as many as fit),
// RASTER_M, PROBLEM_LIST, MAX_GROUPS, KIND (KIND_*), A_CODE, B_CODE (MMA_*), SCALES_A, SCALES_B (SCALES_*), GROUPS_ON_TILES, OUT
// (OUT_*), COLUMN_MAJOR, WIDE_STORES, POLICY_A, POLICY_B (L2_EVICT_*).
constexpr int KIND_MXFP8 = 0, KIND_NVFP4 = 1, KIND_MXFP4 = 2, KIND_FP8_BLOCK = 3;
static_assert(KIND == KIND_MXFP8 || KIND == KIND_NVFP4 || KIND == KIND_MXFP4 || KIND == KIND_FP8_BLOCK,
              "one of the kinds");
constexpr bool PROMOTES = KIND == KIND_FP8_BLOCK;  // the store warps scale: sm100_grouped/promote.cuh

// With EPILOGUE_IS_QUANT also the constants of device/quant_outputs.cuh, from the Epilogue.
#if EPILOGUE_IS_QUANT
constexpr bool GATE_AND_UP_APART = GLU == GLU_CONCATENATED;
constexpr int WIDE = 128;  // rows or columns of FP8_BLOCK's blocks
constexpr bool WIDE_BLOCKS = ROW_QUANT == QUANT_FP8_BLOCK || COLUMN_QUANT == QUANT_FP8_BLOCK;
#else
constexpr bool GATE_AND_UP_APART = false;
#endif
// Whether it is asked for which 128-row tile each group's scales start on, if each starts one of its own.
constexpr bool NEEDS_OWN_TILES = GROUPS_ON_TILES || EPILOGUE_IS_QUANT;

constexpr int LANE_ROWS = 128;
constexpr int LEFT_ROWS = LANE_ROWS * CTA_GROUP;
constexpr int RIGHT_ROWS = MMA_N / CTA_GROUP;  // that one CTA loads
constexpr int TILE_M = TOKENS_ON_N ? MMA_N : LEFT_ROWS;
constexpr int TILE_N = TOKENS_ON_N ? LEFT_ROWS : MMA_N;
static_assert(MMA_N % 32 == 0 && MMA_N <= 256, "columns are stored 32 at a time");

// Tokens on the right: a tile with fewer of them loads and multiplies no more than they need, by COLUMN_STEP.
constexpr bool SHORT_TILES = TOKENS_ON_N && MULTICAST == 1 && !PROMOTES;
constexpr int COLUMN_STEP = MMA_N < 128 ? 32 : 64;

__device__ __forceinline__ int columns_of(const Tile& tile) {
    return SHORT_TILES ? (tile.rows + COLUMN_STEP - 1) / COLUMN_STEP * COLUMN_STEP : MMA_N;
}

constexpr int CLUSTER = CTA_GROUP * MULTICAST;  // CTAs
constexpr int CLUSTER_N = TILE_N * MULTICAST;   // columns of D that they make at a time
// CTAs of a cluster that need the same part of the tokens: the even ones of all pairs (or all CTAs, without pairs).
constexpr int SAME_PART = ((1 << CLUSTER) - 1) / ((1 << CTA_GROUP) - 1);
static_assert(SAME_PART == 1 || SAME_PART == 3 || SAME_PART == 5 || SAME_PART == 15 || SAME_PART == 0x55,
              "1, 2 or 4 workers");
static_assert((TOKENS_ON_N ? RIGHT_ROWS : LANE_ROWS) / MULTICAST % 8 == 0,
              "a share is whole swizzle patterns");

constexpr int BLOCK_K = 128;                                                // bytes of a row in a stage
constexpr int MMA_K = 32;                                                   // bytes of a row in a product
constexpr int ATOMS = KIND == KIND_NVFP4 ? 4 : KIND == KIND_MXFP4 ? 2 : 1;  // of scales along K in a stage
constexpr int RIGHT_ATOMS = (MMA_N + 127) / 128;                            // of scales along the columns
constexpr int LEFT_BYTES = LANE_ROWS * BLOCK_K, RIGHT_BYTES = RIGHT_ROWS * BLOCK_K;

// FP4 weights beside 8-bit tokens: of every 16 bytes that the tensor core reads 8 hold 16 codes. The copy engine spreads
// them, and counts what it has read. A stage of K is a window of 128 values that begins on a multiple of 64: the last one
// ends with the last 64 of K that are begun, and may begin inside the one before.
constexpr bool PADDED_B = KIND == KIND_MXFP8 && B_CODE == MMA_E2M1;
constexpr int WINDOW_STEP = 64;
constexpr int LEFT_SCALE_BYTES = PROMOTES ? 0 : ATOMS * SCALE_ATOM_BYTES;
constexpr int RIGHT_SCALE_BYTES = RIGHT_ATOMS * LEFT_SCALE_BYTES;

constexpr bool GATHERS_A = !PROMOTES && SCALES_A != SCALES_TILED;
constexpr bool GATHERS_B = !PROMOTES && SCALES_B != SCALES_TILED;
constexpr int NUM_GATHER_WARPS = GATHERS_A || GATHERS_B ? 4 : 0;
constexpr int NUM_STORE_WARPS = 4;  // of a warpgroup
// With PROMOTES the first of several warpgroups that share a tile's columns; the others' warps come last.
constexpr int PROMOTERS = !PROMOTES || MMA_N == 32 ? 1 : 2;
constexpr int NUM_THREADS = 32 * (4 + NUM_STORE_WARPS * PROMOTERS + NUM_GATHER_WARPS);
constexpr int LOAD_A_WARP = 4, LOAD_B_WARP = 5, MULTIPLY_WARP = 6, SCHEDULE_WARP = 7, GATHER_WARP = 8;
// Registers of a thread of two such warpgroups, and of the other four warps: sums and loaded products need more than all get.
constexpr bool MOVES_REGISTERS = PROMOTERS > 1;
constexpr int PROMOTER_REGISTERS = MMA_N == 256 ? 240 : 232, OTHER_REGISTERS = MMA_N == 256 ? 24 : 40;
// Bytes that the two producers bring to a stage of a CTA.
constexpr int LEFT_LOADED = LEFT_BYTES / (PADDED_B && TOKENS_ON_N ? 2 : 1) +
                            ((TOKENS_ON_N ? GATHERS_B : GATHERS_A) ? 0 : LEFT_SCALE_BYTES);
constexpr int RIGHT_LOADED = RIGHT_BYTES / (PADDED_B && !TOKENS_ON_N ? 2 : 1) +
                             ((TOKENS_ON_N ? GATHERS_A : GATHERS_B) ? 0 : RIGHT_SCALE_BYTES);

// Arrivals that end a phase of a barrier; of `full` also the bytes of CTA_GROUP CTAs.
constexpr int FULL_ARRIVALS = 2 + (NUM_GATHER_WARPS > 0 ? CTA_GROUP : 0);  // one gathering warp of each CTA
constexpr int EMPTY_ARRIVALS = MULTICAST;
constexpr int DRAINED_ARRIVALS = CTA_GROUP * NUM_STORE_WARPS * PROMOTERS;
constexpr int QUEUE_ARRIVALS = CLUSTER * (NUM_STORE_WARPS * PROMOTERS + 2 + NUM_GATHER_WARPS) + MULTICAST;

// Tensor memory: two accumulators, then the scales. Where that is more than there is, the accumulators share columns, and
// the shared ones are read first and given back.
constexpr int SCALE_COLUMNS = PROMOTES ? 0 : SCALE_ATOM_COLUMNS * ATOMS * (1 + RIGHT_ATOMS);
constexpr int CHUNK = 32;  // columns that are read at a time
constexpr int TOO_MANY = 2 * MMA_N + SCALE_COLUMNS - 512;
constexpr int SHARED_COLUMNS = TOO_MANY > 0 ? (TOO_MANY + CHUNK - 1) / CHUNK * CHUNK : 0;
constexpr int NUM_CHUNKS = MMA_N / CHUNK;
constexpr int OWN_CHUNKS = NUM_CHUNKS / PROMOTERS;  // that a warp stores
constexpr int CHUNKS_BEFORE_DRAINED = SHARED_COLUMNS > 0 ? SHARED_COLUMNS / CHUNK : OWN_CHUNKS;
// With PROMOTES an accumulator is for a unit of the tile, for 128 of K: while one is read, products of others are under way.
constexpr int UNITS = PROMOTES && MMA_N > 128 ? 2 : 1;
constexpr int UNIT_N = MMA_N / UNITS;
constexpr int ACCUMULATORS = PROMOTES ? 4 : 2;
constexpr int SECOND_ACCUMULATOR = PROMOTES ? UNIT_N : MMA_N - SHARED_COLUMNS;
constexpr int LEFT_SCALES_AT = PROMOTES ? ACCUMULATORS * UNIT_N : 2 * MMA_N - SHARED_COLUMNS;
constexpr int RIGHT_SCALES_AT = LEFT_SCALES_AT + SCALE_ATOM_COLUMNS * ATOMS;
constexpr int USED_COLUMNS = LEFT_SCALES_AT + SCALE_COLUMNS;
constexpr int TMEM_COLUMNS = USED_COLUMNS <= 128 ? 128 : USED_COLUMNS <= 256 ? 256 : 512;
static_assert(USED_COLUMNS <= TMEM_COLUMNS && SHARED_COLUMNS <= MMA_N, "does not fit in tensor memory");

// Starts on a 1024-byte boundary, and so does every operand of a stage: their sizes are multiples of it.
template <int STAGES>
struct alignas(128) SharedStorageOf {
    uint8_t left[STAGES][LEFT_BYTES];
    uint8_t right[STAGES][RIGHT_BYTES];
    uint8_t left_scales[STAGES][PROMOTES ? 1 : LEFT_SCALE_BYTES];
    // Atoms of one 128 rows along K, then of the next 128 rows.
    uint8_t right_scales[STAGES][PROMOTES ? 1 : RIGHT_SCALE_BYTES];
    uint64_t full[STAGES], empty[STAGES];
    uint64_t done[ACCUMULATORS], drained[ACCUMULATORS];
    TileQueueStorage queue;
    GroupTableStorage<PROBLEM_LIST ? 1 : MAX_GROUPS> groups;
    int scale_shifts[NEEDS_OWN_TILES ? MAX_GROUPS : 1];
#if EPILOGUE_IS_QUANT
    alignas(16) float column_multipliers[NUM_STORE_WARPS][CHUNK];
    float column_maxima[2][NUM_STORE_WARPS][COLUMN_QUANT == QUANT_FP8_BLOCK ? WIDE / CHUNK : 1][32];
#endif
    uint32_t tensor_memory;
    // Of the tokens of a warp's columns, scale times the weights' scale, of two K blocks in turn.
    alignas(16) float column_scales[PROMOTES && TOKENS_ON_N ? NUM_STORE_WARPS * PROMOTERS : 1][2]
                                   [PROMOTES && TOKENS_ON_N ? OWN_CHUNKS * CHUNK : 1];
};

static_assert(LEFT_BYTES % 1024 == 0 && RIGHT_BYTES % 1024 == 0, "the swizzle repeats every 1024 bytes");

constexpr int STAGES = NUM_STAGES == 0 ? stages_that_fit<SharedStorageOf, 24>() : NUM_STAGES;
using SharedStorage = SharedStorageOf<STAGES>;
#include "device/read_back.cuh"
extern "C" __device__ const int padless_stage_bytes =
    LEFT_BYTES + RIGHT_BYTES + LEFT_SCALE_BYTES + RIGHT_SCALE_BYTES;
extern "C" __device__ const int padless_tmem_used = USED_COLUMNS;
extern "C" __device__ const int padless_tmem_columns = TMEM_COLUMNS;
extern "C" __device__ const int padless_tmem_shared = SHARED_COLUMNS;

// And kernel_map_grouped.py, which draws them.
extern "C" __device__ const int padless_left_bytes = LEFT_BYTES, padless_right_bytes = RIGHT_BYTES;
extern "C" __device__ const int padless_left_scale_bytes = LEFT_SCALE_BYTES;
extern "C" __device__ const int padless_right_scale_bytes = RIGHT_SCALE_BYTES;
extern "C" __device__ const int padless_full_bytes = CTA_GROUP * (LEFT_LOADED + RIGHT_LOADED);
extern "C" __device__ const int padless_full_arrivals = FULL_ARRIVALS;
extern "C" __device__ const int padless_empty_arrivals = EMPTY_ARRIVALS;
extern "C" __device__ const int padless_drained_arrivals = DRAINED_ARRIVALS;
extern "C" __device__ const int padless_queue_arrivals = QUEUE_ARRIVALS;
extern "C" __device__ const int padless_queue_slots = QUEUE_SLOTS;
extern "C" __device__ const int padless_second_accumulator = SECOND_ACCUMULATOR;
extern "C" __device__ const int padless_left_scales_at = LEFT_SCALES_AT;
extern "C" __device__ const int padless_right_scales_at = RIGHT_SCALES_AT;
