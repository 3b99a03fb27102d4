// Which experts have tokens and which hidden row is whose, from the ids of at most MOST_SLOTS slots, given or chosen: by one warp, in shared
// memory. Ids that are no expert have no row. A token that names an expert twice has one row with it.
#pragma once

constexpr int SLOTS_OF_LANE = MOST_SLOTS / 32;
constexpr int WORDS_OF_LANE = EXPERT_WORDS / 32;

#ifndef LOGITS_ROOM
// The number of slot `slot`'s expert, -1 where it is none.
__device__ __forceinline__ int load_id(const Problem& p, int slot) {
    const long long id =
        p.ids_bytes == 8 ? static_cast<const long long*>(p.ids)[slot] : static_cast<const int*>(p.ids)[slot];
    return id >= 0 && id < p.experts ? static_cast<int>(id) : -1;
}

__device__ __forceinline__ float load_weight(const Problem& p, int slot) {
    if (p.weights_type == WEIGHTS_F32) return static_cast<const float*>(p.weights)[slot];
    const uint16_t half = static_cast<const uint16_t*>(p.weights)[slot];
    return p.weights_type == WEIGHTS_BF16 ? cvt_f32_bf16(half) : cvt_f32_f16(half);
}
#endif

// Sum of the lanes' values up to this lane's, without it.
__device__ __forceinline__ int sum_of_lower_lanes(int value, int lane, int& all) {
    int sum = value;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xffffffff, sum, distance);
        if (lane >= distance) sum += other;
    }
    all = __shfl_sync(0xffffffff, sum, 31);
    return sum - value;
}

__device__ __forceinline__ void route(SharedStorage& shared, const Problem& p, int lane) {
    int id[SLOTS_OF_LANE];
    float weight[SLOTS_OF_LANE];
#ifdef LOGITS_ROOM
    mbarrier_wait(shared_address(&shared.chosen), 0);
#endif
#pragma unroll
    for (int n = 0; n < SLOTS_OF_LANE; ++n) {
        const int slot = 32 * n + lane;
#ifdef LOGITS_ROOM
        id[n] = slot < p.slots() ? shared.id_of_slot[slot] : -1;
        weight[n] = slot < p.slots() ? shared.slot_weight[slot] : 0.0f;
#else
        id[n] = slot < p.slots() ? load_id(p, slot) : -1;
        weight[n] = slot < p.slots() ? load_weight(p, slot) : 0.0f;
#endif
    }
#pragma unroll
    for (int n = 0; n < WORDS_OF_LANE; ++n) shared.is_hit[WORDS_OF_LANE * lane + n] = 0;
#pragma unroll
    for (int n = 0; n < SLOTS_OF_LANE; ++n) shared.tokens_of[32 * n + lane] = 0;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < SLOTS_OF_LANE; ++n)
        if (id[n] >= 0) atomicOr(&shared.is_hit[id[n] / 32], 1u << id[n] % 32);
    __syncwarp();

    int hits = 0, num_hit;
#pragma unroll
    for (int n = 0; n < WORDS_OF_LANE; ++n) hits += __popc(shared.is_hit[WORDS_OF_LANE * lane + n]);
    int before = sum_of_lower_lanes(hits, lane, num_hit);
#pragma unroll
    for (int n = 0; n < WORDS_OF_LANE; ++n) {
        const int word = WORDS_OF_LANE * lane + n;
        shared.hits_before[word] = before;
        before += __popc(shared.is_hit[word]);
    }
    __syncwarp();
    int number[SLOTS_OF_LANE];  // of the slot's expert among those hit
#pragma unroll
    for (int n = 0; n < SLOTS_OF_LANE; ++n) {
        if (id[n] < 0) continue;
        const uint32_t smaller = shared.is_hit[id[n] / 32] & ((1u << id[n] % 32) - 1);
        number[n] = shared.hits_before[id[n] / 32] + __popc(smaller);
        const int token = (32 * n + lane) / p.top_k;
        if (atomicOr(&shared.tokens_of[number[n]], 1u << token) == 0) shared.experts[number[n]] = id[n];
    }
    __syncwarp();
    int row = 0;
    for (int first = 0; first < num_hit; first += 32) {
        int rows;
        const int mine = sum_of_lower_lanes(__popc(shared.tokens_of[first + lane]), lane, rows);
        shared.first_row[first + lane] = row + mine;
        row += rows;
    }
    __syncwarp();
    if (lane == 0) {
        shared.num_hit = num_hit;
        shared.first_row[num_hit] = row;
    }
#pragma unroll
    for (int n = 0; n < SLOTS_OF_LANE; ++n) {
        const int slot = 32 * n + lane;
        if (slot >= p.slots()) break;
        if (id[n] >= 0) {
            const uint32_t smaller = shared.tokens_of[number[n]] & ((1u << slot / p.top_k) - 1);
            shared.row_of_slot[slot] = shared.first_row[number[n]] + __popc(smaller);
        } else {
            shared.row_of_slot[slot] = -1;
        }
        shared.slot_weight[slot] = weight[n];
    }
    __syncwarp();
}
