// What the kernels of a layer of few tokens share, whatever their weights: the scratch in global memory, tables of experts
// and rows, the layer's sizes, and how work is shared out and waited for. Included before the storage of either.
#pragma once

// The host defines MOST_TOKENS and SPIN_LIMIT (0 for none).
constexpr int UNIT_ROWS =
    16;  // weight rows of one expert: 8 of gate and 8 of up, or 16 columns of the result
constexpr int UNIT_OUTPUTS = 8;  // activated columns of a unit of the first product
constexpr int MOST_TOP_K = 16;
constexpr int MOST_SLOTS = MOST_TOKENS * MOST_TOP_K;
constexpr int EXPERT_WORDS = 128;  // bits for 4096 experts
constexpr int MOST_SHARES = 255;   // CTAs of a launch
constexpr int NO_SHARE = -1, UNKNOWN_SHARE = -2;
constexpr int CODES_BARRIER = 1;  // of the consumers: what was written is there for all of them

// Scratch of a launch, zero when it was made; launches that may run at the same time have scratch of their own. The hidden
// rows follow, two buffers: launches take turns, and each clears the words that the one before it used. A word is the
// complement of what it tells, which is never all ones, and 0 says that it has not been written.
struct Control {
    uint32_t launches, shares, finished, words;
    uint32_t unused[28];
};

// In shared memory.
struct Tables {
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
    int id_of_slot[MOST_SLOTS];  // -1: no expert
#ifdef LOGITS_ROOM
    uint64_t chosen;  // ids and weights
#endif
};

constexpr int WEIGHTS_F32 = 0, WEIGHTS_BF16 = 1, WEIGHTS_F16 = 2;

// Kernels that choose experts by a router's logits (choose.cuh) are compiled with LOGITS_ROOM, and have the rule behind their
// other parameters. Theirs are logits, and the correction bias or null, where others have ids and weights.
#ifdef LOGITS_ROOM
struct Rule {
    float scaling_factor;
    int groups, top_groups;  // as many: no groups
    int is_sigmoid, renormalizes;
};
#define RULE_PARAMETERS , float scaling_factor, int groups, int top_groups, int is_sigmoid, int renormalizes
#define RULE                                                         \
    , {                                                              \
        scaling_factor, groups, top_groups, is_sigmoid, renormalizes \
    }
#else
#define RULE_PARAMETERS
#define RULE
#endif

struct Layer {
    const uint16_t *x, *shared;
    const void *ids, *weights;
    uint16_t* out;
    Control* control;
    int tokens, top_k, experts, h, i;
    int run;        // units between which gate's rows are adjacent; I / 8 where there is one run
    int ids_bytes;  // 4 or 8; of logits: their type
    int weights_type;
    int stages;
    int room;  // words of a buffer of hidden rows, the same in all launches with this scratch
#ifdef LOGITS_ROOM
    Rule rule;
#endif

    __device__ __forceinline__ int slots() const { return tokens * top_k; }
    __device__ __forceinline__ int units_of_expert() const { return i / UNIT_OUTPUTS; }
    __device__ __forceinline__ int stripes() const { return h / UNIT_ROWS; }
    __device__ __forceinline__ uint32_t* hidden(uint32_t launch) const {
        return reinterpret_cast<uint32_t*>(control + 1) + (launch & 1) * room;
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
__device__ __forceinline__ int share_at(Tables& shared, int index, int lane) {
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

__device__ __forceinline__ void announce_share(Tables& shared, int index, int share) {
    asm volatile("st.relaxed.cta.shared::cta.s32 [%0], %1;" ::"r"(shared_address(&shared.shares[index])),
                 "r"(share)
                 : "memory");
}

// One output: the k slots of a token in their order, `shared_value` last, rounded once. `results`: address of the column's
// result of row 0, bf16; rows are UNIT_ROWS values apart. Loads of eight slots are under way together.
__device__ __forceinline__ float sum_of_slots(const Tables& shared, const Layer& p, uint32_t results,
                                              int token, float shared_value) {
    constexpr int AT_ONCE = 8;
    float total = 0.0f;
#pragma unroll 1
    for (int first = 0; first < p.top_k; first += AT_ONCE) {
        int row[AT_ONCE];
        float weight[AT_ONCE], y[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int slot = token * p.top_k + first + j;
            row[j] = first + j < p.top_k ? shared.row_of_slot[slot] : -1;
            weight[j] = first + j < p.top_k ? shared.slot_weight[slot] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            y[j] = cvt_f32_bf16(row[j] < 0 ? uint16_t(0) : ld_shared_b16(results + row[j] * (UNIT_ROWS * 2)));
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const float sum = __fadd_rn(total, __fmul_rn(weight[j], y[j]));
            total = row[j] < 0 ? total : sum;
        }
    }
    return p.shared == nullptr ? total : __fadd_rn(total, shared_value);
}

// Row of token `token` with the expert that has `tokens` from row `first_row` on, -1 where it has none.
__device__ __forceinline__ int row_of_token(uint32_t tokens, int first_row, int token) {
    return tokens >> token & 1 ? first_row + __popc(tokens & ((1u << token) - 1)) : -1;
}
