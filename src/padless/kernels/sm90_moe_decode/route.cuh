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

// Slots are gone through 32 at a time, in loops that are not unrolled: a launch runs this once, so instructions have to be
// fetched, and the first weights wait for it. A lane has the same slots in all loops, and finds them in shared memory.
__device__ __forceinline__ void route(SharedStorage& shared, const Problem& p, int lane) {
    const int slots = p.slots();
#ifdef LOGITS_ROOM
    mbarrier_wait(shared_address(&shared.chosen), 0);
#else
    int id[SLOTS_OF_LANE];
    float weight[SLOTS_OF_LANE];
#pragma unroll
    for (int n = 0; n < SLOTS_OF_LANE; ++n) {
        if (32 * n >= slots) break;
        const int slot = min(32 * n + lane, slots - 1);
        id[n] = load_id(p, slot);
        weight[n] = load_weight(p, slot);
    }
#endif
    const uint32_t inverse = (65535 + p.top_k) / p.top_k;  // token slot / k is slot * inverse / 2^16
#pragma unroll
    for (int n = 0; n < WORDS_OF_LANE; ++n) shared.is_hit[WORDS_OF_LANE * lane + n] = 0;
#pragma unroll 1
    for (int first = 0; first < slots; first += 32) shared.tokens_of[first + lane] = 0;
#ifndef LOGITS_ROOM
#pragma unroll
    for (int n = 0; n < SLOTS_OF_LANE; ++n) {
        if (32 * n >= slots) break;
        shared.id_of_slot[32 * n + lane] = id[n];
        shared.slot_weight[32 * n + lane] = weight[n];
    }
#endif
    __syncwarp();
#pragma unroll 1
    for (int slot = lane; slot < slots; slot += 32) {
        const int id = shared.id_of_slot[slot];
        if (id >= 0) atomicOr(&shared.is_hit[id / 32], 1u << id % 32);
    }
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
#pragma unroll 1
    for (int slot = lane; slot < slots; slot += 32) {
        const int id = shared.id_of_slot[slot];
        int number = -1;  // of the slot's expert among those hit
        if (id >= 0) {
            const uint32_t smaller = shared.is_hit[id / 32] & ((1u << id % 32) - 1);
            number = shared.hits_before[id / 32] + __popc(smaller);
            if (atomicOr(&shared.tokens_of[number], 1u << (slot * inverse >> 16)) == 0)
                shared.experts[number] = id;
        }
        shared.row_of_slot[slot] = number;
    }
    __syncwarp();
    int row = 0;
#pragma unroll 1
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
#pragma unroll 1
    for (int slot = lane; slot < slots; slot += 32) {
        const int number = shared.row_of_slot[slot];
        if (number < 0) continue;
        const uint32_t smaller = shared.tokens_of[number] & ((1u << (slot * inverse >> 16)) - 1);
        shared.row_of_slot[slot] = shared.first_row[number] + __popc(smaller);
    }
    __syncwarp();
}
