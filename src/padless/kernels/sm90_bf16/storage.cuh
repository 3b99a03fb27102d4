// What the roles of sm90_bf16_grouped_gemm.cu share: the constants that follow from its config, shared memory, the problem.
#pragma once

// The host defines, from Bf16GemmConfig: BLOCK_M (tokens), BLOCK_N (weight rows), NUM_MMA_WARPGROUPS, NUM_STAGES (0 = as
// many as fit), STAGE_BLOCKS (K blocks to a stage), RASTER_M, MAX_GROUPS, A_FORMAT, B_FORMAT, SFB_IS_BLOCKED, B_IS_REPACKED, OUT_TYPE, and
// BOX_ROWS: tokens of one copy. A tile of no more takes one copy, and products of so many tokens.
constexpr int BLOCK_K = 128;
constexpr int WGMMA_M = 64;
constexpr int M64S_OF_WARPGROUP = BLOCK_N / WGMMA_M / NUM_MMA_WARPGROUPS;
constexpr int NUM_CONSUMER_WARPS = NUM_MMA_WARPGROUPS * 4;
// Few tokens are converted by two warps, in the producer's warpgroup, so that four consumer warpgroups get the registers.
constexpr bool HELPERS_TOGETHER = NUM_MMA_WARPGROUPS == 4 && BLOCK_M <= 32;
constexpr int NUM_CONVERTER_WARPS = HELPERS_TOGETHER ? 2 : 4;
constexpr int NUM_THREADS = 128 * (NUM_MMA_WARPGROUPS + (HELPERS_TOGETHER ? 1 : 2));
constexpr int CONSUMER_REGISTERS = NUM_MMA_WARPGROUPS == 2 ? 208 : HELPERS_TOGETHER ? 104 : 96;
constexpr int CONVERTER_REGISTERS = HELPERS_TOGETHER ? 64 : 56;
constexpr int PRODUCER_REGISTERS = HELPERS_TOGETHER ? CONVERTER_REGISTERS : 40;
static_assert(BLOCK_M == 8 || BLOCK_M == 16 || BLOCK_M == 32 || BLOCK_M == 64 || BLOCK_M == 128, "tokens");
static_assert(BOX_ROWS == BLOCK_M || (BOX_ROWS == 64 && BLOCK_M == 128), "a tile, or half of one");
static_assert(NUM_MMA_WARPGROUPS == 2 || NUM_MMA_WARPGROUPS == 4, "warpgroups");
#if EPILOGUE_IS_QUANT
#include "device/ptx/conversion.cuh"
#include "device/activation.cuh"
#include "device/quant_rules.cuh"
#include "device/quant_outputs.cuh"
#include "device/sm90/transposed_quant.cuh"
static_assert(!(GATE_AND_UP_APART && SFB_IS_BLOCKED), "a copy of blocked scales has 128 rows together");
#else
constexpr bool GATE_AND_UP_APART = false;
#endif
static_assert(BLOCK_N % (WGMMA_M * NUM_MMA_WARPGROUPS) == 0 && BLOCK_N % 128 == 0 && BLOCK_N <= 256, "rows");

// FP8_BLOCK scales change every 128 of K and are no powers of two: sums of 128 are promoted to other registers.
constexpr bool HAS_TOKEN_SCALES = A_FORMAT == FORMAT_FP8_BLOCK;
constexpr bool HAS_WEIGHT_SCALES = B_FORMAT == FORMAT_FP8_BLOCK;
constexpr bool PROMOTE = HAS_TOKEN_SCALES || HAS_WEIGHT_SCALES;
static_assert(!(HAS_TOKEN_SCALES && HAS_WEIGHT_SCALES), "one operand with float32 scales");
constexpr bool PAIRS_ARE_ADJACENT = !is_fp4(A_FORMAT) && !is_fp4(B_FORMAT);
// NVFP4 values and e4m3 codes are exact in f16 too, which takes fewer instructions to make and multiplies the same way.
constexpr bool IS_F16 = B_FORMAT == FORMAT_NVFP4 && A_FORMAT != FORMAT_BF16;
// MXFP4 values are exact in f16 if their scales lie in a window of 24 powers of two, as nearly all do. So a tile begins in f16
// and changes over to bf16, to its end, at the first stage that has another scale. The checker warps look for those.
constexpr bool BEGINS_IN_F16 = A_FORMAT == FORMAT_MXFP4 && B_FORMAT == FORMAT_MXFP4;
// Two warps beside the producer that have nothing else to do; if there are none the converters look first, and then convert.
constexpr bool CHECKERS_APART = BEGINS_IN_F16 && !HELPERS_TOGETHER;
constexpr int NUM_CHECKER_WARPS = CHECKERS_APART ? 2 : NUM_CONVERTER_WARPS;
constexpr int NUM_TILE_READERS =
    NUM_CONSUMER_WARPS + NUM_CONVERTER_WARPS + (CHECKERS_APART ? NUM_CHECKER_WARPS : 0) + 1;
