// Chooses the experts of every token by a router's logits and weighs them, with the bits of `padless.moe.topk` (its twin in
// moe/twins.py is the definition: every rounding, the order of sums, which of equals comes first). Every CTA does it for all
// tokens, a consumer warp a token, and shared memory holds the result. Without LOGITS_ROOM there is nothing here.
#pragma once
#ifdef LOGITS_ROOM

// The host defines LOGITS_ROOM: experts there is room for, 128 to 1024, a power of two. Of quads of adjacent experts a lane
// has each 32nd, from quad `lane` on, so that a sum of neighbours is first one of a lane, then one of adjacent lanes.
constexpr int OF_LANE = LOGITS_ROOM / 32;
constexpr uint32_t ALL_LANES = 0xffffffff;
constexpr uint32_t ABSENT = 0;  // below the rank of every value
constexpr float LEAST_SUM = 1e-20f;

__device__ __forceinline__ int expert_at(int n, int lane) {
    return n / 4 * 128 + lane * 4 + n % 4;
}
__device__ __forceinline__ float of_half(uint16_t half, int type) {
    return type == WEIGHTS_BF16 ? cvt_f32_bf16(half) : cvt_f32_f16(half);
}

__device__ __forceinline__ float load_value(const void* values, int type, int at) {
    if (type == WEIGHTS_F32) return static_cast<const float*>(values)[at];
    return of_half(static_cast<const uint16_t*>(values)[at], type);
}

// A lane's of `experts` values, all loads under way together; where there is no expert it is another's.
__device__ __forceinline__ void load_values(float (&x)[OF_LANE], const void* values, int type, int first,
                                            int experts, int lane) {
    if (type == WEIGHTS_F32) {
        const float* from = static_cast<const float*>(values) + first;
#pragma unroll
        for (int n = 0; n < OF_LANE; ++n) x[n] = from[min(expert_at(n, lane), experts - 1)];
    } else {
        const uint16_t* from = static_cast<const uint16_t*>(values) + first;
        uint16_t half[OF_LANE];
#pragma unroll
        for (int n = 0; n < OF_LANE; ++n) half[n] = from[min(expert_at(n, lane), experts - 1)];
#pragma unroll
        for (int n = 0; n < OF_LANE; ++n) x[n] = of_half(half[n], type);
    }
}

// Unsigned, in the order of x, -0 as 0, NaN last: the addition makes any NaN the canonical one, 0x7FFFFFFF.
__device__ __forceinline__ uint32_t rank_of(float x) {
    const int bits = __float_as_int(__fadd_rn(x, 0.0f));
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)) ^ 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t rank) {
    const int order = static_cast<int>(rank ^ 0x80000000u);
    return __int_as_float(order ^ (order >> 31 & 0x7FFFFFFF));
}

// e^x of x up to 0; 0 where the exponential ends, NaN for NaN.
__device__ __forceinline__ float decayed(float x) {
    const float power = exp_minus(-x);
    return x < -87.0f ? 0.0f : x == x ? power : x;
}
__device__ __forceinline__ float sigmoid_or_nan(float x) {
    const float s = sigmoid(fmaxf(x, -87.25f));
    return x == x ? s : x;
}

// Of values that lanes have in their order: pairs of neighbours, then pairs of their sums, and so on.
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
        x = __fadd_rn(x, __shfl_xor_sync(ALL_LANES, x, distance));
    return x;
}

// The same of all experts.
__device__ __forceinline__ float sum_of_pairs(float (&x)[OF_LANE]) {
#pragma unroll
    for (int n = 0; n < OF_LANE; n += 4)
        x[n / 4] = sum_of_lanes(__fadd_rn(__fadd_rn(x[n], x[n + 1]), __fadd_rn(x[n + 2], x[n + 3])));
#pragma unroll
    for (int left = OF_LANE / 4; left > 1; left /= 2)
#pragma unroll
        for (int n = 0; n < left / 2; ++n) x[n] = __fadd_rn(x[2 * n], x[2 * n + 1]);
    return x[0];
}

__device__ __forceinline__ uint32_t largest_of(const uint32_t (&rank)[OF_LANE]) {
    uint32_t best = rank[0];
#pragma unroll
    for (int n = 1; n < OF_LANE; ++n) best = max(best, rank[n]);
    return __reduce_max_sync(ALL_LANES, best);
}

// From here on one token's ranks: by logits, and then by what experts are chosen by.

// Experts of all but the best groups become absent: a group's score is the sum of its two best. Groups are 32 at most.
__device__ __forceinline__ void keep_best_groups(uint32_t (&rank)[OF_LANE], const Layer& p, int lane) {
    const int size = p.experts / p.rule.groups;
    uint32_t score = ABSENT;  // of the group with the lane's number
    for (int group = 0; group < p.rule.groups; ++group) {
        uint32_t best = ABSENT, second = ABSENT;
#pragma unroll
        for (int n = 0; n < OF_LANE; ++n) {
            const int member = expert_at(n, lane) - group * size;
            const uint32_t one = member >= 0 && member < size ? rank[n] : ABSENT;
            second = max(second, min(best, one));
            best = max(best, one);
        }
        const uint32_t first = __reduce_max_sync(ALL_LANES, best);
        const int owner = __ffs(__ballot_sync(ALL_LANES, best == first)) - 1;
        const uint32_t next = __reduce_max_sync(ALL_LANES, lane == owner ? second : best);
        if (lane == group) score = rank_of(__fadd_rn(value_of(first), value_of(next)));
    }
    uint32_t kept = 0;
    for (int n = 0; n < p.rule.top_groups; ++n) {
        const uint32_t best = __reduce_max_sync(ALL_LANES, score);
        const int group = __ffs(__ballot_sync(ALL_LANES, score == best)) - 1;
        kept |= 1u << group;
        if (lane == group) score = ABSENT;
    }
#pragma unroll
    for (int n = 0; n < OF_LANE; ++n)
        if (!(kept >> min(expert_at(n, lane) / size, 31) & 1)) rank[n] = ABSENT;
}

