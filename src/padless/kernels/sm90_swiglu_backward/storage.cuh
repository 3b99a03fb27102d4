// What the steps of sm90_swiglu_backward.cu share: constants, shared memory, the problem, an item of work.
#pragma once

// The host defines, from SwigluBackwardConfig: HAS_PROB, INTERLEAVED, SQUARE, MAX_GROUPS, BAND.
constexpr int GATE = 0, UP = 1, HIDDEN = 2, NUM_OUTPUTS = 3;
constexpr int RUN = 32;    // columns of gate, then of up, where they are interleaved
constexpr int STAGES = 2;  // of loads: the rows at hand, and the next tile's

struct alignas(1024) SharedStorage {
    Row values[3][TILE];   // gate, up, dH of a tile; a row is the next tile's as soon as it has been read
    float probs[2][TILE];  // of a tile and the next one's, in turn
    float largest[NUM_WARPS][NUM_OUTPUTS][TILE];  // magnitude of each column over a warp's tokens
    float inverse[NUM_OUTPUTS][TILE];             // 1 / scale of each column
    float largest_of_warps[4];
    TransposedCodes codes[NUM_OUTPUTS];
    Schedule<MAX_GROUPS> schedule;
};
#include "device/read_back.cuh"

struct Problem {
    const uint8_t* dh;  // (M, I) bf16, rows dh_stride values apart
    const uint8_t* z;   // (M, 2 I) bf16
    const float* prob;  // (M), where HAS_PROB
    Groups groups;
    uint8_t* row_codes;     // (M, 2 I)
    float* row_scale;       // (2 I / 128, row_scale_ld)
    uint8_t* dz_codes;      // (2 I, T')
    float* dz_scale;        // (num_scale_rows, 2 I)
    uint8_t* hidden_codes;  // (I, T')
    float* hidden_scale;    // (num_scale_rows, I), or SQUARE (num_scale_rows, I / 128)
    float* sums;            // (I / 128, M), where HAS_PROB: dprob of each 128 columns
    int num_rows, hidden, dh_stride, z_stride, row_scale_ld;

    __device__ __forceinline__ int num_blocks() const { return hidden / TILE; }
};

// Column of Z and feature of dZ of gate's column `column` of dH; up's are up_offset behind.
__device__ __forceinline__ int gate_column(int column) {
    return INTERLEAVED ? column / RUN * (2 * RUN) + column % RUN : column;
}

__device__ __forceinline__ int up_offset(const Problem& problem) {
    return INTERLEAVED ? RUN : problem.hidden;
}
