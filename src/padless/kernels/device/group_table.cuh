// Builds the scheduler's table of groups in shared memory from `offs`, once per CTA.
#pragma once

template <int MAX_GROUPS>
struct GroupTableStorage {
    SortedGroups<MAX_GROUPS> sorted;
    alignas(16) int tile_ends[(MAX_GROUPS + 3) / 4 * 4];

    __device__ __forceinline__ GroupTable table() const {
        return GroupTable{sorted.order, sorted.ends, tile_ends, sorted.active, sorted.is_sorted != 0};
    }
};

constexpr int SMALL_TABLE = 32;  // groups whose table one warp builds, a group to a lane

// All threads of the CTA: tile_ends[i] = sum over j <= i of ceil(rows of the j-th group in the walk / BLOCK_M).
template <int BLOCK_M, int NUM_THREADS, int MAX_GROUPS>
__device__ __forceinline__ void count_tiles(GroupTableStorage<MAX_GROUPS>& storage, int lane) {
    SortedGroups<MAX_GROUPS>& sorted = storage.sorted;
    int* const tile_ends = storage.tile_ends;
#pragma unroll 1
    for (int i = threadIdx.x; i - lane < sorted.active; i += NUM_THREADS) {  // among 32 groups
        int tiles = i < sorted.active ? (sorted.rows(sorted.order[i]) + BLOCK_M - 1) / BLOCK_M : 0;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {  // running sum
            const int other = __shfl_up_sync(0xffffffff, tiles, distance);
            if (lane >= distance) tiles += other;
        }
        if (i < sorted.active) tile_ends[i] = tiles;
        if (lane == 31) sorted.of_chunk[i / 32] = tiles;
    }
    if (sorted.active <= 32) return;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i - lane < sorted.active; i += NUM_THREADS) {
        int before = 0;
        for (int chunk = lane; chunk < i / 32; chunk += 32) before += sorted.of_chunk[chunk];
        before = sum_of_lanes(before);
        if (i < sorted.active) tile_ends[i] += before;
    }
}

// A tile of so few rows takes as long as one of one row, so that the order of such groups does not matter.
__device__ __forceinline__ constexpr int flat_rows(int block_m) {
    return block_m < 64 ? block_m : 64;
}

// All threads of the CTA, any number of groups. Ends with the table visible to all of them. Result: whether it is flat.
template <int BLOCK_M, int NUM_THREADS, int MAX_GROUPS>
__device__ __forceinline__ bool build_large_table(GroupTableStorage<MAX_GROUPS>& storage, const int* offs,
                                                  int num_groups, int m, int lane) {
    const bool is_sorted = storage.sorted.template build<NUM_THREADS, flat_rows(BLOCK_M)>(
        storage.tile_ends, offs, num_groups, m);
    if (is_sorted) {
        count_tiles<BLOCK_M, NUM_THREADS>(storage, lane);
        __syncthreads();
    }
    return !is_sorted;
}

// A group as its lane knows it: cleaned, its place in the walk, and how many m-tiles it, those up to it and all have.
struct PlacedGroup {
    int start, end, place, tiles, tile_end, all_tiles;
};

// One warp, group g of at most SMALL_TABLE to a lane: its part of the table. Every CTA waits for this before anything else,
// and it is a third of a microsecond less than the way of many groups. `end`: the load_group_end of this lane's group.
template <int BLOCK_M>
__device__ __forceinline__ PlacedGroup place_group(int end, int num_groups, int m, int lane) {
    int before = __shfl_up_sync(0xffffffff, end, 1);
    const bool is_right = lane >= num_groups || (end >= (lane == 0 ? 0 : before) && end <= m);
    if (!__all_sync(0xffffffff, is_right)) {
        end = clean_end(end, m, 0, lane);
        before = __shfl_up_sync(0xffffffff, end, 1);
    }
    const int start = lane == 0 ? 0 : before;
    const int rows = end - start;  // of a lane without a group: nobody's, and looked at by nobody
    const auto tiles_of = [](int rows) { return static_cast<unsigned>(rows + BLOCK_M - 1) / BLOCK_M; };
    PlacedGroup group{start, end, 0, lane < num_groups ? static_cast<int>(tiles_of(rows)) : 0, 0, 0};
    group.tile_end = group.tiles;
#pragma unroll 8
    for (int h = 0; h < num_groups; ++h) {  // which groups come before this one, and how many tiles they have
        const int other = __shfl_sync(0xffffffff, rows, h);
        group.all_tiles += tiles_of(other);
        if (other > rows || (other == rows && h < lane)) {
            ++group.place;
            group.tile_end += tiles_of(other);
        }
    }
    return group;
}

// One warp: writes down what place_group has found.
template <int MAX_GROUPS>
__device__ __forceinline__ void store_group(GroupTableStorage<MAX_GROUPS>& storage, const PlacedGroup& group,
                                            int num_groups, int lane) {
    const uint32_t with_rows = __ballot_sync(0xffffffff, group.tiles > 0);
    if (lane == 0) {
        storage.sorted.active = __popc(with_rows);
        storage.sorted.is_sorted = 1;
    }
    if (lane >= num_groups) return;
    storage.sorted.ends[lane] = group.end;
    storage.sorted.order[group.place] = lane;
    storage.tile_ends[group.place] = group.tile_end;
}
