// What the steps of sm90_rows_columns.cu share: shared memory, the problem, magnitudes of bf16 pairs.
#pragma once

// The host defines, from RowsColumnsConfig: HAS_ROWS, SQUARE, GATHERS, MAX_GROUPS, BAND.
constexpr int CTAS_PER_SM = 2;
constexpr int STAGES = 2;  // of loads: the rows at hand, and the next tile's

struct alignas(1024) SharedStorage {
    Row values[TILE];  // a row is the next tile's as soon as it has been read
    TransposedCodes codes;
    uint32_t largest[NUM_WARPS][TILE / 2];  // magnitudes of two columns over a warp's tokens, with any signs
    float inverse[TILE];                    // 1 / scale of each column
    float largest_of_warps[4];
    Schedule<MAX_GROUPS> schedule;
};
#include "device/read_back.cuh"

struct Problem {
    const uint8_t* x;   // (M, F) bf16, rows `stride` values apart; (num_source_rows, F) where GATHERS
    const int* tokens;  // (M) rows of x, where GATHERS
    Groups groups;
    uint8_t* row_codes;  // (M, F), where HAS_ROWS
    float* row_scale;    // (ceil(F / 128), row_scale_ld), where HAS_ROWS
    uint8_t* codes;      // (F, T')
    float* scale;        // (num_scale_rows, F), or SQUARE (num_scale_rows, ceil(F / 128))
    int num_rows, num_source_rows, features, stride, row_scale_ld;

    __device__ __forceinline__ int num_blocks() const { return (features + TILE - 1) / TILE; }
};

// The larger magnitudes of two pairs of bf16, with some sign; NaN where there is one.
__device__ __forceinline__ uint32_t larger_of_pairs(uint32_t x, uint32_t y) {
    uint32_t pair;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(x), "r"(y));
    return pair;
}
