// What the roles of sm100_mxfp8_wgrad.cu share: constants, shared memory, the tile, loads of codes and stores of sums.
#pragma once

// The host defines, from Mxfp8WgradConfig: CTA_GROUP (1, or 2: a pair), NUM_STAGES (0 = as many as fit), OUT_TYPE (OUT_BF16 or
// OUT_F32), ACCUMULATE (adds to what is there).
constexpr int OUT_BF16 = 0, OUT_F32 = 2;
constexpr int PART =
    128;  // features of either operand that a CTA loads: as many bytes, the width of a swizzle
constexpr int TILE = PART * CTA_GROUP;
constexpr int BLOCK_T = 128;  // tokens of a stage
constexpr int MMA_T = 32;     // of an instruction, which have a scale in common
constexpr int STEPS = BLOCK_T / MMA_T;
constexpr int OPERAND_BYTES = BLOCK_T * PART;
constexpr int STEP_BYTES = MMA_T * PART;

// Bits 15 and 16 of the instruction descriptor: A and B are MN-major. A CTA has 128 features to a token, one width of the swizzle,
// so eight tokens are 1024 bytes, as eight rows are of a K-major operand: the same shared-memory descriptor.
constexpr uint32_t A_IS_MN_MAJOR = 1u << 15, B_IS_MN_MAJOR = 1u << 16;
constexpr uint32_t SHAPE = mxf8f6f4_shape(TILE, TILE, MMA_E4M3, MMA_E4M3) | A_IS_MN_MAJOR | B_IS_MN_MAJOR;

// The last CTA_GROUP warps have the scales of 128 columns each: a CTA of a pair multiplies its rows by the columns of both.
constexpr int STORE_WARPS = 4, LOAD_WARP = 4, MMA_WARP = 5, SFA_WARP = 6, SFB_WARP = 7;
constexpr int NUM_THREADS = (SFB_WARP + CTA_GROUP) * 32;
constexpr int FULL_ARRIVALS =
    1 + CTA_GROUP * (1 + CTA_GROUP);  // bytes announced, and the scales' warps of every CTA
constexpr int SFA_COLUMN = TILE, SFB_COLUMN = SFA_COLUMN + SCALE_ATOM_COLUMNS;
constexpr int TMEM_COLUMNS = 256 * CTA_GROUP;
static_assert(SFB_COLUMN + CTA_GROUP * SCALE_ATOM_COLUMNS <= TMEM_COLUMNS, "does not fit in tensor memory");

template <int STAGES>
struct alignas(1024) SharedStorageOf {
    uint8_t a[STAGES][OPERAND_BYTES];
    uint8_t b[STAGES][OPERAND_BYTES];
    uint8_t sfa[STAGES][SCALE_ATOM_BYTES];
    uint8_t sfb[CTA_GROUP][STAGES][SCALE_ATOM_BYTES];
    uint64_t full[STAGES], empty[STAGES];
    uint64_t done;
    uint32_t tensor_memory;
};

constexpr int STAGES = NUM_STAGES == 0 ? stages_that_fit<SharedStorageOf, 12>() : NUM_STAGES;
using SharedStorage = SharedStorageOf<STAGES>;
#include "device/read_back.cuh"
#include "device/sm100/gradient.cuh"

// A tile of one group. end: its last token and one; first_scales: row of the scales of its first 32 tokens.
struct Tile {
    int group, row, column, tokens, end, first_scales;

    __device__ __forceinline__ int blocks() const { return (tokens + BLOCK_T - 1) / BLOCK_T; }
    // Products of 32 tokens in a block.
    __device__ __forceinline__ int steps(int block) const {
        const int left = (tokens - block * BLOCK_T + MMA_T - 1) / MMA_T;
        return left < STEPS ? left : STEPS;
    }
};

// Tile `number`, columns first, then rows, then groups. A whole warp calls it. Offsets that are wrong are cut to the tokens, and a
// group without room in the scales has none.
__device__ __forceinline__ Tile tile_of(int number, const int* offs, int n_rows, int n_columns, int tokens,
                                        int scale_rows, int lane) {
    const int across = (n_columns + TILE - 1) / TILE, down = (n_rows + TILE - 1) / TILE;
    const int group = number / (across * down), in_group = number % (across * down);
    int before = 0;  // blocks of 128 tokens
    for (int g = lane; g < group; g += 32) {
        const int rows = __ldg(offs + g) - (g == 0 ? 0 : __ldg(offs + g - 1));
        before += rows > 0 ? (rows + BLOCK_T - 1) / BLOCK_T : 0;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        before += __shfl_xor_sync(0xffffffff, before, distance);
    const int given = group == 0 ? 0 : __ldg(offs + group - 1), given_end = __ldg(offs + group);
    const int start = given < 0 ? 0 : given, end = given_end < tokens ? given_end : tokens;
    const int first_scales = before * STEPS;
    const bool has_scales =
        first_scales >= 0 && first_scales + (end - start + MMA_T - 1) / MMA_T <= scale_rows;
    return Tile{group,
                in_group / across * TILE,
                in_group % across * TILE,
                end > start && has_scales ? end - start : 0,
                end,
                first_scales};
}

// One operand, rows of tokens: the plain map, and the ragged one, which ends at any token.
struct Rows {
    const TensorMap& plain;
    const TensorMap& ragged;
};
constexpr int RAGGED_B = 1 << 30;  // the same number as in kernels/maps.py

// BLOCK_T tokens from `token` on, PART features of each. Those behind `end`, the next group's, come as zeros: 0 * NaN is NaN, and
// a scale cannot undo that. `full`: of a pair, the even CTA's.
__device__ __forceinline__ void load_block(const Rows& rows, uint8_t* stage, uint32_t full, int feature,
                                           int token, int end) {
    const uint32_t destination = shared_address(stage);
    if (end - token >= BLOCK_T) {
        if constexpr (CTA_GROUP == 1)
            tma_load_2d(rows.plain, destination, full, feature, token);
        else
            tma_load_2d_pair(rows.plain, destination, full, feature, token);
    } else {
        const int cut = RAGGED_B - (end - token);
        if constexpr (CTA_GROUP == 1)
            tma_load_4d(rows.ragged, destination, full, feature, cut, end, RAGGED_B);
        else
            tma_load_4d_pair(rows.ragged, destination, full, feature, cut, end, RAGGED_B);
    }
}