constexpr float F16_UNSHIFT = 1 << (2 * MXFP4_F16_SHIFT);
constexpr bool HAS_GLOBAL_SCALES = A_FORMAT == FORMAT_NVFP4 || B_FORMAT == FORMAT_NVFP4;
constexpr int SHIFT = shift_of(A_FORMAT) + shift_of(B_FORMAT);
static_assert(STAGE_BLOCKS == 1 || (STAGE_BLOCKS == 2 && is_fp4(B_FORMAT) && !PROMOTE),
              "K blocks of a stage");

// An FP8 or bf16 tile has rows of 128 bytes with the 128-byte swizzle (bf16: two tiles, of 64 values of K each); FP4 rows
// are 64 bytes and not swizzled: eight lanes that read 16 bytes each of two rows touch all banks either way.
constexpr int A_BYTES = BLOCK_M * row_bytes(A_FORMAT);  // of a K block
constexpr int B_BYTES = BLOCK_N * row_bytes(B_FORMAT);
constexpr int TOKEN_HALF_BYTES = BLOCK_M * 128;  // 64 of K in bf16

// Row-major scales come as 16 bytes a row, the least that a copy can have: the scales of 256 of K (NVFP4) or of 512 (MX).
// That is enough for all K blocks of a stage. Blocked ones come as tiles, those of a K block one after the other.
constexpr int SCALE_ROW_BYTES = 16;
constexpr int SFA_BYTES = scales_of_128(A_FORMAT) == 0 ? 0 : BLOCK_M * SCALE_ROW_BYTES;
constexpr int SCALE_TILES =
    scales_of_128(B_FORMAT) / 4;  // 32x4x4 tiles of 512 bytes for 128 rows and 128 of K
constexpr int SCALE_BLOCK_BYTES = SCALE_TILES * 512;
constexpr int SFB_BLOCK_BYTES =
    SFB_IS_BLOCKED ? BLOCK_N / 128 * SCALE_BLOCK_BYTES : 0;  // from a K block to the next
constexpr int SFB_BYTES = scales_of_128(B_FORMAT) == 0 ? 0
                          : SFB_IS_BLOCKED             ? STAGE_BLOCKS * SFB_BLOCK_BYTES
                                                       : BLOCK_N * SCALE_ROW_BYTES;
constexpr int STAGE_BYTES_OF_BOX = (STAGE_BLOCKS * A_BYTES + SFA_BYTES) / (BLOCK_M / BOX_ROWS);
constexpr int STAGE_BYTES_OF_WEIGHTS = STAGE_BLOCKS * B_BYTES + SFB_BYTES;

#if !EPILOGUE_IS_QUANT
// A slab is 128 bytes of D's columns of BLOCK_M tokens. A warpgroup stages one m64, 64 columns, at a time.
constexpr int OUT_BYTES = OUT_TYPE == OUT_F32 ? 4 : 2;
constexpr int SLAB_COLUMNS = 128 / OUT_BYTES;
constexpr int NUM_SLABS = WGMMA_M / SLAB_COLUMNS;
constexpr int SLAB_BYTES = BLOCK_M * 128;
#endif

template <int STAGES, int TOKEN_STAGES>
struct alignas(1024) SharedStorageOf {
    uint8_t b[STAGES][STAGE_BLOCKS][B_BYTES];
    uint8_t tokens[TOKEN_STAGES][STAGE_BLOCKS][2][TOKEN_HALF_BYTES];
#if EPILOGUE_IS_QUANT
    uint8_t d[NUM_TEAMS][PIECE_BYTES];
#else
    uint8_t d[NUM_MMA_WARPGROUPS][NUM_SLABS * SLAB_BYTES];
#endif
    alignas(1024) uint8_t a[STAGES][STAGE_BLOCKS][A_BYTES];  // the swizzle repeats every 1024 bytes
    alignas(128) uint8_t sfb[STAGES][SFB_BYTES == 0 ? 128 : SFB_BYTES];
    alignas(128) uint8_t sfa[STAGES][SFA_BYTES == 0 ? 128 : SFA_BYTES];
    float token_scales[TOKEN_STAGES][HAS_TOKEN_SCALES ? BLOCK_M : 2];
    uint64_t full[STAGES], empty[STAGES];
    uint64_t tokens_full[TOKEN_STAGES], tokens_empty[TOKEN_STAGES];
    TileQueueStorage queue;
    GroupTableStorage<MAX_GROUPS> groups;
    uint64_t checked[BEGINS_IN_F16 ? STAGES : 1];
    // A byte to each of four checker warps, or two to each of two.
    alignas(4) uint8_t beyond_f16[BEGINS_IN_F16 ? STAGES : 1][4];
#if EPILOGUE_IS_QUANT
    int group_tiles[HAS_GROUP_TILES ? MAX_GROUPS
                                    : 1];  // first 128-row tile of each group, every group starting on one
#endif
};

