// What the steps of sm90_swiglu_backward.cu share: constants, shared memory, the problem, an item of work.
#pragma once

// The host defines, from SwigluBackwardConfig: HAS_PROB, INTERLEAVED, SQUARE.
constexpr int TILE = 128;  // tokens, and columns of dH
constexpr int NUM_WARPS = 16, NUM_THREADS = 32 * NUM_WARPS;
constexpr int ROWS = TILE / NUM_WARPS;  // tokens of a warp
constexpr int COLUMNS = TILE / 32;      // columns of dH of a lane
constexpr int GATE = 0, UP = 1, HIDDEN = 2, NUM_OUTPUTS = 3;
constexpr int RUN = 32;  // columns of gate, then of up, where they are interleaved
constexpr int STAGES = 2;  // of loads: the rows at hand, and the next tile's

struct alignas(16) Row {
    uint32_t words[TILE / 2];  // two bf16 each
};

struct alignas(1024) SharedStorage {
    Row values[3][TILE];  // gate, up, dH of a tile; a row is the next tile's as soon as it has been read
    float largest[NUM_WARPS][NUM_OUTPUTS][TILE];  // magnitude of each column over a warp's tokens
    float inverse[NUM_OUTPUTS][TILE];             // 1 / scale of each column
    float largest_of_warps[4];
    uint64_t codes[NUM_OUTPUTS][TILE][NUM_WARPS];  // transposed: 8 tokens at `slot_of`
};
#include "device/read_back.cuh"

struct Problem {
    const uint8_t* dh;       // (M, I) bf16, rows dh_stride values apart
    const uint8_t* z;        // (M, 2 I) bf16
    const float* prob;       // (M), where HAS_PROB
    const int* table;        // (5, num_tiles): group_tiles.py
    uint8_t* row_codes;      // (M, 2 I)
    float* row_scale;        // (2 I / 128, row_scale_ld)
    uint8_t* dz_codes;       // (2 I, T')
    float* dz_scale;         // (num_scale_rows, 2 I)
    uint8_t* hidden_codes;   // (I, T')
    float* hidden_scale;     // (num_scale_rows, I), or SQUARE (num_scale_rows, I / 128)
    float* sums;             // (I / 128, M), where HAS_PROB: dprob of each 128 columns
    int num_rows, hidden, dh_stride, z_stride, row_scale_ld, tokens, num_scale_rows, num_tiles;

    __device__ __forceinline__ int num_blocks() const { return hidden / TILE; }
};

// A tile of 128 tokens x 128 columns of dH; tile is num_tiles where there are no more.
struct Item {
    int tile, block, first_row, rows;
};

// Items of a CTA: every so manieth of those that have something to do. Neighbours in time are neighbours in memory.
struct Items {
    const Problem& problem;
    int tile, block, tiles_a_step, blocks_a_step;

    __device__ __forceinline__ explicit Items(const Problem& problem) : problem(problem) {
        tile = blockIdx.x / problem.num_blocks();
        block = blockIdx.x % problem.num_blocks();
        tiles_a_step = gridDim.x / problem.num_blocks();
        blocks_a_step = gridDim.x % problem.num_blocks();
    }

    __device__ __forceinline__ Item take() {
        Item item{problem.num_tiles, 0, 0, 0};
        bool found = false;
        while (!found && tile < problem.num_tiles) {
            const int* entry = problem.table + tile;
            const int rows = entry[problem.num_tiles];
            found = rows > 0 || entry[4 * problem.num_tiles] > 0 || tile < problem.num_scale_rows;
            if (found) item = Item{tile, block, entry[0], rows};
            tile += tiles_a_step;
            block += blocks_a_step;
            if (block >= problem.num_blocks()) {
                block -= problem.num_blocks();
                ++tile;
            }
        }
        return item;
    }
};

// Column of Z and feature of dZ of gate's column `column` of dH; up's are up_offset behind.
__device__ __forceinline__ int gate_column(int column) {
    return INTERLEAVED ? column / RUN * (2 * RUN) + column % RUN : column;
}

__device__ __forceinline__ int up_offset(const Problem& problem) {
    return INTERLEAVED ? RUN : problem.hidden;
}
