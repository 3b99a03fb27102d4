// Builds the scheduler's table of groups in shared memory from `offs`, once per CTA.
#pragma once

template <int MAX_GROUPS>
struct GroupTableStorage {
    int group_ends[MAX_GROUPS];  // by group number: cleaned offs
    int groups[MAX_GROUPS], starts[MAX_GROUPS], ends[MAX_GROUPS], tile_ends[MAX_GROUPS];

    __device__ __forceinline__ GroupTable table(int num_groups) const {
        return GroupTable{groups, starts, ends, tile_ends, num_groups};
    }
};

constexpr int SMALL_TABLE = 32;  // groups whose table one warp builds, a group to a lane

// Where group g ends, as given. A null `offs` is a dense problem: one group of m rows.
__device__ __forceinline__ int load_group_end(const int* offs, int num_groups, int m, int g) {
    return g >= num_groups ? 0 : offs == nullptr ? m : offs[g];
}

// One warp, group g to a lane: min(max(highest, ends[.. g]), m), the largest of `highest` and the lanes up to this one.
// Whatever offs hold, the result is ascending and inside [0, m], so that no wrong value can lead outside the tensors.
__device__ __forceinline__ int clean_end(int end, int m, int highest, int lane) {
    end = end < highest ? highest : end;
    end = end > m ? m : end;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {  // running maximum
        const int other = __shfl_up_sync(0xffffffff, end, distance);
        if (lane >= distance && other > end) end = other;
    }
    return end;
}

// One warp: the cleaned offs of all groups.
__device__ __forceinline__ void clean_offs(const int* offs, int num_groups, int m, int* group_ends,
                                           int lane) {
    int highest = 0;
#pragma unroll 1  // short: all CTAs of few groups jump over it
    for (int base = 0; base < num_groups; base += 32) {
        const int g = base + lane;
        const int end = clean_end(load_group_end(offs, num_groups, m, g), m, highest, lane);
        if (g < num_groups) group_ends[g] = end;
        highest = __shfl_sync(0xffffffff, end, 31);
    }
}

// One warp: tile_ends[i] = sum over j <= i of ceil(rows of the j-th group in the walk / BLOCK_M).
template <int BLOCK_M>
__device__ __forceinline__ void count_tiles(const int* starts, const int* ends, int num_groups,
                                            int* tile_ends, int lane) {
    int before = 0;
#pragma unroll 1
    for (int base = 0; base < num_groups; base += 32) {
        const int i = base + lane;
        int tiles = i < num_groups ? (ends[i] - starts[i] + BLOCK_M - 1) / BLOCK_M : 0;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {  // running sum
            const int other = __shfl_up_sync(0xffffffff, tiles, distance);
            if (lane >= distance) tiles += other;
        }
        tiles += before;
        if (i < num_groups) tile_ends[i] = tiles;
        before = __shfl_sync(0xffffffff, tiles, 31);
    }
}

// All threads of the CTA, any number of groups. Ends with the table visible to all of them.
template <int BLOCK_M, int NUM_THREADS, int MAX_GROUPS>
__device__ __forceinline__ void build_large_table(GroupTableStorage<MAX_GROUPS>& storage, const int* offs,
                                                  int num_groups, int m, int warp, int lane) {
    if (warp == 1) clean_offs(offs, num_groups, m, storage.group_ends, lane);
    __syncthreads();
#pragma unroll 1
    for (int g = threadIdx.x; g < num_groups; g += NUM_THREADS) {
        const int place = place_of_group(storage.group_ends, num_groups, g);
        storage.groups[place] = g;
        storage.starts[place] = g == 0 ? 0 : storage.group_ends[g - 1];
        storage.ends[place] = storage.group_ends[g];
    }
    __syncthreads();
    if (warp == 1) count_tiles<BLOCK_M>(storage.starts, storage.ends, num_groups, storage.tile_ends, lane);
    __syncthreads();
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
    if (lane >= num_groups) return;
    storage.group_ends[lane] = group.end;
    storage.groups[group.place] = lane;
    storage.starts[group.place] = group.start;
    storage.ends[group.place] = group.end;
    storage.tile_ends[group.place] = group.tile_end;
}