// With two token stages the converters have only what is left of a K block, after the first octet of its products, for the
// whole of the next one. A third lets them run ahead; it is worth one of four stages of codes, not one of two.
constexpr int FEW_STAGES = NUM_STAGES == 0 ? 3 : NUM_STAGES;
template <int STAGES>
using WithThreeTokenStages = SharedStorageOf<STAGES, 3>;
template <int STAGES>
using WithFourTokenStages = SharedStorageOf<STAGES, 4>;

constexpr int token_stages() {
    if (BLOCK_M == 128) return sizeof(SharedStorageOf<FEW_STAGES, 3>) <= SHARED_LIMIT ? 3 : 2;
    // The fourth is worth less than one of four stages of codes.
    return stages_that_fit<WithFourTokenStages, 4>() < stages_that_fit<WithThreeTokenStages, 4>() ? 3 : 4;
}
constexpr int TOKEN_STAGES = token_stages();

template <int STAGES>
using SharedStorageWithTokens = SharedStorageOf<STAGES, TOKEN_STAGES>;

constexpr int STAGES = NUM_STAGES == 0 ? stages_that_fit<SharedStorageWithTokens, 12>() : NUM_STAGES;
using SharedStorage = SharedStorageWithTokens<STAGES>;
#include "device/read_back.cuh"

using Order = TileOrder<BLOCK_M, BLOCK_N, RASTER_M>;
using Reader = TileReader<1>;

struct Problem {
    const float* scales;  // float32, of the FP8_BLOCK operand: a row for each of its blocks along M or N
    long long scales_row_stride, scales_k_stride;
    const float* global_a;  // null: 1
    const float* global_b;
    int global_a_stride, global_b_stride;  // 0: one for all groups, 1: one a group
    int m, n, k, num_groups;

    // K in stages. The last one's second K block may lie past K: its codes and scales count as 0.
    __device__ __forceinline__ int k_stages() const {
        return (k + STAGE_BLOCKS * BLOCK_K - 1) / (STAGE_BLOCKS * BLOCK_K);
    }
    __device__ __forceinline__ int sfb_columns() const {
        constexpr int BLOCK = B_FORMAT == FORMAT_NVFP4 ? 16 : 32;
        return (k + BLOCK - 1) / BLOCK;
    }
};

// Where the scales of K block `kb` begin in a row-major row of SCALE_ROW_BYTES.
template <int FORMAT>
__device__ __forceinline__ int scale_offset(int kb) {
    return kb * scales_of_128(FORMAT) % SCALE_ROW_BYTES;
}

// One arrival a warp, after all its lanes have read what is given back; or one a lane.
template <int ARRIVALS = 1>
__device__ __forceinline__ void arrive_warp(uint64_t& barrier, int lane) {
    static_assert(ARRIVALS == 1 || ARRIVALS == 32, "of a warp");
    if constexpr (ARRIVALS == 1) __syncwarp();
    if (ARRIVALS == 32 || lane == 0) mbarrier_arrive(shared_address(&barrier));
}

// Lanes pass the float32 scales of the tokens on by stores and loads of their own, and each says so itself: racecheck
// follows a thread's arrival, not what __syncwarp adds to lane 0's.
constexpr int TOKEN_ARRIVALS = HAS_TOKEN_SCALES ? 32 : 1;

// With gate and up apart, the weights of a tile come in runs of 32 rows, of gate and of up in turn: the row of the group's
// weights that run `run` of the tile at `column` starts at.
__device__ __forceinline__ int run_of_weights(const Problem& problem, int column, int run) {
    return column / 2 + run / 2 * 32 + run % 2 * (problem.n / 2);
}

// Whether row `row` of the tile at `column` is one of the weights'.
__device__ __forceinline__ bool weights_exist(const Problem& problem, int column, int row) {
    if constexpr (GATE_AND_UP_APART) return column / 2 + row / 64 * 32 + row % 32 < problem.n / 2;
    return column + row < problem.n;
}
