// What the roles of sm90_moe_decode.cu share: constants, shared memory, the problem.
#pragma once

// The host defines, from MoeDecodeConfig: MOST_TOKENS (8 or 16), SPIN_LIMIT (0 for none).
constexpr int BLOCK_K = 128;   // bytes, elements, and the length of a scale block
constexpr int TILE_UNITS = 4;  // a warp's rows of an m64 are a unit
constexpr int UNIT_BYTES = UNIT_ROWS * BLOCK_K;
constexpr int STAGE_BYTES = TILE_UNITS * UNIT_BYTES;

constexpr int PIPELINES = 2;  // a producer warp, a ring and a consumer warpgroup each
constexpr int NUM_CONSUMER_WARPS = 4 * PIPELINES;
constexpr int NUM_CONSUMERS = 32 * NUM_CONSUMER_WARPS;
constexpr int ROUTER_WARP = NUM_CONSUMER_WARPS + PIPELINES, SHARE_WARP = ROUTER_WARP + 1;
constexpr int NUM_THREADS = 32 * (SHARE_WARP + 1);

constexpr int STAGES = 12;  // of a ring, at most

constexpr int POOL_BYTES = 218 * 1024;

struct alignas(1024) Pool {
    uint8_t pool[POOL_BYTES];  // rings, codes, scales, results: Layout
};

struct SharedStorage : Pool, Tables {
    uint64_t full[PIPELINES][STAGES], empty[PIPELINES][STAGES];
};
#include "device/read_back.cuh"

struct Problem : Layer {
    const float *w13_scale, *w2_scale;

    __device__ __forceinline__ int h_blocks() const { return h / BLOCK_K; }
    __device__ __forceinline__ int i_blocks() const { return i / BLOCK_K; }
    __device__ __forceinline__ int room_for_rows() const { return (slots() + 7) / 8 * 8; }
    __device__ __forceinline__ int words_of_row() const { return i; }  // in scratch: float32
};

// Where things are in the pool. Codes of x and of the hidden rows take one place after the other, and so do their scales: all
// of a CTA's products with x come before those with hidden rows. The host counts the same bytes (host.py).
struct Layout {
    uint32_t ring, codes, scales, results;

    __device__ __forceinline__ Layout(const SharedStorage& shared, const Problem& p) {
        const int rows = p.room_for_rows();
        const int code_bytes = max(MOST_TOKENS * p.h, rows * p.i);
        ring = shared_address(shared.pool);
        codes = ring + PIPELINES * p.stages * STAGE_BYTES;
        scales = codes + code_bytes;
        results = scales + code_bytes / BLOCK_K * 4;
    }
    // Results of the stripe at hand, bf16 by row and column; stripes take turns with two places.
    __device__ __forceinline__ uint32_t result(const Problem& p, int stripe_parity, int row,
                                               int column) const {
        return results + ((stripe_parity * p.room_for_rows() + row) * UNIT_ROWS + column) * 2;
    }
};
