// What the roles of sm90_moe_decode_fp4.cu share: constants, shared memory, the problem.
#pragma once

// The host defines, from MoeDecodeFp4Config: MOST_TOKENS (8), SPIN_LIMIT (0 for none), REPACKED (of codes), and the gate's rule.
constexpr int STAGE_K = 256;  // of a stage
constexpr int BLOCK_K = 128;
constexpr int STAGE_BLOCKS = STAGE_K / BLOCK_K;
constexpr int CODE_BYTES = UNIT_ROWS * STAGE_K / 2;  // 128 bytes a row, swizzled
constexpr int SCALE_BYTES =
    UNIT_ROWS * 16 * STAGE_BLOCKS;  // half of a 32x4x4 tile a K block: of 64 rows, one in four groups is used
constexpr int STAGE_BYTES = CODE_BYTES + SCALE_BYTES;

constexpr int NUM_CONSUMER_WARPS = 16;
constexpr int NUM_CONSUMERS = 32 * NUM_CONSUMER_WARPS;
constexpr int ROUTER_WARP = NUM_CONSUMER_WARPS, SHARE_WARP = ROUTER_WARP + 1;
constexpr int NUM_THREADS = NUM_CONSUMERS + 128;  // whole warpgroups, for setmaxnreg
constexpr int CONSUMER_REGISTERS = 104, OTHER_REGISTERS = 64;

constexpr int STAGES = 8;  // of a warp's ring, at most

constexpr int POOL_BYTES = 220 * 1024;

struct alignas(1024) Pool {
    uint8_t pool[POOL_BYTES];  // rings, rows, results: Layout
};

struct SharedStorage : Pool, Tables {
    uint64_t full[NUM_CONSUMER_WARPS][STAGES];
};
#include "device/read_back.cuh"

struct Problem : Layer {
    const float *bias13, *bias2;  // null: 0

    __device__ __forceinline__ int h_stages() const { return (h + STAGE_K - 1) / STAGE_K; }
    __device__ __forceinline__ int i_stages() const { return (i + STAGE_K - 1) / STAGE_K; }
    // In scratch: pairs of bf16, K padded to whole blocks.
    __device__ __forceinline__ int words_of_row() const {
        return (i + BLOCK_K - 1) / BLOCK_K * (BLOCK_K / 2);
    }
    // Units of the second product have 16 columns of an expert, or, where a product's eight rows have room for those of two
    // experts, 8 columns of either: stripes are narrower, and so shared out more evenly.
    __device__ __forceinline__ bool is_paired() const { return tokens <= 4; }
    __device__ __forceinline__ int columns() const { return is_paired() ? 8 : UNIT_ROWS; }
    __device__ __forceinline__ int stripes_of(int share) const {
        const int stripes = h / columns();
        return share < stripes ? (stripes - share - 1) / static_cast<int>(gridDim.x) + 1 : 0;
    }
    // Units of a stripe.
    __device__ __forceinline__ int teams(int hit) const { return is_paired() ? (hit + 1) / 2 : hit; }
};

// Where things are in the pool. Rows of x and hidden rows take one place after the other. The host counts the same bytes
// (config.py).
struct Layout {
    uint32_t codes, scales, rows, results;

    __device__ __forceinline__ Layout(const SharedStorage& shared, const Problem& p) {
        const int stages = NUM_CONSUMER_WARPS * p.stages;
        codes = shared_address(shared.pool);
        scales = codes + stages * CODE_BYTES;
        rows = scales + stages * SCALE_BYTES;
        results = rows + max(p.tokens * row_bytes(p.h_stages()), p.slots() * row_bytes(p.i_stages()));
    }
    // From a row to the next. The 64 bytes more put neighbours into other banks.
    static __device__ __forceinline__ int row_bytes(int k_stages) { return 2 * STAGE_K * k_stages + 64; }
    // Results of a share's stripe number `stripe`, bf16 by row and column, with room for 16 columns.
    __device__ __forceinline__ uint32_t result(int stripe, int rows, int row, int column) const {
        return results + ((stripe * rows + row) * UNIT_ROWS + column) * 2;
    }
};

// Rows of x, or hidden rows, are octets: 8 neighbours along K in the order of dequantize.cuh, (0, 4), (1, 5), (2, 6), (3, 7), 16
// bytes. An octet is number `step` of quad `quad`: what a lane of the quad multiplies next, of a K block four steps. In shared
// memory a row's octets lie together, step after step, so that where a lane's next one is needs no calculation. In global
// memory those of a step do, row after row.
__device__ __forceinline__ int octet_of(int step, int quad) {
    return step / 4 * 16 + quad * 4 + step % 4;
}
// In global memory, of row `row` of `rows`, in octets.
__device__ __forceinline__ int place_of_octet(int octet, int row, int rows) {
    const int step = octet / 16 * 4 + octet % 4, quad = octet % 16 / 4;
    return (step * rows + row) * 4 + quad;
}
constexpr int STEPS_OF_STAGE = STAGE_K / 32;
constexpr int STEP_BYTES = 64;  // a row's octets of a step

// Which of eight rows a lane has: lanes that read together have rows whose numbers differ by 4, for the banks.
__device__ __forceinline__ int row_of_lane(int lane) {
    return lane / 4 % 2 * 4 + lane / 8;
}
// The same of eight weight rows, and of eight pairs of neighbouring ones. Repacked codes have other banks.
__device__ __forceinline__ int weight_row_of_lane(int lane) {
    return REPACKED ? lane / 4 : row_of_lane(lane);
}
__device__ __forceinline__ int pair_of_lane(int lane) {
    return REPACKED ? lane / 4 : lane / 4 % 2 * 2 + lane / 8 % 2 * 4 + lane / 16;
}
constexpr int OF_FOURTH_PAIR =
    REPACKED ? 16 : 8;  // lanes whose pairs' numbers differ by 4 differ in this bit
