// What the roles of sm90_moe_decode.cu share: constants, shared memory, the scratch in global memory, the problem.
#pragma once

// The host defines, from MoeDecodeConfig: MOST_TOKENS (8 or 16), SPIN_LIMIT (0 for none).
constexpr int BLOCK_K = 128;  // bytes, elements, and the length of a scale block
constexpr int UNIT_ROWS =
    16;  // weight rows of one expert: 8 of gate and 8 of up, or 16 columns of the result
constexpr int UNIT_OUTPUTS = 8;  // activated columns of a unit of the first product
constexpr int TILE_UNITS = 4;    // a warp's rows of an m64 are a unit
constexpr int UNIT_BYTES = UNIT_ROWS * BLOCK_K;
constexpr int STAGE_BYTES = TILE_UNITS * UNIT_BYTES;

constexpr int PIPELINES = 2;  // a producer warp, a ring and a consumer warpgroup each
constexpr int NUM_CONSUMER_WARPS = 4 * PIPELINES;
constexpr int NUM_CONSUMERS = 32 * NUM_CONSUMER_WARPS;
constexpr int ROUTER_WARP = NUM_CONSUMER_WARPS + PIPELINES, SHARE_WARP = ROUTER_WARP + 1;
constexpr int NUM_THREADS = 32 * (SHARE_WARP + 1);

constexpr int STAGES = 12;  // of a ring, at most
constexpr int MOST_TOP_K = 16;
constexpr int MOST_SLOTS = MOST_TOKENS * MOST_TOP_K;
constexpr int EXPERT_WORDS = 128;  // bits for 4096 experts
constexpr int MOST_SHARES = 255;   // CTAs of a launch
constexpr int NO_SHARE = -1, UNKNOWN_SHARE = -2;

// Scratch of a launch, zero when it was made; launches that may run at the same time have scratch of their own. The hidden
// rows follow, two buffers: launches take turns, and each clears the words that the one before it used. A word is the
// complement of a float32, and 0 says that it has not been written.
struct Control {
    uint32_t launches, shares, finished, words;
    uint32_t unused[28];
};

constexpr int POOL_BYTES = 218 * 1024;

struct alignas(1024) SharedStorage {
    uint8_t pool[POOL_BYTES];  // rings, codes, scales, results: Layout
    uint64_t full[PIPELINES][STAGES], empty[PIPELINES][STAGES];
    uint64_t routed;
    uint32_t launches, old_words;
    int shares[MOST_SHARES + 2];     // that this CTA has taken, then NO_SHARE; UNKNOWN_SHARE beyond
    uint32_t is_hit[EXPERT_WORDS];   // a bit an expert
    int hits_before[EXPERT_WORDS];   // experts hit with smaller ids than the word's
    int num_hit;                     // experts that have a token; from 0 on in the order of their ids:
    int experts[MOST_SLOTS];         // ids
    uint32_t tokens_of[MOST_SLOTS];  // a bit a token
    int first_row[MOST_SLOTS + 1];   // hidden rows are numbered by expert, then token
    int row_of_slot[MOST_SLOTS];     // -1: no expert
    float slot_weight[MOST_SLOTS];
};
#include "device/read_back.cuh"

constexpr int WEIGHTS_F32 = 0, WEIGHTS_BF16 = 1, WEIGHTS_F16 = 2;

struct Problem {
    const float *w13_scale, *w2_scale;
    const uint16_t *x, *shared;
    const void *ids, *weights;
    uint16_t* out;
    Control* control;
    int tokens, top_k, experts, h, i;
    int run;        // units between which gate's rows are adjacent: I / 8, or 4 where runs of 32 alternate
    int ids_bytes;  // 4 or 8
    int weights_type;
    int stages;
    int room;  // words of a buffer of hidden rows, the same in all launches with this scratch

    __device__ __forceinline__ int slots() const { return tokens * top_k; }
    __device__ __forceinline__ int units_of_expert() const { return i / UNIT_OUTPUTS; }
    __device__ __forceinline__ int h_blocks() const { return h / BLOCK_K; }
    __device__ __forceinline__ int i_blocks() const { return i / BLOCK_K; }
    __device__ __forceinline__ int stripes() const { return h / UNIT_ROWS; }
    __device__ __forceinline__ int room_for_rows() const { return (slots() + 7) / 8 * 8; }
    __device__ __forceinline__ uint32_t* hidden(uint32_t launch) const {
        return reinterpret_cast<uint32_t*>(control + 1) + (launch & 1) * room;
    }
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

// A CTA's or pipeline's part of `count` units that are shared out evenly in order.
struct Range {
    int begin, end;
};
__device__ __forceinline__ Range range_of(int units, int worker, int workers) {
    return {units * worker / workers, units * (worker + 1) / workers};
}

// Position in a ring whose depth is known at run time.
struct RingPosition {
    int stage = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance(int stages) {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Counts turns of a loop that waits, and traps where there are more than SPIN_LIMIT.
struct Patience {
    uint32_t turns = 0;
    __device__ __forceinline__ void wait() {
        if (SPIN_LIMIT > 0 && ++turns > SPIN_LIMIT) __trap();
        __nanosleep(40);
    }
};

// Warp: share number `index` of this CTA, or NO_SHARE; waits until it is known.
__device__ __forceinline__ int share_at(SharedStorage& shared, int index, int lane) {
    int share = UNKNOWN_SHARE;
    if (lane == 0) {
        Patience patience;
        for (;;) {
            asm volatile("ld.relaxed.cta.shared::cta.s32 %0, [%1];"
                         : "=r"(share)
                         : "r"(shared_address(&shared.shares[index]))
                         : "memory");
            if (share != UNKNOWN_SHARE) break;
            patience.wait();
        }
    }
    return __shfl_sync(0xffffffff, share, 0);
}

__device__ __forceinline__ void announce_share(SharedStorage& shared, int index, int share) {
    asm volatile("st.relaxed.cta.shared::cta.s32 [%0], %1;" ::"r"(shared_address(&shared.shares[index])),
                 "r"(share)
                 : "memory");
}