// The best of a token's experts, one after the other. A lane knows the two best that it has, and goes through the others again
// when both are taken, which is seldom.
struct Best {
    uint32_t first, second, taken = 0;  // ranks; a bit for each of the lane's
    int first_at, second_at, left;

    __device__ __forceinline__ void find(const uint32_t (&rank)[OF_LANE]) {
        first = second = ABSENT;
        first_at = second_at = 0;
        left = 2;
#pragma unroll
        for (int n = 0; n < OF_LANE; ++n) {
            const uint32_t one = taken >> n & 1 ? ABSENT : rank[n];
            const bool is_first = one > first, is_second = one > second;  // of equals it is the smaller id
            second = is_first ? first : is_second ? one : second;
            second_at = is_first ? first_at : is_second ? n : second_at;
            first = is_first ? one : first;
            first_at = is_first ? n : first_at;
        }
    }

    // Warp: the next expert, and its rank.
    __device__ __forceinline__ int take(const uint32_t (&rank)[OF_LANE], uint32_t& best, int lane) {
        best = __reduce_max_sync(ALL_LANES, first);
        const uint32_t mine = first == best ? expert_at(first_at, lane) : ~0u;
        const uint32_t expert = __reduce_min_sync(ALL_LANES, mine);
        if (mine == expert) {
            taken |= 1u << first_at;
            first = second;
            first_at = second_at;
            second = ABSENT;
            --left;
        }
        if (__any_sync(ALL_LANES, left == 0)) find(rank);
        return static_cast<int>(expert);
    }
};

// Warp: of token `token`.
__device__ __forceinline__ void choose(Tables& shared, const Layer& p, int token, int lane) {
    const Rule& rule = p.rule;
    const void *logits = p.ids, *biases = p.weights;  // they come in their places (common.cuh)
    const int logits_type = p.ids_bytes, bias_type = p.weights_type;
    const bool has_groups = rule.top_groups < rule.groups, is_by_score = biases != nullptr || has_groups;
    const int first = token * p.experts;
    float largest = 0.0f, total = 1.0f;  // of a softmax
    uint32_t rank[OF_LANE];
    float value[OF_LANE], bias[OF_LANE];
    load_values(value, logits, logits_type, first, p.experts, lane);
    if (biases != nullptr) load_values(bias, biases, bias_type, 0, p.experts, lane);
#pragma unroll
    for (int n = 0; n < OF_LANE; ++n) rank[n] = expert_at(n, lane) < p.experts ? rank_of(value[n]) : ABSENT;
    if (!rule.is_sigmoid && (is_by_score || !rule.renormalizes)) {
        largest = value_of(largest_of(rank));
        float power[OF_LANE];
#pragma unroll
        for (int n = 0; n < OF_LANE; ++n)
            power[n] = rank[n] == ABSENT ? 0.0f : decayed(__fsub_rn(value[n], largest));
        total = sum_of_pairs(power);
    }
    if (is_by_score) {
#pragma unroll
        for (int n = 0; n < OF_LANE; ++n)
            value[n] = rule.is_sigmoid ? sigmoid_or_nan(value[n])
                                       : __fdiv_rn(decayed(__fsub_rn(value[n], largest)), total);
        if (biases != nullptr) {
#pragma unroll
            for (int n = 0; n < OF_LANE; ++n) value[n] = __fadd_rn(value[n], bias[n]);
        }
#pragma unroll
        for (int n = 0; n < OF_LANE; ++n) rank[n] = rank[n] == ABSENT ? ABSENT : rank_of(value[n]);
    }
    if (has_groups) keep_best_groups(rank, p, lane);

    Best next;
    next.find(rank);
    int id = 0;  // from here on a lane has the slot of its number
    uint32_t chosen_by = ABSENT;
    for (int slot = 0; slot < p.top_k; ++slot) {
        uint32_t best;
        const int expert = next.take(rank, best, lane);
        if (lane == slot) {
            id = expert;
            chosen_by = best;
        }
    }
    const bool is_slot = lane < p.top_k;
    float logit = value_of(chosen_by);
    if (is_by_score) logit = is_slot ? load_value(logits, logits_type, first + id) : 0.0f;
    float weight;
    if (rule.is_sigmoid) {
        weight = is_slot ? sigmoid_or_nan(logit) : 0.0f;
        if (rule.renormalizes) weight = __fdiv_rn(weight, __fadd_rn(sum_of_lanes(weight), LEAST_SUM));
    } else {
        if (rule.renormalizes) {
            largest = value_of(__reduce_max_sync(ALL_LANES, is_slot ? rank_of(logit) : ABSENT));
            total = sum_of_lanes(is_slot ? decayed(__fsub_rn(logit, largest)) : 0.0f);
        }
        weight = __fdiv_rn(decayed(__fsub_rn(logit, largest)), total);
    }
    if (is_slot) {
        const float by = value_of(chosen_by);
        shared.id_of_slot[token * p.top_k + lane] = id;
        shared.slot_weight[token * p.top_k + lane] = by == by ? __fmul_rn(weight, rule.scaling_factor) : by;
    }
}

// A consumer warp: its tokens; the barrier counts consumer warps.
__device__ __forceinline__ void choose_experts(SharedStorage& shared, const Problem& p, int warp, int lane) {
    for (int token = warp; token < p.tokens; token += NUM_CONSUMER_WARPS) choose(shared, p, token, lane);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&shared.chosen));
}

#endif
